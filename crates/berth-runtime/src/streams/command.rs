//! A process whose streams are ours.

use futures::future::BoxFuture;
use tokio::io::{AsyncRead, AsyncWrite};

use super::terminal::Terminal;
use crate::errors::RuntimeResult;

/// What a process prints.
pub type Reader = Box<dyn AsyncRead + Send + Unpin>;
/// What a process reads; dropping it ends its input.
pub type Writer = Box<dyn AsyncWrite + Send + Unpin>;

/// A process that runs, and the streams that were wanted. Dropping it leaves the process alone, but for a terminal that
/// was made for it, which is hung up.
pub struct Command {
    /// What it reads.
    pub stdin: Option<Writer>,
    /// What it prints; ends with it. Is to be read also where it was not wanted: what is there then must not wait.
    pub stdout: Option<Reader>,
    /// What it complains; ends with it.
    pub stderr: Option<Reader>,
    /// Its terminal.
    pub terminal: Option<Terminal>,
    /// Its exit code; to be asked for once its output has ended.
    pub end: BoxFuture<'static, RuntimeResult<i32>>,
}
