//! Gives the shared library its SONAME, so that programs linked with it name the ABI and not the file.

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    let abi = std::env::var("CARGO_PKG_VERSION_MAJOR").unwrap_or_else(|_| "0".to_owned());
    println!("cargo:rustc-cdylib-link-arg=-Wl,-soname,libberth.so.{abi}");
}
