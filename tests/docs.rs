//! What documents say of names in the code: every environment variable stands in the README's table, and nothing else does.

use std::collections::BTreeSet;
use std::path::Path;

fn read(name: &str) -> String {
    std::fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join(name)).unwrap()
}

#[test]
fn the_table_of_settings_has_every_variable_and_no_other() {
    let readme = read("README.md");
    let table = readme.split("\n## Settings\n").nth(1).and_then(|t| t.split("\n## ").next()).expect("a section");
    let named: BTreeSet<&str> = table.lines().filter_map(|l| l.strip_prefix("| `")?.split('`').next()).collect();
    assert_eq!(named, BTreeSet::from(berth::config::VARIABLES));
}

/// A name that is in no list is misspelt, or was forgotten there.
#[test]
fn no_document_names_a_variable_that_does_not_exist() {
    // Of the tests, of CMake and of the header.
    let others = [
        "BERTH_CACHE",
        "BERTH_LIB",
        "BERTH_FULL",
        "BERTH_STRICT_TESTS",
        "BERTH_SKIP_LOG",
        "BERTH_LIBRARY",
        "BERTH_LLAMA_STATIC",
        "BERTH_CFLAGS",
        "BERTH_LIBS",
    ];
    let header = read("include/berth.h");
    let mut seen = 0;
    for file in ["README.md", "CONTRIBUTING.md", "docs/device.md", "docs/moe.md", "docs/embedding.md", "docs/releasing.md", "docs/rules.md"]
    {
        let text = read(file);
        for word in text.split(|c: char| !(c.is_ascii_uppercase() || c.is_ascii_digit() || c == '_')).filter(|w| w.starts_with("BERTH_")) {
            let known = berth::config::VARIABLES.contains(&word) || others.contains(&word) || header.contains(word);
            assert!(known, "{file} names {word}");
            seen += 1;
        }
    }
    assert!(seen > 30, "{seen}");
}
