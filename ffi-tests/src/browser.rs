//! One page in headless Chromium, over its DevTools protocol: JSON messages that end in NUL, through two pipes.
//!
//! Owns: the browser's life, the calls used here, and what the page logged and asked for. Must not know: what a page should look like.

use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use serde_json::{Value, json};

use crate::tools;

/// No answer for so long means that there will be none. A browser's first start on a busy machine takes long.
const PATIENCE: Duration = Duration::from_secs(120);

/// A running browser with one empty page.
pub struct Browser {
    child: Child,
    to: ChildStdin,
    from: Receiver<Value>,
    session: String,
    last_id: u64,
    /// Everything that happened and was not an answer.
    events: Vec<Value>,
    _profile: tempfile::TempDir,
}

impl Browser {
    /// Starts it.
    ///
    /// # Errors
    /// [`tools::Missing`] if there is no Chromium.
    pub fn start() -> Result<Browser> {
        let program = tools::command("chromium")?;
        let profile = tempfile::tempdir()?;
        // The protocol's pipes are the descriptors 3 and 4: the shell moves its own streams there.
        let mut command = Command::new("sh");
        command.args(["-c", r#"exec "$0" "$@" 3<&0 4>&1 </dev/null >/dev/null 2>&1"#]).arg(program.get_program());
        command.args(["--headless=new", "--remote-debugging-pipe", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]);
        command.args(["--no-first-run", "--disable-extensions", "--disable-background-networking", "--hide-scrollbars"]);
        command.arg(format!("--user-data-dir={}", profile.path().display())).arg("about:blank");
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null());
        let mut child = command.spawn().context("cannot start Chromium")?;
        let to = child.stdin.take().context("its input")?;
        let mut out = BufReader::new(child.stdout.take().context("its output")?);
        let (sender, from) = channel();
        thread::spawn(move || {
            let mut message = Vec::new();
            while out.read_until(0, &mut message).is_ok_and(|n| n > 0) {
                let text = message.strip_suffix(&[0]).unwrap_or(&message);
                if serde_json::from_slice(text).is_ok_and(|value| sender.send(value).is_err()) {
                    break;
                }
                message.clear();
            }
        });
        let mut browser = Browser { child, to, from, session: String::new(), last_id: 0, events: Vec::new(), _profile: profile };
        let page = browser.call("Target.createTarget", json!({"url": "about:blank"}))?;
        let attached = browser.call("Target.attachToTarget", json!({"targetId": page["targetId"], "flatten": true}))?;
        browser.session = attached["sessionId"].as_str().context("no session")?.to_owned();
        for domain in ["Page", "Runtime", "Log", "Network"] {
            browser.call(&format!("{domain}.enable"), json!({}))?;
        }
        Ok(browser)
    }

    /// Calls a method and waits for its answer.
    pub fn call(&mut self, method: &str, params: Value) -> Result<Value> {
        self.last_id += 1;
        let mut message = json!({"id": self.last_id, "method": method, "params": params});
        if !self.session.is_empty() {
            message["sessionId"] = self.session.clone().into();
        }
        write!(self.to, "{message}\0").and_then(|()| self.to.flush()).with_context(|| format!("{method}: the browser is gone"))?;
        let id = self.last_id;
        let mut answer = self.wait(method, |v| v["id"] == id)?;
        ensure!(answer["error"].is_null(), "{method}: {}", answer["error"]);
        Ok(answer["result"].take())
    }

    /// Waits for the first message that is `wanted`; keeps all others.
    fn wait(&mut self, what: &str, wanted: impl Fn(&Value) -> bool) -> Result<Value> {
        let start = Instant::now();
        loop {
            let left = PATIENCE.saturating_sub(start.elapsed());
            let message = self.from.recv_timeout(left).with_context(|| format!("{what}: the browser says nothing"))?;
            if wanted(&message) {
                return Ok(message);
            }
            self.events.push(message);
        }
    }

    /// Shows pages in a window of that size (in CSS pixels), light or dark.
    pub fn window(&mut self, width: u32, height: u32, dark: bool) -> Result<()> {
        let size = json!({"width": width, "height": height, "deviceScaleFactor": 1, "mobile": false});
        self.call("Emulation.setDeviceMetricsOverride", size)?;
        let scheme = json!({"features": [{"name": "prefers-color-scheme", "value": if dark { "dark" } else { "light" }}]});
        self.call("Emulation.setEmulatedMedia", scheme).map(drop)
    }

    /// Loads a file, waits until all of it is there, and gives everything that happened meanwhile.
    pub fn load(&mut self, file: &Path) -> Result<Visit> {
        self.events.clear();
        let url = format!("file://{}", file.canonicalize()?.display());
        let answer = self.call("Page.navigate", json!({"url": url}))?;
        if let Some(error) = answer["errorText"].as_str() {
            bail!("{url}: {error}");
        }
        let loaded = |v: &Value| v["method"] == "Page.loadEventFired";
        if !self.events.iter().any(loaded) {
            self.wait("load", loaded)?;
        }
        // What a script or a style starts late is in the events once two frames have been drawn.
        self.evaluate("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(() => setTimeout(done, 100))))")?;
        let of = |method: &str| self.events.iter().filter(|v| v["method"] == method).collect::<Vec<_>>();
        let mut complaints: Vec<String> = Vec::new();
        for method in ["Runtime.exceptionThrown", "Runtime.consoleAPICalled", "Log.entryAdded", "Network.loadingFailed"] {
            complaints.extend(of(method).iter().map(|v| v["params"].to_string()));
        }
        let requests =
            of("Network.requestWillBeSent").iter().filter_map(|v| v["params"]["request"]["url"].as_str().map(str::to_owned)).collect();
        Ok(Visit { url, complaints, requests })
    }

    /// The value of an expression of JavaScript in the page; a promise is awaited.
    pub fn evaluate(&mut self, expression: &str) -> Result<Value> {
        let params = json!({"expression": expression, "returnByValue": true, "awaitPromise": true});
        let mut answer = self.call("Runtime.evaluate", params)?;
        ensure!(answer["exceptionDetails"].is_null(), "{expression}: {}", answer["exceptionDetails"]);
        Ok(answer["result"]["value"].take())
    }

    /// A picture (PNG) of the upper `height` pixels of the page, over the width of the window.
    pub fn picture(&mut self, width: u32, height: u32) -> Result<Vec<u8>> {
        let clip = json!({"x": 0, "y": 0, "width": width, "height": height, "scale": 1});
        let params = json!({"format": "png", "clip": clip, "captureBeyondViewport": true, "optimizeForSpeed": false});
        let answer = self.call("Page.captureScreenshot", params)?;
        base64(answer["data"].as_str().context("no picture")?)
    }
}

/// What happened while a page was loaded.
#[derive(Debug)]
pub struct Visit {
    /// The page.
    pub url: String,
    /// Messages of the console, exceptions, failed loads.
    pub complaints: Vec<String>,
    /// Every address that was asked for, the page's own among them.
    pub requests: Vec<String>,
}

impl Drop for Browser {
    fn drop(&mut self) {
        self.session.clear();
        // It may be gone already; then there is nothing to end.
        let _ = write!(self.to, "{{\"id\":0,\"method\":\"Browser.close\"}}\0").and_then(|()| self.to.flush());
        let start = Instant::now();
        while start.elapsed() < Duration::from_secs(10) {
            if !matches!(self.child.try_wait(), Ok(None)) {
                return;
            }
            thread::sleep(Duration::from_millis(20));
        }
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn base64(text: &str) -> Result<Vec<u8>> {
    let mut out = Vec::with_capacity(text.len() / 4 * 3);
    let (mut bits, mut count) = (0u32, 0);
    for c in text.bytes().filter(|c| *c != b'=') {
        let value = match c {
            b'A'..=b'Z' => c - b'A',
            b'a'..=b'z' => c - b'a' + 26,
            b'0'..=b'9' => c - b'0' + 52,
            b'+' => 62,
            b'/' => 63,
            _ => bail!("not base64: {c}"),
        };
        (bits, count) = (bits << 6 | u32::from(value), count + 6);
        if count >= 8 {
            count -= 8;
            out.push((bits >> count) as u8);
        }
    }
    Ok(out)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn base64_is_decoded() {
        for (text, bytes) in [("", &b""[..]), ("Zg==", b"f"), ("Zm8=", b"fo"), ("Zm9v", b"foo"), ("+/8A", &[0xfb, 0xff, 0x00])] {
            assert_eq!(base64(text).unwrap(), bytes);
        }
        assert!(base64("%").is_err());
    }
}
