//! A memory limit for a program: a version 1 cgroup, which root can make.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// A group with a limit, removed at the end. Its programs must have ended by then.
pub struct Cgroup(PathBuf);

impl Cgroup {
    /// A group whose programs get `limit` bytes of memory, page cache included; or why there is none.
    pub fn new(name: &str, limit: u64) -> Result<Cgroup, String> {
        let root = Path::new("/sys/fs/cgroup/memory");
        if !root.join("memory.limit_in_bytes").exists() {
            return Err("no memory cgroups of version 1".into());
        }
        let path = root.join(format!("berth-{name}-{}", std::process::id()));
        fs::create_dir(&path).map_err(|e| format!("cannot make a cgroup: {e}"))?;
        let group = Cgroup(path);
        group.write("memory.limit_in_bytes", limit)?;
        // Swap would hide what does not fit.
        let _ = group.write("memory.swappiness", 0);
        Ok(group)
    }

    fn write(&self, file: &str, value: u64) -> Result<(), String> {
        fs::write(self.0.join(file), value.to_string()).map_err(|e| format!("cannot set {file} of a cgroup: {e}"))
    }

    /// The command, to be run in the group.
    pub fn wrap(&self, command: Command) -> Command {
        join(command, &self.procs())
    }

    /// The file that a process joins by.
    pub fn procs(&self) -> PathBuf {
        self.0.join("cgroup.procs")
    }

    /// Most bytes that were used at once.
    pub fn most(&self) -> Option<u64> {
        fs::read_to_string(self.0.join("memory.max_usage_in_bytes")).ok()?.trim().parse().ok()
    }

    /// Processes that were killed for want of memory, if the kernel counts them.
    pub fn killed(&self) -> Option<u64> {
        let text = fs::read_to_string(self.0.join("memory.oom_control")).ok()?;
        text.lines().find_map(|l| l.strip_prefix("oom_kill "))?.trim().parse().ok()
    }
}

/// The command, to be run by a shell that first joins a group by this file.
pub(super) fn join(command: Command, procs: &Path) -> Command {
    let mut wrapped = Command::new("sh");
    wrapped.args(["-c", "echo 0 > \"$0\" && exec \"$@\""]).arg(procs);
    wrapped.arg(command.get_program()).args(command.get_args());
    for (name, value) in command.get_envs() {
        match value {
            Some(value) => wrapped.env(name, value),
            None => wrapped.env_remove(name),
        };
    }
    wrapped
}

impl Drop for Cgroup {
    fn drop(&mut self) {
        // A group with programs cannot be removed: then it stays, and the next test has another name.
        let _ = fs::remove_dir(&self.0);
    }
}
