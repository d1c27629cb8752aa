//! `berth arena`: the files that `BERTH_ARENA_PERSIST=1` has left in the arena directory: which there are, whether their bytes are right, and
//! away with them.

use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::SystemTime;

use berth::config;
use berth::log::one_line;
use berth::memory::arena::Directory;
use berth::memory::lasting::manage::{Listed, State};
use berth::memory::lasting::store::Store;
use berth::memory::lasting::{Refusal, Why};
use berth::placement::render;
use berth::report::human;
use serde::Serialize;

/// What to do.
#[derive(clap::Args)]
pub(crate) struct Args {
    #[command(subcommand)]
    action: Action,
    /// The directory [default: BERTH_ARENA_DIR, or the one in the user's cache].
    #[arg(long, value_name = "PATH", global = true)]
    dir: Option<PathBuf>,
}

#[derive(clap::Subcommand)]
enum Action {
    /// List the files: model, size, last use, state.
    Ls {
        /// Print one JSON array.
        #[arg(long)]
        json: bool,
    },
    /// Read all data and compare them with their checksums; fails if a byte is wrong.
    Verify {
        /// Names as `ls` shows them [default: all].
        names: Vec<String>,
    },
    /// Remove files that no process uses.
    Rm {
        /// Names as `ls` shows them.
        #[arg(required = true)]
        names: Vec<String>,
    },
    /// Remove what no start will use any more: the model is gone or has changed, the file is damaged or of another version, its builder has ended.
    Gc,
}

#[derive(Serialize)]
struct Row<'a> {
    name: &'a str,
    models: &'a [String],
    bytes: u64,
    /// Seconds since 1970.
    last_use: u64,
    in_use: bool,
    state: &'static str,
    reason: Option<Why>,
    message: Option<&'a str>,
}

/// Does it.
pub(crate) fn run(args: &Args) -> ExitCode {
    crate::finish("arena", act(args))
}

fn act(args: &Args) -> Result<ExitCode, String> {
    let Some(store) = open(args)? else {
        // A directory that nobody has made yet holds nothing.
        return match &args.action {
            Action::Ls { json: true } => crate::print("[]\n").map(|()| ExitCode::SUCCESS),
            Action::Rm { names } => Err(format!("there is no {}", one_line(&names.join(", ")))),
            Action::Verify { names } if !names.is_empty() => Err(format!("there is no {}", one_line(&names.join(", ")))),
            _ => Ok(ExitCode::SUCCESS),
        };
    };
    match &args.action {
        Action::Ls { json } => {
            let all = store.list();
            let rows: Vec<Row<'_>> = all.iter().map(row).collect();
            let json_text = || render::quiet_json(&serde_json::to_string_pretty(&rows).unwrap_or_default()) + "\n";
            crate::print(&if *json { json_text() } else { table(&rows) })?;
            Ok(ExitCode::SUCCESS)
        }
        Action::Verify { names } => verify(&store, names),
        Action::Rm { names } => {
            let mut code = ExitCode::SUCCESS;
            for name in names {
                match checked(name).and_then(|name| store.remove(name).map_err(|r| one_line(&r.message))) {
                    Ok(()) => crate::print(&format!("removed {}\n", one_line(name)))?,
                    // The others go all the same.
                    Err(message) => {
                        code = ExitCode::FAILURE;
                        crate::complain("arena", &message);
                    }
                }
            }
            Ok(code)
        }
        Action::Gc => {
            let mut freed = 0;
            for file in store.list().iter().filter(|f| matches!(f.state, State::Stale(_) | State::Abandoned)) {
                match store.remove(&file.name) {
                    Ok(()) => {
                        freed += file.bytes;
                        crate::print(&format!("removed {}: {}\n", one_line(&file.name), why(file)))?;
                    }
                    // What was left of a lock went with it.
                    Err(r) if r.why == Why::Missing => crate::print(&format!("removed the lock of {}\n", one_line(&file.name)))?,
                    Err(r) => crate::print(&format!("left {}: {}\n", one_line(&file.name), one_line(&r.message)))?,
                }
            }
            for name in store.clear_locks() {
                crate::print(&format!("removed the lock of {}\n", one_line(&name)))?;
            }
            crate::print(&format!("{} freed\n", human(usize::try_from(freed).unwrap_or(usize::MAX))))?;
            Ok(ExitCode::SUCCESS)
        }
    }
}

fn open(args: &Args) -> Result<Option<Store>, String> {
    let config = config::get().map_err(|e| e.message)?;
    let path = args.dir.clone().or_else(|| config.arena_dir.clone());
    let path = path.ok_or("no directory: neither --dir nor BERTH_ARENA_DIR nor XDG_CACHE_HOME nor HOME is set")?;
    let path = std::path::absolute(&path).map_err(|e| format!("{}: {e}", one_line(&path.to_string_lossy())))?;
    if std::fs::symlink_metadata(&path).is_err_and(|e| e.kind() == std::io::ErrorKind::NotFound) {
        // The one of the settings is made at the first start that needs it; one that is named here is mistyped.
        return if args.dir.is_some() { Err(format!("there is no directory {}", one_line(&path.to_string_lossy()))) } else { Ok(None) };
    }
    // What is removed needs more, and fails by itself where it cannot be had.
    let directory = Directory::open_to_read(&path).map_err(|e| one_line(&e.message))?;
    let version = config::VERSION.to_str().unwrap_or("?");
    Store::new(Arc::new(directory), version).map(Some).map_err(|r| one_line(&r.message))
}

/// A name that cannot lead out of the directory.
fn checked(name: &str) -> Result<&str, String> {
    if name.ends_with(".arena") && !name.contains('/') {
        Ok(name)
    } else {
        Err(format!("'{}' is no name of an arena's file", one_line(name)))
    }
}

fn verify(store: &Store, names: &[String]) -> Result<ExitCode, String> {
    let all = store.names();
    let mut code = ExitCode::SUCCESS;
    for name in if names.is_empty() { &all } else { names } {
        let checked = checked(name).map_err(|message| Refusal::new(Why::Missing, message));
        let line = match checked.and_then(|name| store.verify(name)) {
            Ok(checked) if checked.damaged.is_empty() => {
                format!("{name}: {} tensors, {}: as they were written", checked.tensors, human(usize::try_from(checked.bytes).unwrap_or(0)))
            }
            Ok(checked) => {
                code = ExitCode::FAILURE;
                let count = checked.damaged.len();
                format!("{name}: DAMAGED: {count} of {} tensors: {}", checked.tensors, checked.damaged.join(", "))
            }
            Err(Refusal { message, .. }) => {
                code = ExitCode::FAILURE;
                format!("{name}: NOT TRUSTED: {message}")
            }
        };
        crate::print(&(one_line(&line) + "\n"))?;
    }
    Ok(code)
}

fn row(file: &Listed) -> Row<'_> {
    let (state, refusal) = match &file.state {
        State::Complete => ("complete", None),
        State::Building => ("building", None),
        State::Stale(refusal) => ("stale", Some(refusal)),
        State::Abandoned => ("abandoned", None),
    };
    Row {
        name: &file.name,
        models: &file.models,
        bytes: file.bytes,
        last_use: file.used.duration_since(SystemTime::UNIX_EPOCH).map_or(0, |d| d.as_secs()),
        in_use: file.in_use,
        state,
        reason: refusal.map(|r| r.why),
        message: refusal.map(|r| r.message.as_str()),
    }
}

fn why(file: &Listed) -> String {
    match &file.state {
        State::Stale(refusal) => one_line(&refusal.message),
        _ => "its builder has ended".into(),
    }
}

fn table(rows: &[Row<'_>]) -> String {
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).map_or(0, |d| d.as_secs());
    let mut text = String::new();
    for r in rows {
        let size = human(usize::try_from(r.bytes).unwrap_or(usize::MAX));
        let used = if r.in_use { "in use".into() } else { ago(now.saturating_sub(r.last_use)) };
        text += &format!("{:9}  {size:>10}  {used:>12}  {}\n", r.state, one_line(r.name));
        for line in r.models.iter().map(String::as_str).chain(r.message) {
            text += &format!("{:9}  {:>10}  {:>12}  -> {}\n", "", "", "", one_line(line));
        }
    }
    text
}

/// A time span for people.
fn ago(seconds: u64) -> String {
    match seconds {
        0..120 => format!("{seconds} s ago"),
        120..7200 => format!("{} min ago", seconds / 60),
        7200..172_800 => format!("{} h ago", seconds / 3600),
        _ => format!("{} days ago", seconds / 86_400),
    }
}
