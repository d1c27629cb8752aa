//! A second witness, independent of bindgen: the C compiler says sizes, offsets and values itself.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::path::Path;
use std::time::Duration;

use ffi_tests::hosts::Headers;
use ffi_tests::{run, tools};

/// Asks the C compiler for the values of these constant expressions over one set of headers.
pub(crate) fn ask(headers: &Headers, expressions: impl Iterator<Item = String>) -> BTreeMap<String, i128> {
    let mut program =
        String::from("#include <stddef.h>\n#include <stdio.h>\n#include \"ggml.h\"\n#include \"ggml-backend-impl.h\"\nint main(void) {\n");
    for expression in expressions {
        writeln!(program, "    printf(\"%s = %lld\\n\", \"{expression}\", (long long) ({expression}));").expect("writing to a string");
    }
    program.push_str("    return 0;\n}\n");
    let dir = tempfile::tempdir().expect("a temporary directory");
    let (source, executable) = (dir.path().join("witness.c"), dir.path().join("witness"));
    std::fs::write(&source, program).expect("the program is written");
    let include = |dir: &Path| format!("-I{}", dir.display());
    let mut cc = tools::command("cc").unwrap_or_else(|e| panic!("{e}"));
    cc.args(["-std=c11", "-Wall", "-Werror"]).args([include(&headers.ggml_include), include(&headers.ggml_src)]);
    cc.arg(&source).arg("-o").arg(&executable);
    run::run(cc, Duration::from_secs(60)).and_then(|o| o.checked(&format!("cc over {}", headers.id))).unwrap_or_else(|e| panic!("{e:#}"));
    let output = run::run(std::process::Command::new(&executable), Duration::from_secs(60)).and_then(|o| o.checked("the witness"));
    let line = |line: &str| {
        let (expression, value) = line.rsplit_once(" = ").expect("expression = value");
        (expression.to_owned(), value.parse().expect("an integer"))
    };
    output.unwrap_or_else(|e| panic!("{e:#}")).stdout.lines().map(line).collect()
}
