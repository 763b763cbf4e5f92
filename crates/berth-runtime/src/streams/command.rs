//! A running process with its stdio streams.

use futures::future::BoxFuture;
use tokio::io::{AsyncRead, AsyncWrite};

use super::terminal::Terminal;
use crate::errors::RuntimeResult;

/// Output stream of a process.
pub type Reader = Box<dyn AsyncRead + Send + Unpin>;
/// Input stream of a process; dropping it ends the input.
pub type Writer = Box<dyn AsyncWrite + Send + Unpin>;

/// A running process and its requested streams. Dropping it leaves the process running, but hangs up a terminal that
/// was created for it.
pub struct CommandStreams {
    /// Standard input.
    pub stdin: Option<Writer>,
    /// Standard output; ends with the process. Must be read even if not requested, so that the process does not block.
    pub stdout: Option<Reader>,
    /// Standard error; ends with the process.
    pub stderr: Option<Reader>,
    /// Handle that resizes the terminal; `None` if the process has none.
    pub terminal: Option<Terminal>,
    /// Exit code; await it after the output has ended.
    pub end: BoxFuture<'static, RuntimeResult<i32>>,
}
