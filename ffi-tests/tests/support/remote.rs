//! `ggml-rpc-server`: devices for other processes.

use std::process::{Child, Command, Stdio};
use std::time::Duration;

use ffi_tests::hosts::Host;

/// A server; ended when dropped.
pub(crate) struct Remote {
    child: Child,
    address: String,
}

impl Remote {
    /// A server with these devices (`-d`), which its clients see as GPUs; `prepare` may change how it is run, and `reached` tells whether a client
    /// reaches it.
    pub(crate) fn start(
        host: &Host,
        devices: &str,
        (address, port): (&str, u16),
        prepare: impl FnOnce(Command) -> Command,
        reached: impl Fn() -> bool,
    ) -> Remote {
        let mut command = host.command("ggml-rpc-server");
        command.args(["-H", address, "-p", &port.to_string(), "-d", devices, "-t", "1"]).env("OMP_WAIT_POLICY", "passive");
        let mut command = prepare(command);
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        let remote = Remote { child: command.spawn().expect("ggml-rpc-server starts"), address: format!("{address}:{port}") };
        let ready = (0..200).any(|_| {
            std::thread::sleep(Duration::from_millis(50));
            reached()
        });
        assert!(ready, "the server is not ready");
        remote
    }

    /// Where it listens: host and port.
    pub(crate) fn address(&self) -> &str {
        &self.address
    }
}

impl Drop for Remote {
    fn drop(&mut self) {
        // It may have ended by itself: then there is nothing to kill.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
