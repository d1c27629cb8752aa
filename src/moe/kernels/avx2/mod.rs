//! stub
pub(super) static KERNELS: super::Table = super::scalar::KERNELS_COPY;
