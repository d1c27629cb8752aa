//! Puts files below a prefix: each appears whole, in one step, or not at all, and what is in the way is told before the first one.

use std::fs::{self, File};
use std::io::Write;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail, ensure};

/// Something to install.
pub(crate) struct Entry {
    /// Path below the prefix.
    pub(crate) path: PathBuf,
    pub(crate) what: What,
}

/// What it is.
pub(crate) enum What {
    File(Vec<u8>),
    Program(Vec<u8>),
    /// A symbolic link to a name in the same directory.
    Link(PathBuf),
}

impl What {
    /// Its mode in a file system.
    pub(crate) fn mode(&self) -> u32 {
        match self {
            What::File(_) => 0o644,
            What::Program(_) | What::Link(_) => 0o755,
        }
    }
}

/// The prefix as an absolute path.
///
/// # Errors
/// If it, or what it lies in, is no directory, or not writable.
pub(crate) fn check_prefix(prefix: &Path) -> Result<PathBuf> {
    ensure!(!prefix.as_os_str().is_empty(), "the prefix is empty");
    let prefix = std::path::absolute(prefix).with_context(|| prefix.display().to_string())?;
    // pkg-config and Makefiles read lines: nothing there could name such a directory.
    ensure!(!prefix.as_os_str().as_bytes().contains(&b'\n'), "{prefix:?} has a line end in its name");
    writable_or_to_be_made(&prefix)?;
    Ok(prefix)
}

/// A directory that may be written to, or one that is missing where one may be made.
fn writable_or_to_be_made(dir: &Path) -> Result<()> {
    for there in dir.ancestors() {
        match there.metadata() {
            Ok(meta) => {
                ensure!(meta.is_dir(), "{} is in the way: it is no directory", there.display());
                return tempfile::Builder::new()
                    .prefix(".berth-")
                    .tempfile_in(there)
                    .map(drop)
                    .with_context(|| format!("cannot write to {}", there.display()));
            }
            // What is there by name and leads nowhere would be met again when the directory is made.
            Err(_) if there.symlink_metadata().is_ok() => bail!("{} is in the way: a link that leads nowhere", there.display()),
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => {}
            Err(e) => return Err(e).with_context(|| there.display().to_string()),
        }
    }
    bail!("{} has no directory above it", dir.display())
}

/// Installs everything below the prefix, which is given back as an absolute path.
///
/// # Errors
/// What is in the way or not writable is named, before any file is written.
pub(crate) fn install(prefix: &Path, entries: &[Entry]) -> Result<PathBuf> {
    let prefix = check_prefix(prefix)?;
    for entry in entries {
        let path = prefix.join(&entry.path);
        writable_or_to_be_made(parent(&path)?)?;
        ensure!(!path.symlink_metadata().is_ok_and(|m| m.is_dir()), "{} is in the way: it is a directory", path.display());
    }
    for entry in entries {
        let path = prefix.join(&entry.path);
        let dir = parent(&path)?;
        fs::create_dir_all(dir).with_context(|| format!("cannot make {}", dir.display()))?;
        put(&path, dir, &entry.what).with_context(|| format!("cannot write {}", path.display()))?;
    }
    Ok(prefix)
}

fn parent(path: &Path) -> Result<&Path> {
    path.parent().with_context(|| format!("{} is in no directory", path.display()))
}

/// By rename: a program that has the old file open keeps it, and nobody sees half of the new one.
fn put(path: &Path, dir: &Path, what: &What) -> Result<()> {
    let new = tempfile::Builder::new().prefix(".berth-").tempdir_in(dir)?;
    let partial = new.path().join("new");
    match what {
        What::Link(to) => symlink(to, &partial)?,
        What::File(bytes) | What::Program(bytes) => {
            let mut file = File::create_new(&partial)?;
            file.write_all(bytes)?;
            file.set_permissions(fs::Permissions::from_mode(what.mode()))?;
            file.sync_all()?;
        }
    }
    fs::rename(&partial, path)?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::MetadataExt;

    fn entries(text: &str) -> Vec<Entry> {
        vec![
            Entry { path: "bin/b".into(), what: What::Program(text.into()) },
            Entry { path: "lib/a.so".into(), what: What::Link("a.so.0".into()) },
            Entry { path: "lib/a.so.0".into(), what: What::File(text.into()) },
        ]
    }

    fn names(dir: &Path) -> Vec<String> {
        let mut names: Vec<String> = fs::read_dir(dir).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    }

    #[test]
    fn files_are_replaced_in_one_step_and_nothing_else_is_left() {
        let dir = tempfile::tempdir().unwrap();
        let prefix = dir.path().join("a b/c");
        install(&prefix, &entries("one")).unwrap();
        let library = prefix.join("lib/a.so.0");
        let (open, inode) = (File::open(&library).unwrap(), library.metadata().unwrap().ino());
        install(&prefix, &entries("two")).unwrap();
        assert_eq!(fs::read_to_string(prefix.join("lib/a.so")).unwrap(), "two", "through the link");
        assert_eq!(std::io::read_to_string(open).unwrap(), "one", "who had it open keeps it");
        assert_ne!(library.metadata().unwrap().ino(), inode);
        assert_eq!(names(&prefix.join("lib")), ["a.so", "a.so.0"]);
        assert_eq!(prefix.join("bin/b").metadata().unwrap().mode() & 0o777, 0o755);
        assert_eq!(library.metadata().unwrap().mode() & 0o777, 0o644);
    }

    #[test]
    fn what_is_in_the_way_is_named_before_anything_is_written() {
        let dir = tempfile::tempdir().unwrap();
        let fails = |prefix: &Path| format!("{:#}", install(prefix, &entries("x")).unwrap_err());
        let at = |name: &str| dir.path().join(name);

        fs::write(at("file"), "").unwrap();
        assert!(fails(&at("file")).contains("file is in the way: it is no directory"));
        assert!(fails(&at("file/below")).contains("file"), "a prefix below a file");
        symlink("nowhere", at("link")).unwrap();
        assert!(fails(&at("link")).contains("a link that leads nowhere"));

        fs::create_dir_all(at("p/lib/a.so.0")).unwrap();
        assert!(fails(&at("p")).contains("a.so.0 is in the way: it is a directory"));
        assert_eq!(names(&at("p")), ["lib"], "nothing was written");
        fs::create_dir(at("q")).unwrap();
        fs::write(at("q/lib"), "").unwrap();
        assert!(fails(&at("q")).contains("lib is in the way: it is no directory"));
        assert_eq!(names(&at("q")), ["lib"]);
        assert!(fails(Path::new("")).contains("the prefix is empty"));
        assert!(fails(&at("a\nb")).contains("line end"));
        assert!(fails(Path::new("/proc/berth")).contains("/proc"), "not writable, by root either");
    }

    #[test]
    fn a_file_that_is_a_link_is_replaced_and_not_followed() {
        let dir = tempfile::tempdir().unwrap();
        fs::create_dir(dir.path().join("lib")).unwrap();
        fs::write(dir.path().join("other"), "other's").unwrap();
        symlink("../other", dir.path().join("lib/a.so.0")).unwrap();
        install(dir.path(), &entries("ours")).unwrap();
        assert_eq!(fs::read_to_string(dir.path().join("other")).unwrap(), "other's");
        assert_eq!(fs::read_to_string(dir.path().join("lib/a.so.0")).unwrap(), "ours");
    }
}
