//! Any sequence of calls of `berth.h`, with pointers that are valid or NULL and numbers that are anything: an error or an answer, nothing written on an error,
//! memory that was given is there and stays as it was written, and every object can be freed at any time.

#![no_main]
#![allow(clippy::undocumented_unsafe_blocks)]

mod choices;

use std::ffi::{CStr, CString, c_char, c_void};
use std::path::PathBuf;
use std::ptr::{null, null_mut};
use std::sync::OnceLock;

use berth::capi::arena::{Arena, berth_arena_alloc, berth_arena_close, berth_arena_open};
use berth::capi::moe::{MoeDesc, berth_moe_check, berth_moe_type_supported, berth_moe_workspace_size};
use berth::capi::placement::{DecisionInfo, LoadDesc, TensorDesc, berth_decide, berth_load_init, berth_memory_text};
use berth::capi::rules::{
    RuleInfo, Rules, berth_rules_count, berth_rules_cpu_moe, berth_rules_free, berth_rules_get, berth_rules_n_cpu_moe, berth_rules_new, berth_rules_parse,
    berth_rules_push,
};
use berth::capi::threads::{Pool, berth_pool_count, berth_pool_free, berth_pool_new, berth_pool_run};
use berth::capi::{berth_last_error, berth_report_json, berth_string_free};
use berth::error::Status;
use choices::Choices;
use libfuzzer_sys::fuzz_target;

/// Most bytes that a sequence asks for in one piece; larger ones are asked for too, and may be refused.
const PIECE: usize = 1 << 20;

fn directory() -> &'static CStr {
    static DIRECTORY: OnceLock<CString> = OnceLock::new();
    DIRECTORY.get_or_init(|| {
        let path: PathBuf = std::env::temp_dir().join(format!("berth-fuzz-{}", std::process::id()));
        std::fs::create_dir_all(&path).expect("a directory for arenas");
        CString::new(path.into_os_string().into_encoded_bytes()).expect("a path")
    })
}

/// Text from the input, or now and then NULL.
fn text(c: &mut Choices<'_>, most: usize) -> Option<CString> {
    if c.rarely() {
        return None;
    }
    let bytes: Vec<u8> = c.bytes(most).iter().copied().filter(|b| *b != 0).collect();
    CString::new(bytes).ok()
}

fn pointer(text: &Option<CString>) -> *const c_char {
    text.as_ref().map_or(null(), |t| t.as_ptr())
}

/// A size: small, at an edge, or huge.
fn size(c: &mut Choices<'_>) -> usize {
    match c.below(6) {
        0 => 0,
        1 => usize::from(c.byte()),
        2 => usize::from(c.byte()) << 12,
        3 => PIECE + usize::from(c.byte()),
        4 => usize::MAX - usize::from(c.byte()),
        _ => isize::MAX as usize - usize::from(c.byte()),
    }
}

/// An error has a text, and a success none that is new.
fn told(status: Status) -> bool {
    if status != Status::Ok {
        let message = unsafe { CStr::from_ptr(berth_last_error()) };
        assert!(!message.is_empty(), "an error without a word");
    }
    status == Status::Ok
}

struct Given {
    at: *mut u8,
    len: usize,
    value: u8,
}

#[derive(Default)]
struct World {
    arenas: Vec<(*mut Arena, Vec<Given>)>,
    rules: Vec<*mut Rules>,
    pools: Vec<*mut Pool>,
}

impl World {
    fn arena(&mut self, c: &mut Choices<'_>) {
        let mut arena = null_mut();
        let name = text(c, 12);
        let directory = if c.rarely() { c"/proc/none".as_ptr() } else { directory().as_ptr() };
        let size = if c.rarely() { size(c) } else { PIECE * (1 + usize::from(c.below(4))) };
        let status = unsafe { berth_arena_open(directory, pointer(&name), size, i32::from(c.byte()) - 128, &raw mut arena) };
        assert_eq!(told(status), !arena.is_null());
        if !arena.is_null() {
            self.arenas.push((arena, Vec::new()));
        }
    }

    fn piece(&mut self, c: &mut Choices<'_>) {
        let Some(which) = self.arenas.len().checked_sub(1).map(|n| usize::from(c.byte()) % (n + 1)) else { return };
        let (arena, given) = &mut self.arenas[which];
        let (size, value) = (size(c), c.byte());
        let mut backed = false;
        let at = unsafe { berth_arena_alloc(*arena, size, if c.rarely() { null_mut() } else { &raw mut backed }) }.cast::<u8>();
        if !at.is_null() && size <= 2 * PIECE {
            unsafe { std::ptr::write_bytes(at, value, size) };
            given.push(Given { at, len: size, value });
        }
        for piece in given.iter() {
            let bytes = unsafe { std::slice::from_raw_parts(piece.at, piece.len) };
            assert!(bytes.iter().all(|b| *b == piece.value), "pieces overlap");
        }
    }

    fn rule(&mut self, c: &mut Choices<'_>) {
        let Some(which) = self.rules.len().checked_sub(1).map(|n| usize::from(c.byte()) % (n + 1)) else { return };
        let rules = self.rules[which];
        unsafe {
            let before = berth_rules_count(rules);
            let status = match c.below(4) {
                0 => berth_rules_parse(rules, pointer(&text(c, 40))),
                1 => berth_rules_push(rules, pointer(&text(c, 20)), if c.rarely() { pointer(&text(c, 8)) } else { c"ARENA".as_ptr() }),
                2 => berth_rules_cpu_moe(rules),
                _ => berth_rules_n_cpu_moe(rules, u32::from(c.byte()) << c.below(25)),
            };
            assert!(told(status) || berth_rules_count(rules) == before, "an error adds nothing");
            let mut info: RuleInfo = std::mem::zeroed();
            info.struct_size = if c.rarely() { size(c) } else { size_of::<RuleInfo>() };
            let index = usize::from(c.byte());
            let has = index < berth_rules_count(rules);
            let whole = info.struct_size == size_of::<RuleInfo>();
            assert!(told(berth_rules_get(rules, index, &raw mut info)) == has || !whole);
        }
    }

    fn decide(&self, c: &mut Choices<'_>) {
        unsafe {
            let mut load: LoadDesc = std::mem::zeroed();
            load.struct_size = size_of::<LoadDesc>();
            assert!(told(berth_load_init(&raw mut load)));
            load.mmap = c.rarely();
            load.repack = c.below(4);
            load.lazy = c.below(4);
            load.gpu_layers = i32::from(c.byte()) - 5;
            let name = text(c, 24);
            let mut tensor: TensorDesc = std::mem::zeroed();
            tensor.struct_size = if c.rarely() { size(c) } else { size_of::<TensorDesc>() };
            tensor.name = pointer(&name);
            let mut decision: DecisionInfo = std::mem::zeroed();
            decision.struct_size = size_of::<DecisionInfo>();
            // A struct that says that it is larger than this one would be read beyond its end.
            if tensor.struct_size <= size_of::<TensorDesc>() {
                let rules = self.rules.last().map_or(null(), |r| r.cast_const());
                told(berth_decide(&raw const tensor, rules, if c.rarely() { null() } else { &raw const load }, &raw mut decision));
            }
            assert!(!berth_memory_text(i32::from(c.byte()) - 100).is_null());
        }
    }

    fn moe(&self, c: &mut Choices<'_>) {
        let weights = [0u8; 4096];
        unsafe {
            berth_moe_type_supported(i32::from(c.byte()) - 100);
            let mut desc: MoeDesc = std::mem::zeroed();
            desc.struct_size = size_of::<MoeDesc>();
            (desc.d, desc.f, desc.n_expert) = (size(c), size(c), size(c));
            desc.activation = u32::from(c.below(14));
            desc.flags = u32::from(c.byte());
            (desc.alpha, desc.limit) = (f32::from(c.byte()) - 9.0, f32::from(c.byte()) - 9.0);
            for weights_of in [&mut desc.gate, &mut desc.up, &mut desc.down] {
                if !c.rarely() {
                    weights_of.data = weights.as_ptr().cast();
                    weights_of.size = weights.len();
                    weights_of.ggml_type = u32::from(c.below(45));
                    weights_of.row_stride = if c.rarely() { size(c) } else { 0 };
                    weights_of.expert_stride = if c.rarely() { size(c) } else { 0 };
                }
            }
            let fits = told(berth_moe_check(&raw const desc));
            let mut bytes = 77;
            let status = berth_moe_workspace_size(&raw const desc, size(c), size(c), size(c), &raw mut bytes);
            assert!(!told(status) || fits, "a size for what is not understood");
            assert!(status == Status::Ok || bytes == 77, "an error writes nothing");
        }
    }

    fn pool(&mut self, c: &mut Choices<'_>) {
        unsafe extern "C" fn task(counter: *mut c_void, _: usize) {
            let counter = unsafe { &*counter.cast::<std::sync::atomic::AtomicUsize>() };
            counter.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        }
        unsafe {
            if self.pools.len() < 2 {
                let mut pool = null_mut();
                let count = if c.rarely() { size(c) } else { usize::from(c.below(4)) };
                if told(berth_pool_new(count.min(usize::MAX), &raw mut pool)) {
                    self.pools.push(pool);
                }
            }
            if let Some(pool) = self.pools.last() {
                let mut counter = std::sync::atomic::AtomicUsize::new(0);
                assert!(told(berth_pool_run(*pool, Some(task), (&raw mut counter).cast())));
                assert_eq!(counter.into_inner(), berth_pool_count(*pool));
            }
        }
    }

    fn free(&mut self, c: &mut Choices<'_>) {
        unsafe {
            match c.below(4) {
                0 => drop(self.arenas.pop().map(|(arena, _)| berth_arena_close(arena))),
                1 => drop(self.rules.pop().map(|rules| berth_rules_free(rules))),
                2 => drop(self.pools.pop().map(|pool| berth_pool_free(pool))),
                _ => {
                    berth_arena_close(null_mut());
                    berth_rules_free(null_mut());
                    berth_pool_free(null_mut());
                    berth_string_free(null_mut());
                }
            }
        }
    }
}

fuzz_target!(|input: &[u8]| {
    let mut c = Choices(input);
    let mut world = World::default();
    while !c.0.is_empty() {
        match c.below(9) {
            0 if world.arenas.len() < 4 => world.arena(&mut c),
            1 | 2 => world.piece(&mut c),
            3 if world.rules.len() < 4 => unsafe {
                let mut rules = null_mut();
                let names = [c"CUDA0".as_ptr(), pointer(&None)];
                if told(berth_rules_new(names.as_ptr(), usize::from(c.below(3)), &raw mut rules)) {
                    world.rules.push(rules);
                }
            },
            4 => world.rule(&mut c),
            5 => world.decide(&mut c),
            6 => world.moe(&mut c),
            7 => world.pool(&mut c),
            _ => world.free(&mut c),
        }
    }
    for (arena, _) in world.arenas.drain(..) {
        unsafe { berth_arena_close(arena) };
    }
    world.rules.drain(..).for_each(|rules| unsafe { berth_rules_free(rules) });
    world.pools.drain(..).for_each(|pool| unsafe { berth_pool_free(pool) });
    if input.len() % 64 == 0 {
        let mut json = null_mut();
        assert!(told(unsafe { berth_report_json(&raw mut json) }));
        unsafe { berth_string_free(json) };
    }
});
