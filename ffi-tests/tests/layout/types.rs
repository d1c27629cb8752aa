//! C types as text, so that those written in `src/abi` and those that bindgen finds in a header can be compared.
//!
//! What the ABI does not see is dropped: `const`, the names of parameters, and the sign of an enum.

use std::collections::BTreeMap;

use syn::{BinOp, Expr, GenericArgument, Lit, PathArguments, ReturnType, Type, UnOp};

/// Any function pointer: written for a slot that Berth leaves empty, whose type nobody looks at.
pub(crate) const ANY_FUNCTION: &str = "any function";

/// The names that the types of one side may refer to.
#[derive(Default)]
pub(crate) struct Scope {
    /// Other names for types.
    pub(crate) aliases: BTreeMap<String, Type>,
    /// Names of enums.
    pub(crate) enums: BTreeMap<String, Type>,
    /// Constants, for the lengths of arrays.
    pub(crate) constants: BTreeMap<String, i128>,
}

impl Scope {
    /// The canonical text of a type.
    pub(crate) fn text(&self, ty: &Type) -> String {
        match ty {
            Type::Ptr(ptr) => format!("*{}", self.text(&ptr.elem)),
            Type::Array(array) => format!("[{}; {}]", self.text(&array.elem), self.value(&array.len)),
            Type::Paren(inner) => self.text(&inner.elem),
            Type::Tuple(tuple) if tuple.elems.is_empty() => "void".into(),
            Type::BareFn(function) => {
                let inputs = function.inputs.iter().map(|arg| self.text(&arg.ty)).collect();
                self.function(inputs, function.variadic.is_some(), &function.output)
            }
            Type::Path(path) => {
                let names: Vec<String> = path.path.segments.iter().map(|s| s.ident.to_string()).collect();
                let last = path.path.segments.last().expect("a path has a last segment");
                match (names.as_slice(), &last.arguments) {
                    // A function pointer that may be NULL.
                    ([.., name], PathArguments::AngleBracketed(args)) if name == "Option" => match args.args.first() {
                        Some(GenericArgument::Type(inner)) => self.text(inner),
                        other => panic!("Option of {other:?}"),
                    },
                    ([name, member], _) if member == "Type" && self.enums.contains_key(name) => self.enumeration(name),
                    ([.., name], _) => self.named(name),
                    ([], _) => unreachable!("a path has a last segment"),
                }
            }
            other => panic!("a type of an unknown kind: {other:?}"),
        }
    }

    /// The canonical text of a function.
    pub(crate) fn function(&self, mut inputs: Vec<String>, variadic: bool, output: &ReturnType) -> String {
        if variadic {
            inputs.push("...".into());
        }
        let output = match output {
            ReturnType::Default => "void".into(),
            ReturnType::Type(_, ty) => self.text(ty),
        };
        format!("fn({}) -> {output}", inputs.join(", "))
    }

    fn named(&self, name: &str) -> String {
        if name == "unused_slot" {
            return ANY_FUNCTION.into();
        }
        if let Some(ty) = self.aliases.get(name) {
            return self.text(ty);
        }
        match name {
            "c_int" | "i32" => "i32",
            "c_uint" | "u32" => "u32",
            "c_longlong" | "c_long" | "i64" => "i64",
            "c_ulonglong" | "c_ulong" | "u64" => "u64",
            "c_uchar" | "u8" => "u8",
            "c_char" | "i8" => "char",
            "c_void" => "void",
            "c_float" | "f32" => "f32",
            name => plain_name(name),
        }
        .into()
    }

    fn enumeration(&self, name: &str) -> String {
        match self.text(&self.enums[name]).as_str() {
            "i32" | "u32" => "i32".into(),
            other => panic!("enum {name} is {other}, not 32 bits"),
        }
    }

    /// The value of a constant expression.
    pub(crate) fn value(&self, expr: &Expr) -> i128 {
        match expr {
            Expr::Lit(lit) => match &lit.lit {
                Lit::Int(int) => int.base10_parse().expect("an integer"),
                other => panic!("a constant of an unknown kind: {other:?}"),
            },
            Expr::Unary(unary) if matches!(unary.op, UnOp::Neg(_)) => -self.value(&unary.expr),
            Expr::Binary(binary) if matches!(binary.op, BinOp::Div(_)) => self.value(&binary.left) / self.value(&binary.right),
            Expr::Paren(inner) => self.value(&inner.expr),
            Expr::Path(path) => {
                let name = path.path.segments.last().expect("a path has a last segment").ident.to_string();
                *self.constants.get(&name).unwrap_or_else(|| panic!("no constant {name}"))
            }
            other => panic!("a constant of an unknown kind: {other:?}"),
        }
    }
}

/// The C name of what is mirrored: `ggml_backend_i_v2` is `struct ggml_backend_i`, `ggml_backend_of<..>` is `struct ggml_backend`,
/// `GGML_BACKEND_API_VERSION_V3` is `GGML_BACKEND_API_VERSION`.
pub(crate) fn plain_name(rust: &str) -> &str {
    let name = rust.strip_suffix("_of").unwrap_or(rust);
    match name.rsplit_once("_v").or_else(|| name.rsplit_once("_V")) {
        Some((base, version)) if version.bytes().all(|b| b.is_ascii_digit()) => base,
        _ => name,
    }
}
