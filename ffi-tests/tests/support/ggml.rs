//! C programs that use a host's ggml as any C program does: its headers, its libraries.

use std::ffi::OsString;

use ffi_tests::hosts::{self, Host};

use crate::peer::Compile;

/// Compiled with the headers of the host's version, internal ones too, and linked with these libraries of the host, which are found again at
/// run time.
pub(crate) fn against(host: &Host, libraries: &[&str], compile: Compile) -> Compile {
    let headers = hosts::headers_of(host.headers.expect("a host with headers")).unwrap_or_else(|e| panic!("{e:#}"));
    let mut rpath = OsString::from("-Wl,-rpath,");
    rpath.push(&host.lib_dir);
    let compile = compile.arg("-isystem").arg(headers.ggml_include).arg("-isystem").arg(headers.ggml_src);
    compile.args(libraries.iter().map(|name| host.lib(name).unwrap_or_else(|e| panic!("{e:#}")))).arg(rpath)
}
