//! The backend ("stream") that every device must hand to every context: where the experts are computed.
//!
//! Owns: the host's `ggml_backend` struct, in the layout of the host, from `init_backend` to `free`, and in it what the host may set: the
//! number of threads, and the function that tells it to stop.

use std::ffi::{c_char, c_int, c_void};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};

use super::claim::Claims;
use super::fuse::Graph;
use super::node::Node;
use super::rest::Rest;
use super::run::{Abort, Engine, Step};
use super::team::Team;
use super::{Instance, Kind};
use crate::abi::*;
use crate::ahead::READER;
use crate::config::{self, Config};
use crate::error::Result;
use crate::{log, moe, report};

/// `GGML_MAX_N_THREADS`: more, the host itself does not take.
const MOST_THREADS: usize = 512;

/// Identifies backends of this kind; a random UUID.
static GUID: [u8; 16] = [0x3e, 0x0b, 0x1c, 0x8f, 0x5a, 0x2d, 0x4e, 0x61, 0x9b, 0x47, 0xd1, 0x70, 0xc2, 0x96, 0x0a, 0xe5];

const V1: ggml_backend_i_v1 = ggml_backend_i_v1 {
    get_name: Some(get_name::<ggml_backend_i_v1>),
    free: Some(free::<ggml_backend_i_v1>),
    set_tensor_async: None,
    get_tensor_async: None,
    cpy_tensor_async: None,
    synchronize: None,
    graph_plan_create: None,
    graph_plan_free: None,
    graph_plan_update: None,
    graph_plan_compute: None,
    graph_compute: Some(graph_compute::<ggml_backend_i_v1>),
    event_record: None,
    event_wait: None,
    graph_optimize: None,
};

const V2: ggml_backend_i_v2 = ggml_backend_i_v2 {
    get_name: Some(get_name::<ggml_backend_i_v2>),
    free: Some(free::<ggml_backend_i_v2>),
    set_tensor_async: None,
    get_tensor_async: None,
    set_tensor_2d_async: None,
    get_tensor_2d_async: None,
    cpy_tensor_async: None,
    synchronize: None,
    graph_plan_create: None,
    graph_plan_free: None,
    graph_plan_update: None,
    graph_plan_compute: None,
    graph_compute: Some(graph_compute::<ggml_backend_i_v2>),
    event_record: None,
    event_wait: None,
    graph_optimize: None,
};

/// What a backend's context is.
struct Stream {
    instance: &'static Instance,
    config: &'static Config,
    /// 0 until the host sets it.
    threads: AtomicUsize,
    running: Mutex<Running>,
}

/// What computes, for one graph at a time.
struct Running {
    team: Team,
    engine: Engine,
    rest: Rest,
}

/// A new backend of a device. The host ends it through `free`.
///
/// # Errors
/// If a setting is not understood.
pub(super) fn new(instance: &'static Instance, device: *mut ggml_backend_device) -> Result<*mut ggml_backend> {
    fn boxed<I>(iface: I, context: *mut c_void, device: *mut ggml_backend_device) -> *mut ggml_backend {
        Box::into_raw(Box::new(ggml_backend_of { guid: &raw const GUID, iface, device, context })).cast()
    }
    let engine = Engine::new(moe::table(moe::isa::detect()?));
    let running = Mutex::new(Running { team: Team::new(), engine, rest: Rest::default() });
    let context = into_foreign(Stream { instance, config: config::get()?, threads: AtomicUsize::new(0), running });
    Ok(match instance.host.layout {
        Layout::V1 => boxed(V1, context, device),
        Layout::V2 | Layout::V3 => boxed(V2, context, device),
    })
}

/// # Safety
/// `backend` must be one made by [`new`] for a host of layout `I`, and live.
unsafe fn stream<'a, I>(backend: *mut ggml_backend) -> &'a Stream {
    // SAFETY: by the caller's promise the struct has this layout and its context is ours.
    unsafe { borrow::<Stream>((*backend.cast::<ggml_backend_of<I>>()).context) }
}

unsafe extern "C" fn get_name<I>(backend: *mut ggml_backend) -> *const c_char {
    guard("backend get_name", c"BERTH".as_ptr(), || {
        // SAFETY: the host passes a backend made by `new` with this layout, whose device is ours.
        let (stream, device) = unsafe { (stream::<I>(backend), (*backend.cast::<ggml_backend_of<I>>()).device) };
        stream.instance.kind_of(device).map_or(c"BERTH", Kind::device_name).as_ptr()
    })
}

unsafe extern "C" fn free<I>(backend: *mut ggml_backend) {
    guard("backend free", (), || {
        // SAFETY: made by `new` with this layout; the host frees it once, and uses it no more.
        let backend = unsafe { Box::from_raw(backend.cast::<ggml_backend_of<I>>()) };
        // SAFETY: likewise.
        let stream = unsafe { from_foreign::<Stream>(backend.context) };
        // Once, by the first of them that ends.
        report::ahead::say();
        READER.rest();
        drop(stream);
    });
}

unsafe extern "C" fn graph_compute<I>(backend: *mut ggml_backend, graph: *mut ggml_cgraph) -> c_int {
    guard("graph_compute", GGML_STATUS_FAILED, || {
        // SAFETY: the host passes a backend made by `new` with this layout, and a live graph.
        let (stream, nodes) = unsafe {
            let stream = stream::<I>(backend);
            let api = &stream.instance.host.api;
            let count = (api.ggml_graph_n_nodes)(graph);
            (stream, (0..count).map(|i| Node::new((api.ggml_graph_node)(graph, i))).collect::<Option<Vec<_>>>())
        };
        let Some(nodes) = nodes else {
            log::error!("a graph with a node that is NULL");
            return GGML_STATUS_FAILED;
        };
        if nodes.is_empty() {
            return GGML_STATUS_SUCCESS;
        }
        let graph = Graph { nodes, raw: graph, host: &stream.instance.host };
        // SAFETY: the host has allocated the tensors of a graph that it wants computed, and leaves them alone meanwhile.
        unsafe { stream.compute(&graph) }.unwrap_or_else(|error| {
            log::error!("{error}");
            GGML_STATUS_FAILED
        })
    })
}

impl Stream {
    /// Computes a graph: what is claimed on the kernels here, in one call of the team for each part, and what is not on the host's CPU backend.
    ///
    /// # Safety
    /// All tensors of the graph are live, and nobody else uses what is written.
    unsafe fn compute(&self, graph: &Graph<'_>) -> Result<c_int> {
        let mut running = self.running.lock().unwrap_or_else(PoisonError::into_inner);
        let Running { team, engine, rest } = &mut *running;
        let claims = Claims::new(self.instance, self.config);
        let threads = self.threads();
        team.prepare(threads, self.instance.gomp())?;
        let mut next = 0;
        loop {
            let stopped = if self.config.fuse {
                // SAFETY: the caller vouches for the tensors.
                match team.gather(|threads| Ok(unsafe { engine.compute(graph, next, threads) }))? {
                    Step::Done(status) => return Ok(status),
                    Step::Stopped { at, error } => Some((at, error)),
                }
            } else {
                None
            };
            if let Some((at, error)) = stopped {
                // What was claimed and is broken stays an error.
                if graph.nodes.get(at).is_none_or(|node| claims.supports(*node)) {
                    return Err(error);
                }
                next = at;
            }
            // SAFETY: likewise.
            match unsafe { rest.compute(graph, next, |node| claims.supports(node), threads) }? {
                Ok(after) if after < graph.nodes.len() => next = after,
                Ok(_) => return Ok(GGML_STATUS_SUCCESS),
                Err(status) => return Ok(status),
            }
        }
    }

    /// As many as the host said, or else one for every processor.
    fn threads(&self) -> usize {
        match self.threads.load(Ordering::Relaxed) {
            0 => std::thread::available_parallelism().map_or(1, usize::from),
            n => n,
        }
    }
}

/// `ggml_backend_set_n_threads`, which the host looks up by name.
pub(super) unsafe extern "C" fn set_n_threads<I>(backend: *mut ggml_backend, threads: c_int) {
    guard("set_n_threads", (), || {
        // SAFETY: the host passes a backend made by `new` with this layout.
        let stream = unsafe { stream::<I>(backend) };
        stream.threads.store(usize::try_from(threads).unwrap_or(0).min(MOST_THREADS), Ordering::Relaxed);
    });
}

/// `ggml_backend_set_abort_callback`, which the host looks up by name. NULL is none.
pub(super) unsafe extern "C" fn set_abort_callback<I>(backend: *mut ggml_backend, abort: Option<Abort>, data: *mut c_void) {
    guard("set_abort_callback", (), || {
        // SAFETY: the host passes a backend made by `new` with this layout.
        let stream = unsafe { stream::<I>(backend) };
        stream.running.lock().unwrap_or_else(PoisonError::into_inner).engine.abort = abort.map(|abort| (abort, data));
    });
}
