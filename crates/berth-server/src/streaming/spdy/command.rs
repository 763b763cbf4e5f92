//! Server side of SPDY exec and attach: collects the client's streams (spec 04b §3.1).

use std::time::Duration;

use tokio::time::timeout;
use tracing::debug;

use super::{IncomingStreams, SpdyStream, StreamClosed};

/// Timeout for the client to open all streams.
pub const CREATION: Duration = Duration::from_secs(30);

/// Expected streams, besides the error stream.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ExpectedStreams {
    /// Standard input.
    pub stdin: bool,
    /// Standard output.
    pub stdout: bool,
    /// Standard error.
    pub stderr: bool,
    /// Terminal sizes: with a terminal, and protocol version 3 or later.
    pub resize: bool,
}

/// Standard streams, error, and resize stream of exec or attach.
pub struct CommandStreams {
    /// Carries the exit status.
    pub error: SpdyStream,
    /// Standard input.
    pub stdin: Option<SpdyStream>,
    /// Standard output.
    pub stdout: Option<SpdyStream>,
    /// Standard error.
    pub stderr: Option<SpdyStream>,
    /// Terminal sizes as JSON.
    pub resize: Option<SpdyStream>,
}

/// Reason why the streams of a command are incomplete.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum MissingStreams {
    /// Not all streams were opened within [`CREATION`].
    #[error("timed out waiting for client to create streams")]
    TimedOut,
    /// The connection ended.
    #[error(transparent)]
    Gone(#[from] StreamClosed),
}

/// Accepts streams until all expected ones are open.
///
/// # Errors
/// If that takes longer than [`CREATION`], or the connection ends; the caller must close it then.
pub async fn accept(
    incoming: &mut IncomingStreams,
    expected: ExpectedStreams,
) -> Result<CommandStreams, MissingStreams> {
    timeout(CREATION, assemble(incoming, expected)).await.map_err(|_| MissingStreams::TimedOut)?
}

async fn assemble(incoming: &mut IncomingStreams, expected: ExpectedStreams) -> Result<CommandStreams, MissingStreams> {
    let (mut error, mut stdin, mut stdout, mut stderr, mut resize) = (None, None, None, None, None);
    loop {
        let complete = |stream: &Option<SpdyStream>, wanted: bool| !wanted || stream.is_some();
        let all = complete(&stdin, expected.stdin)
            && complete(&stdout, expected.stdout)
            && complete(&stderr, expected.stderr)
            && complete(&resize, expected.resize);
        if all && let Some(error) = error.take() {
            return Ok(CommandStreams { error, stdin, stdout, stderr, resize });
        }
        let stream = incoming.recv().await.ok_or(StreamClosed::Gone)?;
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
