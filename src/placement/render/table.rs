//! The explanation in a terminal.
//!
//! Owns: columns and their widths. Must not know: colours (the output may be a file), how an explanation was found.

use std::fmt::Write;

use super::collapse;
use crate::placement::Target;
use crate::placement::bytes::Bytes;
use crate::placement::explain::{Explanation, Placed};
// Names come from files: nothing in them may steer the terminal.
use crate::text::printable;

/// The explanation as text. With `all`, a line per tensor; otherwise tensors that differ only in their layer share one.
pub fn table(e: &Explanation, all: bool) -> String {
    let mut out = String::new();
    summary(&mut out, e);
    rules(&mut out, e);
    places(&mut out, e);
    tensors(&mut out, e, all);
    for w in &e.warnings {
        line(&mut out, format_args!("WARNING {}: {}", w.code, printable(&w.message)));
    }
    out
}

/// Writing to a `String` cannot fail.
fn line(out: &mut String, text: std::fmt::Arguments<'_>) {
    let written = out.write_fmt(text);
    debug_assert!(written.is_ok(), "writing to a String cannot fail");
    out.truncate(out.trim_end_matches(' ').len());
    out.push('\n');
}

fn summary(out: &mut String, e: &Explanation) {
    let m = &e.model;
    let name = m.name.as_deref().filter(|n| !n.is_empty()).unwrap_or("(no name)");
    let architecture = if m.architecture.is_empty() { "(no architecture)" } else { m.architecture.as_str() };
    let experts = if m.experts > 0 { format!(", {} experts, {} used", m.experts, m.experts_used) } else { String::new() };
    let counted = if m.counted_layers == m.layers { String::new() } else { format!(" (-ngl counts {})", m.counted_layers) };
    line(
        out,
        format_args!("{}: {}, {} layers{counted}{experts}, {} tensors", printable(name), printable(architecture), m.layers, e.tensor_count),
    );
    let t = &e.totals;
    let lacking = |place: Target| e.places.iter().filter(|p| p.place == place && e.lacks(&place).is_some()).map(|p| p.copied).sum::<u64>();
    let (not_pinned, no_arena) = (lacking(Target::CudaHost), lacking(Target::Arena));
    let parts = [
        ("stay in the file's mapping", t.mapped),
        ("copied to memory", t.pageable),
        ("page-locked", t.pinned.saturating_sub(not_pinned)),
        ("asked to be page-locked, which this machine cannot do", not_pinned),
        ("in the arena", t.arena.saturating_sub(no_arena)),
        ("asked to be in an arena, which this machine does not have", no_arena),
        ("on devices", t.device),
    ];
    let mut shown: Vec<String> = parts.iter().filter(|p| p.1 > 0).map(|(what, n)| format!("{} {what}", Bytes(*n))).collect();
    if shown.is_empty() {
        shown.push("there is nothing to load".to_owned());
    }
    line(out, format_args!("mmap {}: {}", if e.mmap { "on" } else { "off" }, shown.join(", ")));
    if let Some(available) = e.machine.available {
        let limit = e.machine.memlock.map_or(String::new(), |l| format!(", limit for locked memory {}", Bytes(l)));
        line(out, format_args!("available: {}{limit}", Bytes(available)));
    }
    if let Some(min) = e.offload_min_batch {
        let hint = e
            .offload_expert_hint
            .map_or(String::new(), |h| format!("; for these experts it pays from about {h} (GGML_OP_OFFLOAD_MIN_BATCH)"));
        line(out, format_args!("weights in host memory are used on a GPU from {min} tokens per batch{hint}"));
    }
    out.push('\n');
}

fn rules(out: &mut String, e: &Explanation) {
    if e.rules.is_empty() {
        return;
    }
    line(out, format_args!("{:>4}  {:>7}  {:>7}  {:>9}  rule", "rule", "won", "lost", "bytes"));
    // Generated rules come by the dozen: show those that did something.
    let idle = |r: &&crate::placement::explain::RuleUse| r.names_absent_layer();
    for r in e.rules.iter().filter(|r| !idle(r)) {
        let text = printable(&r.pattern);
        let loud = if r.is_idle() { "   <== decides nothing" } else { "" };
        line(out, format_args!("{:>4}  {:>7}  {:>7}  {:>9}  {text}={}{loud}", r.number, r.won, r.lost, Bytes(r.bytes), r.target));
    }
    match e.rules.iter().filter(idle).count() {
        0 => {}
        n => line(out, format_args!("      {n} generated rules name layers that have nothing for them")),
    }
    out.push('\n');
}

fn places(out: &mut String, e: &Explanation) {
    line(out, format_args!("{:<18}  {:>7}  {:>9}  {:>9}  {:>9}", "place", "tensors", "bytes", "mapped", "copied"));
    for p in &e.places {
        let (bytes, mapped, copied) = (Bytes(p.bytes), Bytes(p.mapped), Bytes(p.copied));
        let loud = if e.lacks(&p.place).is_some() { "   <== not on this machine: ordinary memory instead" } else { "" };
        line(out, format_args!("{:<18}  {:>7}  {bytes:>9}  {mapped:>9}  {copied:>9}{loud}", p.place.to_string(), p.tensors));
    }
    out.push('\n');
}

fn tensors(out: &mut String, e: &Explanation, all: bool) {
    let rows: Vec<(String, usize, u64, &Placed)> = if all {
        e.tensors.iter().map(|t| (printable(&t.name), 1, t.bytes, t)).collect()
    } else {
        collapse::lines(e).into_iter().map(|l| (printable(&l.name), l.count, l.bytes, l.first)).collect()
    };
    const MOST: usize = 60;
    let width = rows.iter().map(|r| r.0.chars().count()).max().unwrap_or(0).clamp(6, MOST);
    line(
        out,
        format_args!(
            "{:<width$}  {:>5}  {:<7}  {:>9}  {:<17}  {:<8}  {:>4}  reason",
            "tensor", "count", "type", "bytes", "place", "memory", "rule"
        ),
    );
    let mut doubtful = false;
    for (name, count, bytes, t) in rows {
        let place = t.place.as_ref().map_or("-".to_owned(), ToString::to_string);
        let lacking = t.place.as_ref().is_some_and(|p| e.lacks(p).is_some());
        let memory = format!("{}{}", t.memory.map_or("-", |m| m.name()), if lacking { "?" } else { "" });
        doubtful |= lacking;
        let rule = t.rule.map_or(String::new(), |r| r.to_string());
        let bytes = Bytes(bytes);
        line(
            out,
            format_args!(
                "{name:<width$}  {count:>5}  {:<7}  {bytes:>9}  {place:<17}  {memory:<8}  {rule:>4}  {}",
                t.type_name,
                t.reason.code()
            ),
        );
    }
    if doubtful {
        line(out, format_args!("? asked for, and not on this machine: ordinary memory instead"));
    }
    out.push('\n');
}
