//! Two hosts: `ggml-rpc-server` with Berth on one, `llama-completion --rpc` on the other, each in a network of its own, joined by a cable. The
//! experts are in the memory of the first, in the places of its Berth, and computed there as one operation.
//!
//! A client takes every operation for supported by a remote device, so the server is sent more than Berth has claimed: norms, routing, or all of
//! a model. Those are computed by the server's CPU backend.

#[path = "support/remote.rs"]
mod remote;
#[path = "support/scratch.rs"]
mod scratch;
#[path = "support/wrap.rs"]
mod wrap;

use std::process::Command;
use std::time::Duration;

use ffi_tests::hosts::{self, Host};
use ffi_tests::report::{Blocks, Report};
use ffi_tests::run::{self, agree, until_whole};
use ffi_tests::{berth_lib, cache, models, skip};
use remote::Remote;
use scratch::Scratch;
use wrap::wrap;

const HOST: &str = "sdist-dl";
const PORT: u16 = 50052;
const SERVER: &str = "10.77.7.1";
const CLIENT: &str = "10.77.7.2";
/// Tokens of a text.
const TOKENS: &str = "40";
/// Bytes of it that must be the same.
const SAME: usize = 40;

/// Two networks and the cable between them; gone when dropped, once their programs have ended.
struct Networks {
    server: String,
    client: String,
}

impl Networks {
    fn new() -> Result<Networks, String> {
        let name = |which: &str| format!("berth-{which}-{}", std::process::id());
        let networks = Networks { server: name("s"), client: name("c") };
        let Networks { server, client } = &networks;
        ip(&["netns", "add", server])?;
        ip(&["netns", "add", client])?;
        ip(&["-n", server, "link", "add", "cable", "type", "veth", "peer", "name", "cable", "netns", client])?;
        for (network, address) in [(server, SERVER), (client, CLIENT)] {
            ip(&["-n", network, "addr", "add", &format!("{address}/24"), "dev", "cable"])?;
            ip(&["-n", network, "link", "set", "cable", "up"])?;
            ip(&["-n", network, "link", "set", "lo", "up"])?;
        }
        Ok(networks)
    }
}

impl Drop for Networks {
    fn drop(&mut self) {
        for network in [&self.server, &self.client] {
            // Perhaps it was never made.
            let _ = ip(&["netns", "del", network]);
        }
    }
}

fn ip(args: &[&str]) -> Result<(), String> {
    let output = Command::new("ip").args(args).output().map_err(|e| format!("ip (package iproute2) does not run: {e}"))?;
    let said = || format!("ip {}: {}", args.join(" "), String::from_utf8_lossy(&output.stderr).trim());
    if output.status.success() { Ok(()) } else { Err(said()) }
}

/// A text, made by these arguments besides those of every run.
fn text(host: &Host, args: &[&str], network: Option<&str>, settings: &[(&str, &str)]) -> String {
    let model = models::smollm_moe().unwrap_or_else(|e| panic!("{e:#}"));
    let run = || {
        let mut command = host.command("llama-completion");
        command.arg("-m").arg(&model).args(["-p", "The capital of France is", "-n", TOKENS, "-c", "256", "-t", "1", "--temp", "0"]);
        command.args(["--ignore-eos", "-no-cnv", "--no-display-prompt", "--no-repack"]).args(args).env("OMP_WAIT_POLICY", "passive");
        command.envs(settings.iter().copied());
        let command = network.map_or_else(|| wrap(&command, "env", &[]), |name| wrap(&command, "ip", &["netns", "exec", name]));
        let output = run::run(command, Duration::from_secs(300)).and_then(|o| o.checked("llama-completion"));
        output.unwrap_or_else(|e| panic!("{args:?}: {e:#}")).stdout
    };
    until_whole(run, |text| agree(text, text, SAME))
}

/// A text of a model whose experts, or all of it, are on the server with these devices, and what the server's Berth reports.
fn remote_text(host: &Host, networks: &Networks, devices: &str, args: &[&str], fuse: &str) -> (String, Report) {
    let scratch = Scratch::new();
    let (report, arena) = (scratch.path().join("report.json"), scratch.dir("arena"));
    let library = berth_lib().unwrap_or_else(|e| panic!("{e:#}"));
    let prepare = |mut command: Command| {
        command.env("GGML_BACKEND_PATH", library).env("BERTH_REPORT", &report).env("BERTH_ARENA_DIR", arena).env("BERTH_FUSE", fuse);
        wrap(&command, "ip", &["netns", "exec", &networks.server])
    };
    let probe = format!("exec 3<>/dev/tcp/{SERVER}/{PORT}");
    let reached =
        || Command::new("ip").args(["netns", "exec", &networks.client, "bash", "-c", &probe]).output().is_ok_and(|o| o.status.success());
    let server = Remote::start(host, devices, (SERVER, PORT), prepare, reached);
    let address = server.address().to_owned();
    let args: Vec<String> = args.iter().map(|a| a.replace("ADDRESS", &address)).collect();
    let args: Vec<&str> = ["--rpc", &address].into_iter().chain(args.iter().map(String::as_str)).collect();
    let text = text(host, &args, Some(&networks.client), &[]);
    // The server lets go of the buffers of a client that has gone, and the report is written.
    let free = |r: &Report| r.buffers.iter().all(|b| !b.live) && !r.buffers.is_empty();
    let read = || Report::read(&report).unwrap_or_else(|e| panic!("{e:#}"));
    let freed = (0..100).any(|_| {
        std::thread::sleep(Duration::from_millis(50));
        free(&read())
    });
    assert!(freed, "the server keeps the client's buffers");
    (text, read())
}

fn bytes_in(report: &Report, asked: &str, got: &str) -> u64 {
    report.buffers.iter().filter(|b| b.asked == asked && b.got == got).map(|b| b.bytes).sum()
}

#[test]
fn experts_in_the_memory_of_another_host_are_computed_there_and_the_text_is_the_same() {
    let Some(host) = hosts::require(HOST) else { return };
    let Some(_) = skip::available("the language model", models::smollm_moe()) else { return };
    let networks = match Networks::new() {
        Ok(networks) => networks,
        Err(why) => return skip::skipped("two hosts", &why),
    };
    let library = berth_lib().unwrap_or_else(|e| panic!("{e:#}"));
    let here = text(&host, &["-ot", "exps=CPU_MMAP"], None, &[("GGML_BACKEND_PATH", library.to_str().unwrap())]);
    let stock = text(&host, &[], None, &[]);
    let experts = 49_766_400;
    let (first, second) = ("exps=RPC0[ADDRESS]", "exps=RPC1[ADDRESS]");
    let cases: [(&str, &[&str], &str, &str); 5] = [
        // Only the experts are there, and what stands between their products.
        ("ARENA", &["-ngl", "0", "-ot", first], "ARENA", "arena"),
        ("BERTH", &["-ngl", "0", "-ot", first], "CPU_MMAP", "pageable"),
        // All of the model is there: the experts in an arena, the rest as its CPU backend has it.
        ("CPU,ARENA", &["-ngl", "99", "-ts", "1,0", "-ot", second], "ARENA", "arena"),
        // All of the model is there, in one place.
        ("ARENA", &["-ngl", "99"], "ARENA", "arena"),
        ("BERTH", &["-ngl", "99"], "CPU_MMAP", "pageable"),
    ];
    for (devices, args, asked, got) in cases {
        let (text, report) = remote_text(&host, &networks, devices, args, "1");
        let Blocks { fused, node_by_node, unclaimed, .. } = report.blocks;
        cache::say(&format!(
            "{devices} {args:?}: {fused} blocks as one operation, {node_by_node} not, {unclaimed} operations on the CPU backend"
        ));
        assert!(agree(&here, &text, SAME), "{devices} {args:?}: {text:?}, on one host {here:?}");
        assert!(bytes_in(&report, asked, got) >= experts, "{devices} {args:?}: {:?}", report.buffers);
        assert!(fused > 0 && unclaimed > 0, "{devices} {args:?}: {:?}", report.blocks);
    }
    // Placement only: the server's CPU backend computes everything, in Berth's memory.
    let (text, report) = remote_text(&host, &networks, "ARENA", &["-ngl", "0", "-ot", first], "0");
    assert!(agree(&stock, &text, SAME), "{text:?}, without Berth {stock:?}");
    assert!(bytes_in(&report, "ARENA", "arena") >= experts, "{:?}", report.buffers);
    assert!(report.blocks.fused == 0 && report.blocks.unclaimed > 0, "{:?}", report.blocks);
}
