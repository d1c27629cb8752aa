//! Packages from npm, PyPI and crates.io, through their own clients: those are configured on the user's machine, for proxies and mirrors too.
//!
//! A download is kept under `dl/` in the cache. This module knows packages, not what is in them.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, ensure};

use crate::cache::{self, say};
use crate::tools::{self, Missing};

/// The tarball of an npm package.
pub fn npm(package: &str, version: &str) -> Result<PathBuf> {
    let file = format!("{}-{version}.tgz", package.trim_start_matches('@').replace('/', "-"));
    cache::file("dl", &file, |partial| {
        let mut npm = tools::command("npm")?;
        say(&format!("fetching {package} {version} from npm"));
        let dir = tempfile::tempdir()?;
        npm.args(["pack", "--silent", "--pack-destination"]).arg(dir.path()).arg(format!("{package}@{version}")).current_dir(dir.path());
        client(npm, &format!("npm pack {package}@{version}"))?;
        take(dir.path(), partial)
    })
}

/// Whether a PyPI package is wanted as its wheel or as its source.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Dist {
    /// A built distribution for this machine.
    Wheel,
    /// The source distribution.
    Source,
}

/// A distribution of a PyPI package.
pub fn pypi(package: &str, version: &str, dist: Dist) -> Result<PathBuf> {
    let stem = format!("{}-{version}", package.replace('-', "_"));
    let (file, option) = match dist {
        Dist::Wheel => (format!("{stem}.whl"), "--only-binary"),
        Dist::Source => (format!("{stem}.tar.gz"), "--no-binary"),
    };
    cache::file("dl", &file, |partial| {
        let mut pip = tools::command("pip")?;
        say(&format!("fetching {package} {version} from PyPI"));
        let dir = tempfile::tempdir()?;
        pip.args(["download", "--quiet", "--no-deps", "--no-input", "--disable-pip-version-check", option, package, "--dest"]);
        pip.arg(dir.path()).arg(format!("{package}=={version}"));
        client(pip, &format!("pip download {package}=={version}"))?;
        take(dir.path(), partial)
    })
}

/// The unpacked source of a crate, where cargo keeps it. Copy what must last: cargo may clean it.
pub fn crate_source(name: &str, version: &str) -> Result<PathBuf> {
    say(&format!("fetching the crate {name} {version}"));
    let dir = tempfile::tempdir()?;
    fs::create_dir(dir.path().join("src"))?;
    fs::write(dir.path().join("src/lib.rs"), "")?;
    let manifest = format!("[package]\nname = \"fetch\"\nedition = \"2021\"\n[dependencies]\n{name} = \"={version}\"\n[workspace]\n");
    fs::write(dir.path().join("Cargo.toml"), manifest)?;
    let mut cargo = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    cargo.args(["metadata", "--format-version", "1", "--quiet"]).current_dir(dir.path());
    let metadata: serde_json::Value = serde_json::from_slice(&client(cargo, &format!("cargo metadata for {name} {version}"))?)?;
    let package = metadata["packages"].as_array().into_iter().flatten().find(|p| p["name"] == name && p["version"] == version);
    let manifest = package.and_then(|p| p["manifest_path"].as_str()).with_context(|| format!("cargo metadata does not name {name}"))?;
    Ok(Path::new(manifest).parent().context("a manifest has no directory")?.to_path_buf())
}

/// The newest version of an npm package.
pub fn newest_npm(package: &str) -> Result<String> {
    let mut npm = tools::command("npm")?;
    npm.args(["view", "--silent", package, "version"]);
    version(&client(npm, &format!("npm view {package}"))?, "")
}

/// The newest version of a PyPI package.
pub fn newest_pypi(package: &str) -> Result<String> {
    let mut pip = tools::command("pip")?;
    pip.args(["index", "versions", "--no-input", "--disable-pip-version-check", package]);
    // "package (1.2.3)", then all of them.
    version(&client(pip, &format!("pip index versions {package}"))?, &format!("{package} ("))
}

/// The newest version of a crate.
pub fn newest_crate(name: &str) -> Result<String> {
    let mut cargo = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    // Outside of a workspace, which may hold an older one.
    let dir = tempfile::tempdir()?;
    cargo.args(["info", "--quiet", name]).current_dir(dir.path());
    version(&client(cargo, &format!("cargo info {name}"))?, "version: ")
}

/// The version that follows `start` on a line.
fn version(output: &[u8], start: &str) -> Result<String> {
    let text = String::from_utf8_lossy(output).into_owned();
    let rest = text.lines().find_map(|l| l.trim().strip_prefix(start).filter(|r| !r.is_empty()));
    let version: String = rest.unwrap_or_default().chars().take_while(|c| c.is_ascii_alphanumeric() || "._-+".contains(*c)).collect();
    ensure!(version.starts_with(|c: char| c.is_ascii_digit()), "no version in {text:?}");
    Ok(version)
}

/// Runs a registry's client; its failure means that the registry or the package could not be reached.
fn client(mut command: Command, what: &str) -> Result<Vec<u8>> {
    let out = command.stdin(Stdio::null()).output().map_err(|e| Missing(format!("{what}: {e}")))?;
    if !out.status.success() {
        let stderr = String::from_utf8_lossy(&out.stderr);
        let lines: Vec<&str> = stderr.lines().map(str::trim).filter(|l| !l.is_empty()).collect();
        let tail = lines[lines.len().saturating_sub(3)..].join("; ");
        return Err(Missing(format!("{what} failed ({}): {tail}", out.status)).into());
    }
    Ok(out.stdout)
}

/// Moves the single file that a client left in `dir` to `to`, which may be on another file system.
fn take(dir: &Path, to: &Path) -> Result<()> {
    let files: Vec<_> = fs::read_dir(dir)?.collect::<std::io::Result<_>>()?;
    ensure!(files.len() == 1, "the client left {} files instead of one", files.len());
    fs::copy(files[0].path(), to)?;
    Ok(())
}

/// Unpacks the entries of a gzipped tarball for which `keep` gives a path below `dir`.
///
/// Times are not kept: archives carry old ones, and ninja would see a build that is never up to date.
pub fn untar(archive: &Path, dir: &Path, keep: impl Fn(&Path) -> Option<PathBuf>) -> Result<()> {
    let read = std::io::BufReader::new(fs::File::open(archive)?);
    let mut tar = tar::Archive::new(flate2::bufread::MultiGzDecoder::new(read));
    tar.set_preserve_mtime(false);
    for entry in tar.entries()? {
        let mut entry = entry?;
        let Some(relative) = keep(&entry.path()?) else { continue };
        ensure!(is_inside(&relative), "{} has an entry outside its directory: {}", archive.display(), relative.display());
        let to = dir.join(relative);
        fs::create_dir_all(to.parent().context("an entry has no directory")?)?;
        entry.unpack(&to).with_context(|| format!("cannot unpack {}", to.display()))?;
    }
    Ok(())
}

/// Unpacks a zip file (a wheel) into `dir`.
pub fn unzip(archive: &Path, dir: &Path) -> Result<()> {
    let read = std::io::BufReader::new(fs::File::open(archive)?);
    zip::ZipArchive::new(read)?.extract(dir).with_context(|| format!("cannot unpack {}", archive.display()))
}

fn is_inside(path: &Path) -> bool {
    path.components().all(|c| matches!(c, std::path::Component::Normal(_) | std::path::Component::CurDir))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_version_is_read_from_what_each_client_prints() {
        assert_eq!(version(b"3.22.1\n", "").unwrap(), "3.22.1");
        assert_eq!(version(b"p-q (0.3.36)\nAvailable versions: 0.3.36, 0.3.35\n", "p-q (").unwrap(), "0.3.36");
        assert_eq!(version(b"c #tag\nversion: 0.1.161 (from ..)\n", "version: ").unwrap(), "0.1.161");
        assert!(version(b"nothing\n", "version: ").is_err() && version(b"latest\n", "").is_err() && version(b"", "").is_err());
    }

    #[test]
    fn an_archive_path_stays_inside() {
        assert!(is_inside(Path::new("package/bins/a.so")));
        assert!(!is_inside(Path::new("../a")) && !is_inside(Path::new("/a")) && !is_inside(Path::new("a/../../b")));
    }
}
