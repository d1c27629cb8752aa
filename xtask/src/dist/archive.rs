//! The `.tar.gz` of what is installed. The same files make the same archive, byte for byte: no time, no owner, order by path.

use std::fs::Permissions;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use anyhow::{Context, Result};
use flate2::Compression;
use flate2::write::GzEncoder;
use tar::{Builder, EntryType, Header};

use super::install::{Entry, What};

/// Writes `file`, in which everything lies in the directory `name`.
pub(crate) fn write(file: &Path, name: &str, entries: &[Entry]) -> Result<()> {
    let dir = file.parent().context("an archive lies in a directory")?;
    let partial =
        tempfile::Builder::new().prefix(".berth-").tempfile_in(dir).with_context(|| format!("cannot write to {}", dir.display()))?;
    let mut tar = Builder::new(GzEncoder::new(partial, Compression::default()));
    for entry in entries {
        let mut header = Header::new_gnu();
        header.set_mode(entry.what.mode());
        header.set_mtime(time());
        let path = Path::new(name).join(&entry.path);
        match &entry.what {
            What::Link(to) => {
                header.set_entry_type(EntryType::Symlink);
                header.set_size(0);
                tar.append_link(&mut header, path, to)?;
            }
            What::File(bytes) | What::Program(bytes) => {
                header.set_size(bytes.len() as u64);
                tar.append_data(&mut header, path, bytes.as_slice())?;
            }
        }
    }
    let partial = tar.into_inner()?.finish()?;
    partial.as_file().set_permissions(Permissions::from_mode(0o644))?;
    partial.persist(file).with_context(|| format!("cannot write {}", file.display()))?;
    Ok(())
}

/// The time that files in it have: what `SOURCE_DATE_EPOCH` says, or the first second of 1980, which every tool can show.
fn time() -> u64 {
    std::env::var("SOURCE_DATE_EPOCH").ok().and_then(|v| v.parse().ok()).unwrap_or(315_532_800)
}
