//! What the real headers say, as bindgen reads them with libclang: its layout assertions, constants and prototypes.

use std::collections::BTreeMap;

use ffi_tests::hosts::Headers;
use syn::{Expr, ForeignItem, Item, Lit, Stmt};

use super::types::Scope;
use super::{Facts, Field, Struct};

const WRAPPER: &str = "#include \"ggml.h\"\n#include \"ggml-backend.h\"\n#include \"ggml-backend-impl.h\"\n#include \"ggml-impl.h\"\n";

/// Reads one set of headers.
pub(crate) fn read(headers: &Headers) -> Facts {
    let include = |dir: &std::path::Path| format!("-I{}", dir.display());
    let bindings = bindgen::Builder::default()
        .header_contents("wrapper.h", WRAPPER)
        .clang_args([include(&headers.ggml_include), include(&headers.ggml_src)])
        .allowlist_item("(ggml|GGML)_.*")
        .default_enum_style(bindgen::EnumVariation::ModuleConsts)
        .layout_tests(true)
        .generate_comments(false)
        .formatter(bindgen::Formatter::None)
        .generate()
        .unwrap_or_else(|e| panic!("bindgen over {}: {e}", headers.id));
    let file = syn::parse_file(&bindings.to_string()).expect("bindgen writes Rust");
    facts(&file.items)
}

fn facts(items: &[Item]) -> Facts {
    let mut scope = Scope::default();
    let mut numbers = BTreeMap::new();
    for item in items {
        match item {
            Item::Type(alias) => {
                scope.aliases.insert(alias.ident.to_string(), (*alias.ty).clone());
            }
            Item::Const(constant) if constant.ident == "_" => asserted(&constant.expr, &mut numbers),
            // Text and floating-point macros are of no interest.
            Item::Const(constant) if is_integer(&constant.expr) => {
                let value = scope.value(&constant.expr);
                scope.constants.insert(constant.ident.to_string(), value);
            }
            Item::Mod(module) => {
                for item in module.content.iter().flat_map(|(_, items)| items) {
                    match item {
                        Item::Type(alias) => {
                            scope.enums.insert(module.ident.to_string(), (*alias.ty).clone());
                        }
                        Item::Const(constant) => {
                            let value = scope.value(&constant.expr);
                            scope.constants.insert(constant.ident.to_string(), value);
                        }
                        _ => {}
                    }
                }
            }
            _ => {}
        }
    }
    let mut facts = Facts { constants: scope.constants.clone(), ..Facts::default() };
    for item in items {
        match item {
            Item::Struct(item) => {
                let name = item.ident.to_string();
                // Without assertions it is only declared in these headers.
                if let Some(&size) = numbers.get(&format!("Size of {name}")) {
                    let field = |field: &syn::Field| {
                        let field_name = field.ident.as_ref().map(ToString::to_string).unwrap_or_default();
                        let offset = numbers.get(&format!("Offset of field: {name}::{field_name}"));
                        let offset = *offset.unwrap_or_else(|| panic!("bindgen asserts no offset of {name}.{field_name}"));
                        Field { name: field_name, offset, ty: scope.text(&field.ty) }
                    };
                    facts.structs.insert(name.clone(), Struct { size, fields: item.fields.iter().map(field).collect() });
                }
            }
            Item::ForeignMod(module) => {
                for item in &module.items {
                    if let ForeignItem::Fn(function) = item {
                        let inputs = function.sig.inputs.iter().map(|arg| match arg {
                            syn::FnArg::Typed(arg) => scope.text(&arg.ty),
                            syn::FnArg::Receiver(_) => unreachable!("C has no methods"),
                        });
                        let text = scope.function(inputs.collect(), function.sig.variadic.is_some(), &function.sig.output);
                        facts.functions.insert(function.sig.ident.to_string(), text);
                    }
                }
            }
            _ => {}
        }
    }
    // The types of functions that a plug-in gives to the host.
    let given = ["init", "score", "get_features", "set_n_threads", "set_abort_callback"].map(|name| format!("ggml_backend_{name}_t"));
    for name in given.each_ref().map(String::as_str) {
        if let Some(ty) = scope.aliases.get(name) {
            facts.functions.insert(name.into(), scope.text(ty));
        }
    }
    facts
}

/// Reads statements of the form `["Size of x"][::std::mem::size_of::<x>() - 16usize];`.
fn asserted(expr: &Expr, numbers: &mut BTreeMap<String, usize>) {
    let Expr::Block(block) = expr else { return };
    for stmt in &block.block.stmts {
        let Stmt::Expr(Expr::Index(index), _) = stmt else { continue };
        if let (Expr::Array(label), Expr::Binary(difference)) = (&*index.expr, &*index.index)
            && let Some(Expr::Lit(label)) = label.elems.first()
            && let Lit::Str(label) = &label.lit
            && let Expr::Lit(number) = &*difference.right
            && let Lit::Int(number) = &number.lit
        {
            numbers.insert(label.value(), number.base10_parse().expect("an integer"));
        }
    }
}

fn is_integer(expr: &Expr) -> bool {
    match expr {
        Expr::Lit(lit) => matches!(lit.lit, Lit::Int(_)),
        Expr::Unary(unary) => is_integer(&unary.expr),
        _ => false,
    }
}
