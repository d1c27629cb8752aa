//! The plot of `cargo xtask figures`: share of the limit against tokens of a call, a line per block format, as one SVG without anything from
//! outside. Knows nothing of how the points were measured.

use anyhow::{Result, anyhow};
use plotters::prelude::*;

/// A format and its shares (1 is the limit) by tokens.
pub(crate) struct Line {
    pub(crate) name: String,
    pub(crate) points: Vec<(usize, f64)>,
}

const SIZE: (u32, u32) = (1000, 560);
const LEGEND: u32 = 150;
/// Dark enough on white; every fifth line has the same colour and another mark.
const COLOURS: [RGBColor; 5] =
    [RGBColor(0, 90, 181), RGBColor(200, 60, 20), RGBColor(0, 128, 80), RGBColor(140, 50, 160), RGBColor(90, 90, 90)];

/// Draws them. The same lines give the same bytes.
pub(crate) fn shares(title: &str, lines: &[Line]) -> Result<String> {
    let mut svg = String::new();
    draw(&mut svg, title, lines).map_err(|error| anyhow!("{error}"))?;
    Ok(svg)
}

fn draw(svg: &mut String, title: &str, lines: &[Line]) -> Result<(), Box<dyn std::error::Error>> {
    let root = SVGBackend::with_string(svg, SIZE).into_drawing_area();
    root.fill(&WHITE)?;
    let (left, right) = root.split_horizontally(SIZE.0 - LEGEND);
    let tokens = || lines.iter().flat_map(|l| l.points.iter().map(|p| p.0));
    let last = log2(tokens().max().unwrap_or(1)).max(1.0);
    // More than the limit is a limit that was measured while the machine had other work: it is shown, not hidden.
    let most = lines.iter().flat_map(|l| l.points.iter().map(|p| p.1)).fold(1.0, f64::max);
    let top = (10.0 * most).ceil() * 10.0;
    let text = |size: u32| ("sans-serif", size).into_font().color(&BLACK);
    let mut chart = ChartBuilder::on(&left)
        .caption(title, text(20))
        .margin(12)
        .x_label_area_size(44)
        .y_label_area_size(56)
        .build_cartesian_2d(-0.15..last + 0.15, 0.0..top)?;
    chart
        .configure_mesh()
        .x_labels(last as usize + 1)
        .y_labels(11)
        .max_light_lines(0)
        .bold_line_style(RGBColor(225, 225, 225))
        .x_label_formatter(&|x| format!("{:.0}", x.exp2()))
        .y_label_formatter(&|y| format!("{y:.0} %"))
        .x_desc("tokens of a call")
        .y_desc("share of the limit that binds")
        .label_style(text(14))
        .axis_desc_style(text(15))
        .draw()?;
    for (i, line) in lines.iter().enumerate() {
        let points = || line.points.iter().map(|(tokens, share)| (log2(*tokens), 100.0 * share));
        chart.draw_series(LineSeries::new(points(), COLOURS[i % COLOURS.len()].stroke_width(2)))?;
        chart.draw_series(points().map(|at| EmptyElement::at(at) + mark(i)))?;
        // The legend, in the order of the lines.
        let y = 60 + 26 * i as i32;
        right.draw(&PathElement::new(vec![(0, y), (34, y)], COLOURS[i % COLOURS.len()].stroke_width(2)))?;
        right.draw(&(EmptyElement::at((17, y)) + mark(i)))?;
        right.draw(&Text::new(line.name.clone(), (42, y - 7), text(15)))?;
    }
    root.present()?;
    Ok(())
}

fn log2(tokens: usize) -> f64 {
    (tokens.max(1) as f64).log2()
}

/// The mark of line `i`, in pixels around its point: a diamond, a square, a triangle.
fn mark(i: usize) -> Polygon<(i32, i32)> {
    let corners: &[(i32, i32)] = match i / COLOURS.len() % 3 {
        0 => &[(0, -5), (5, 0), (0, 5), (-5, 0)],
        1 => &[(-4, -4), (4, -4), (4, 4), (-4, 4)],
        _ => &[(0, -6), (5, 4), (-5, 4)],
    };
    Polygon::new(corners, COLOURS[i % COLOURS.len()].filled())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_plot_is_the_same_every_time_shows_every_line_and_needs_nothing_from_outside() {
        let line = |i: usize| Line { name: format!("format_{i}"), points: (0..12).map(|p| (1 << p, 0.05 * (i + p % 3) as f64)).collect() };
        let lines: Vec<Line> = (0..15).map(line).collect();
        let svg = shares("a title", &lines).unwrap();
        assert_eq!(svg, shares("a title", &lines).unwrap());
        assert!(lines.iter().all(|l| svg.contains(&l.name)) && svg.contains("a title") && svg.contains("2048"));
        let outside = svg.replace("http://www.w3.org/2000/svg", "");
        assert!(!["http", "href", "url(", "@import", "<script", "<image"].iter().any(|text| outside.contains(text)));
        assert!(svg.contains("#FFFFFF"), "a background of its own");
    }
}
