//! Berth gives every tensor of a mixture-of-experts model its place in host memory: mapped, page-locked, or in a file-backed arena.
//!
//! Two ways in: stock, unmodified llama.cpp loads `libberth.so` as a ggml backend (`GGML_BACKEND_PATH`), or a C or C++ program calls
//! `berth.h`. The Rust interface is for this project's own tests and tools and may change in any release.
//!
//! Files import their own level or lower ones: [`error`], [`log`], [`config`] < [`abi`] < [`memory`], [`gguf`] < [`buffers`],
//! [`placement`], [`moe`] < [`ahead`] < [`loader`], [`backend`] < [`capi`].

#[cfg(not(all(target_os = "linux", target_pointer_width = "64")))]
compile_error!("Berth needs 64-bit Linux");

pub mod abi;
#[deny(unsafe_code)]
pub mod ahead;
pub mod backend;
pub mod buffers;
pub mod capi;
pub mod config;
pub mod error;
#[forbid(unsafe_code)]
pub mod gguf;
pub mod loader;
pub mod log;
pub mod memory;
pub mod moe;
#[forbid(unsafe_code)]
pub mod placement;
pub mod report;
#[forbid(unsafe_code)]
pub mod text;
