//! Executes a credential provider plugin: request on stdin, response on stdout (spec 03b §2.3).
//!
//! The timeout is one minute.

use std::{path::PathBuf, process::Stdio, time::Duration};

use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    process::Command,
    time::timeout,
};
use tracing::debug;

use super::plugin_config::Provider;

const LIMIT: Duration = Duration::from_secs(60);
/// Maximum bytes read of each output stream: enough for many logins, bounded for a runaway plugin.
const MOST: u64 = 1 << 20;
/// Maximum bytes of stderr that are logged.
const SHOWN: usize = 1 << 10;

/// Why a plugin returned no response.
#[derive(Debug, thiserror::Error)]
pub enum RunError {
    /// The plugin could not be started, or I/O with it failed.
    #[error("error execing credential provider plugin: {0}")]
    Io(#[from] std::io::Error),
    /// The plugin exited with a failure.
    #[error("error execing credential provider plugin: {0}")]
    Failed(std::process::ExitStatus),
    /// The plugin timed out.
    #[error("error execing credential provider plugin: no response within {LIMIT:?}")]
    TimedOut,
}

/// Runs the plugin and returns its output. Dropping the future kills it.
///
/// # Errors
/// The plugin fails or takes more than a minute.
pub async fn run(binary: &PathBuf, provider: &Provider, request: &[u8]) -> Result<Vec<u8>, RunError> {
    timeout(LIMIT, exchange(binary, provider, request)).await.map_err(|_| RunError::TimedOut)?
}

async fn exchange(binary: &PathBuf, provider: &Provider, request: &[u8]) -> Result<Vec<u8>, RunError> {
    let mut child = Command::new(binary)
        .args(&provider.args)
        .envs(provider.env.iter().map(|(name, value)| (name, value)))
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .kill_on_drop(true)
        .spawn()?;
    let missing = || std::io::Error::other("standard stream of the plugin is not piped");
    let mut stdin = child.stdin.take().ok_or_else(missing)?;
    let stdout = child.stdout.take().ok_or_else(missing)?;
    let stderr = child.stderr.take().ok_or_else(missing)?;
    let (mut answer, mut complaint) = (Vec::new(), Vec::new());
    let asked = async {
        // a plugin may close stdin without reading the request; its response counts
        let _ = stdin.write_all(request).await;
        drop(stdin);
    };
    let (mut stdout, mut stderr) = (stdout.take(MOST), stderr.take(MOST));
    let ((), stdout_read, stderr_read) =
        tokio::join!(asked, stdout.read_to_end(&mut answer), stderr.read_to_end(&mut complaint));
    stdout_read?;
    stderr_read?;
    let status = child.wait().await?;
    if !complaint.is_empty() {
        complaint.truncate(SHOWN);
        debug!(plugin = %provider.name, stderr = %String::from_utf8_lossy(&complaint), "Credential provider plugin wrote to stderr");
    }
    if status.success() { Ok(answer) } else { Err(RunError::Failed(status)) }
}
