//! Calls a plugin: a program that reads JSON and answers in JSON.
//!
//! It is killed with all it started when it takes too long. Behaviour: spec 09b §13.2.

use std::{path::PathBuf, process::Stdio, time::Duration};

use nix::{
    sys::signal::{Signal, killpg},
    unistd::Pid,
};
use serde_json::Value;
use tokio::{
    io::{AsyncRead, AsyncReadExt, AsyncWriteExt},
    process::Command,
    time::timeout,
};

use super::{config, result};

/// The longest answer.
const ANSWER: u64 = 1 << 20;
/// The most that is kept of what it says besides.
const NOISE: u64 = 64 << 10;
/// The number of a failure that may pass.
const TRY_AGAIN: u64 = 11;
/// How long a killed plugin has to be gone.
const REAPING: Duration = Duration::from_secs(5);

/// What is asked of a plugin.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Verb {
    /// A pod comes.
    Add,
    /// A pod goes.
    Del,
    /// Whether it is ready.
    Status,
    /// Which pods there are; the rest is to be cleared up.
    Gc,
}

impl Verb {
    fn name(self) -> &'static str {
        match self {
            Self::Add => "ADD",
            Self::Del => "DEL",
            Self::Status => "STATUS",
            Self::Gc => "GC",
        }
    }
}

/// The pod a plugin is called for; empty where it is for none.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Subject {
    /// The sandbox.
    pub container: String,
    /// The file that names its network namespace; empty once it is gone.
    pub netns: String,
    /// Its link.
    pub link: String,
    /// `KEY=value;KEY=value`.
    pub args: String,
}

/// Why a plugin did not do it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct PluginError {
    /// What is said.
    pub text: String,
    /// Whether it may work in a moment.
    pub may_pass: bool,
}

impl PluginError {
    /// One that will not pass.
    pub fn lasting(text: String) -> Self {
        Self { text, may_pass: false }
    }
}

/// Where plugins are, and how long each has.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Caller {
    /// Directories, in order.
    pub directories: Vec<PathBuf>,
    /// How long one call may take.
    pub limit: Duration,
}

impl Caller {
    /// Calls a plugin of this type.
    ///
    /// # Errors
    /// That it is not there, or what it says.
    pub async fn call(
        &self,
        kind: &str,
        verb: Verb,
        subject: &Subject,
        input: &Value,
    ) -> Result<Option<Value>, PluginError> {
        let program = self.find(kind)?;
        let path: Vec<String> = self.directories.iter().map(|d| d.display().to_string()).collect();
        let mut command = Command::new(program);
        command.env_clear().env("CNI_COMMAND", verb.name()).env("CNI_PATH", path.join(":"));
        command.env("PATH", std::env::var_os("PATH").unwrap_or_else(|| "/usr/sbin:/usr/bin:/sbin:/bin".into()));
        if !subject.container.is_empty() {
            command.env("CNI_CONTAINERID", &subject.container).env("CNI_NETNS", &subject.netns);
            command.env("CNI_IFNAME", &subject.link).env("CNI_ARGS", &subject.args);
        }
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).kill_on_drop(true).process_group(0);
        let failed = |text: String, may_pass| PluginError {
            text: format!("plugin type={kind:?} failed ({}): {text}", verb.name().to_lowercase()),
            may_pass,
        };
        let (success, stdout, stderr) = self.run(command, input).await.map_err(|text| failed(text, false))?;
        if !success {
            let (code, text) = result::failure(&stdout, &stderr);
            return Err(failed(text, code == Some(TRY_AGAIN)));
        }
        if verb != Verb::Add {
            return Ok(None);
        }
        let answer =
            serde_json::from_slice(&stdout).map_err(|e| failed(format!("its answer is no JSON: {e}"), false))?;
        Ok(Some(answer))
    }

    fn find(&self, kind: &str) -> Result<PathBuf, PluginError> {
        let found = self.directories.iter().map(|d| d.join(kind)).find(|p| config::is_program(kind) && p.is_file());
        let places: Vec<String> = self.directories.iter().map(|d| d.display().to_string()).collect();
        found.ok_or_else(|| {
            PluginError::lasting(format!("failed to find plugin {kind:?} in path [{}]", places.join(" ")))
        })
    }

    async fn run(&self, mut command: Command, input: &Value) -> Result<(bool, Vec<u8>, Vec<u8>), String> {
        let mut child = command.spawn().map_err(|e| e.to_string())?;
        let group = child.id().and_then(|id| i32::try_from(id).ok()).map(Pid::from_raw);
        let input = input.to_string();
        let talk = async {
            let stdin = child.stdin.take();
            let write = async {
                if let Some(mut stdin) = stdin {
                    // One that does not read its input says so by its answer.
                    let _ = stdin.write_all(input.as_bytes()).await;
                }
            };
            let ((), stdout, stderr) =
                tokio::join!(write, read(child.stdout.take(), ANSWER), read(child.stderr.take(), NOISE));
            (child.wait().await, stdout, stderr)
        };
        let answered = timeout(self.limit, talk).await;
        let Ok((status, stdout, stderr)) = answered else {
            if let Some(group) = group {
                // It may have ended this moment.
                let _ = killpg(group, Signal::SIGKILL);
            }
            // Dropping it kills and reaps it otherwise.
            let _ = timeout(REAPING, child.wait()).await;
            return Err(format!("timed out after {:?}", self.limit));
        };
        Ok((status.map_err(|e| e.to_string())?.success(), stdout, stderr))
    }
}

/// What is read as far as the limit; the rest is thrown away, so that the writer goes on.
async fn read(from: Option<impl AsyncRead + Unpin>, limit: u64) -> Vec<u8> {
    let mut kept = Vec::new();
    if let Some(mut from) = from {
        // A broken pipe ends it like any end.
        let _ = (&mut from).take(limit).read_to_end(&mut kept).await;
        let _ = tokio::io::copy(&mut from, &mut tokio::io::sink()).await;
    }
    kept
}
