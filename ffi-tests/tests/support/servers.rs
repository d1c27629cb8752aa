//! A `llama-server` without Berth and one with Berth computing the experts, asked the same.

use std::path::Path;

use ffi_tests::hosts;
use ffi_tests::report::Blocks;
use ffi_tests::run::{Options, Server};
use serde_json::{Value as Json, json};

use crate::device::{blocks, with_berth};
use crate::scratch::Scratch;

/// Runs `ask` on a server without Berth and on one with it, which gets `more` arguments; the answers must satisfy `same`. The answer without, and
/// what the blocks of the other were.
pub(crate) fn compare<T: std::fmt::Debug>(
    host: &str,
    model: &Path,
    args: &[&str],
    more: &[&str],
    ask: impl Fn(&Server) -> T,
    same: impl Fn(&T, &T) -> bool,
) -> Option<(T, Blocks)> {
    let host = hosts::require(host)?;
    let scratch = Scratch::new();
    let run = |options: Options| {
        let server = Server::start(&host, model, &options).unwrap_or_else(|e| panic!("{args:?}: {e:#}"));
        let answer = ask(&server);
        server.stop().unwrap_or_else(|e| panic!("{args:?}: {e:#}"));
        answer
    };
    let options = || Options::default().arg(args);
    let (stock, with) = (run(options()), run(with_berth(options().arg(more), &scratch)));
    assert!(same(&stock, &with), "{args:?}:\n   {with:?}\nnot {stock:?}");
    Some((stock, blocks(&scratch)))
}

/// What four clients get that ask at once.
pub(crate) fn four_clients<T: Send>(ask: impl Fn(u32) -> T + Sync) -> Vec<T> {
    let ask = &ask;
    std::thread::scope(|scope| {
        let clients: Vec<_> = (0..4).map(|i| scope.spawn(move || ask(i))).collect();
        clients.into_iter().map(|c| c.join().expect("a client that got its answer")).collect()
    })
}

/// All blocks as one operation, but for those of the warm-up, in which all experts are computed.
pub(crate) fn assert_fused(blocks: &Blocks) {
    assert!(blocks.fused > 0 && blocks.reasons.iter().all(|r| r.reason == "some_choices"), "{blocks:?}");
}

/// Sampled tokens.
pub(crate) fn sampled(server: &Server, prompt: &str, tokens: u32) -> Vec<i64> {
    let body = json!({
        "prompt": prompt, "n_predict": tokens, "temperature": 1.0, "seed": 3, "cache_prompt": false, "ignore_eos": true, "return_tokens": true,
    });
    let answer = server.post("/completion", &body).unwrap_or_else(|e| panic!("{e:#}"));
    let tokens: Vec<i64> = answer["tokens"].as_array().into_iter().flatten().filter_map(Json::as_i64).collect();
    assert!(!tokens.is_empty(), "{answer}");
    tokens
}
