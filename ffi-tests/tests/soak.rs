//! `llama-server` with Berth for a long time: 16 clients, one more that is gone in the middle of its answer every second. All answers are
//! right, nothing crashes, and nothing grows.

#[path = "support/scratch.rs"]
mod scratch;

use std::fs;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use ffi_tests::report::Report;
use ffi_tests::run::{Options, Server};
use ffi_tests::{berth_lib, figures, hosts, models, skip};
use scratch::Scratch;
use serde_json::json;

const CLIENTS: usize = 16;
const REQUESTS: usize = 1000;
const CAPITALS: [(&str, &str); 4] = [("France", "Paris"), ("Italy", "Rome"), ("Germany", "Berlin"), ("Japan", "Tokyo")];

/// What must not grow: KiB of anonymous memory, threads, open files.
#[derive(Clone, Copy, Debug)]
struct Held {
    anonymous: u64,
    threads: usize,
    files: usize,
}

fn held(server: &Server) -> Held {
    let status = fs::read_to_string(server.proc("status")).expect("the server runs");
    let field = |name: &str| -> u64 {
        let line = status.lines().find_map(|l| l.strip_prefix(name)?.strip_prefix(':')).unwrap_or_else(|| panic!("no {name} in {status}"));
        line.trim().trim_end_matches(" kB").parse().unwrap_or_else(|e| panic!("{name}: {e}"))
    };
    let files = fs::read_dir(server.proc("fd")).expect("the server runs").count();
    Held { anonymous: field("RssAnon"), threads: field("Threads") as usize, files }
}

/// The capital of a country. A longer answer would not be the same each time, with or without Berth: what others ask is computed in the same batch, which
/// changes last digits, and sooner or later two tokens are as likely.
fn ask(server: &Server, question: usize) {
    let (country, capital) = CAPITALS[question % CAPITALS.len()];
    let answer = server.complete(&format!("The capital of {country} is"), 1).unwrap_or_else(|e| panic!("{e:#}"));
    assert_eq!(answer.text.trim(), capital);
}

/// Asks for a long answer, reads its beginning, and is gone.
fn gone_in_the_middle(server: &Server) {
    let body =
        json!({ "prompt": "What ships are for", "n_predict": 200, "ignore_eos": true, "stream": true, "cache_prompt": false }).to_string();
    let mut stream = TcpStream::connect(server.socket()).expect("the server listens");
    write!(
        stream,
        "POST /completion HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {}\r\n\r\n{body}",
        body.len()
    )
    .expect("the server reads");
    // Its first bytes may not come before others have their answers.
    stream.set_read_timeout(Some(Duration::from_millis(500))).expect("a timeout of some length");
    let _ = stream.read(&mut [0; 256]);
    // What has not been read makes the end a reset, as with a process that was killed.
}

/// `requests` by all clients; how many clients were gone in between.
fn storm(server: &Server, requests: usize) -> usize {
    let (next, done) = (AtomicUsize::new(0), AtomicBool::new(false));
    std::thread::scope(|scope| {
        let clients: Vec<_> = (0..CLIENTS)
            .map(|_| {
                scope.spawn(|| {
                    loop {
                        let i = next.fetch_add(1, Ordering::Relaxed);
                        if i >= requests {
                            break;
                        }
                        ask(server, i);
                    }
                })
            })
            .collect();
        let killed = scope.spawn(|| {
            let mut gone = 0;
            while !done.load(Ordering::Relaxed) {
                gone_in_the_middle(server);
                gone += 1;
                let second = Instant::now();
                while !done.load(Ordering::Relaxed) && second.elapsed() < Duration::from_secs(1) {
                    std::thread::sleep(Duration::from_millis(20));
                }
            }
            gone
        });
        let answered: Vec<_> = clients.into_iter().map(|c| c.join()).collect();
        done.store(true, Ordering::Relaxed);
        let gone = killed.join().expect("a client that is gone");
        answered.into_iter().for_each(|a| a.expect("a client that got its answers"));
        gone
    })
}

#[test]
fn a_server_that_many_clients_ask_and_some_leave_answers_the_same_and_does_not_grow() {
    let Some(host) = hosts::require("sdist-dl") else { return };
    let Some(model) = skip::available("the language model", models::smollm_moe()) else { return };
    let scratch = Scratch::new();
    let report = scratch.path().join("report.json");
    let library = berth_lib().unwrap_or_else(|e| panic!("{e:#}"));
    let options = Options { context: 4096, ..Options::default() }.with_berth(&library, "exps=ARENA").arg(&["-np", "4", "-kvu"]);
    let options =
        options.env("BERTH_ARENA_DIR", scratch.dir("arena").display().to_string()).env("BERTH_REPORT", report.display().to_string());
    let server = Server::start(&host, &model, &options).unwrap_or_else(|e| panic!("{e:#}"));
    // The first round fills what the server keeps: its slots, its cache of prompts, the allocator's pools of each thread.
    let mut gone = storm(&server, REQUESTS / 4);
    let before = held(&server);
    gone += storm(&server, REQUESTS);
    let after = held(&server);
    let grown = (after.anonymous as f64 / before.anonymous as f64 - 1.0) * 100.0;
    figures::tell(
        &format!("{REQUESTS} requests of {CLIENTS} clients after {} more, {gone} clients gone in the middle", REQUESTS / 4),
        &format!(
            "all answers right; RssAnon {} to {} KiB ({grown:+.2} %), {} to {} threads, {} to {} open files",
            before.anonymous, after.anonymous, before.threads, after.threads, before.files, after.files
        ),
    );
    assert!(gone > 1, "no client was gone");
    assert!(after.anonymous * 100 <= before.anonymous * 102, "anonymous memory grew: {before:?}, {after:?}");
    // The server's own threads for connections come and go.
    assert!(after.threads <= before.threads + CLIENTS && after.files <= before.files + CLIENTS, "{before:?}, {after:?}");
    server.stop().unwrap_or_else(|e| panic!("{e:#}"));
    let blocks = Report::read(&report).unwrap_or_else(|e| panic!("{e:#}")).blocks;
    assert!(blocks.fused > 0 && blocks.reasons.iter().all(|r| r.reason == "some_choices"), "{blocks:?}");
}
