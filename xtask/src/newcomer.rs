//! `cargo xtask newcomer`: README.md tried in a clean root by an ordinary user, line by line. It knows how such a root is made; what is typed there
//! stands in README.md alone.

use std::collections::BTreeSet;
use std::fs;
use std::net::TcpListener;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Instant;

use anyhow::{Context, Result, bail, ensure};
use ffi_tests::report::Report;
use ffi_tests::run;
use ffi_tests::tools::on_path;

use crate::shell;

/// Try README.md as a new user would, in a clean Debian or Ubuntu. Needs root, debootstrap and 8 GB of disk; takes half an hour on two cores.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Release of the clean system [default: this machine's].
    #[arg(long)]
    suite: Option<String>,
    /// Where its packages come from [default: debootstrap's own].
    #[arg(long)]
    mirror: Option<String>,
    /// Run `cargo xtask test` as README.md has it, not with --quick: two hours more, and 30 GB.
    #[arg(long)]
    full: bool,
    /// Keep the root, and say where it is.
    #[arg(long)]
    keep: bool,
}

/// What README.md names beside Rust: git and a C compiler.
const NAMED: [&str; 3] = ["git", "gcc", "libc6-dev"];
/// What brings the commands of this file itself.
const OWN: [&str; 2] = ["ca-certificates", "sudo"];
const USER: &str = "newcomer";
/// Where Rust is in the root.
const RUST: &str = "/opt/rust";

pub(crate) fn run(args: &Args) -> Result<()> {
    let start = Instant::now();
    let readme = fs::read_to_string(shell::root().join("README.md"))?;
    let [first, by_hand] = &blocks(&readme, "Try it")?[..] else { bail!("README.md has not two blocks of commands under 'Try it'") };
    let look = blocks(&readme, "Look before you load")?.concat();
    let temp = tempfile::Builder::new().prefix("newcomer-").tempdir_in(cargo_target()?)?;
    let root = Root::make(args, temp.path())?;
    println!("Rust    this machine's, mounted read-only (in place of rustup)");

    root.checked("root", &format!("apt-get install -q -y --no-install-recommends {}", [&NAMED[..], &OWN].concat().join(" ")))?;
    root.own_settings()?;
    root.checked("root", &format!("useradd -m -s /bin/bash {USER} && echo '{USER} ALL=(ALL) NOPASSWD: ALL' > /etc/sudoers.d/{USER}"))?;
    root.checked(USER, "git clone -q /srv/berth.bundle ~/berth")?;

    for line in first {
        let line = if line == "cargo xtask test" {
            root.typed("cargo xtask setup --apt")?;
            if args.full { line.clone() } else { format!("{line} --quick") }
        } else {
            line.clone()
        };
        root.hinted(&line)?;
    }
    // A server and a model of the newcomer's own: those that the demo has fetched and made.
    let found = root.checked(USER, "ls ~/.cache/berth/models/smollm2-moe-*.gguf ~/.cache/berth/hosts/*/*/bin/llama-server")?.stdout;
    let path = |end: &str| found.lines().find(|l| l.ends_with(end)).with_context(|| format!("the demo left no {end}:\n{found}"));
    let server = Path::new(path("llama-server")?).parent().context("a program has no directory")?;
    root.checked(USER, &format!("ln -s {} ~/berth/model.gguf", path(".gguf")?))?;
    for line in by_hand {
        if line.contains("llama-server") { root.served(line, server)? } else { root.typed(line)? }
    }
    for line in &look {
        root.typed(&format!("export PATH=$PWD/target/release:{}:$PATH; {line}", server.display()))?;
    }
    let left_out = if args.full { "" } else { " (tests with hosts left out: --full)" };
    println!(
        "\n{} commands of README.md did what it says{left_out}, {:.0} minutes",
        first.len() + by_hand.len() + look.len(),
        minutes(start)
    );
    if args.keep {
        println!("kept {}", temp.keep().display());
    }
    Ok(())
}

fn minutes(since: Instant) -> f64 {
    since.elapsed().as_secs_f64() / 60.0
}

/// cargo's target directory, which is on a disk with room.
fn cargo_target() -> Result<PathBuf> {
    let program = std::env::current_exe()?;
    let dir = program.parent().and_then(Path::parent).context("this program is in no target directory")?;
    Ok(dir.to_owned())
}

/// The commands of each block of `sh` in a section, without comments.
fn blocks(readme: &str, section: &str) -> Result<Vec<Vec<String>>> {
    let title = format!("## {section}");
    let mut lines = readme.lines().skip_while(|l| **l != title).skip(1).take_while(|l| !l.starts_with("## "));
    let mut found = Vec::new();
    while lines.by_ref().any(|l| l == "```sh") {
        let commands = lines.by_ref().take_while(|l| *l != "```").map(|l| l.split(" # ").next().unwrap_or(l).trim().to_owned());
        found.push(commands.filter(|l| !l.is_empty()).collect());
    }
    ensure!(!found.is_empty(), "README.md has no commands under '{section}'");
    Ok(found)
}

/// The packages in `apt-get install …` of hints.
fn hinted_packages(output: &str) -> BTreeSet<String> {
    let hints = output.split("apt-get install ").skip(1).filter_map(|rest| rest.split_whitespace().next());
    hints.map(str::to_owned).filter(|p| !p.starts_with('-')).collect()
}

/// A clean system in a directory.
struct Root {
    dir: PathBuf,
    rust: PathBuf,
}

/// Mounts that end with the process: nothing is left to be unmounted when the directory is removed. The root is a mount of its own, so that
/// programs in it find their file system.
const ENTER: &str = "set -e
mount --make-rprivate /
mount --bind \"$1\" \"$1\"
mount -t proc proc \"$1/proc\"
mount --rbind /dev \"$1/dev\"
mount --rbind /sys \"$1/sys\"
mount --bind \"$2\" \"$1/opt/rust\"
mount -o remount,ro,bind \"$1/opt/rust\"
exec chroot \"$1\" su -s /bin/bash \"$3\" -c \"$4\"";

impl Root {
    fn make(args: &Args, dir: &Path) -> Result<Root> {
        let user = Command::new("id").arg("-u").output()?;
        ensure!(user.stdout == b"0\n", "a clean root is made by root: sudo -E cargo xtask newcomer");
        for (program, package) in [("debootstrap", "debootstrap"), ("unshare", "util-linux"), ("git", "git")] {
            ensure!(on_path(program).is_some(), "{program} is missing: apt-get install {package}   (for a clean root)");
        }
        let sysroot = Command::new("rustc").args(["--print", "sysroot"]).current_dir(shell::root()).output()?;
        let rust = PathBuf::from(String::from_utf8(sysroot.stdout)?.trim());
        ensure!(rust.join("bin/cargo").is_file(), "{} has no cargo", rust.display());

        let suite = args.suite.clone().map_or_else(codename, Ok)?;
        let mut debootstrap = Command::new("debootstrap");
        debootstrap.args(["--variant=minbase", &suite]).arg(dir).args(&args.mirror);
        shell::step(debootstrap.stdout(Stdio::null()))?;
        fs::set_permissions(dir, fs::Permissions::from_mode(0o755))?;
        let root = Root { dir: dir.to_owned(), rust };
        fs::create_dir_all(root.path(RUST))?;
        fs::create_dir_all(root.path("/srv"))?;
        for file in ["/etc/resolv.conf", "/etc/hosts"] {
            root.copy(Path::new(file), file)?;
        }
        // What is committed, as a stranger gets it.
        let mut git = Command::new("git");
        git.arg("-C").arg(shell::root()).args(["bundle", "create", "--quiet"]).arg(root.path("/srv/berth.bundle")).arg("HEAD");
        shell::step(&mut git)?;
        Ok(root)
    }

    /// A path in it, as seen from here.
    fn path(&self, inside: &str) -> PathBuf {
        self.dir.join(inside.trim_start_matches('/'))
    }

    fn copy(&self, from: &Path, to: &str) -> Result<()> {
        if from.is_file() {
            let to = self.path(to);
            fs::create_dir_all(to.parent().unwrap_or(&self.dir))?;
            fs::copy(from, &to).with_context(|| to.display().to_string())?;
        }
        Ok(())
    }

    /// How this machine reaches the registries: certificates, and the settings of their clients.
    fn own_settings(&self) -> Result<()> {
        let home = PathBuf::from(std::env::var_os("HOME").context("HOME is not set")?);
        for file in ["/etc/ssl/certs/ca-certificates.crt", "/etc/pip.conf"] {
            self.copy(Path::new(file), file)?;
        }
        for file in [".npmrc", ".cargo/config.toml", ".config/pip/pip.conf"] {
            self.copy(&home.join(file), &format!("/etc/skel/{file}"))?;
        }
        Ok(())
    }

    /// A line of a shell, typed by that user in it.
    fn command(&self, user: &str, line: &str) -> Command {
        let mut command = Command::new("unshare");
        command
            .args(["--mount", "--pid", "--fork", "--kill-child", "sh", "-c", ENTER, "sh"])
            .arg(&self.dir)
            .arg(&self.rust)
            .args([user, line]);
        let settings: Vec<(String, String)> = std::env::vars().filter(|(name, _)| is_network(name)).collect();
        let path = format!("{RUST}/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin");
        command.env_clear().envs(settings).env("PATH", path).env("LANG", "C.UTF-8").env("DEBIAN_FRONTEND", "noninteractive");
        command.stdin(Stdio::null());
        command
    }

    /// The same, silent; what it wrote.
    fn checked(&self, user: &str, line: &str) -> Result<run::Output> {
        eprintln!("\n==> {line}");
        run::run(self.command(user, line), std::time::Duration::from_secs(1200))?.checked(line)
    }

    /// A line as the newcomer types it, where the project was cloned.
    fn typed(&self, line: &str) -> Result<()> {
        shell::shown(&format!("$ {line}"), &mut self.command(USER, &format!("cd ~/berth && {line}")))
    }

    /// The same; a hint that names a package is followed.
    fn hinted(&self, line: &str) -> Result<()> {
        let log = "/tmp/hint.log";
        for _ in 0..5 {
            let line = format!("set -o pipefail; {line} 2>&1 | tee {log}");
            let Err(error) = self.typed(&line) else { return Ok(()) };
            let packages: Vec<String> = hinted_packages(&fs::read_to_string(self.path(log))?).into_iter().collect();
            if packages.is_empty() {
                return Err(error);
            }
            self.checked("root", &format!("apt-get install -q -y --no-install-recommends {}", packages.join(" ")))?;
        }
        bail!("{line}: hint after hint")
    }

    /// A server's line: it must answer, with the experts where the line says.
    fn served(&self, line: &str, server: &Path) -> Result<()> {
        let port = TcpListener::bind("127.0.0.1:0")?.local_addr()?.port();
        let place = line.rsplit(['=', '"']).nth(1).context("the line names no place")?.to_owned();
        let home = format!("/home/{USER}");
        let ask = format!(
            "import json, urllib.request as u, time, sys
body = json.dumps({{'prompt': 'The capital of France is', 'n_predict': 8, 'temperature': 0}}).encode()
for _ in range(120):
    try:
        print(json.load(u.urlopen(u.Request('http://127.0.0.1:{port}/completion', body, {{'Content-Type': 'application/json'}})))['content'])
        sys.exit(0)
    except OSError:
        time.sleep(1)
sys.exit('no answer')"
        );
        fs::write(self.path("/srv/ask.py"), ask)?;
        let script = format!(
            "export PATH={}:$PATH BERTH_REPORT={home}/report.json; {line} --port {port} > {home}/server.log 2>&1 & \
             python3 /srv/ask.py; asked=$?; cp {home}/report.json {home}/kept.json; kill $!; wait $!; cat {home}/server.log; exit $asked",
            server.display()
        );
        self.typed(&script)?;
        let report = Report::read(&self.path(&format!("{home}/kept.json")))?;
        let tensors: usize = report.asked(&place).filter(|b| b.reason.is_none()).map(|b| b.tensors.len()).sum();
        ensure!(tensors == 90, "{line}: {tensors} of 90 expert tensors are in {place}");
        println!("{tensors} expert tensors are in {place}");
        Ok(())
    }
}

/// Whether a variable says how registries are reached.
fn is_network(name: &str) -> bool {
    let upper = name.to_uppercase();
    ["_PROXY", "CERT", "_CA_BUNDLE", "INDEX_URL", "CARGO_HTTP_", "CARGO_NET_"].iter().any(|part| upper.contains(part))
}

/// The release of this system.
fn codename() -> Result<String> {
    let text = fs::read_to_string("/etc/os-release").context("/etc/os-release")?;
    let name = text.lines().find_map(|l| l.strip_prefix("VERSION_CODENAME="));
    Ok(name.context("/etc/os-release has no VERSION_CODENAME: name one with --suite")?.trim_matches('"').to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn commands_are_those_of_the_section_without_their_comments() {
        let text = "```sh\nno\n```\n## A\ntext\n```sh\ncargo x    # why\n\nb -ot \"c=#d\"\n```\n```\nno\n```\n```sh\ne\n```\n## B\n```sh\nno\n```\n";
        assert_eq!(blocks(text, "A").unwrap(), [vec!["cargo x", "b -ot \"c=#d\""], vec!["e"]]);
        assert!(blocks(text, "C").unwrap_err().to_string().contains("'C'"));
    }

    #[test]
    fn hints_are_followed_by_package() {
        let output = "pip is missing: apt-get install python3-pip   (for hosts)\nx: apt-get install gcc\ny: apt-get install -q\n";
        assert_eq!(hinted_packages(output).into_iter().collect::<Vec<_>>(), ["gcc", "python3-pip"]);
    }

    #[test]
    fn the_readme_has_what_a_newcomer_types() {
        let readme = fs::read_to_string(shell::root().join("README.md")).unwrap();
        let tried = blocks(&readme, "Try it").unwrap();
        assert_eq!(tried.len(), 2);
        assert_eq!(tried[0], ["cargo xtask demo", "cargo xtask test"]);
        assert!(tried[1].iter().any(|l| l.contains("llama-server -m model.gguf")));
        assert!(!blocks(&readme, "Look before you load").unwrap().is_empty());
    }
}
