//! The real ggml, opened at run time: `BERTH_FUZZ_GGML` names the directory of its shared libraries.

use std::ffi::{CString, c_char, c_int, c_void};
use std::sync::OnceLock;

use libloading::os::unix::{Library, RTLD_GLOBAL, RTLD_NOW};

/// Tensors, contexts, graphs, buffers, backends: all of them pointers.
pub type Ptr = *mut c_void;

/// `struct ggml_init_params`.
#[repr(C)]
pub struct InitParams {
    pub size: usize,
    pub buffer: Ptr,
    pub no_alloc: bool,
}

macro_rules! functions {
    ($($name:ident($($arg:ty),*) $(-> $result:ty)?;)*) => {
        /// The functions that are called.
        #[allow(dead_code, reason = "not every target calls all of them")]
        pub struct Ggml {
            $(pub $name: unsafe extern "C" fn($($arg),*) $(-> $result)?,)*
            pub cpu: Ptr,
            _libraries: [Library; 2],
        }

        fn open() -> Ggml {
            let directory = std::env::var("BERTH_FUZZ_GGML").expect("BERTH_FUZZ_GGML names the directory of libggml.so");
            let open = |name: &str| unsafe { Library::open(Some(format!("{directory}/{name}")), RTLD_NOW | RTLD_GLOBAL) }.expect("a library of ggml");
            let libraries = [open("libggml-base.so"), open("libggml.so")];
            let find = |name: &str| {
                let symbol = CString::new(name).expect("a name");
                let found = libraries.iter().find_map(|l| unsafe { l.get::<Ptr>(symbol.as_bytes_with_nul()) }.ok());
                found.map(|s| s.as_raw_ptr()).unwrap_or_else(|| panic!("no {name}"))
            };
            let mut ggml = Ggml {
                $($name: unsafe { std::mem::transmute::<Ptr, unsafe extern "C" fn($($arg),*) $(-> $result)?>(find(stringify!($name))) },)*
                cpu: std::ptr::null_mut(),
                _libraries: libraries,
            };
            let file = CString::new(format!("{directory}/libggml-cpu.so")).expect("a path");
            unsafe {
                assert!(!(ggml.ggml_backend_load)(file.as_ptr()).is_null(), "the CPU backend does not load");
                let device = (ggml.ggml_backend_dev_by_type)(0);
                ggml.cpu = (ggml.ggml_backend_dev_init)(device, std::ptr::null());
            }
            assert!(!ggml.cpu.is_null());
            ggml
        }
    };
}

functions! {
    ggml_init(InitParams) -> Ptr;
    ggml_free(Ptr);
    ggml_new_tensor_3d(Ptr, c_int, i64, i64, i64) -> Ptr;
    ggml_mul_mat_id(Ptr, Ptr, Ptr, Ptr) -> Ptr;
    ggml_add_id(Ptr, Ptr, Ptr, Ptr) -> Ptr;
    ggml_glu(Ptr, Ptr, c_int, bool) -> Ptr;
    ggml_glu_split(Ptr, Ptr, Ptr, c_int) -> Ptr;
    ggml_swiglu_oai(Ptr, Ptr, Ptr, f32, f32) -> Ptr;
    ggml_silu(Ptr, Ptr) -> Ptr;
    ggml_gelu(Ptr, Ptr) -> Ptr;
    ggml_relu(Ptr, Ptr) -> Ptr;
    ggml_sqr(Ptr, Ptr) -> Ptr;
    ggml_mul(Ptr, Ptr, Ptr) -> Ptr;
    ggml_add(Ptr, Ptr, Ptr) -> Ptr;
    ggml_scale(Ptr, Ptr, f32) -> Ptr;
    ggml_cont(Ptr, Ptr) -> Ptr;
    ggml_clamp(Ptr, Ptr, f32, f32) -> Ptr;
    ggml_repeat_4d(Ptr, Ptr, i64, i64, i64, i64) -> Ptr;
    ggml_get_rows(Ptr, Ptr, Ptr) -> Ptr;
    ggml_reshape_3d(Ptr, Ptr, i64, i64, i64) -> Ptr;
    ggml_view_2d(Ptr, Ptr, i64, i64, usize, usize) -> Ptr;
    ggml_view_3d(Ptr, Ptr, i64, i64, i64, usize, usize, usize) -> Ptr;
    ggml_set_output(Ptr);
    ggml_set_input(Ptr);
    ggml_new_graph(Ptr) -> Ptr;
    ggml_build_forward_expand(Ptr, Ptr);
    ggml_gallocr_new(Ptr) -> Ptr;
    ggml_gallocr_alloc_graph(Ptr, Ptr) -> bool;
    ggml_gallocr_free(Ptr);
    ggml_get_data(Ptr) -> Ptr;
    ggml_quantize_chunk(c_int, *const f32, Ptr, i64, i64, i64, *const f32) -> usize;
    ggml_backend_alloc_ctx_tensors_from_buft(Ptr, Ptr) -> Ptr;
    ggml_backend_buffer_free(Ptr);
    ggml_backend_buffer_set_usage(Ptr, c_int);
    ggml_backend_buffer_clear(Ptr, u8);
    ggml_backend_tensor_set(Ptr, *const c_void, usize, usize);
    ggml_backend_tensor_get(Ptr, *mut c_void, usize, usize);
    ggml_backend_tensor_memset(Ptr, u8, usize, usize);
    ggml_backend_tensor_copy(Ptr, Ptr);
    ggml_are_same_shape(Ptr, Ptr) -> bool;
    ggml_backend_load(*const c_char) -> Ptr;
    ggml_backend_dev_by_type(c_int) -> Ptr;
    ggml_backend_dev_init(Ptr, *const c_char) -> Ptr;
    ggml_backend_dev_buffer_type(Ptr) -> Ptr;
    ggml_backend_graph_compute(Ptr, Ptr) -> c_int;
    ggml_backend_free(Ptr);
}

// Pointers to code, and a backend that one thread uses.
unsafe impl Send for Ggml {}
unsafe impl Sync for Ggml {}

/// Opened once.
pub fn ggml() -> &'static Ggml {
    static GGML: OnceLock<Ggml> = OnceLock::new();
    GGML.get_or_init(open)
}
