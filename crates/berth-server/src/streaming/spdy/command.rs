//! The streams of exec and attach, as a server puts them together (spec 04b §3.1).

use std::time::Duration;

use tokio::time::timeout;
use tracing::debug;

use super::{Closed, Incoming, Stream};

/// How long a client may take to open all streams.
pub const CREATION: Duration = Duration::from_secs(30);

/// Which streams are to come, beside the one for errors.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Expected {
    /// `stdin`.
    pub stdin: bool,
    /// `stdout`.
    pub stdout: bool,
    /// `stderr`.
    pub stderr: bool,
    /// `resize`: a terminal, and a protocol from version 3 on.
    pub resize: bool,
}

/// The streams of a command.
pub struct Command {
    /// Where the end is told.
    pub error: Stream,
    /// What the process reads.
    pub stdin: Option<Stream>,
    /// What it prints.
    pub stdout: Option<Stream>,
    /// What it complains.
    pub stderr: Option<Stream>,
    /// JSON sizes of the terminal.
    pub resize: Option<Stream>,
}

/// Why a command has not all its streams.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Incomplete {
    /// They did not come in time.
    #[error("timed out waiting for client to create streams")]
    TimedOut,
    /// The connection ended.
    #[error(transparent)]
    Gone(#[from] Closed),
}

/// Accepts streams until all expected ones are there.
///
/// # Errors
/// If that takes longer than [`CREATION`], or the connection ends; it is to be closed then.
pub async fn accept(incoming: &mut Incoming, expected: Expected) -> Result<Command, Incomplete> {
    timeout(CREATION, assemble(incoming, expected)).await.map_err(|_| Incomplete::TimedOut)?
}

async fn assemble(incoming: &mut Incoming, expected: Expected) -> Result<Command, Incomplete> {
    let (mut error, mut stdin, mut stdout, mut stderr, mut resize) = (None, None, None, None, None);
    loop {
        let complete = |stream: &Option<Stream>, wanted: bool| !wanted || stream.is_some();
        let all = complete(&stdin, expected.stdin)
            && complete(&stdout, expected.stdout)
            && complete(&stderr, expected.stderr)
            && complete(&resize, expected.resize);
        if all && let Some(error) = error.take() {
            return Ok(Command { error, stdin, stdout, stderr, resize });
        }
        let stream = incoming.recv().await.ok_or(Closed::Gone)?;
        stream.accept().await?;
        let slot = match stream.headers().get("streamtype") {
            Some("error") => &mut error,
            Some("stdin") => &mut stdin,
            Some("stdout") => &mut stdout,
            Some("stderr") => &mut stderr,
            Some("resize") => &mut resize,
            other => {
                debug!(streamType = other, "Unexpected stream type");
                continue;
            }
        };
        *slot = Some(stream);
    }
}
