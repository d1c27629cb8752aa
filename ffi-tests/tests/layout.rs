//! Everything that `src/abi` says about ggml's C ABI, compared with the real headers of every version in the table: sizes, offsets and types
//! of fields, values of constants, prototypes of functions.
//!
//! Three sides: `src/abi` as written (parsed: what there is to compare, and types), as compiled (sizes, offsets, values), and the headers as
//! bindgen reads them. A C compiler is asked too, as a witness that shares nothing with bindgen.

#[path = "layout/headers.rs"]
mod headers;
#[path = "layout/mirror.rs"]
mod mirror;
#[path = "layout/source.rs"]
mod source;
#[path = "layout/types.rs"]
mod types;
#[path = "layout/witness.rs"]
mod witness;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::OnceLock;

use berth::abi::{Layout, Version};
use ffi_tests::cache::say;
use ffi_tests::hosts::{self, Headers};
use ffi_tests::{skip, tools};
use mirror::LAYOUTS;
use source::Source;
use types::ANY_FUNCTION;

/// What one side says.
#[derive(Clone, Default)]
struct Facts {
    structs: BTreeMap<String, Struct>,
    constants: BTreeMap<String, i128>,
    functions: BTreeMap<String, String>,
}

#[derive(Clone)]
struct Struct {
    size: usize,
    fields: Vec<Field>,
}

#[derive(Clone)]
struct Field {
    name: String,
    offset: usize,
    ty: String,
}

/// The one field that the mirror may have and a header not: it lies in what was padding of `ggml_backend_dev_props` before (checked below),
/// so a host that does not know it never sees it.
const LATER: (&str, &str) = ("ggml_backend_dev_caps", "mmap_support");

/// The one function that a header may not have: it is looked up, and its operation is known where it is found.
const LATER_FUNCTION: &str = "ggml_swiglu_clamp";

/// Every way in which the mirror differs from a header, one line each.
fn differences(mirror: &Facts, header: &Facts) -> Vec<String> {
    let mut found = Vec::new();
    for (name, ours) in &mirror.structs {
        let Some(theirs) = header.structs.get(name) else {
            found.push(format!("struct {name} is not in the header"));
            continue;
        };
        let later = |field: &str| (name.as_str(), field) == LATER && theirs.fields.iter().all(|f| f.name != field);
        for field in &ours.fields {
            match theirs.fields.iter().find(|f| f.name == field.name) {
                None if later(&field.name) => found.extend(outside_padding(mirror, header, field)),
                None => found.push(format!("{name}.{} is not in the header", field.name)),
                Some(f) if f.offset != field.offset => {
                    found.push(format!("{name}.{} is at {}, in the header at {}", field.name, field.offset, f.offset));
                }
                Some(f) if f.ty != field.ty && !(field.ty == ANY_FUNCTION && f.ty.starts_with("fn(")) => {
                    found.push(format!("{name}.{} is {}, in the header {}", field.name, field.ty, f.ty));
                }
                Some(_) => {}
            }
        }
        for field in theirs.fields.iter().filter(|f| ours.fields.iter().all(|o| o.name != f.name)) {
            found.push(format!("{name}.{} is missing, in the header it is at {}", field.name, field.offset));
        }
        if ours.size != theirs.size && !ours.fields.iter().any(|f| later(&f.name)) {
            found.push(format!("struct {name} has {} bytes, in the header {}", ours.size, theirs.size));
        }
    }
    let both = |what: &str, name: &str, ours: String, theirs: Option<String>| match theirs {
        None => Some(format!("{what} {name} is not in the header")),
        Some(theirs) => (ours != theirs).then(|| format!("{what} {name} is {ours}, in the header {theirs}")),
    };
    let constants = mirror.constants.iter();
    found.extend(constants.filter_map(|(n, v)| both("constant", n, v.to_string(), header.constants.get(n).map(ToString::to_string))));
    let functions = mirror.functions.iter().filter(|(n, _)| *n != LATER_FUNCTION || header.functions.contains_key(*n));
    found.extend(functions.filter_map(|(n, t)| both("function", n, t.clone(), header.functions.get(n).cloned())));
    found
}

/// Says so if a field that the header does not have would be written outside the header's `ggml_backend_dev_props`, or over another field.
fn outside_padding(mirror: &Facts, header: &Facts, field: &Field) -> Option<String> {
    let caps = |facts: &Facts| {
        let props = facts.structs.get("ggml_backend_dev_props")?;
        let caps = props.fields.last().filter(|f| f.name == "caps")?;
        Some((props.size, caps.offset))
    };
    let end_of_header_caps = header.structs.get(LATER.0)?.size;
    let ((size, offset), (header_size, header_offset)) = (caps(mirror)?, caps(header)?);
    let fits = offset == header_offset && size == header_size && field.offset >= end_of_header_caps && offset + field.offset < header_size;
    (!fits).then(|| format!("{}.{} is not in the header, and not in padding", LATER.0, field.name))
}

/// The headers that are to be had, with what bindgen reads in them. Read once for all tests of this file.
fn all() -> &'static [(Headers, Facts)] {
    static ALL: OnceLock<Vec<(Headers, Facts)>> = OnceLock::new();
    ALL.get_or_init(|| {
        if let Err(why) = std::panic::catch_unwind(bindgen::clang_version) {
            let why = why.downcast_ref::<String>().map_or("libclang cannot be loaded", String::as_str);
            skip::skipped("layout against real headers", &format!("{why} (apt-get install libclang-dev)"));
            return Vec::new();
        }
        hosts::headers().into_iter().map(|h| (h.clone(), headers::read(&h))).collect()
    })
}

/// The layout that Berth chooses for a host built from these headers.
fn chosen(headers: &Headers, facts: &Facts) -> Layout {
    let version = Version::parse(&headers.ggml_version).expect("the table holds versions");
    let exports = |name: &str| facts.functions.contains_key(name);
    let chosen = Layout::choose(version, exports("ggml_backend_tensor_set_2d"), exports("ggml_backend_buft_alloc_buffer_n"));
    let (layout, unknown) = chosen.unwrap_or_else(|e| panic!("{}: {e}", headers.id));
    assert!(!unknown, "{} is compared here, so Berth must not call it unknown", headers.id);
    layout
}

fn mirror_of(layout: Layout) -> Facts {
    mirror::facts(&mut Source::read(), layout)
}

#[test]
fn whatever_is_mirrored_is_compared() {
    let source = Source::read();
    let compared: BTreeMap<String, Vec<&str>> = mirror::compared().into_iter().collect();
    for (name, fields) in &source.structs {
        let here = compared.get(name).unwrap_or_else(|| panic!("struct {name} of src/abi is not in tests/layout/mirror.rs"));
        let fields: Vec<&str> = fields.iter().map(|(field, _)| field.as_str()).collect();
        assert_eq!(&fields, here, "fields of {name} in src/abi, and in tests/layout/mirror.rs");
    }
    let constants: BTreeSet<String> = mirror::compared_constants().into_iter().collect();
    for name in source.constants.iter().filter(|name| *name != "GGML_TYPES") {
        assert!(constants.contains(name), "constant {name} of src/abi is not in tests/layout/mirror.rs");
    }
    let count = |prefix: &str| source.functions.iter().filter(|(name, _)| name.starts_with(prefix)).count();
    assert!(source.structs.len() >= 17 && source.constants.len() >= 20, "the parser finds what src/abi is known to have");
    assert!(count("ggml_backend_buffer_init") >= 1 && count("ggml_log_internal") == 1 && count("ggml_mul_mat_id") == 1);
    for function in
        [LATER_FUNCTION, "ggml_can_fuse_subgraph_ext", "ggml_backend_dev_count", "ggml_backend_dev_get", "ggml_backend_dev_type"]
    {
        assert_eq!(count(function), 1, "{function}");
    }
    let given = source.functions.iter().filter(|(name, _)| name.ends_with("_t")).count();
    assert_eq!(given, 5, "init, score, get_features, set_n_threads and set_abort_callback");
}

#[test]
fn every_struct_constant_and_prototype_equals_the_real_headers() {
    let mut wrong = Vec::new();
    for (headers, facts) in all() {
        let layout = chosen(headers, facts);
        let mirror = mirror_of(layout);
        let found = differences(&mirror, facts);
        let fields: usize = mirror.structs.values().map(|s| s.fields.len()).sum();
        say(&format!(
            "compared with {} (ggml {}, layout {}): {} structs, {fields} fields, {} constants, {} functions, {} differences",
            headers.id,
            headers.ggml_version,
            layout.name(),
            mirror.structs.len(),
            mirror.constants.len(),
            mirror.functions.len(),
            found.len(),
        ));
        wrong.extend(found.into_iter().map(|line| format!("{}: {line}", headers.id)));
        for name in &Source::read().opaque {
            let known = facts.structs.contains_key(name) || facts.functions.values().any(|f| f.contains(&format!("*{name}")));
            assert!(known, "{}: no struct {name}", headers.id);
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn the_c_compiler_agrees() {
    if let Err(missing) = tools::command("cc") {
        return skip::skipped("layout against a C compiler", &missing.0);
    }
    let mut wrong = Vec::new();
    for (headers, facts) in all() {
        let mirror = mirror_of(chosen(headers, facts));
        let mut ours: BTreeMap<String, i128> = mirror.constants.clone();
        for (name, s) in &mirror.structs {
            let is_later =
                |f: &Field| (name.as_str(), f.name.as_str()) == LATER && !facts.structs[name].fields.iter().any(|t| t.name == f.name);
            if !s.fields.iter().any(is_later) {
                ours.insert(format!("sizeof(struct {name})"), s.size as i128);
            }
            // A name that is a word of Rust is written with an underscore there.
            let offset = |f: &Field| (format!("offsetof(struct {name}, {})", f.name.trim_end_matches('_')), f.offset as i128);
            ours.extend(s.fields.iter().filter(|f| !is_later(f)).map(offset));
        }
        let theirs = witness::ask(headers, ours.keys().cloned());
        assert_eq!(ours.len(), theirs.len());
        let differ = ours.iter().filter(|(expression, value)| theirs[*expression] != **value);
        wrong.extend(differ.map(|(expression, value)| format!("{}: {expression} is {value}, in C {}", headers.id, theirs[expression])));
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn the_headers_cover_every_layout_and_every_drift() {
    if all().len() < hosts::header_ids().len() {
        // What is missing has been said, as a skip.
        return;
    }
    let covered: BTreeSet<String> = all()
        .iter()
        .flat_map(|(headers, facts)| {
            let field = |name: &str, field: &str| facts.structs[name].fields.iter().find(|f| f.name == field).map(|f| f.ty.clone());
            let parameters = field("ggml_backend_i", "graph_optimize").map(|ty| ty.matches(", ").count() + 1);
            [
                format!("layout {}", chosen(headers, facts).name()),
                format!("graph_optimize has {} parameters", parameters.unwrap_or(0)),
                format!("mmap_support {}", if field(LATER.0, LATER.1).is_some() { "is there" } else { "is not there" }),
                format!("{LATER_FUNCTION} {}", if facts.functions.contains_key(LATER_FUNCTION) { "is there" } else { "is not there" }),
            ]
        })
        .collect();
    for drift in ["layout v1", "layout v2", "layout v3", "mmap_support is there", "mmap_support is not there"] {
        assert!(covered.contains(drift), "{drift}: {covered:?}");
    }
    for there in ["is there", "is not there"] {
        assert!(covered.contains(&format!("{LATER_FUNCTION} {there}")), "{covered:?}");
    }
    for parameters in [2, 3] {
        assert!(covered.contains(&format!("graph_optimize has {parameters} parameters")), "{covered:?}");
    }
    let versions: BTreeSet<&str> = all().iter().map(|(headers, _)| headers.ggml_version.as_str()).collect();
    assert!(versions.len() >= 3, "{versions:?}");
}

#[test]
fn every_other_layout_is_found_to_be_wrong() {
    for (headers, facts) in all() {
        let right = chosen(headers, facts);
        for wrong in LAYOUTS.into_iter().filter(|layout| *layout != right) {
            let found = differences(&mirror_of(wrong), facts);
            let expect = |field: &str| {
                let said = found.iter().any(|line| line.starts_with(&format!("{field} is at ")));
                assert!(said, "{} against layout {}: {field}: {found:#?}", headers.id, wrong.name());
            };
            if wrong == Layout::V1 || right == Layout::V1 {
                let fields = ["ggml_backend_buffer_i.cpy_tensor", "ggml_backend_buffer.usage", "ggml_backend_i.graph_compute"];
                fields.into_iter().chain(["ggml_backend.context"]).for_each(expect);
            }
            if wrong == Layout::V3 || right == Layout::V3 {
                ["ggml_backend_buffer_type_i.is_host", "ggml_backend_buffer_type.context"].into_iter().for_each(expect);
                assert!(found.iter().any(|line| line.starts_with("constant GGML_BACKEND_API_VERSION is ")), "{found:#?}");
            }
        }
    }
}

#[test]
fn one_wrong_offset_type_value_or_parameter_is_one_difference() {
    for (headers, facts) in all() {
        let right = mirror_of(chosen(headers, facts));
        let before = differences(&right, facts);
        let wrong = |change: &dyn Fn(&mut Facts)| {
            let mut mirror = right.clone();
            change(&mut mirror);
            let found: Vec<String> = differences(&mirror, facts).into_iter().filter(|line| !before.contains(line)).collect();
            assert_eq!(found.len(), 1, "{}: {found:#?}", headers.id);
            found[0].clone()
        };
        let tensor = |mirror: &mut Facts| mirror.structs.get_mut("ggml_tensor").map(|s| &mut s.fields[4]).expect("op").clone();
        assert_eq!(tensor(&mut right.clone()).name, "op");
        let line = wrong(&|m| m.structs.get_mut("ggml_tensor").expect("mirrored").fields[4].offset += 4);
        assert_eq!(line, "ggml_tensor.op is at 84, in the header at 80");
        let line = wrong(&|m| m.structs.get_mut("ggml_tensor").expect("mirrored").fields[4].ty = "i64".into());
        assert_eq!(line, "ggml_tensor.op is i64, in the header i32");
        let line = wrong(&|m| m.structs.get_mut("ggml_tensor").expect("mirrored").size += 8);
        assert_eq!(line, "struct ggml_tensor has 344 bytes, in the header 336");
        let line = wrong(&|m| drop(m.structs.get_mut("ggml_backend_reg").expect("mirrored").fields.pop()));
        assert_eq!(line, "ggml_backend_reg.context is missing, in the header it is at 40");
        let line = wrong(&|m| *m.constants.get_mut("GGML_TYPE_Q4_K").expect("mirrored") += 1);
        assert_eq!(line, "constant GGML_TYPE_Q4_K is 13, in the header 12");
        let line = wrong(&|m| drop(m.functions.insert("ggml_nbytes".into(), "fn(*ggml_tensor, i32) -> usize".into())));
        assert_eq!(line, "function ggml_nbytes is fn(*ggml_tensor, i32) -> usize, in the header fn(*ggml_tensor) -> usize");
    }
}
