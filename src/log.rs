//! Where messages go: to the function a C program chose, else to the host's own log once a host is known, else to standard error.
//!
//! Owns: severity, the filter (`BERTH_LOG`), the sink. Must not know: ggml's types (the host's log arrives here as a plain function).

use std::fmt;
use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

/// Severity, most severe first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
#[repr(u8)]
pub enum Level {
    /// Something the user asked for is not done.
    Error = 1,
    /// Something is done in another way than asked for.
    Warn = 2,
    /// What was done.
    Info = 3,
    /// Details for somebody who looks for a fault.
    Debug = 4,
}

/// Takes one finished line, without the newline. It may be called from any thread.
pub type Sink = Arc<dyn Fn(Level, &str) + Send + Sync>;

static THRESHOLD: AtomicU8 = AtomicU8::new(Level::Info as u8);
static SINKS: Mutex<Sinks> = Mutex::new(Sinks { chosen: None, host: None });

struct Sinks {
    chosen: Option<Sink>,
    host: Option<Sink>,
}

/// Sets the least severe level that is passed on; `None` silences everything.
pub fn set_threshold(level: Option<Level>) {
    THRESHOLD.store(level.map_or(0, |l| l as u8), Ordering::Relaxed);
}

/// Sends messages to `sink` from now on, whatever hosts have to offer; `None` undoes that.
pub fn choose_sink(sink: Option<Sink>) {
    SINKS.lock().unwrap_or_else(PoisonError::into_inner).chosen = sink;
}

/// Sends messages to a host's log where no sink was chosen.
pub fn offer_sink(sink: Sink) {
    SINKS.lock().unwrap_or_else(PoisonError::into_inner).host = Some(sink);
}

/// Passes a message on if it is severe enough. Every line starts with `berth: `.
pub fn write(level: Level, message: fmt::Arguments<'_>) {
    if level as u8 > THRESHOLD.load(Ordering::Relaxed) {
        return;
    }
    let line = one_line(&format!("berth: {message}"));
    // The lock is not held while the sink runs: a host's log may call back into us.
    let sink = {
        let sinks = SINKS.lock().unwrap_or_else(PoisonError::into_inner);
        sinks.chosen.clone().or_else(|| sinks.host.clone())
    };
    match sink {
        Some(sink) => sink(level, &line),
        None => to_stderr(&line),
    }
}

/// The text without control characters: a path in it must not be able to break the line or to speak to a terminal.
pub fn one_line(text: &str) -> String {
    crate::text::printable(text)
}

fn to_stderr(line: &str) {
    use std::io::Write;
    // A closed standard error is no reason to disturb the host.
    let _ = writeln!(std::io::stderr(), "{line}");
}

/// Something the user asked for is not done.
macro_rules! error {
    ($($arg:tt)*) => { $crate::log::write($crate::log::Level::Error, format_args!($($arg)*)) };
}
/// Something is done in another way than asked for.
macro_rules! warning {
    ($($arg:tt)*) => { $crate::log::write($crate::log::Level::Warn, format_args!($($arg)*)) };
}
/// What was done.
macro_rules! info {
    ($($arg:tt)*) => { $crate::log::write($crate::log::Level::Info, format_args!($($arg)*)) };
}
pub(crate) use {error, info, warning};
