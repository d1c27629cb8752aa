//! `berth_rules_*`: the ordered list of rules that say which tensor goes where.

use std::ffi::{CString, c_char};
use std::sync::Arc;

use super::{input, status};
use crate::abi::guard;
use crate::error::{Error, Position, Result, Status};
use crate::placement::{self, RuleError, Targets};

/// An ordered list of rules. It may not be changed once a loader uses it, nor by one thread while another uses it.
pub struct Rules {
    pub(super) rules: Arc<placement::Rules>,
    /// Pattern and target of each rule, as C sees them.
    texts: Vec<[CString; 2]>,
}

/// One rule.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct RuleInfo {
    /// `sizeof(struct berth_rule)`, set by the caller.
    pub struct_size: usize,
    /// The regular expression (ECMAScript, searched for anywhere in the tensor's name). Valid until the rules are freed.
    pub pattern: *const c_char,
    /// The name of the place. Valid as long.
    pub target: *const c_char,
    /// How many tensors this rule has decided so far: every successful `berth_decide`, and in a loader every tensor of it, once.
    pub matches: u64,
}

// SAFETY: `repr(C)`, begins with `struct_size`; numbers and pointers may be zero.
unsafe impl input::Versioned for RuleInfo {
    const NAME: &'static str = "berth_rule";
    const FIELDS: &'static [usize] = input::offsets!(RuleInfo, pattern, target, matches);
}

impl From<RuleError> for Error {
    fn from(error: RuleError) -> Error {
        Error::invalid(error.to_string()).at(Position::Rule { rule: error.rule, column: error.column })
    }
}

/// That there is nothing at an index, which counts from 0.
fn no_such(what: &str, index: usize, count: usize) -> Error {
    let last = count.checked_sub(1).map_or(String::new(), |last| format!(", and the last has index {last}"));
    Error::invalid(format!("no {what} has index {index}: there are {count}{last}"))
}

impl Rules {
    fn change(&mut self, change: impl FnOnce(&mut placement::Rules) -> std::result::Result<(), RuleError>) -> Result<()> {
        let rules = Arc::get_mut(&mut self.rules).ok_or_else(|| Error::invalid("the rules are in use by a loader"))?;
        let changed = change(rules);
        let text = |t: &str| CString::new(t).unwrap_or_default();
        // Whatever became of the change: there is a text for every rule that there is.
        self.texts.extend(rules.iter().skip(self.texts.len()).map(|r| [text(r.pattern().as_str()), text(r.target().name())]));
        Ok(changed?)
    }
}

/// New, empty rules. `devices` are the names of device buffer types that rules may name beside `CPU`, `CPU_MMAP`, `CUDA_Host` and `ARENA`, for
/// example "CUDA0"; a name that is empty or contains `,`, `;`, `=` or a control character is an error, and so is one that is there twice, `CPU`, or
/// one of Berth's, in whatever case of letters. Free with `berth_rules_free`.
///
/// # Safety
/// `devices` must point at `n_devices` strings, or be NULL if that is 0; `rules` must be NULL, which is an error, or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn berth_rules_new(devices: *const *const c_char, n_devices: usize, rules: *mut *mut Rules) -> Status {
    status("berth_rules_new", || {
        // SAFETY: the caller vouches for the array and the strings in it.
        let names = unsafe { input::array(devices, n_devices, "devices") }?;
        // SAFETY: likewise.
        let names = names.iter().map(|name| unsafe { input::text(*name, "a device's name") }).collect::<Result<Vec<_>>>()?;
        Targets::check_devices(names.iter().map(|name| (*name, None))).map_err(Error::invalid)?;
        let make = || Ok(Box::into_raw(Box::new(Rules { rules: Arc::new(placement::Rules::new(Targets::new(names))), texts: Vec::new() })));
        // SAFETY: the caller vouches for `rules`.
        unsafe { input::output(rules, "rules", make) }
    })
}

/// Appends the rules of one `-ot` argument of llama.cpp: `pattern=TARGET,pattern=TARGET`. On an error nothing is appended, and
/// `berth_last_error_info` tells rule and column.
///
/// # Safety
/// `rules` must be NULL, which is an error, or valid; `text` must be NULL, which is an error, or NUL-terminated.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn berth_rules_parse(rules: *mut Rules, text: *const c_char) -> Status {
    status("berth_rules_parse", || {
        // SAFETY: the caller vouches for both.
        let (rules, text) = unsafe { (input::handle(rules, "rules")?, input::text(text, "text")?) };
        rules.change(|r| r.parse(text))
    })
}

/// Appends the rules of one `-ot` argument of llama-bench: `pattern=TARGET;pattern=TARGET`. A `,` there separates runs with rules of their own;
/// `run`, from 0, says which one is wanted. On an error, in whichever run, nothing is appended.
///
/// # Safety
/// As `berth_rules_parse`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn berth_rules_parse_bench(rules: *mut Rules, text: *const c_char, run: usize) -> Status {
    status("berth_rules_parse_bench", || {
        // SAFETY: the caller vouches for both.
        let (rules, text) = unsafe { (input::handle(rules, "rules")?, input::text(text, "text")?) };
        let runs = placement::Rules::bench_runs(text);
        if run >= runs {
            return Err(no_such("run", run, runs));
        }
        rules.change(|r| r.parse_bench(text, run))
    })
}

/// Appends one rule. Nothing is split off, so the pattern may contain `,`, `;` and `=`.
///
/// # Safety
/// `rules` must be NULL, which is an error, or valid; `pattern` and `target` must be NULL, which is an error, or NUL-terminated.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn berth_rules_push(rules: *mut Rules, pattern: *const c_char, target: *const c_char) -> Status {
    status("berth_rules_push", || {
        // SAFETY: the caller vouches for all three.
        let (rules, pattern, target) =
            unsafe { (input::handle(rules, "rules")?, input::text(pattern, "pattern")?, input::text(target, "target")?) };
        rules.change(|r| r.push(pattern, target))
    })
}

/// Appends what `--cpu-moe` means: all experts to `CPU`.
///
/// # Safety
/// `rules` must be NULL, which is an error, or valid.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn berth_rules_cpu_moe(rules: *mut Rules) -> Status {
    // SAFETY: the caller vouches for `rules`.
    status("berth_rules_cpu_moe", || unsafe { input::handle(rules, "rules") }?.change(placement::Rules::cpu_moe))
}

/// Appends what `--n-cpu-moe n` means: the experts of the first `n` layers to `CPU`.
///
/// # Safety
/// `rules` must be NULL, which is an error, or valid.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn berth_rules_n_cpu_moe(rules: *mut Rules, n: u32) -> Status {
    // SAFETY: the caller vouches for `rules`.
    status("berth_rules_n_cpu_moe", || unsafe { input::handle(rules, "rules") }?.change(|r| r.n_cpu_moe(n)))
}

/// Appends what `--n-cpu-ffn n` means: the dense feed-forward weights of the first `n` layers to `CPU`.
///
/// # Safety
/// `rules` must be NULL, which is an error, or valid.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn berth_rules_n_cpu_ffn(rules: *mut Rules, n: u32) -> Status {
    // SAFETY: the caller vouches for `rules`.
    status("berth_rules_n_cpu_ffn", || unsafe { input::handle(rules, "rules") }?.change(|r| r.n_cpu_ffn(n)))
}

/// How many rules there are; 0 for NULL.
///
/// # Safety
/// `rules` must be NULL or valid.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn berth_rules_count(rules: *const Rules) -> usize {
    // SAFETY: the caller vouches for `rules`.
    guard("berth_rules_count", 0, || unsafe { rules.as_ref() }.map_or(0, |r| r.rules.len()))
}

/// The rule at `index`, from 0, and how often it has decided.
///
/// # Safety
/// `rules` must be NULL, which is an error, or valid; `rule` must be NULL, which is an error, or point at a struct whose `struct_size` is set.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn berth_rules_get(rules: *const Rules, index: usize, rule: *mut RuleInfo) -> Status {
    status("berth_rules_get", || {
        // SAFETY: the caller vouches for `rules`.
        let rules = unsafe { rules.as_ref() }.ok_or_else(|| Error::invalid("rules is NULL"))?;
        let wanted = rules.rules.get(index).ok_or_else(|| no_such("rule", index, rules.rules.len()))?;
        let [pattern, target] = &rules.texts[index];
        let info = RuleInfo { struct_size: 0, pattern: pattern.as_ptr(), target: target.as_ptr(), matches: wanted.matches() };
        // SAFETY: the caller vouches for `rule`.
        unsafe { input::put(rule, info) }
    })
}

/// Frees rules. NULL is allowed. A loader that uses them keeps what it needs.
///
/// # Safety
/// `rules` must be NULL, or valid and not be used again.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn berth_rules_free(rules: *mut Rules) {
    guard("berth_rules_free", (), || {
        if !rules.is_null() {
            // SAFETY: by the caller's promise, made by `berth_rules_new` and freed once.
            drop(unsafe { Box::from_raw(rules) });
        }
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_index_without_a_rule_or_a_run_is_told_with_the_last_one() {
        let mut rules = Rules { rules: Arc::new(placement::Rules::new(Targets::new([""; 0]))), texts: Vec::new() };
        let get = |rules: &Rules, index| {
            let mut info = RuleInfo { struct_size: size_of::<RuleInfo>(), pattern: std::ptr::null(), target: std::ptr::null(), matches: 0 };
            // SAFETY: rules, and a struct of its full size.
            let status = unsafe { berth_rules_get(rules, index, &raw mut info) };
            (status, last_error())
        };
        assert_eq!(get(&rules, 0), (Status::InvalidArgument, "no rule has index 0: there are 0".into()));
        // SAFETY: rules, and a constant text.
        assert_eq!(unsafe { berth_rules_parse(&raw mut rules, c"a=CPU,b=CPU".as_ptr()) }, Status::Ok);
        assert_eq!(get(&rules, 1).0, Status::Ok);
        assert_eq!(get(&rules, 2), (Status::InvalidArgument, "no rule has index 2: there are 2, and the last has index 1".into()));
        // SAFETY: likewise.
        assert_eq!(unsafe { berth_rules_parse_bench(&raw mut rules, c"a=CPU".as_ptr(), 1) }, Status::InvalidArgument);
        assert_eq!(last_error(), "no run has index 1: there are 1, and the last has index 0");
    }

    #[test]
    fn an_empty_target_is_refused_and_a_device_has_the_same_name_as_in_a_load() {
        let mut rules = Rules { rules: Arc::new(placement::Rules::new(Targets::new([""; 0]))), texts: Vec::new() };
        // SAFETY: rules, and constant texts.
        assert_eq!(unsafe { berth_rules_push(&raw mut rules, c"a".as_ptr(), c"".as_ptr()) }, Status::InvalidArgument);
        let said = "rule 1, column 1: the name of the target is empty. Known: CPU, CPU_MMAP, CUDA_Host, ARENA";
        assert_eq!((last_error().as_str(), rules.rules.len()), (said, 0));
        for (names, said) in [
            (&[c"CUDA0", c"cuda0"][..], "'cuda0' is named twice"),
            (&[c"cpu"], "'cpu' is host memory and no device that layers go to"),
            (&[c"ARENA"], "'ARENA' is host memory and no device that layers go to"),
        ] {
            let names: Vec<_> = names.iter().map(|n| n.as_ptr()).collect();
            let mut made = std::ptr::null_mut();
            // SAFETY: as many strings as said, and a pointer to write to.
            assert_eq!(unsafe { berth_rules_new(names.as_ptr(), names.len(), &raw mut made) }, Status::InvalidArgument);
            assert_eq!((last_error().as_str(), made.is_null()), (said, true));
        }
    }

    #[test]
    fn a_run_that_does_not_fit_leaves_the_rules_as_they_were_and_is_told_where() {
        let mut rules = Rules { rules: Arc::new(placement::Rules::new(Targets::new([""; 0]))), texts: Vec::new() };
        // SAFETY: rules, and a constant text.
        let parse = |rules: &mut Rules, text: &std::ffi::CStr| unsafe { berth_rules_parse_bench(&raw mut *rules, text.as_ptr(), 0) };
        // SAFETY: rules.
        assert_eq!(unsafe { berth_rules_n_cpu_moe(&raw mut rules, 4090) }, Status::Ok);
        assert_eq!(parse(&mut rules, c"a=CPU;b=CPU;c=CPU;d=CPU;e=CPU;f=CPU;g=CPU;h=CPU"), Status::InvalidArgument);
        assert!(last_error().starts_with("rule 4097, column 37: "), "{}", last_error());
        assert_eq!((rules.rules.len(), rules.texts.len()), (4090, 4090));
        assert_eq!(parse(&mut rules, c"a=CPU;b=CPU;c=CPU;d=CPU;e=CPU;f=CPU"), Status::Ok);
        assert_eq!((rules.rules.len(), rules.texts.len()), (4096, 4096));
        assert_eq!(rules.texts[4095][0].as_c_str(), c"f");
    }

    fn last_error() -> String {
        // SAFETY: a string of this thread.
        unsafe { std::ffi::CStr::from_ptr(crate::capi::berth_last_error()) }.to_string_lossy().into_owned()
    }
}
