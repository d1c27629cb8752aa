//! ggml's C ABI as data: structs, tables, functions found at load, numbers by name. The only place with C spelling.
//!
//! Owns: everything that must match a C header or the dynamic loader. Must not know: memory regions, buffer types, models.

#![expect(non_camel_case_types, reason = "names are those of ggml's headers")]

mod check;
mod context;
mod cpu;
mod guard;
mod host;
mod symbols;
mod tensor;
mod vtables;

pub use check::Ops;
pub use context::{borrow, from_foreign, into_foreign};
pub use cpu::Cpu;
pub use guard::guard;
pub use host::{Host, Layout, OLDEST, Version};
pub use symbols::{Api, CanFuseSubgraph, GompParallel, Handed, Library, SymbolFn, open_library, stay_loaded};
pub use tensor::*;
pub use vtables::*;
