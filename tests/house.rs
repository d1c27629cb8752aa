//! Rules of the house that the compiler does not know: who may import whom, where `unsafe` may stand, and that every function C can call
//! starts with the panic guard.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use syn::visit::Visit;

/// What each module may import. A module missing here fails the test, so a new one has to be given its place.
const MAY_IMPORT: &[(&str, &[&str])] = &[
    ("error", &[]),
    ("text", &[]),
    ("log", &["text"]),
    ("config", &["error", "log"]),
    // Of `placement` only what a tensor's name says of its kind.
    ("report", &["error", "log", "config", "memory", "placement"]),
    ("abi", &["error", "log"]),
    ("memory", &["error"]),
    ("gguf", &["text"]),
    ("placement", &["text", "gguf"]),
    ("moe", &["error"]),
    ("ahead", &["error", "log", "config", "report", "memory", "gguf", "placement", "moe"]),
    ("buffers", &["error", "log", "config", "report", "abi", "memory"]),
    // Of `placement` only which weights its decision gives the device.
    ("backend", &["error", "log", "config", "report", "abi", "placement", "buffers", "moe", "ahead"]),
    ("loader", &["error", "text", "config", "report", "memory", "gguf", "placement", "buffers"]),
    (
        "capi",
        &["error", "text", "log", "config", "report", "abi", "memory", "gguf", "placement", "moe", "ahead", "buffers", "loader", "backend"],
    ),
];

/// Where `unsafe` may stand.
const MAY_BE_UNSAFE: &[&str] = &[
    "abi/",
    "ahead/mod.rs",
    "memory/",
    "buffers/fill.rs",
    "buffers/lasting.rs",
    "buffers/tensors.rs",
    "buffers/vtable.rs",
    "backend/",
    "loader/place.rs",
    "capi/",
    "moe/acts.rs",
    "moe/ahead.rs",
    "moe/args.rs",
    "moe/blocks.rs",
    "moe/copies.rs",
    "moe/crew.rs",
    "moe/kernels/",
    "moe/pool.rs",
    "moe/shared.rs",
    "moe/tests.rs",
];

/// What a function that C calls may consist of: one call of one of these, all of which catch panics.
const GUARDS: &[&str] = &["guard", "status", "pointer"];

/// Longest file, in lines.
const LONGEST: usize = 700;

struct Source {
    /// Path below `src`, with `/`.
    name: String,
    text: String,
    syntax: syn::File,
}

impl Source {
    fn module(&self) -> &str {
        self.name.split(['/', '.']).next().unwrap_or("")
    }
}

fn sources() -> Vec<Source> {
    fn walk(dir: &Path, found: &mut Vec<PathBuf>) {
        for entry in std::fs::read_dir(dir).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                walk(&path, found);
            } else if path.extension().is_some_and(|e| e == "rs") {
                found.push(path);
            }
        }
    }
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let mut files = Vec::new();
    walk(&root, &mut files);
    let read = |path: PathBuf| {
        let text = std::fs::read_to_string(&path).unwrap();
        let syntax = syn::parse_file(&text).unwrap();
        Source { name: path.strip_prefix(&root).unwrap().to_str().unwrap().to_owned(), text, syntax }
    };
    let all: Vec<Source> = files.into_iter().map(read).collect();
    assert!(all.len() > 20, "the sources were not found");
    all
}

#[test]
fn no_file_imports_from_above_its_level() {
    let rules: BTreeMap<&str, &[&str]> = MAY_IMPORT.iter().copied().collect();
    let mut faults = Vec::new();
    for source in sources().iter().filter(|s| s.name != "lib.rs" && !s.name.starts_with("bin/")) {
        let module = source.module();
        let Some(allowed) = rules.get(module) else {
            faults.push(format!("{}: module {module} has no place in the order", source.name));
            continue;
        };
        let code = source.text.lines().filter(|l| !l.trim_start().starts_with("//"));
        for (number, line) in code.enumerate() {
            for imported in line.split("crate::").skip(1) {
                // `use crate::{a, b::c};` names several.
                let list = imported.strip_prefix('{').map_or(imported, |l| l.split('}').next().unwrap_or(l));
                let names = if imported.starts_with('{') { list.split(',').collect::<Vec<_>>() } else { vec![list] };
                for name in names {
                    let name: String = name.trim().chars().take_while(|c| c.is_alphanumeric() || *c == '_').collect();
                    if rules.contains_key(name.as_str()) && name != module && !allowed.contains(&name.as_str()) {
                        faults.push(format!("{}: code line {number} imports {name}", source.name));
                    }
                }
            }
        }
    }
    assert!(faults.is_empty(), "{}", faults.join("\n"));
}

#[derive(Default)]
struct Finder {
    /// Functions with the C calling convention: name, and whether their body is one guard call.
    exported: Vec<(String, bool)>,
    unsafe_items: usize,
}

impl Finder {
    fn function(&mut self, signature: &syn::Signature, block: &syn::Block) {
        if signature.abi.is_some() {
            let guarded = match block.stmts.as_slice() {
                [syn::Stmt::Expr(syn::Expr::Call(call), _)] => is_guard(call),
                _ => false,
            };
            self.exported.push((signature.ident.to_string(), guarded));
        }
        self.unsafe_items += usize::from(signature.unsafety.is_some());
    }
}

fn is_guard(call: &syn::ExprCall) -> bool {
    matches!(&*call.func, syn::Expr::Path(p) if p.path.segments.last().is_some_and(|s| GUARDS.contains(&s.ident.to_string().as_str())))
}

impl<'ast> Visit<'ast> for Finder {
    fn visit_item_fn(&mut self, item: &'ast syn::ItemFn) {
        self.function(&item.sig, &item.block);
        syn::visit::visit_item_fn(self, item);
    }

    fn visit_impl_item_fn(&mut self, item: &'ast syn::ImplItemFn) {
        self.function(&item.sig, &item.block);
        syn::visit::visit_impl_item_fn(self, item);
    }

    fn visit_expr_unsafe(&mut self, block: &'ast syn::ExprUnsafe) {
        self.unsafe_items += 1;
        syn::visit::visit_expr_unsafe(self, block);
    }

    fn visit_item_impl(&mut self, item: &'ast syn::ItemImpl) {
        self.unsafe_items += usize::from(item.unsafety.is_some());
        syn::visit::visit_item_impl(self, item);
    }
}

fn find(source: &Source) -> Finder {
    let mut finder = Finder::default();
    finder.visit_file(&source.syntax);
    finder
}

#[test]
fn every_function_that_c_can_call_is_one_guard_call() {
    let mut count = 0;
    let mut faults = Vec::new();
    for source in sources() {
        for (function, guarded) in find(&source).exported {
            count += 1;
            if !guarded {
                faults.push(format!("{}: {function} is not one call of the panic guard", source.name));
            }
        }
    }
    // A small statement before the guard (a nested type, a constant) is allowed nowhere: it would be the one that panics.
    assert!(count > 30, "only {count} functions were found");
    assert!(faults.is_empty(), "{}", faults.join("\n"));
}

#[test]
fn the_guard_rule_sees_an_unguarded_function() {
    let unguarded: syn::File = syn::parse_quote! { extern "C" fn f() -> i32 { g(); guard("f", 0, || 1) } };
    let source = Source { name: "x.rs".into(), text: String::new(), syntax: unguarded };
    assert_eq!(find(&source).exported, [("f".to_owned(), false)]);
}

#[test]
fn unsafe_code_stands_only_at_its_addresses() {
    for source in sources() {
        let allowed = MAY_BE_UNSAFE.iter().any(|place| source.name.starts_with(place));
        let found = find(&source).unsafe_items;
        assert!(allowed || found == 0, "{} has {found} unsafe items", source.name);
    }
}

#[test]
fn every_file_says_what_it_is_and_none_is_too_long() {
    for source in sources() {
        assert!(source.text.starts_with("//!"), "{} does not start with a description", source.name);
        let lines = source.text.lines().count();
        assert!(lines <= LONGEST, "{} has {lines} lines", source.name);
        assert!(!source.text.contains(concat!("#[", "allow")), "{}: use #[expect(.., reason = \"..\")]", source.name);
    }
}
