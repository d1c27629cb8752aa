//! A `llama-server` for a test: started on a free port of the loopback, asked over HTTP, stopped when dropped.

use std::fs::File;
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use serde_json::{Value, json};

use super::{Options, last_lines};
use crate::hosts::Host;

/// A running server.
pub struct Server {
    child: Child,
    address: String,
    log: tempfile::NamedTempFile,
    timeout: Duration,
    /// From start to ready.
    pub load_time: Duration,
}

/// An answer.
#[derive(Clone, Debug)]
pub struct Completion {
    /// What was generated.
    pub text: String,
    /// The generated tokens.
    pub tokens: Vec<i64>,
    /// Tokens per second of the prompt.
    pub prompt_tokens_per_second: f64,
    /// Tokens per second of the generation.
    pub tokens_per_second: f64,
}

impl Server {
    /// Starts `llama-server` of `host` with `model`, and waits until it is ready. Of the options, prompt and tokens are for
    /// [`Server::complete`].
    pub fn start(host: &Host, model: &Path, options: &Options) -> Result<Server> {
        // Between finding a free port and the server's bind, another process may take it: then the next one is tried.
        let mut last = None;
        for _ in 0..3 {
            match Self::start_once(host, model, options) {
                Ok(server) => return Ok(server),
                Err(error) if error.to_string().contains("bind") => last = Some(error),
                Err(error) => return Err(error),
            }
        }
        Err(last.context("no attempt was made")?)
    }

    fn start_once(host: &Host, model: &Path, options: &Options) -> Result<Server> {
        let start = Instant::now();
        let port = TcpListener::bind("127.0.0.1:0")?.local_addr()?.port().to_string();
        let log = tempfile::NamedTempFile::new()?;
        let mut command = host.command("llama-server");
        command.args(["--host", "127.0.0.1", "--port", &port, "-np", "1"]);
        options.apply(&mut command, model);
        let mut command = options.grouped(command);
        let out: File = log.reopen()?;
        command.stdin(Stdio::null()).stdout(out.try_clone()?).stderr(out);
        let child = command.spawn().with_context(|| format!("cannot start llama-server of {}", host.id))?;
        let address = format!("http://127.0.0.1:{port}");
        let mut server = Server { child, address, log, timeout: options.timeout, load_time: Duration::ZERO };
        server.wait_until_ready(&host.id)?;
        server.load_time = start.elapsed();
        Ok(server)
    }

    fn wait_until_ready(&mut self, host: &str) -> Result<()> {
        let start = Instant::now();
        loop {
            if let Some(status) = self.child.try_wait()? {
                bail!("llama-server of {host} ended ({status}) before it was ready:\n{}", last_lines(&self.log(), 30));
            }
            let health = minreq::get(format!("{}/health", self.address)).with_timeout(2).send();
            if health.is_ok_and(|r| r.status_code == 200) {
                return Ok(());
            }
            ensure!(start.elapsed() < self.timeout, "llama-server of {host} is not ready:\n{}", last_lines(&self.log(), 30));
            thread::sleep(Duration::from_millis(50));
        }
    }

    /// Greedy text: exactly `tokens` tokens after `prompt`, with no use of an earlier prompt's state.
    pub fn complete(&self, prompt: &str, tokens: u32) -> Result<Completion> {
        let body = json!({
            "prompt": prompt, "n_predict": tokens, "temperature": 0.0, "top_k": 1, "seed": 1,
            "cache_prompt": false, "ignore_eos": true, "return_tokens": true,
        });
        let answer = self.post("/completion", &body)?;
        let timing = |name: &str| answer["timings"][name].as_f64().unwrap_or(0.0);
        Ok(Completion {
            text: answer["content"].as_str().context("the answer has no content")?.to_owned(),
            tokens: answer["tokens"].as_array().into_iter().flatten().filter_map(Value::as_i64).collect(),
            prompt_tokens_per_second: timing("prompt_per_second"),
            tokens_per_second: timing("predicted_per_second"),
        })
    }

    /// Posts JSON to a path of the server and reads the JSON that it answers.
    pub fn post(&self, path: &str, body: &Value) -> Result<Value> {
        let response = minreq::post(format!("{}{path}", self.address))
            .with_header("Content-Type", "application/json")
            .with_body(body.to_string())
            .with_timeout(self.timeout.as_secs())
            .send()
            .with_context(|| format!("{path}; the server's log ends:\n{}", last_lines(&self.log(), 30)))?;
        let text = response.as_str().context("the answer is not text")?;
        ensure!(response.status_code == 200, "{path}: {} {text}", response.status_code);
        serde_json::from_str(text).with_context(|| format!("the answer is not JSON: {text}"))
    }

    /// Everything the server has written so far, stdout and stderr together.
    pub fn log(&self) -> String {
        std::fs::read(self.log.path()).map(|b| String::from_utf8_lossy(&b).into_owned()).unwrap_or_default()
    }

    /// Where it listens, for a connection of one's own.
    pub fn socket(&self) -> &str {
        self.address.trim_start_matches("http://")
    }

    /// The process, for a look into `/proc`.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// The file under `/proc` of this process.
    pub fn proc(&self, file: &str) -> PathBuf {
        PathBuf::from(format!("/proc/{}/{file}", self.pid()))
    }

    /// Asks it to end (SIGTERM), as a user would, and waits; returns its log. An end by a crash signal is an error.
    pub fn stop(mut self) -> Result<String> {
        let pid = self.pid().to_string();
        let mut kill = std::process::Command::new("sh");
        kill.args(["-c", &format!("kill -TERM {pid}")]);
        ensure!(kill.status()?.success(), "cannot signal llama-server");
        let start = Instant::now();
        let status = loop {
            if let Some(status) = self.child.try_wait()? {
                break status;
            }
            ensure!(start.elapsed() < Duration::from_secs(30), "llama-server does not end:\n{}", last_lines(&self.log(), 30));
            thread::sleep(Duration::from_millis(20));
        };
        ensure!(status.success(), "llama-server ended badly ({status}):\n{}", last_lines(&self.log(), 30));
        Ok(self.log())
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // It may have ended by itself: then there is nothing to kill.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
