//! How many wrong calls a C program of `ffi-tests/c` has made and seen refused.

/// Says for `cargo xtask robust` how many wrong calls a peer has counted.
pub(crate) fn tell(name: &str, how: &str, stdout: &str) {
    let count = stdout.lines().find_map(|l| l.strip_prefix("misuse: ")?.strip_suffix(" cases")?.parse::<usize>().ok());
    let count = count.filter(|n| *n > 0).unwrap_or_else(|| panic!("{name} counts no misuse:\n{stdout}"));
    ffi_tests::figures::tell(&format!("misuse in {name}, {how}"), &format!("{count} cases"));
}
