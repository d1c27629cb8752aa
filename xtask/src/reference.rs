//! docs/c-api.md: the reference of the C API, made from the text of `include/berth.h`.

use std::fmt::Write as _;

use anyhow::{Result, ensure};

const HEAD: &str = "\
# C API

Written by `cargo xtask header` from [`include/berth.h`](../include/berth.h). [embedding.md](embedding.md) shows whole programs.

";

/// A declaration: what it is, its name, its documentation, its text without comments.
struct Item<'a> {
    kind: Kind,
    name: &'a str,
    doc: String,
    code: String,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    Function,
    Struct,
    Enum,
    Callback,
    Constant,
}

const SECTIONS: [(Kind, &str); 5] = [
    (Kind::Function, "Functions"),
    (Kind::Struct, "Structs"),
    (Kind::Enum, "Enumerations"),
    (Kind::Callback, "Types of functions that the caller gives"),
    (Kind::Constant, "Constants"),
];

/// The page.
pub(crate) fn page(header: &str) -> Result<String> {
    let items = items(header);
    let mut text = String::from(HEAD);
    // The header's own first comment: what holds for all of it.
    let conventions = header.lines().skip_while(|l| !l.contains("Conventions")).skip(1).take_while(|l| l.trim() != "*");
    let rules: Vec<&str> = conventions.map(|l| l.trim_start_matches([' ', '*'])).collect();
    ensure!(!rules.is_empty(), "the header states no conventions");
    for line in rules {
        let (mark, rest) = line.strip_prefix("- ").map_or(("  ", line), |rest| ("- ", rest));
        writeln!(text, "{mark}{}", marked(rest))?;
    }
    for (kind, title) in SECTIONS {
        writeln!(text, "\n## {title}")?;
        for item in items.iter().filter(|i| i.kind == kind) {
            write!(text, "\n### `{}`\n\n{}\n\n```c\n{}\n```\n", item.name, item.doc, item.code)?;
        }
    }
    Ok(text)
}

/// Names of code in quotes, as Markdown has them, where a comment writes them plainly.
fn marked(line: &str) -> String {
    let is_code = |word: &str| word.contains('_') || word.contains("()");
    line.split(' ').map(|w| if is_code(w) && !w.contains('`') { quoted(w) } else { w.to_owned() }).collect::<Vec<_>>().join(" ")
}

fn quoted(word: &str) -> String {
    let code = word.trim_end_matches([',', ';', '.', ':']);
    format!("`{code}`{}", &word[code.len()..])
}

fn items(header: &str) -> Vec<Item<'_>> {
    let mut items = Vec::new();
    let mut rest = header;
    // Documentation begins a line; that of fields is indented.
    while let Some(at) = rest.find("\n/**\n") {
        let Some((comment, after)) = rest[at + 5..].split_once("\n */\n") else { break };
        let lines = comment.lines().map(|l| l.trim_start_matches(" *").trim_start());
        let doc = lines.map(|l| if l == "# Safety" { "**Owed by the caller:**" } else { l }).collect::<Vec<_>>().join("\n");
        let Some((kind, name, end)) = declaration(after) else { break };
        items.push(Item { kind, name, doc, code: tidy(&after[..end]) });
        rest = &after[end..];
    }
    items
}

/// Kind and name of what begins here, and where it ends.
fn declaration(text: &str) -> Option<(Kind, &str, usize)> {
    let first = text.lines().next()?;
    let end = |mark: &str| Some(text.find(mark)? + mark.len());
    if let Some(rest) = first.strip_prefix("#define ") {
        return Some((Kind::Constant, rest.split(' ').next()?, first.len()));
    }
    if first.starts_with("typedef ") {
        let name = first.split_once("(*")?.1.split(')').next()?;
        return Some((Kind::Callback, name, end(";\n")? - 1));
    }
    for (word, kind) in [("struct ", Kind::Struct), ("enum ", Kind::Enum)] {
        if let Some(rest) = first.strip_prefix(word).filter(|r| r.ends_with([';', '{'])).filter(|r| !r.contains('(')) {
            let name = rest.trim_end_matches([';', '{', ' ']);
            return Some((kind, name, if rest.ends_with(';') { first.len() } else { end("\n};")? }));
        }
    }
    Some((Kind::Function, first.split('(').next()?.rsplit([' ', '*']).next()?, end(";\n")? - 1))
}

/// The comments of fields on one line each.
fn tidy(code: &str) -> String {
    let mut text = String::new();
    let mut lines = code.lines();
    while let Some(line) = lines.next() {
        if line.trim() == "/**" {
            let words: Vec<&str> = lines.by_ref().take_while(|l| l.trim() != "*/").map(|l| l.trim_start_matches([' ', '*'])).collect();
            text += &format!("    // {}\n", words.join(" "));
        } else {
            text += &format!("{line}\n");
        }
    }
    text.trim_end().to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_declaration_of_the_header_is_in_the_page() {
        let header = std::fs::read_to_string(crate::shell::root().join("include/berth.h")).unwrap();
        let page = page(&header).unwrap();
        for name in crate::dist::documented(&header).iter().filter(|n| n.starts_with("berth_")) {
            assert!(page.contains(&format!("### `{name}`\n")), "{name}");
        }
        let declared = header.lines().filter(|l| l.starts_with("struct berth_") || l.starts_with("enum berth_") && l.ends_with('{'));
        let names: Vec<&str> = declared.filter(|l| !l.contains('(')).filter_map(|l| l.split([' ', ';']).nth(1)).collect();
        assert!(names.len() >= 20, "{names:?}");
        for name in names {
            assert!(page.contains(&format!("### `{name}`\n")), "{name}");
        }
        assert!(page.contains("**Owed by the caller:**") && page.contains("- Functions that can fail") && !page.contains("/**"));
    }
}
