//! The directory outside the checkout that holds what is costly to fetch or build, and the rule that makes an entry whole or absent.
//!
//! An entry is a directory or file whose name carries a key of everything that shaped it. It is made under an exclusive lock, so concurrent
//! test processes make it once; a directory counts only with its stamp, which is written last; a file appears by rename. What an interrupted
//! run left behind is removed and made again.

use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use sha2::{Digest, Sha256};

const STAMP: &str = ".complete";

/// `$BERTH_CACHE`, or `$XDG_CACHE_HOME/berth`, or `~/.cache/berth`.
pub fn root() -> Result<PathBuf> {
    root_from(|name| std::env::var_os(name).filter(|v| !v.is_empty()).map(PathBuf::from))
}

fn root_from(var: impl Fn(&str) -> Option<PathBuf>) -> Result<PathBuf> {
    let dir = match (var("BERTH_CACHE"), var("XDG_CACHE_HOME"), var("HOME")) {
        (Some(dir), _, _) => dir,
        (_, Some(xdg), _) => xdg.join("berth"),
        (_, _, Some(home)) => home.join(".cache/berth"),
        _ => bail!("none of BERTH_CACHE, XDG_CACHE_HOME and HOME is set: no place for the cache"),
    };
    std::path::absolute(&dir).with_context(|| format!("{}", dir.display()))
}

/// Twelve hex digits that name a recipe: equal text, equal key.
pub fn key(recipe: &str) -> String {
    Sha256::digest(recipe.as_bytes()).iter().take(6).map(|b| format!("{b:02x}")).collect()
}

/// The directory `<kind>/<name>-<key of recipe>`, made by `make` (which gets it empty) unless it is there and whole.
pub fn directory(kind: &str, name: &str, recipe: &str, make: impl FnOnce(&Path) -> Result<()>) -> Result<PathBuf> {
    directory_in(&root()?, kind, name, recipe, make)
}

fn directory_in(root: &Path, kind: &str, name: &str, recipe: &str, make: impl FnOnce(&Path) -> Result<()>) -> Result<PathBuf> {
    let entry = format!("{name}-{}", key(recipe));
    let dir = root.join(kind).join(&entry);
    if dir.join(STAMP).is_file() {
        return Ok(dir);
    }
    let _lock = lock(root, kind, &entry)?;
    if dir.join(STAMP).is_file() {
        return Ok(dir);
    }
    if dir.exists() {
        fs::remove_dir_all(&dir).with_context(|| format!("cannot remove the unfinished {}", dir.display()))?;
    }
    fs::create_dir_all(&dir).with_context(|| format!("cannot create {}", dir.display()))?;
    make(&dir)?;
    fs::write(dir.join(STAMP), recipe).with_context(|| format!("cannot write the stamp of {}", dir.display()))?;
    Ok(dir)
}

/// The file `<kind>/<name>`, written by `make` to the path it gets unless it is there. The name must carry a key where a recipe may change.
pub fn file(kind: &str, name: &str, make: impl FnOnce(&Path) -> Result<()>) -> Result<PathBuf> {
    file_in(&root()?, kind, name, make)
}

fn file_in(root: &Path, kind: &str, name: &str, make: impl FnOnce(&Path) -> Result<()>) -> Result<PathBuf> {
    let path = root.join(kind).join(name);
    if path.is_file() {
        return Ok(path);
    }
    let _lock = lock(root, kind, name)?;
    if path.is_file() {
        return Ok(path);
    }
    let partial = path.with_file_name(format!(".{name}.partial"));
    fs::create_dir_all(root.join(kind))?;
    make(&partial)?;
    fs::rename(&partial, &path).with_context(|| format!("cannot rename {} to {}", partial.display(), path.display()))?;
    Ok(path)
}

/// An exclusive lock on one entry, held until dropped (also by the end of the process, however it ends).
fn lock(root: &Path, kind: &str, entry: &str) -> Result<File> {
    let dir = root.join("locks");
    fs::create_dir_all(&dir).with_context(|| format!("cannot create {}", dir.display()))?;
    let path = dir.join(format!("{kind}-{entry}.lock"));
    let file = File::options().create(true).append(true).open(&path).with_context(|| format!("cannot open {}", path.display()))?;
    if file.try_lock().is_err() {
        say(&format!("waiting for {entry}: another process is making it"));
        file.lock().with_context(|| format!("cannot lock {}", path.display()))?;
    }
    Ok(file)
}

/// One line of progress on the real stderr, past the test runner's capture: a first run takes minutes and must not look dead.
pub fn say(line: &str) {
    // A closed stderr is no reason to stop.
    let _ = writeln!(std::io::stderr(), "{line}");
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::thread;
    use std::time::Duration;

    fn vars<'a>(set: &'a [(&'a str, &'a str)]) -> impl Fn(&str) -> Option<PathBuf> + 'a {
        |name| set.iter().find(|(n, _)| *n == name).map(|(_, v)| PathBuf::from(v))
    }

    #[test]
    fn the_root_prefers_its_own_variable_then_xdg_then_home() {
        let all = [("BERTH_CACHE", "/b"), ("XDG_CACHE_HOME", "/x"), ("HOME", "/h")];
        assert_eq!(root_from(vars(&all)).unwrap(), Path::new("/b"));
        assert_eq!(root_from(vars(&all[1..])).unwrap(), Path::new("/x/berth"));
        assert_eq!(root_from(vars(&all[2..])).unwrap(), Path::new("/h/.cache/berth"));
        assert!(root_from(vars(&[])).is_err());
    }

    #[test]
    fn many_at_once_make_an_entry_once() {
        let root = tempfile::tempdir().unwrap();
        let made = AtomicUsize::new(0);
        let make = |dir: &Path| {
            made.fetch_add(1, Ordering::SeqCst);
            thread::sleep(Duration::from_millis(50));
            Ok(fs::write(dir.join("x"), "whole")?)
        };
        thread::scope(|s| {
            for _ in 0..8 {
                s.spawn(|| {
                    let dir = directory_in(root.path(), "hosts", "h", "recipe", make).unwrap();
                    assert_eq!(fs::read_to_string(dir.join("x")).unwrap(), "whole");
                });
            }
        });
        assert_eq!(made.load(Ordering::SeqCst), 1);
    }

    #[test]
    fn what_an_interrupted_run_left_is_made_again_from_nothing() {
        let root = tempfile::tempdir().unwrap();
        let interrupted = directory_in(root.path(), "hosts", "h", "r", |dir| {
            fs::write(dir.join("half"), "")?;
            bail!("killed")
        });
        assert!(interrupted.is_err());
        let dir = directory_in(root.path(), "hosts", "h", "r", |dir| Ok(fs::write(dir.join("whole"), "")?)).unwrap();
        assert!(dir.join("whole").is_file() && !dir.join("half").exists());

        let interrupted = file_in(root.path(), "models", "m", |path| {
            fs::write(path, "half")?;
            bail!("killed")
        });
        assert!(interrupted.is_err() && !root.path().join("models/m").exists());
        let file = file_in(root.path(), "models", "m", |path| Ok(fs::write(path, "whole")?)).unwrap();
        assert_eq!(fs::read_to_string(file).unwrap(), "whole");
    }

    #[test]
    fn another_recipe_is_another_entry() {
        let root = tempfile::tempdir().unwrap();
        let dir = |recipe| directory_in(root.path(), "hosts", "h", recipe, |_| Ok(())).unwrap();
        assert_ne!(dir("a"), dir("b"));
        assert_eq!(dir("a"), dir("a"));
    }

    #[test]
    fn a_key_depends_on_every_byte_and_on_nothing_else() {
        assert_eq!(key("a"), key("a"));
        assert_ne!(key("a"), key("b"));
        assert_eq!(key("").len(), 12);
    }
}
