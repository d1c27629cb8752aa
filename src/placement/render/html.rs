//! The explanation as one page: the model as a map.
//!
//! Owns: layout, colours, escaping. Must not know: how an explanation was found.
//!
//! A row per layer, all on the same scale, so that area is bytes; colour is the place, stripes are bytes that stay in
//! the file's mapping. The page asks for nothing: no script, no font, no picture, no address.

use std::collections::BTreeMap;
use std::fmt::Write;

use super::collapse;
use crate::placement::Name;
use crate::placement::Target;
use crate::placement::bytes::Bytes;
use crate::placement::decide::Memory;
use crate::placement::explain::{Explanation, Placed};
use crate::placement::names::Part;
use crate::placement::tensor::Class;

/// Rows of the map; a model with more layers than that has its last ones in one row.
const MOST_ROWS: usize = 400;

/// Lines of the table of tensors.
const MOST_LINES: usize = 2000;

/// Tensors narrower than this share of the map are drawn together.
const NARROW: f64 = 0.004;

/// A label fits into cells wider than this share of the map.
const LABELLED: f64 = 0.07;

const STYLE: &str = "\
:root{--ink:#1b1f24;--soft:#59636e;--line:#d5dae0;--paper:#fff;--warn:#a3261b}\
@media(prefers-color-scheme:dark){:root{--ink:#e6e9ec;--soft:#9aa4ae;--line:#3a4149;--paper:#16191d;--warn:#ff8a7a}}\
*{box-sizing:border-box}body{margin:0 auto;padding:24px 20px 60px;max-width:1280px;background:var(--paper);color:var(--ink);\
font:14px/1.45 system-ui,sans-serif}h1{font-size:22px;margin:0}h2{font-size:16px;margin:32px 0 8px}p{margin:4px 0;color:var(--soft)}\
.legend{display:flex;flex-wrap:wrap;gap:6px 22px;margin:14px 0}.legend span{display:inline-flex;align-items:center;gap:7px}\
.key{width:16px;height:16px;border-radius:3px;flex:none}.row{display:flex;align-items:center;gap:8px;margin-bottom:2px}\
.row>b{width:58px;flex:none;text-align:right;font-weight:400;color:var(--soft);font-variant-numeric:tabular-nums}\
.row>i{width:70px;flex:none;font-style:normal;color:var(--soft);font-variant-numeric:tabular-nums;font-size:12px}.track{flex:1;min-width:0}\
.cells{display:flex;height:100%;border-radius:3px;overflow:hidden}.cells div{min-width:0;overflow:hidden;white-space:nowrap;color:#fff;font-size:11px;\
padding:0 4px;box-shadow:inset -1px 0 0 rgba(255,255,255,.55);display:flex;align-items:center}.cells .n{padding:0}\
.m{background-image:repeating-linear-gradient(135deg,rgba(255,255,255,.28) 0 3px,transparent 3px 8px)}\
.scroll{overflow-x:auto}table{border-collapse:collapse;width:100%;font-size:13px}th,td{text-align:left;padding:3px 14px 3px 0;border-bottom:1px solid var(--line);\
vertical-align:top}th{color:var(--soft);font-weight:500}.num{text-align:right;font-variant-numeric:tabular-nums;white-space:nowrap}\
code{font:12px/1.45 ui-monospace,monospace;overflow-wrap:anywhere}.t code{white-space:nowrap}.warn{color:var(--warn)}ul{margin:8px 0;padding-left:20px}";

/// The page.
pub fn html(e: &Explanation) -> String {
    let mut page = Page { out: String::new() };
    let name = e.model.name.as_deref().filter(|n| !n.is_empty()).unwrap_or("A model without a name");
    page.add(format_args!(
        "<!doctype html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n<meta name=\"viewport\" content=\"width=device-width\">\n\
         <title>{0}: where its tensors go</title>\n<style>{STYLE}</style>\n</head>\n<body>\n<h1>{0}</h1>\n",
        Escaped(name)
    ));
    page.summary(e);
    page.warnings(e);
    page.legend(e);
    page.map(e);
    page.rules(e);
    page.tensors(e);
    page.add(format_args!("</body>\n</html>\n"));
    page.out
}

/// Text from a model or a command line, made harmless.
struct Escaped<'a>(&'a str);

impl std::fmt::Display for Escaped<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.0.chars().try_for_each(|c| match c {
            '&' => f.write_str("&amp;"),
            '<' => f.write_str("&lt;"),
            '>' => f.write_str("&gt;"),
            '"' => f.write_str("&quot;"),
            '\'' => f.write_str("&#39;"),
            c if c.is_control() => f.write_char('\u{fffd}'),
            c => f.write_char(c),
        })
    }
}

/// White text on each is readable (contrast above 4.5).
fn colour(e: &Explanation, place: Option<&Target>) -> &'static str {
    const DEVICES: [&str; 5] = ["#4a4fb5", "#7a3fa8", "#2f6a8c", "#963f78", "#3f5aa8"];
    match place {
        None => "#6b6b6b",
        Some(Target::Cpu) => "#5f6f84",
        Some(Target::CpuMmap) => "#1f7a6f",
        Some(Target::CudaHost) => "#b5482b",
        Some(Target::Arena) => "#4f7a3a",
        Some(Target::StockHost(_)) => "#8a5f10",
        Some(Target::Device(name)) => {
            let mut devices: Vec<&str> =
                e.places.iter().filter_map(|p| if let Target::Device(n) = &p.place { Some(&**n) } else { None }).collect();
            devices.sort_unstable();
            DEVICES[devices.iter().position(|d| *d == &**name).unwrap_or(0) % DEVICES.len()]
        }
    }
}

fn place_name(place: Option<&Target>) -> String {
    place.map_or("not loaded".to_owned(), ToString::to_string)
}

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Row {
    Input,
    Layer(u32),
    Further,
    Output,
}

/// Part of a row: one tensor, or several that are too narrow to be told apart.
struct Cell<'a> {
    first: &'a Placed,
    count: usize,
    bytes: u64,
}

struct Page {
    out: String,
}

impl Page {
    fn add(&mut self, text: std::fmt::Arguments<'_>) {
        let written = self.out.write_fmt(text);
        debug_assert!(written.is_ok(), "writing to a String cannot fail");
    }

    fn summary(&mut self, e: &Explanation) {
        let m = &e.model;
        let experts =
            if m.experts > 0 { format!(", {} experts of which {} are used per token", m.experts, m.experts_used) } else { String::new() };
        let all: u64 = e.tensors.iter().map(|t| t.bytes).fold(0, u64::saturating_add);
        let (architecture, layers, count) = (Escaped(&m.architecture), m.layers, e.tensor_count);
        self.add(format_args!("<p>{architecture}, {layers} layers{experts}, {count} tensors, {}</p>\n", Bytes(all)));
        let copied = e.totals.pageable.saturating_add(e.totals.pinned).saturating_add(e.totals.arena);
        self.add(format_args!(
            "<p>mmap {}: {} stay in the file's mapping, {} are copied in host memory, {} go to devices",
            if e.mmap { "on" } else { "off" },
            Bytes(e.totals.mapped),
            Bytes(copied),
            Bytes(e.totals.device)
        ));
        if let Some(available) = e.machine.available {
            self.add(format_args!("; {} of memory are available", Bytes(available)));
        }
        self.add(format_args!("</p>\n"));
    }

    fn warnings(&mut self, e: &Explanation) {
        if e.warnings.is_empty() {
            return;
        }
        self.add(format_args!("<ul class=\"warn\">\n"));
        for w in &e.warnings {
            self.add(format_args!("<li>{}</li>\n", Escaped(&w.message)));
        }
        self.add(format_args!("</ul>\n"));
    }

    fn legend(&mut self, e: &Explanation) {
        self.add(format_args!("<div class=\"legend\">\n"));
        for p in &e.places {
            let (key, name) = (colour(e, Some(&p.place)), p.place.to_string());
            self.add(format_args!(
                "<span><span class=\"key\" style=\"background-color:{key}\"></span>{} &middot; {} tensors &middot; {}</span>\n",
                Escaped(&name),
                p.tensors,
                Bytes(p.bytes)
            ));
        }
        if e.tensors.iter().any(|t| t.place.is_none()) {
            let key = colour(e, None);
            self.add(format_args!("<span><span class=\"key\" style=\"background-color:{key}\"></span>not loaded</span>\n"));
        }
        self.add(format_args!(
            "<span><span class=\"key m\" style=\"background-color:#59636e\"></span>striped: stays in the file's mapping</span>\n</div>\n"
        ));
    }

    fn map(&mut self, e: &Explanation) {
        let mut rows: BTreeMap<Row, Vec<&Placed>> = BTreeMap::new();
        for t in &e.tensors {
            rows.entry(row(t)).or_default().push(t);
        }
        let last_shown = rows.keys().filter(|r| matches!(r, Row::Layer(_))).nth(MOST_ROWS).copied();
        if let Some(from) = last_shown {
            let further: Vec<Row> = rows.range(from..Row::Further).map(|(r, _)| *r).collect();
            let moved: Vec<&Placed> = further.iter().flat_map(|r| rows.remove(r).unwrap_or_default()).collect();
            rows.insert(Row::Further, moved);
        }
        let bytes_of = |tensors: &[&Placed]| tensors.iter().map(|t| t.bytes).fold(0, u64::saturating_add);
        let scale = scale(rows.iter().map(|(row, tensors)| (*row, bytes_of(tensors))));
        let unit = (1200 / rows.len().max(1)).clamp(9, 30);
        self.add(format_args!("<h2>Map</h2>\n"));
        for (row, tensors) in &rows {
            let bytes = bytes_of(tensors);
            let label = match row {
                Row::Input => "input".to_owned(),
                Row::Layer(n) => format!("layer {n}"),
                Row::Further => "further".to_owned(),
                Row::Output => "output".to_owned(),
            };
            // A row that is wider than the map becomes higher instead: area stays bytes.
            let fold = bytes.div_ceil(scale).max(1);
            let (height, row_bytes) = (unit as u64 * fold, scale.saturating_mul(fold));
            let width = bytes as f64 / row_bytes as f64 * 100.0;
            self.add(format_args!(
                "<div class=\"row\" style=\"height:{height}px\"><b>{label}</b><div class=\"track\" style=\"height:{height}px\">\
                 <div class=\"cells\" style=\"width:{width:.3}%\">"
            ));
            for cell in cells(tensors, row_bytes) {
                self.cell(e, &cell, cell.bytes as f64 / row_bytes as f64);
            }
            self.add(format_args!("</div></div><i>{}</i></div>\n", Bytes(bytes)));
        }
    }

    fn cell(&mut self, e: &Explanation, cell: &Cell<'_>, share: f64) {
        let t = cell.first;
        let place = place_name(t.place.as_ref());
        let what = if cell.count == 1 { t.name.clone() } else { format!("{} tensors", cell.count) };
        let rule = t.rule.map_or("no rule".to_owned(), |r| format!("rule {r}"));
        let title = format!("{what}: {place}, {}, {rule}", Bytes(cell.bytes));
        let label = if share >= LABELLED && cell.count == 1 { Name::new(&t.name).base } else { "" };
        let class = match (label.is_empty(), t.memory == Some(Memory::Mapped)) {
            (true, true) => " class=\"n m\"",
            (true, false) => " class=\"n\"",
            (false, true) => " class=\"m\"",
            (false, false) => "",
        };
        let (grow, key) = (cell.bytes.max(1), colour(e, t.place.as_ref()));
        self.add(format_args!(
            "<div{class} style=\"flex:{grow} 0 0;background-color:{key}\" title=\"{}\">{}</div>",
            Escaped(&title),
            Escaped(label)
        ));
    }

    fn rules(&mut self, e: &Explanation) {
        if e.rules.is_empty() {
            return;
        }
        self.add(format_args!(
            "<h2>Rules</h2>\n<div class=\"scroll\"><table>\n<tr><th class=\"num\">rule</th><th>pattern</th><th>place</th><th class=\"num\">tensors won</th>\
             <th class=\"num\">lost to earlier rules</th><th class=\"num\">bytes</th></tr>\n"
        ));
        let mut hidden = 0;
        for r in &e.rules {
            if r.names_absent_layer() {
                hidden += 1;
                continue;
            }
            let (class, note) = if r.is_idle() { (" class=\"warn\"", " (decides nothing)") } else { ("", "") };
            self.add(format_args!(
                "<tr{class}><td class=\"num\">{}</td><td><code>{}</code>{note}</td><td>{}</td><td class=\"num\">{}</td><td class=\"num\">{}</td><td class=\"num\">{}</td></tr>\n",
                r.number,
                Escaped(&r.pattern),
                Escaped(&r.target.to_string()),
                r.won,
                r.lost,
                Bytes(r.bytes)
            ));
        }
        self.add(format_args!("</table></div>\n"));
        if hidden > 0 {
            self.add(format_args!("<p>{hidden} generated rules name layers that have nothing for them.</p>\n"));
        }
    }

    fn tensors(&mut self, e: &Explanation) {
        let lines = collapse::lines(e);
        self.add(format_args!(
            "<h2>Tensors</h2>\n<div class=\"scroll\"><table class=\"t\">\n<tr><th>tensor</th><th class=\"num\">count</th><th>type</th><th class=\"num\">bytes</th><th>place</th>\
             <th>memory</th><th class=\"num\">rule</th><th>why</th></tr>\n"
        ));
        for l in lines.iter().take(MOST_LINES) {
            let t = l.first;
            self.add(format_args!(
                "<tr><td><code>{}</code></td><td class=\"num\">{}</td><td>{}</td><td class=\"num\">{}</td><td>{}</td><td>{}</td><td class=\"num\">{}</td><td>{}</td></tr>\n",
                Escaped(&l.name),
                l.count,
                Escaped(&t.type_name),
                Bytes(l.bytes),
                Escaped(&place_name(t.place.as_ref())),
                t.memory.map_or("", Memory::name),
                t.rule.map_or(String::new(), |r| r.to_string()),
                t.reason.sentence()
            ));
        }
        self.add(format_args!("</table></div>\n"));
        if lines.len() > MOST_LINES {
            self.add(format_args!(
                "<p>{} more lines are left out; the table in a terminal and the JSON have them.</p>\n",
                lines.len() - MOST_LINES
            ));
        }
    }
}

fn row(t: &Placed) -> Row {
    match (t.layer, t.class) {
        (Some(layer), _) => Row::Layer(layer),
        // A second use of the embeddings is named like the first.
        (None, Class::Output) => Row::Output,
        (None, _) => match Name::new(&t.name).known() {
            Some((_, Part::Output)) => Row::Output,
            _ => Row::Input,
        },
    }
}

/// How many bytes fill the width of the map in a row of ordinary height: the largest layer, unless something else is much larger still.
fn scale(rows: impl Iterator<Item = (Row, u64)>) -> u64 {
    let (mut layer, mut other) = (0, 0);
    for (row, bytes) in rows {
        let most = if matches!(row, Row::Layer(_)) { &mut layer } else { &mut other };
        *most = bytes.max(*most);
    }
    const MOST_FOLDS: u64 = 8;
    if layer == 0 { other.max(1) } else { layer.max(other.div_ceil(MOST_FOLDS)) }
}

/// The cells of a row: by place and kind, so that like stands beside like; what is too narrow is put together.
fn cells<'a>(tensors: &[&'a Placed], widest: u64) -> Vec<Cell<'a>> {
    let mut sorted: Vec<&Placed> = tensors.iter().copied().filter(|t| t.bytes > 0).collect();
    sorted.sort_by_key(|t| (&t.place, t.memory, t.class, std::cmp::Reverse(t.bytes)));
    let narrow = |bytes: u64| (bytes as f64) < widest as f64 * NARROW;
    let mut cells: Vec<Cell<'_>> = Vec::new();
    for t in sorted {
        let same = |c: &&mut Cell<'_>| {
            (&c.first.place, c.first.memory) == (&t.place, t.memory) && narrow(t.bytes) && (c.count > 1 || narrow(c.bytes))
        };
        match cells.last_mut().filter(same) {
            Some(cell) => {
                cell.count += 1;
                cell.bytes = cell.bytes.saturating_add(t.bytes);
            }
            None => cells.push(Cell { first: t, count: 1, bytes: t.bytes }),
        }
    }
    cells
}
