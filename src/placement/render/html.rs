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
use crate::text::is_loud;

/// Rows of the map; a model with more layers than that has its last ones in one row.
const MOST_ROWS: usize = 400;

/// Lines of the table of tensors.
const MOST_LINES: usize = 2000;

/// Tensors narrower than this share of the map are drawn together.
const NARROW: f64 = 0.004;

/// A label fits into cells wider than this share of the map.
const LABELLED: f64 = 0.07;

/// The last share of the map's width at which a tick's label fits on a telephone: 320 pixels for the map, under 64 for a label.
const LAST_LABEL: f64 = 0.8;

/// Without a line end in it that a reader of the page would need.
const STYLE: &str = include_str!("page.css");

/// How every page begins, up to the name of the model.
const BEGINS: &str = "<!doctype html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n\
                      <meta name=\"viewport\" content=\"width=device-width\">\n<title>";
/// What follows that name.
const TITLE_ENDS: &str = ": where its tensors go</title>";

/// Whether a file that begins so is such a page.
pub fn is_page(head: &str) -> bool {
    head.starts_with(BEGINS) && head.contains(TITLE_ENDS)
}

/// The page.
pub fn html(e: &Explanation) -> String {
    let mut page = Page { out: String::new() };
    let name = e.model.name.as_deref().filter(|n| !n.is_empty()).unwrap_or("A model without a name");
    page.add(format_args!("{BEGINS}{0}{TITLE_ENDS}\n<style>{STYLE}</style>\n</head>\n<body>\n<h1>{0}</h1>\n", Escaped(name)));
    page.summary(e);
    page.warnings(e);
    page.places(e);
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
            c if is_loud(c) => f.write_char('\u{fffd}'),
            c => f.write_char(c),
        })
    }
}

/// White text on each is readable (contrast above 4.5).
fn colour(e: &Explanation, place: Option<&Target>) -> &'static str {
    const DEVICES: [&str; 5] = ["#4f46c4", "#7a3fa8", "#2f6a8c", "#963f78", "#3f5aa8"];
    match place {
        None => "#6b6b6b",
        Some(Target::Cpu) => "#64748b",
        Some(Target::CpuMmap) => "#0f766e",
        Some(Target::CudaHost) => "#c2410c",
        Some(Target::Arena) => "#3f7d20",
        Some(Target::StockHost(_)) => "#92400e",
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
            if m.experts > 0 { format!(" &middot; {} experts, {} used per token", m.experts, m.experts_used) } else { String::new() };
        let (architecture, layers, count) = (Escaped(&m.architecture), m.layers, e.tensor_count);
        let counted = if m.counted_layers == layers { String::new() } else { format!(" (-ngl counts {})", m.counted_layers) };
        let mmap = if e.mmap { "on" } else { "off" };
        self.add(format_args!(
            "<p>{architecture} &middot; {layers} layers{counted}{experts} &middot; {count} tensors &middot; {} &middot; mmap {mmap}</p>\n",
            Bytes(bytes_of(&e.tensors))
        ));
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

    /// The whole model as one bar, then a card for each place: the legend and the sums.
    fn places(&mut self, e: &Explanation) {
        let all = bytes_of(&e.tensors).max(1);
        let mut shares: BTreeMap<(Option<&Target>, Option<Memory>), u64> = BTreeMap::new();
        for t in &e.tensors {
            let share = shares.entry((t.place.as_ref(), t.memory)).or_default();
            *share = share.saturating_add(t.bytes);
        }
        let mut places: Vec<(Option<&Target>, u64, u64)> = e.places.iter().map(|p| (Some(&p.place), p.tensors, p.bytes)).collect();
        let left_out = e.tensors.iter().filter(|t| t.place.is_none());
        let (count, bytes) = left_out.fold((0, 0u64), |(n, b), t| (n + 1, b.saturating_add(t.bytes)));
        if count > 0 {
            places.push((None, count, bytes));
        }
        let of = |place: Option<&Target>| -> Vec<(Option<Memory>, u64)> {
            shares.iter().filter(|((p, _), bytes)| *p == place && **bytes > 0).map(|((_, memory), bytes)| (*memory, *bytes)).collect()
        };
        self.add(format_args!("<div class=\"bar\">"));
        for (place, _, _) in &places {
            for (memory, bytes) in of(*place) {
                let (class, key) = (if memory == Some(Memory::Mapped) { " class=\"m\"" } else { "" }, colour(e, *place));
                let title = format!("{}, {}: {}", place_name(*place), lies(memory), Bytes(bytes));
                self.add(format_args!(
                    "<div{class} style=\"flex:{bytes} 0 0;background-color:{key}\" title=\"{}\"></div>",
                    Escaped(&title)
                ));
            }
        }
        self.add(format_args!("</div>\n<div class=\"places\">\n"));
        for (place, count, bytes) in &places {
            let (shares, key, plural) = (of(*place), colour(e, *place), if *count == 1 { "" } else { "s" });
            let stripes = if shares.iter().any(|s| s.0 == Some(Memory::Mapped)) { " m" } else { "" };
            let percent = *bytes as f64 / all as f64 * 100.0;
            self.add(format_args!(
                "<div class=\"card\"><div><span class=\"key{stripes}\" style=\"background-color:{key}\"></span><b>{}</b><span>{}</span></div>\
                 <p>{percent:.0}% &middot; {count} tensor{plural}</p>",
                Escaped(&place_name(*place)),
                Bytes(*bytes)
            ));
            for (memory, bytes) in &shares {
                let amount = if shares.len() > 1 { format!("{} ", Bytes(*bytes)) } else { String::new() };
                self.add(format_args!("<p>{amount}{}</p>", lies(*memory)));
            }
            if place.is_some_and(|p| e.lacks(p).is_some()) {
                self.add(format_args!("<p class=\"warn\">not on this machine: ordinary memory instead</p>"));
            }
            self.add(format_args!("</div>\n"));
        }
        self.add(format_args!("</div>\n"));
        let Some(available) = e.machine.available else { return };
        let copied = e.copied_into_memory();
        let limit = e.machine.memlock.map_or(String::new(), |l| format!("; the limit for locked memory is {}", Bytes(l)));
        self.add(format_args!("<p>Copied into memory: {} of the {} that are available{limit}.</p>\n", Bytes(copied), Bytes(available)));
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
        let row_bytes = |tensors: &[&Placed]| tensors.iter().map(|t| t.bytes).fold(0, u64::saturating_add);
        let scale = scale(rows.iter().map(|(row, tensors)| (*row, row_bytes(tensors))));
        let unit = (800 / rows.len().max(1)).clamp(9, 26);
        self.add(format_args!(
            "<h2>Map</h2>\n<p>A row per layer; area is bytes, colour is the place, stripes stay in the file's mapping.</p>\n<div class=\"map\">\n<div class=\"grid\">"
        ));
        for (share, bytes) in ticks(scale) {
            // Where the map is narrow there is no room to the right of these.
            let class = if share > LAST_LABEL { " class=\"e\"" } else { "" };
            self.add(format_args!("<span{class} style=\"left:{:.3}%\">{}</span>", share * 100.0, Bytes(bytes)));
        }
        self.add(format_args!("</div>\n"));
        let mut above: Vec<Cell<'_>> = Vec::new();
        for (row, tensors) in &rows {
            let bytes = row_bytes(tensors);
            // A number alone where there is no room for more.
            let label = match row {
                Row::Input => "input".to_owned(),
                Row::Layer(n) => format!("<span class=\"long\">layer </span>{n}"),
                Row::Further => "further".to_owned(),
                Row::Output => "output".to_owned(),
            };
            // A row that is wider than the map becomes higher instead: area stays bytes.
            let fold = bytes.div_ceil(scale).max(1);
            let (height, full) = (unit as u64 * fold, scale.saturating_mul(fold));
            let width = bytes as f64 / full as f64 * 100.0;
            self.add(format_args!(
                "<div class=\"row\" style=\"height:{height}px\"><b>{label}</b><div class=\"track\"><div class=\"cells\" style=\"width:{width:.3}%\">"
            ));
            let cells = cells(tensors, full);
            for (i, cell) in cells.iter().enumerate() {
                // The same name on every row is no help: it stands where something changes.
                let named = !above.get(i).is_some_and(|a| is_like(a, cell));
                self.cell(e, cell, cell.bytes as f64 / full as f64, named && height >= 12);
            }
            self.add(format_args!("</div></div><i>{}</i></div>\n", Bytes(bytes)));
            above = cells;
        }
        self.add(format_args!("</div>\n"));
    }

    fn cell(&mut self, e: &Explanation, cell: &Cell<'_>, share: f64, named: bool) {
        let t = cell.first;
        let place = place_name(t.place.as_ref());
        let what = if cell.count == 1 { t.name.clone() } else { format!("{} tensors", cell.count) };
        let rule = t.rule.map_or("no rule".to_owned(), |r| format!("rule {r}"));
        let title = format!("{what}: {place}, {}, {rule}", Bytes(cell.bytes));
        let label = if named && share >= LABELLED && cell.count == 1 { Name::new(&t.name).base } else { "" };
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
                "<tr><td><code>{}</code></td><td class=\"num\">{}</td><td>{}</td><td class=\"num\">{}</td><td><span class=\"dot\" style=\"background-color:{}\"></span>{}</td><td>{}</td><td class=\"num\">{}</td><td>{}</td></tr>\n",
                Escaped(&l.name),
                l.count,
                Escaped(&t.type_name),
                Bytes(l.bytes),
                colour(e, t.place.as_ref()),
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

fn bytes_of(tensors: &[Placed]) -> u64 {
    tensors.iter().map(|t| t.bytes).fold(0, u64::saturating_add)
}

/// Where bytes lie, for a person.
fn lies(memory: Option<Memory>) -> &'static str {
    match memory {
        Some(Memory::Mapped) => "stays in the file's mapping",
        Some(Memory::Pageable) => "copied into ordinary memory",
        Some(Memory::Repacked) => "copied and interleaved in memory",
        Some(Memory::Pinned) => "copied into page-locked memory",
        Some(Memory::Arena) => "copied into the arena's file",
        Some(Memory::Device) => "copied to the device",
        None => "not loaded",
    }
}

/// Round numbers of bytes along the width of the map, and how far from the left each one is.
fn ticks(scale: u64) -> Vec<(f64, u64)> {
    let mut step = 1u64;
    // Powers of two are the round numbers of bytes; five to nine of them fit.
    while scale / step >= 9 {
        step = step.saturating_mul(2);
    }
    (0..=scale / step).map(|i| (i as f64 * step as f64 / scale as f64, i * step)).filter(|t| t.0 < 0.96).collect()
}

/// Whether two cells, one below the other, look alike.
fn is_like(a: &Cell<'_>, b: &Cell<'_>) -> bool {
    let name = |c: &Cell<'_>| (c.count == 1).then(|| Name::new(&c.first.name).base.to_owned());
    (&a.first.place, a.first.memory, name(a)) == (&b.first.place, b.first.memory, name(b))
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
