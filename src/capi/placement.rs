//! `berth_decide`: where one tensor goes, and why.

use std::ffi::{CString, c_char};
use std::sync::OnceLock;

use super::rules::Rules;
use super::{input, status};
use crate::abi::guard;
use crate::error::{Error, Result, Status};
use crate::gguf::GgmlType;
use crate::placement::{self, Device, Flags, LazyMode, OFFLOAD_MIN_BATCH, Reason, Repack};
use crate::text::Name;

/// Where the bytes of a tensor lie.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Memory {
    /// Nowhere: the tensor is not made.
    None = 0,
    /// In the file's mapping: no copy, and the kernel may drop the pages.
    Mapped = 1,
    /// Copied into ordinary memory.
    Pageable = 2,
    /// Copied into page-locked memory.
    Pinned = 3,
    /// Copied into a file of Berth.
    Arena = 4,
    /// Copied into ordinary memory in another order, by llama.cpp's CPU backend. Only `berth_decide` says so; a loader keeps the file's order.
    Repacked = 5,
    /// Copied to a device.
    Device = 6,
}

impl From<Option<placement::Memory>> for Memory {
    fn from(memory: Option<placement::Memory>) -> Memory {
        match memory {
            None => Memory::None,
            Some(placement::Memory::Mapped) => Memory::Mapped,
            Some(placement::Memory::Pageable) => Memory::Pageable,
            Some(placement::Memory::Pinned) => Memory::Pinned,
            Some(placement::Memory::Arena) => Memory::Arena,
            Some(placement::Memory::Repacked) => Memory::Repacked,
            Some(placement::Memory::Device) => Memory::Device,
        }
    }
}

/// It may be missing from the model.
pub const BERTH_TENSOR_NOT_REQUIRED: u32 = 1;
/// It is used a second time, elsewhere in the model; token embeddings then act as the output matrix.
pub const BERTH_TENSOR_DUPLICATED: u32 = 2;
/// It is in the model but not wanted.
pub const BERTH_TENSOR_SKIP: u32 = 4;
/// Its rows may be read when they are needed.
pub const BERTH_TENSOR_READ_LAZY: u32 = 8;
/// It is not in the model (`berth_decide` only; a loader knows).
pub const BERTH_TENSOR_MISSING: u32 = 16;

/// What a loader understands of `BERTH_TENSOR_*`.
const LOADER_FLAGS: [(&str, u32); 4] = [
    ("NOT_REQUIRED", BERTH_TENSOR_NOT_REQUIRED),
    ("DUPLICATED", BERTH_TENSOR_DUPLICATED),
    ("SKIP", BERTH_TENSOR_SKIP),
    ("READ_LAZY", BERTH_TENSOR_READ_LAZY),
];

/// `BERTH_TENSOR_*` bits as flags; bits beside those and `more` are an error.
pub(super) fn flags(bits: u32, more: &[(&str, u32)]) -> Result<Flags> {
    let known = || LOADER_FLAGS.iter().chain(more);
    if bits & !known().fold(0, |all, (_, bit)| all | bit) != 0 {
        let names: Vec<String> = known().map(|(name, bit)| format!("{name} {bit}")).collect();
        return Err(Error::invalid(format!("flags {bits:#x} have bits that are not known here: known are {}", names.join(", "))));
    }
    let has = |bit| bits & bit != 0;
    Ok(Flags {
        not_required: has(BERTH_TENSOR_NOT_REQUIRED),
        duplicated: has(BERTH_TENSOR_DUPLICATED),
        skip: has(BERTH_TENSOR_SKIP),
        read_lazy: has(BERTH_TENSOR_READ_LAZY),
    })
}

/// A tensor to be decided on.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct TensorDesc {
    /// `sizeof(struct berth_tensor_desc)`, set by the caller.
    pub struct_size: usize,
    /// Name, as in the model.
    pub name: *const c_char,
    /// Elements per dimension, innermost first; 1 for those it has not. None of them negative.
    pub ne: [i64; 4],
    /// `enum ggml_type`. A format that Berth does not know has no size here, so it is never too large to be read at once.
    pub ggml_type: u32,
    /// `BERTH_TENSOR_*` bits.
    pub flags: u32,
}

// SAFETY: `repr(C)`, begins with `struct_size`; numbers and a pointer may be zero.
unsafe impl input::Versioned for TensorDesc {
    const NAME: &'static str = "berth_tensor_desc";
    const FIELDS: &'static [usize] = input::offsets!(TensorDesc, name, ne, ggml_type, flags);
}

/// A device that layers may go to.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct DeviceDesc {
    /// Name of its buffer type, for example "CUDA0". As in `berth_rules_new`; that of another device, `CPU`, or one of Berth's is an error, in
    /// whatever case of letters.
    pub name: *const c_char,
    /// Name of its page-locked host buffer type, for example "CUDA_Host"; NULL if it has none, and not empty.
    pub host_type: *const c_char,
    /// Its share of the layers: free memory, or what `--tensor-split` says. Finite and not negative.
    pub share: f32,
}

/// The circumstances of a load. `berth_load_init` fills in what llama.cpp starts with on a machine without a GPU.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct LoadDesc {
    /// `sizeof(struct berth_load)`, set by the caller.
    pub struct_size: usize,
    /// Devices in llama.cpp's order; NULL if there are none.
    pub devices: *const DeviceDesc,
    /// How many.
    pub n_devices: usize,
    /// How many layers, counted from the last, and the output behind them go to devices (`-ngl`); -1: all.
    pub gpu_layers: i32,
    /// Layers of the model; 0 in a loader: as the model says. With devices, 0 is an error, unless `gpu_layers` is 0.
    pub layers: u32,
    /// Experts per layer; 0 in a loader: as the model says.
    pub experts: u32,
    /// Experts used per token; likewise.
    pub experts_used: u32,
    /// Batches of at least this many tokens are computed on a device even if the weights are in host memory; -1: never.
    pub offload_min_batch: i32,
    /// Whether the file is mapped.
    pub mmap: bool,
    /// `--no-host`: a device's host buffer type is not considered.
    pub no_host: bool,
    /// Whether llama.cpp's CPU backend may interleave weights: 0 no, 1 as with AVX2, 2 as with AVX-512. `berth_decide` tells then which ones it
    /// would; in a loader, which does not interleave, anything but 0 is an error.
    pub repack: u8,
    /// `--lazy-mode`: 0 auto, 1 off, 2 on.
    pub lazy: u8,
    /// `BERTH_AUTO`: Berth's compute device takes experts that would go to the CPU.
    pub auto_experts: bool,
}

// SAFETY: `repr(C)`, begins with `struct_size`; numbers, bools and pointers may be zero.
unsafe impl input::Versioned for LoadDesc {
    const NAME: &'static str = "berth_load";
    const FIELDS: &'static [usize] = input::offsets!(
        LoadDesc,
        devices,
        n_devices,
        gpu_layers,
        layers,
        experts,
        experts_used,
        offload_min_batch,
        mmap,
        no_host,
        repack,
        lazy,
        auto_experts
    );
}

impl LoadDesc {
    /// # Safety
    /// `devices` must point at `n_devices` devices with valid strings.
    pub(super) unsafe fn to_load(self) -> Result<placement::Load> {
        // SAFETY: the caller vouches for the array.
        let devices = unsafe { input::array(self.devices, self.n_devices, "devices") }?;
        let device = |d: &DeviceDesc| {
            // SAFETY: the caller vouches for the strings.
            let (name, host) = unsafe {
                let host = if d.host_type.is_null() { None } else { Some(input::text(d.host_type, "a device's host type")?) };
                (input::text(d.name, "a device's name")?, host)
            };
            if !(d.share.is_finite() && d.share >= 0.0) {
                return Err(Error::invalid(format!("struct berth_device: share is {}; it must be finite and not negative", d.share)));
            }
            Ok(Device::new(name, host, d.share))
        };
        let choice = |value: u8, what: &str, most: u8| {
            if value <= most { Ok(value) } else { Err(Error::invalid(format!("{what} is {value}; 0 to {most} are known"))) }
        };
        let devices = devices.iter().map(device).collect::<Result<Vec<_>>>()?;
        let names = devices.iter().map(|d| (&*d.name, d.host_type.as_deref()));
        placement::Targets::check_devices(names).map_err(|e| Error::invalid(format!("struct berth_device: {e}")))?;
        Ok(placement::Load {
            mmap: self.mmap,
            devices,
            assumed_shares: false,
            gpu_layers: u32::try_from(self.gpu_layers).ok(),
            layers: self.layers,
            repack: [Repack::Off, Repack::Avx2, Repack::Avx512][usize::from(choice(self.repack, "repack", 2)?)],
            no_host: self.no_host,
            lazy: [LazyMode::Auto, LazyMode::Off, LazyMode::On][usize::from(choice(self.lazy, "lazy", 2)?)],
            auto_experts: self.auto_experts,
            offload_min_batch: u32::try_from(self.offload_min_batch).ok(),
            experts: self.experts,
            experts_used: self.experts_used,
        })
    }
}

/// Fills in the circumstances as llama.cpp starts on a machine without a GPU: mapped, all layers to devices if there are any. The batch size
/// for computing on a device is 32, or what `GGML_OP_OFFLOAD_MIN_BATCH` says.
///
/// # Safety
/// `load` must be NULL, which is an error, or point at a struct whose `struct_size` is set.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn berth_load_init(load: *mut LoadDesc) -> Status {
    status("berth_load_init", || {
        let from_environment = std::env::var_os("GGML_OP_OFFLOAD_MIN_BATCH").map(|v| crate::config::host_number(&v));
        let value = LoadDesc {
            struct_size: 0,
            devices: std::ptr::null(),
            n_devices: 0,
            gpu_layers: -1,
            layers: 0,
            experts: 0,
            experts_used: 0,
            offload_min_batch: from_environment.unwrap_or(OFFLOAD_MIN_BATCH) as i32,
            mmap: true,
            no_host: false,
            repack: 0,
            lazy: 0,
            auto_experts: false,
        };
        // SAFETY: the caller vouches for `load`.
        unsafe { input::put(load, value) }
    })
}

/// Where a tensor goes, and why.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct DecisionInfo {
    /// `sizeof(struct berth_decision)`, set by the caller.
    pub struct_size: usize,
    /// Name of the place, as in `-ot`; "" if the tensor is not made. Cut if it is longer than this.
    pub target: [c_char; 64],
    /// Where its bytes lie then.
    pub memory: Memory,
    /// Index of the rule that won, from 0; -1 if none did.
    pub rule: i32,
    /// Whether the place is the one that a rule names, kept as it is. Not for `CPU`, which is taken as a wish.
    pub buft_overridden: bool,
    /// Whether the choice was page-locked memory, and became the mapping because there is one.
    pub downgraded: bool,
    /// Why, as a stable code. Constant.
    pub reason: *const c_char,
    /// Why, as a sentence. Constant.
    pub reason_text: *const c_char,
    /// Batches of at least this many tokens are computed on a device; 0 if never.
    pub offload_min_batch: u32,
    /// Hint for experts: below this many tokens an expert sees fewer rows on average than that; 0 if it does not apply.
    pub offload_expert_hint: u32,
}

// SAFETY: `repr(C)`, begins with `struct_size`; numbers, bools, a memory and pointers may be zero.
unsafe impl input::Versioned for DecisionInfo {
    const NAME: &'static str = "berth_decision";
    const FIELDS: &'static [usize] = input::offsets!(
        DecisionInfo,
        target,
        memory,
        rule,
        buft_overridden,
        downgraded,
        reason,
        reason_text,
        offload_min_batch,
        offload_expert_hint
    );
}

/// Code and sentence of a reason, NUL-terminated and constant.
pub(super) fn reason_texts(reason: Reason) -> (*const c_char, *const c_char) {
    static TEXTS: OnceLock<Vec<(Reason, CString, CString)>> = OnceLock::new();
    let text = |t: &str| CString::new(t).unwrap_or_default();
    let all = TEXTS.get_or_init(|| Reason::ALL.map(|r| (r, text(r.code()), text(r.sentence()))).into());
    all.iter().find(|(r, ..)| *r == reason).map_or((c"".as_ptr(), c"".as_ptr()), |(_, code, sentence)| (code.as_ptr(), sentence.as_ptr()))
}

/// Decides where one tensor goes, and, if that succeeds, counts a match for the rule that wins. `rules` may be NULL: then there are none.
///
/// # Safety
/// `tensor`, `load` and `decision` must be NULL, which is an error, or point at structs whose `struct_size` is set and whose pointers are
/// valid; `rules` must be NULL or valid.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn berth_decide(
    tensor: *const TensorDesc,
    rules: *const Rules,
    load: *const LoadDesc,
    decision: *mut DecisionInfo,
) -> Status {
    status("berth_decide", || {
        // SAFETY: the caller vouches for the structs and what they point at.
        let (desc, load) = unsafe { (input::get(tensor)?, input::get(load)?.to_load()?) };
        load.check_layers().map_err(|e| Error::invalid(format!("struct berth_load: {e}")))?;
        // SAFETY: likewise.
        let (name, rules) = unsafe { (input::text(desc.name, "the tensor's name")?, rules.as_ref()) };
        let none = placement::Rules::new(placement::Targets::new(load.devices.iter().map(|d| &*d.name)));
        let rules = rules.map_or(&none, |r| &*r.rules);
        let missing = desc.flags & BERTH_TENSOR_MISSING != 0;
        let flags = flags(desc.flags, &[("MISSING", BERTH_TENSOR_MISSING)])?;
        let asked = if missing { placement::Tensor::missing(name) } else { shape(&desc, name)? }.with(flags);
        let made = placement::decide(&asked, rules, &load)?;
        let offload = load.offload(&asked).filter(|_| made.target.as_ref().is_some_and(placement::Target::is_host));
        let (reason, reason_text) = reason_texts(made.reason);
        let mut target = [0; 64];
        let text = made.target.as_ref().map_or("", placement::Target::name);
        for (to, from) in target.iter_mut().zip(text.bytes().take(63)) {
            *to = from as c_char;
        }
        let value = DecisionInfo {
            struct_size: 0,
            target,
            memory: made.memory.into(),
            rule: made.rule.and_then(|r| i32::try_from(r).ok()).unwrap_or(-1),
            buft_overridden: made.buft_overridden,
            downgraded: made.downgraded,
            reason,
            reason_text,
            offload_min_batch: offload.map_or(0, |o| o.min_batch),
            offload_expert_hint: offload.and_then(|o| o.expert_hint).unwrap_or(0),
        };
        // SAFETY: the caller vouches for `decision`.
        unsafe { input::put(decision, value) }?;
        made.count(rules);
        Ok(())
    })
}

/// The shape of a described tensor.
fn shape<'a>(desc: &TensorDesc, name: &'a str) -> Result<placement::Tensor<'a>> {
    let bad = || Error::invalid(format!("tensor {}: no shape {:?} of type {}", Name(name), desc.ne, desc.ggml_type));
    let mut dims = [0u64; 4];
    for (to, from) in dims.iter_mut().zip(desc.ne) {
        *to = u64::try_from(from).map_err(|_| bad())?;
    }
    let ty = GgmlType(desc.ggml_type);
    // As a loader takes it from a file: formats to come too, but none that was taken out. Their bytes only a file tells.
    let bytes = if ty.info().is_none() && !ty.is_removed() { 0 } else { ty.bytes_of(dims).ok_or_else(bad)? };
    Ok(placement::Tensor::new(name, dims, ty, bytes))
}

/// The name of a kind of memory. Constant.
#[unsafe(no_mangle)]
pub extern "C" fn berth_memory_text(memory: i32) -> *const c_char {
    guard("berth_memory_text", c"unknown".as_ptr(), || {
        match memory {
            0 => c"none",
            1 => c"mapped",
            2 => c"pageable",
            3 => c"pinned",
            4 => c"arena",
            5 => c"repacked",
            6 => c"device",
            _ => c"unknown",
        }
        .as_ptr()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_decision_gives_the_device_experts_in_just_the_formats_that_it_computes() {
        use crate::gguf::GgmlType;
        for info in GgmlType::known() {
            let computed = i32::try_from(info.number).ok().and_then(crate::moe::WeightType::from_ggml).is_some();
            assert_eq!(crate::placement::is_computed(GgmlType(info.number)), computed, "{}", info.name);
        }
    }

    #[test]
    fn a_share_that_is_no_amount_is_refused_by_the_name_of_its_field() {
        let decide = |share: f32| {
            let device = DeviceDesc { name: c"CUDA0".as_ptr(), host_type: std::ptr::null(), share };
            // SAFETY: all zeros are valid (`Versioned`).
            let zero: (LoadDesc, TensorDesc, DecisionInfo) = unsafe { std::mem::zeroed() };
            let load = LoadDesc { struct_size: size_of::<LoadDesc>(), devices: &raw const device, n_devices: 1, layers: 4, ..zero.0 };
            let tensor = TensorDesc { struct_size: size_of::<TensorDesc>(), name: c"blk.0.x".as_ptr(), ne: [32, 1, 1, 1], ..zero.1 };
            let mut decision = DecisionInfo { struct_size: size_of::<DecisionInfo>(), ..zero.2 };
            // SAFETY: structs of their full size, with valid strings; no rules.
            let status = unsafe { berth_decide(&raw const tensor, std::ptr::null(), &raw const load, &raw mut decision) };
            // SAFETY: a string of this thread.
            let text = unsafe { std::ffi::CStr::from_ptr(crate::capi::berth_last_error()) };
            (status, text.to_string_lossy().into_owned())
        };
        for share in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, -1.0, -f32::MIN_POSITIVE] {
            let (status, text) = decide(share);
            assert_eq!(status, Status::InvalidArgument, "{share}");
            assert!(text.starts_with("struct berth_device: share is ") && text.ends_with("; it must be finite and not negative"), "{text}");
        }
        for share in [0.0, -0.0, 1.0, f32::MAX] {
            assert_eq!(decide(share).0, Status::Ok, "{share}");
        }
    }
}
