//! Invokes CNI plugin binaries: JSON on stdin, JSON on stdout, with a timeout.
//!
//! A timeout kills the plugin's whole process group. Implements spec 09b §13.2.

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

/// Maximum size of a plugin's stdout, bytes; the rest is discarded.
const ANSWER: u64 = 1 << 20;
/// Maximum size of a plugin's stderr, bytes; the rest is discarded.
const NOISE: u64 = 64 << 10;
/// CNI error code "try again later".
const TRY_AGAIN: u64 = 11;
/// How long to wait for the exit of a killed plugin.
const REAPING: Duration = Duration::from_secs(5);

/// CNI operation.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum CniCommand {
    /// Adds a pod to the network.
    Add,
    /// Removes a pod from the network.
    Del,
    /// Reports whether the plugin is ready.
    Status,
    /// Garbage collection: the input lists the valid attachments, the plugin removes all others.
    Gc,
}

impl CniCommand {
    fn name(self) -> &'static str {
        match self {
            Self::Add => "ADD",
            Self::Del => "DEL",
            Self::Status => "STATUS",
            Self::Gc => "GC",
        }
    }
}

/// The pod of a plugin call; empty for calls without a pod.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct CniRuntimeConf {
    /// Sandbox id.
    pub container: String,
    /// Path of the network namespace; empty once it is gone.
    pub netns: String,
    /// Interface name in the pod.
    pub link: String,
    /// `CNI_ARGS` as `KEY=value;KEY=value`.
    pub args: String,
}

/// A failed plugin call.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct PluginError {
    /// Error message.
    pub text: String,
    /// Whether the error is transient, so that a retry may succeed.
    pub is_transient: bool,
}

impl PluginError {
    /// A permanent error.
    pub fn permanent(text: String) -> Self {
        Self { text, is_transient: false }
    }
}

/// Plugin search path and call timeout.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct PluginRunner {
    /// Search path, in order.
    pub directories: Vec<PathBuf>,
    /// Timeout of one call.
    pub limit: Duration,
}

impl PluginRunner {
    /// Calls the plugin of this type. Returns its result for ADD, `None` otherwise.
    ///
    /// # Errors
    /// The binary is missing, the call timed out, or the plugin failed.
    pub async fn call(
        &self,
        kind: &str,
        verb: CniCommand,
        subject: &CniRuntimeConf,
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
            is_transient: may_pass,
        };
        let (success, stdout, stderr) = self.run(command, input).await.map_err(|text| failed(text, false))?;
        if !success {
            let (code, text) = result::failure(&stdout, &stderr);
            return Err(failed(text, code == Some(TRY_AGAIN)));
        }
        if verb != CniCommand::Add {
            return Ok(None);
        }
        let answer = serde_json::from_slice(&stdout)
            .map_err(|e| failed(format!("invalid JSON in plugin result: {e}"), false))?;
        Ok(Some(answer))
    }

    fn find(&self, kind: &str) -> Result<PathBuf, PluginError> {
        let found = self.directories.iter().map(|d| d.join(kind)).find(|p| config::is_program(kind) && p.is_file());
        let places: Vec<String> = self.directories.iter().map(|d| d.display().to_string()).collect();
        found.ok_or_else(|| {
            PluginError::permanent(format!("failed to find plugin {kind:?} in path [{}]", places.join(" ")))
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
                    // A plugin that does not read its input reports that in its result.
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
                // The process group may have ended in the meantime.
                let _ = killpg(group, Signal::SIGKILL);
            }
            // If the wait times out, dropping the child kills and reaps it.
            let _ = timeout(REAPING, child.wait()).await;
            return Err(format!("timed out after {:?}", self.limit));
        };
        Ok((status.map_err(|e| e.to_string())?.success(), stdout, stderr))
    }
}

/// Reads up to the limit and discards the rest, so that the writer does not block.
async fn read(from: Option<impl AsyncRead + Unpin>, limit: u64) -> Vec<u8> {
    let mut kept = Vec::new();
    if let Some(mut from) = from {
        // A read error counts as end of file.
        let _ = (&mut from).take(limit).read_to_end(&mut kept).await;
        let _ = tokio::io::copy(&mut from, &mut tokio::io::sink()).await;
    }
    kept
}
