//! The licences of everything that is linked into what is shipped, with their complete texts, from the sources that cargo has.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::fs;
use std::path::Path;

use anyhow::{Context, Result, ensure};
use serde_json::Value;

use crate::shell;

/// The list, and below it every text once.
///
/// # Errors
/// If a dependency names no licence or brings no text: then it must not be shipped.
pub(crate) fn text() -> Result<String> {
    let mut cargo = shell::cargo();
    let target = format!("{}-unknown-linux-gnu", std::env::consts::ARCH);
    cargo.args(["metadata", "--format-version", "1", "--quiet", "--filter-platform", &target]);
    let output = cargo.output().context("cargo metadata")?;
    ensure!(output.status.success(), "cargo metadata: {}", String::from_utf8_lossy(&output.stderr));
    render(&serde_json::from_slice(&output.stdout)?)
}

fn render(metadata: &Value) -> Result<String> {
    let packages: BTreeMap<&str, &Value> = list(&metadata["packages"]).filter_map(|p| Some((p["id"].as_str()?, p))).collect();
    let ours = |p: &Value| p["name"] == "ggml-berth";
    let mut wanted: Vec<&str> = packages.iter().filter(|(_, p)| ours(p)).map(|(id, _)| *id).collect();
    ensure!(wanted.len() == 1, "cargo metadata does not name ggml-berth");
    let nodes: BTreeMap<&str, &Value> = list(&metadata["resolve"]["nodes"]).filter_map(|n| Some((n["id"].as_str()?, n))).collect();
    let mut linked = BTreeSet::new();
    while let Some(id) = wanted.pop() {
        if linked.insert(id) {
            // A kind of null is an ordinary dependency; the others build or test.
            let normal = |d: &&Value| list(&d["dep_kinds"]).any(|k| k["kind"].is_null());
            wanted.extend(nodes.get(id).map(|n| list(&n["deps"])).into_iter().flatten().filter(normal).filter_map(|d| d["pkg"].as_str()));
        }
    }

    let mut head = String::from(
        "libberth and the command berth are linked from Berth (MIT OR Apache-2.0, beside this file), the standard library of Rust (MIT OR \
         Apache-2.0)\nand these packages of crates.io. Their texts follow, each once.\n\n",
    );
    let mut texts: BTreeMap<String, Vec<String>> = BTreeMap::new();
    let mut sorted: Vec<&Value> = linked.iter().filter_map(|id| packages.get(id).copied()).filter(|p| !ours(p)).collect();
    sorted.sort_by_key(|p| p["name"].as_str());
    for package in sorted {
        let field = |name: &str| package[name].as_str().unwrap_or_default();
        let name = format!("{} {}", field("name"), field("version"));
        ensure!(!field("license").is_empty(), "{name} names no licence");
        writeln!(head, "{name:28} {}", field("license"))?;
        let dir = Path::new(field("manifest_path")).parent().context("a manifest lies in a directory")?;
        let found = of(dir)?;
        ensure!(!found.is_empty(), "{name} has no text of its licence in {}", dir.display());
        for text in found {
            texts.entry(text).or_default().push(name.clone());
        }
    }
    for (text, names) in texts {
        write!(head, "\n{}\n{}\n\n{}\n", "=".repeat(80), names.join(", "), text.trim_matches('\n'))?;
    }
    Ok(head)
}

fn list(value: &Value) -> impl Iterator<Item = &Value> {
    value.as_array().into_iter().flatten()
}

/// The texts in a package's directory.
fn of(dir: &Path) -> Result<Vec<String>> {
    let mut texts = Vec::new();
    for entry in fs::read_dir(dir).with_context(|| dir.display().to_string())? {
        let path = entry?.path();
        let name = path.file_name().unwrap_or_default().to_string_lossy().to_uppercase();
        if path.is_file() && ["LICENSE", "LICENCE", "COPYING", "NOTICE", "UNLICENSE"].iter().any(|start| name.starts_with(start)) {
            texts.push(fs::read_to_string(&path).with_context(|| path.display().to_string())?.replace("\r\n", "\n"));
        }
    }
    Ok(texts)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn what_only_builds_is_left_out_and_a_missing_text_is_an_error() {
        let dir = tempfile::tempdir().unwrap();
        let package = |name: &str| {
            fs::create_dir_all(dir.path().join(name)).unwrap();
            let manifest = dir.path().join(name).join("Cargo.toml");
            json!({"id": name, "name": name, "version": "1", "license": "MIT", "manifest_path": manifest})
        };
        let dep = |name: &str, kind: Value| json!({"pkg": name, "dep_kinds": [{"kind": kind}]});
        let metadata = json!({
            "packages": [package("ggml-berth"), package("a"), package("b"), package("build")],
            "resolve": {"nodes": [
                {"id": "ggml-berth", "deps": [dep("a", Value::Null), dep("build", json!("build"))]},
                {"id": "a", "deps": [dep("b", Value::Null)]}, {"id": "b", "deps": []}, {"id": "build", "deps": []},
            ]},
        });
        fs::write(dir.path().join("a/LICENSE-MIT"), "the text\n").unwrap();
        assert!(format!("{:#}", render(&metadata).unwrap_err()).contains("b 1 has no text"));
        fs::write(dir.path().join("b/license.md"), "the text\n").unwrap();
        let text = render(&metadata).unwrap();
        assert!(text.contains("a 1, b 1\n\nthe text\n") && !text.contains("build"), "{text}");
    }
}
