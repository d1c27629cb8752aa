//! What `src/abi` says in writing: names of structs, fields and constants, types of fields, prototypes.
//!
//! The compiler knows sizes and offsets, but not what there is to be compared, nor a type as text. This is where nothing can be forgotten.

use std::collections::BTreeMap;
use std::path::Path;

use syn::parse::{Parse, ParseStream};
use syn::punctuated::Punctuated;
use syn::visit::Visit;
use syn::{Attribute, Ident, Item, ItemFn, ItemMacro, ItemStruct, ItemType, Token, Type};

use super::types::{Scope, plain_name};

/// Everything found in the source.
#[derive(Default)]
pub(crate) struct Source {
    /// Names of types and constants.
    pub(crate) scope: Scope,
    /// `#[repr(C)]` structs with fields: their fields and the fields' types, by the name in Rust.
    pub(crate) structs: BTreeMap<String, Vec<(String, Type)>>,
    /// `#[repr(C)]` structs without fields of their own: Berth only points at them.
    pub(crate) opaque: Vec<String>,
    /// Names of constants that mirror one of the headers.
    pub(crate) constants: Vec<String>,
    /// Functions of the host that are called, and those that the host calls by name: prototypes by C name, or by the name of their C type.
    pub(crate) functions: Vec<(String, Type)>,
}

impl Source {
    /// Reads the files that mirror a header.
    pub(crate) fn read() -> Source {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../src");
        let mut source = Source::default();
        let mut files: Vec<_> =
            std::fs::read_dir(root.join("abi")).expect("src/abi").map(|entry| entry.expect("an entry").path()).collect();
        files.extend(["capi/plugin.rs", "backend/registry.rs", "backend/stream.rs", "backend/run.rs"].map(|name| root.join(name)));
        for path in files {
            let text = std::fs::read_to_string(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
            let file = syn::parse_file(&text).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
            source.visit_file(&file);
        }
        source
    }
}

impl<'ast> Visit<'ast> for Source {
    fn visit_item(&mut self, item: &'ast Item) {
        if let Item::Const(constant) = item
            && constant.ident.to_string().starts_with("GGML_")
        {
            self.constants.push(plain_name(&constant.ident.to_string()).to_owned());
        }
        syn::visit::visit_item(self, item);
    }

    fn visit_item_struct(&mut self, item: &'ast ItemStruct) {
        let name = item.ident.to_string();
        let fields: Vec<(String, Type)> = item.fields.iter().filter_map(|f| Some((f.ident.as_ref()?.to_string(), f.ty.clone()))).collect();
        if name == "Found"
            && let Some((_, log)) = fields.iter().find(|(name, _)| name == "log")
        {
            self.functions.push(("ggml_log_internal".into(), log.clone()));
        }
        if item.attrs.iter().any(is_repr_c) {
            match fields.as_slice() {
                [(field, _)] if field == "opaque" => self.opaque.push(name),
                _ => drop(self.structs.insert(name, fields)),
            }
        }
    }

    fn visit_item_type(&mut self, item: &'ast ItemType) {
        // Functions of the host that are called through a type, written where they are looked up.
        let function = match item.ident.to_string().as_str() {
            "Init" => "ggml_backend_buffer_init",
            "SwigluClamp" => "ggml_swiglu_clamp",
            "CanFuseSubgraph" => "ggml_can_fuse_subgraph_ext",
            "Count" => "ggml_backend_dev_count",
            "Get" => "ggml_backend_dev_get",
            "TypeOf" => "ggml_backend_dev_type",
            name => return drop(self.scope.aliases.insert(name.to_owned(), (*item.ty).clone())),
        };
        self.functions.push((function.into(), (*item.ty).clone()));
    }

    fn visit_item_fn(&mut self, item: &'ast ItemFn) {
        let c_type = match item.sig.ident.to_string().as_str() {
            "ggml_backend_init" => "ggml_backend_init_t",
            "ggml_backend_score" => "ggml_backend_score_t",
            "get_features" => "ggml_backend_get_features_t",
            "set_n_threads" => "ggml_backend_set_n_threads_t",
            "set_abort_callback" => "ggml_backend_set_abort_callback_t",
            _ => return syn::visit::visit_item_fn(self, item),
        };
        let inputs = item.sig.inputs.iter().map(|arg| match arg {
            syn::FnArg::Typed(arg) => &arg.ty,
            syn::FnArg::Receiver(_) => unreachable!("a C function has no self"),
        });
        let output = &item.sig.output;
        self.functions.push((c_type.into(), syn::parse_quote!(unsafe extern "C" fn(#(#inputs),*) #output)));
    }

    fn visit_item_macro(&mut self, item: &'ast ItemMacro) {
        if item.mac.path.is_ident("api") || item.mac.path.is_ident("functions") {
            let list: Prototypes = item.mac.parse_body().expect("it holds `name: type,`");
            self.functions.extend(list.0);
        }
    }
}

/// The body of `api! { name: type, .. }`, and of `functions!`.
struct Prototypes(Vec<(String, Type)>);

impl Parse for Prototypes {
    fn parse(input: ParseStream<'_>) -> syn::Result<Self> {
        let one = |input: ParseStream<'_>| {
            Attribute::parse_outer(input)?;
            let name: Ident = input.parse()?;
            input.parse::<Token![:]>()?;
            Ok((name.to_string(), input.parse()?))
        };
        Ok(Prototypes(Punctuated::<_, Token![,]>::parse_terminated_with(input, one)?.into_iter().collect()))
    }
}

fn is_repr_c(attr: &Attribute) -> bool {
    attr.path().is_ident("repr") && attr.parse_args::<Ident>().is_ok_and(|repr| repr == "C")
}
