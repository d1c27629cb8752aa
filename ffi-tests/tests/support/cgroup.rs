//! A memory limit for a program.

pub(crate) use ffi_tests::run::Cgroup;
