//! What the compiler made of `src/abi`: sizes, offsets and values, for one layout of the host's tables.

use std::mem::{offset_of, size_of};

use berth::abi::*;
use syn::{GenericArgument, PathArguments, Type};

use super::source::Source;
use super::types::plain_name;
use super::{Facts, Field, Struct};

/// All layouts.
pub(crate) const LAYOUTS: [Layout; 3] = [Layout::V1, Layout::V2, Layout::V3];

/// A mirrored struct as compiled.
pub(crate) struct Compiled {
    rust: &'static str,
    size: usize,
    offsets: Vec<(&'static str, usize)>,
}

macro_rules! structs {
    ($($ty:ty { $($field:ident),* $(,)? })*) => {
        vec![$(Compiled {
            rust: stringify!($ty),
            size: size_of::<$ty>(),
            offsets: vec![$((stringify!($field), offset_of!($ty, $field))),*],
        }),*]
    };
}

macro_rules! constants {
    ($($name:ident)*) => { vec![$((stringify!($name), $name as i128)),*] };
}

/// Structs that are the same for every host.
fn common() -> Vec<Compiled> {
    structs! {
        ggml_tensor {
            type_, buffer, ne, nb, op, op_params, flags, src, view_src, view_offs, data, name, extra, padding
        }
        ggml_init_params { mem_size, mem_buffer, no_alloc }
        ggml_backend_dev_caps { async_, host_buffer, buffer_from_host_ptr, events, mmap_support }
        ggml_backend_dev_props { name, description, memory_free, memory_total, type_, device_id, caps }
        ggml_backend_device_i {
            get_name, get_description, get_memory, get_type, get_props, init_backend, get_buffer_type, get_host_buffer_type,
            buffer_from_host_ptr, supports_op, supports_buft, offload_op, event_new, event_free, event_synchronize
        }
        ggml_backend_device { iface, reg, context }
        ggml_backend_reg_i { get_name, get_device_count, get_device, get_proc_address }
        ggml_backend_reg { api_version, iface, context }
        ggml_backend_feature { name, value }
    }
}

/// Structs that depend on the layout.
fn varying(layout: Layout) -> Vec<Compiled> {
    let buffer_type = match layout {
        Layout::V1 | Layout::V2 => structs! {
            ggml_backend_buffer_type_i_v2 { get_name, alloc_buffer, get_alignment, get_max_size, get_alloc_size, is_host }
            ggml_backend_buffer_type_of<ggml_backend_buffer_type_i_v2> { iface, device, context }
        },
        Layout::V3 => structs! {
            ggml_backend_buffer_type_i_v3 {
                get_name, alloc_buffer, alloc_buffer_n, get_alignment, get_max_size, get_alloc_size, get_alloc_size_n, is_host
            }
            ggml_backend_buffer_type_of<ggml_backend_buffer_type_i_v3> { iface, device, context }
        },
    };
    let buffer_and_backend = match layout {
        Layout::V1 => structs! {
            ggml_backend_buffer_i_v1 {
                free_buffer, get_base, init_tensor, memset_tensor, set_tensor, get_tensor, cpy_tensor, clear, reset
            }
            ggml_backend_buffer_of<ggml_backend_buffer_i_v1> { iface, buft, context, size, usage }
            ggml_backend_i_v1 {
                get_name, free, set_tensor_async, get_tensor_async, cpy_tensor_async, synchronize, graph_plan_create, graph_plan_free,
                graph_plan_update, graph_plan_compute, graph_compute, event_record, event_wait, graph_optimize
            }
            ggml_backend_of<ggml_backend_i_v1> { guid, iface, device, context }
        },
        Layout::V2 | Layout::V3 => structs! {
            ggml_backend_buffer_i_v2 {
                free_buffer, get_base, init_tensor, memset_tensor, set_tensor, get_tensor, set_tensor_2d, get_tensor_2d, cpy_tensor, clear, reset
            }
            ggml_backend_buffer_of<ggml_backend_buffer_i_v2> { iface, buft, context, size, usage }
            ggml_backend_i_v2 {
                get_name, free, set_tensor_async, get_tensor_async, set_tensor_2d_async, get_tensor_2d_async, cpy_tensor_async, synchronize,
                graph_plan_create, graph_plan_free, graph_plan_update, graph_plan_compute, graph_compute, event_record, event_wait, graph_optimize
            }
            ggml_backend_of<ggml_backend_i_v2> { guid, iface, device, context }
        },
    };
    buffer_type.into_iter().chain(buffer_and_backend).collect()
}

/// Constants, by their C names.
fn constants(layout: Layout) -> Vec<(String, i128)> {
    let named = constants! {
        GGML_MAX_DIMS GGML_MAX_SRC GGML_MAX_OP_PARAMS GGML_MAX_NAME GGML_TENSOR_FLAG_OUTPUT GGML_TYPE_F32 GGML_TYPE_F16 GGML_TYPE_I32
        GGML_STATUS_SUCCESS GGML_STATUS_ABORTED GGML_STATUS_FAILED GGML_BACKEND_BUFFER_USAGE_ANY GGML_BACKEND_BUFFER_USAGE_WEIGHTS
        GGML_BACKEND_BUFFER_USAGE_COMPUTE GGML_BACKEND_DEVICE_TYPE_CPU GGML_BACKEND_DEVICE_TYPE_GPU GGML_BACKEND_DEVICE_TYPE_IGPU GGML_BACKEND_DEVICE_TYPE_ACCEL
        GGML_LOG_LEVEL_DEBUG GGML_LOG_LEVEL_INFO GGML_LOG_LEVEL_WARN GGML_LOG_LEVEL_ERROR
    };
    let named = named.into_iter().map(|(name, value)| (name.to_owned(), value));
    let types = GGML_TYPES.map(|(number, name)| (format!("GGML_TYPE_{}", name.to_uppercase()), i128::from(number)));
    // What Berth puts into its registry for a host of this layout.
    let api_version = ("GGML_BACKEND_API_VERSION".to_owned(), i128::from(layout.api_version()));
    named.chain(types).chain([api_version]).collect()
}

/// Everything that Berth says about a host of this layout.
pub(crate) fn facts(source: &mut Source, layout: Layout) -> Facts {
    let mut facts = Facts { constants: constants(layout).into_iter().collect(), ..Facts::default() };
    source.scope.constants.clone_from(&facts.constants);
    for compiled in common().into_iter().chain(varying(layout)) {
        let (name, parameter) = parts(compiled.rust);
        let written = source.structs.get(&name).unwrap_or_else(|| panic!("src/abi has no #[repr(C)] struct {name}"));
        // A generic struct differs in the type of its table only.
        let mut scope = super::types::Scope { aliases: source.scope.aliases.clone(), ..Default::default() };
        scope.constants.clone_from(&source.scope.constants);
        scope.aliases.extend(parameter.map(|ty| ("I".to_owned(), ty)));
        let field = |&(field, offset): &(&str, usize)| {
            let (_, ty) = written.iter().find(|(name, _)| name == field).unwrap_or_else(|| panic!("{name} has no field {field}"));
            Field { name: field.into(), offset, ty: scope.text(ty) }
        };
        let fields = compiled.offsets.iter().map(field).collect();
        facts.structs.insert(plain_name(&name).into(), Struct { size: compiled.size, fields });
    }
    for (name, ty) in &source.functions {
        facts.functions.insert(name.clone(), source.scope.text(ty));
    }
    facts
}

/// Names of Rust structs and their fields that are compared in some layout.
pub(crate) fn compared() -> Vec<(String, Vec<&'static str>)> {
    let all = common().into_iter().chain(LAYOUTS.into_iter().flat_map(varying));
    all.map(|c| (parts(c.rust).0, c.offsets.iter().map(|(field, _)| *field).collect())).collect()
}

/// Names of constants that are compared.
pub(crate) fn compared_constants() -> Vec<String> {
    constants(Layout::V1).into_iter().map(|(name, _)| name).collect()
}

/// Name and type argument of `name` or `name<argument>`.
fn parts(rust: &str) -> (String, Option<Type>) {
    let path: syn::Path = syn::parse_str(rust).expect("a type's path");
    let last = path.segments.last().expect("a path has a last segment");
    let argument = match &last.arguments {
        PathArguments::AngleBracketed(args) => args.args.iter().find_map(|arg| match arg {
            GenericArgument::Type(ty) => Some(ty.clone()),
            _ => None,
        }),
        _ => None,
    };
    (last.ident.to_string(), argument)
}
