//! `cargo xtask picture`: docs/explain.png, the page of `berth explain --html` for the geometry of a real model, as a browser shows it.

use std::fs;
use std::io::Cursor;

use anyhow::{Context, Result, ensure};
use ffi_tests::{browser::Browser, models, run};

use crate::shell;

/// Where a README can show it.
const PICTURE: &str = "docs/explain.png";
/// Its size, in pixels: the head of the page and the whole map.
const SIZE: (u32, u32) = (1280, 1262);
/// A picture in a repository is fetched by everybody.
const MOST_BYTES: usize = 150 << 10;
/// What it shows: a GPU, half of the experts in an arena, the others in the mapping.
const ARGUMENTS: [&str; 4] = ["--device", "CUDA0:CUDA_Host", "-ot", r"blk\.([0-9]|1[0-9]|2[0-3])\.ffn_.*_exps=ARENA,exps=CPU_MMAP"];

pub(crate) fn run() -> Result<()> {
    shell::berth()?;
    let dir = tempfile::tempdir()?;
    let (model, page) = (dir.path().join("model.gguf"), dir.path().join("page.html"));
    models::qwen3_30b_a3b(&model)?;
    let mut berth = std::process::Command::new(ffi_tests::berth_program()?);
    run::clean_env(&mut berth);
    berth.arg("explain").arg(&model).arg("--html").arg(&page).args(ARGUMENTS).env("BERTH_ARENA_DIR", dir.path().join("arena"));
    run::run(berth, std::time::Duration::from_secs(60))?.checked("berth explain")?;
    let mut browser = Browser::start()?;
    browser.window(SIZE.0, SIZE.1, false)?;
    browser.load(&page)?;
    let picture = smaller(&browser.picture(SIZE.0, SIZE.1)?)?;
    ensure!(picture.len() <= MOST_BYTES, "the picture has {} bytes, more than {MOST_BYTES}", picture.len());
    let path = shell::root().join(PICTURE);
    fs::write(&path, &picture).with_context(|| path.display().to_string())?;
    println!("wrote {} ({} bytes)", path.display(), picture.len());
    Ok(())
}

/// The same picture in fewer bytes. Rows of a map repeat each other: without the filters that a browser chooses for photographs, deflate finds that.
fn smaller(picture: &[u8]) -> Result<Vec<u8>> {
    let mut reader = png::Decoder::new(Cursor::new(picture)).read_info()?;
    let mut pixels = vec![0; reader.output_buffer_size().context("a picture too large for this machine")?];
    let frame = reader.next_frame(&mut pixels)?;
    let mut out = Vec::new();
    let mut encoder = png::Encoder::new(&mut out, frame.width, frame.height);
    encoder.set_color(frame.color_type);
    encoder.set_depth(frame.bit_depth);
    encoder.set_deflate_compression(png::DeflateCompression::Level(9));
    encoder.set_filter(png::Filter::NoFilter);
    encoder.write_header()?.write_image_data(&pixels[..frame.buffer_size()])?;
    Ok(out)
}
