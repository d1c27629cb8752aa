//! The page of `berth explain --html` in headless Chromium: it asks for nothing, complains of nothing, and fits the window, wide and narrow,
//! light and dark.

use std::path::Path;
use std::process::Command;
use std::time::Duration;

use ffi_tests::browser::Browser;
use ffi_tests::models::{self, Spec};
use ffi_tests::{berth_program, run, skip};

/// Windows, in CSS pixels: the one that the page is made for, a small laptop, a telephone.
const WIDTHS: [u32; 3] = [1280, 900, 390];

fn browser() -> Option<Browser> {
    skip::available("the page in a browser", Browser::start())
}

fn page(model: &Path, args: &[&str], dir: &Path) -> std::path::PathBuf {
    let path = dir.join("page.html");
    let mut command = Command::new(berth_program().unwrap_or_else(|e| panic!("{e:#}")));
    run::clean_env(&mut command);
    command.arg("explain").arg(model).arg("--html").arg(&path).args(args).env("BERTH_ARENA_DIR", dir.join("arena"));
    run::run(command, Duration::from_secs(60)).and_then(|o| o.checked("berth explain")).unwrap_or_else(|e| panic!("{e:#}"));
    path
}

/// How many elements reach beyond the window to the right. What scrolls inside a box of its own does not count.
const OUTSIDE: &str = "[...document.querySelectorAll('body *')].filter(e => !e.closest('.scroll') &&
    e.getBoundingClientRect().right > innerWidth + 0.5).map(e => e.tagName + '.' + e.className + ': ' + e.textContent.slice(0, 40))";

/// Labels on the map that are cut off though their text is all that they hold.
const UNREADABLE: &str = "[...document.querySelectorAll('.row b, .row i, .card b, .card p, .grid span')].filter(e =>
    e.scrollWidth > e.clientWidth + 1 && getComputedStyle(e).display != 'none' && !e.closest('.grid')).map(e => e.textContent)";

/// The smallest text on the page, in pixels.
const SMALLEST: &str = "Math.min(...[...document.querySelectorAll('body *')].map(e => parseFloat(getComputedStyle(e).fontSize)))";

/// The least contrast of text on cells and page (WCAG's formula); colours are the browser's own `rgb(r, g, b)`.
const CONTRAST: &str = "(() => {
    const light = c => c.match(/[0-9.]+/g).slice(0, 3).map(v => v / 255).map(v => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
        .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
    const behind = e => { for (; e; e = e.parentElement) {
        const c = getComputedStyle(e).backgroundColor; if (!/, 0\\)$/.test(c)) return c; } return 'rgb(255, 255, 255)'; };
    let least = 99;
    for (const e of document.querySelectorAll('body *')) {
        if (![...e.childNodes].some(n => n.nodeType == 3 && n.textContent.trim())) continue;
        const [a, b] = [light(getComputedStyle(e).color), light(behind(e))].sort((x, y) => y - x);
        least = Math.min(least, (a + 0.05) / (b + 0.05));
    }
    return least; })()";

fn looks_right(browser: &mut Browser, page: &Path, what: &str) {
    for dark in [false, true] {
        for width in WIDTHS {
            let what = format!("{what}, {width} pixels, {}", if dark { "dark" } else { "light" });
            browser.window(width, 900, dark).unwrap_or_else(|e| panic!("{what}: {e:#}"));
            let visit = browser.load(page).unwrap_or_else(|e| panic!("{what}: {e:#}"));
            assert_eq!(visit.complaints, Vec::<String>::new(), "{what}");
            assert_eq!(visit.requests, [visit.url.as_str()], "{what}: the page asks for something");
            let mut evaluate = |script: &str| browser.evaluate(script).unwrap_or_else(|e| panic!("{what}: {e:#}"));
            assert_eq!(evaluate("document.documentElement.scrollWidth <= innerWidth"), true, "{what}: {}", evaluate(OUTSIDE));
            assert_eq!(evaluate(OUTSIDE).as_array().map(Vec::len), Some(0), "{what}: {}", evaluate(OUTSIDE));
            assert_eq!(evaluate(UNREADABLE).as_array().map(Vec::len), Some(0), "{what}: {}", evaluate(UNREADABLE));
            assert!(evaluate(SMALLEST).as_f64().is_some_and(|px| px >= 11.0), "{what}: text of {} pixels", evaluate(SMALLEST));
            assert!(evaluate(CONTRAST).as_f64().is_some_and(|c| c >= 4.5), "{what}: a contrast of {}", evaluate(CONTRAST));
            assert!(evaluate("document.querySelectorAll('.row').length").as_u64().is_some_and(|rows| rows > 2), "{what}: no map");
            assert_eq!(evaluate("document.querySelectorAll('script, link, img, iframe').length"), 0, "{what}");
        }
    }
}

#[test]
fn the_page_asks_for_nothing_complains_of_nothing_and_fits_the_window() {
    let Some(mut browser) = browser() else { return };
    let dir = tempfile::tempdir().unwrap();
    let model = dir.path().join("model.gguf");
    models::qwen3_30b_a3b(&model).unwrap_or_else(|e| panic!("{e:#}"));
    let rules = r"blk\.([0-9]|1[0-9]|2[0-3])\.ffn_.*_exps=ARENA,exps=CPU_MMAP,nothing=CPU";
    let large = page(&model, &["--device", "CUDA0:CUDA_Host", "-ot", rules], dir.path());
    looks_right(&mut browser, &large, "48 layers");
    let small = models::random(&Spec::default()).unwrap_or_else(|e| panic!("{e:#}"));
    let long = format!("{}=CUDA_Host,exps=CPU", "(a|b|c)".repeat(60));
    looks_right(&mut browser, &page(&small, &["-ot", &long, "--no-mmap"], dir.path()), "2 layers, a long rule");
    models::repeated(&model, 20_000).unwrap_or_else(|e| panic!("{e:#}"));
    looks_right(&mut browser, &page(&model, &["-ot", "exps=ARENA"], dir.path()), "20,000 tensors");
}

#[test]
fn the_browser_would_see_a_request_an_error_and_an_overflow() {
    let Some(mut browser) = browser() else { return };
    let dir = tempfile::tempdir().unwrap();
    let page = dir.path().join("bad.html");
    let body = "<img src='file:///nonexistent/picture.png'><div style='width:3000px'>wide</div><script>console.error('bad')</script>";
    std::fs::write(&page, format!("<!doctype html><html><body>{body}</body></html>")).unwrap();
    browser.window(1280, 900, false).unwrap();
    let visit = browser.load(&page).unwrap_or_else(|e| panic!("{e:#}"));
    assert!(visit.requests.iter().any(|r| r.ends_with("picture.png")), "{:?}", visit.requests);
    assert!(visit.complaints.iter().any(|c| c.contains("bad")), "{:?}", visit.complaints);
    assert!(browser.evaluate(OUTSIDE).unwrap().as_array().is_some_and(|a| !a.is_empty()));
}
