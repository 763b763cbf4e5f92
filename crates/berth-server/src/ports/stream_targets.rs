//! Port of the in-process streaming server (embedded runtime): prepared processes and pod ports.

use async_trait::async_trait;
use futures::future::BoxFuture;
use tokio::{
    io::{AsyncRead, AsyncWrite},
    net::TcpStream,
};

use super::streams::StreamSet;

/// Output of a process.
pub type Reader = Box<dyn AsyncRead + Send + Unpin>;
/// Input of a process; dropping it closes the input.
pub type Writer = Box<dyn AsyncWrite + Send + Unpin>;

/// Prepared streams, each under a path that can be used once.
pub trait StreamTargets: Send + Sync + 'static {
    /// Takes the target of a path (`/exec/token`); `None` where it is unknown, expired, or already used.
    fn take(&self, path: &str) -> Option<StreamTarget>;
}

/// Prepared target of a stream request.
pub enum StreamTarget {
    /// Process: a new one or the container's own.
    Command {
        /// Exec or attach.
        verb: CommandKind,
        /// Requested streams.
        set: StreamSet,
        /// Starts or joins the process.
        process: Box<dyn ProcessTarget>,
    },
    /// Port forwarding into a pod.
    Forward {
        /// Prepared ports, where the client does not name one per connection.
        ports: Vec<u16>,
        /// Connects to the ports of the pod.
        pod: Box<dyn PodPorts>,
    },
}

/// Kind of process that a client connects to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CommandKind {
    /// A new process.
    Exec,
    /// The container's main process.
    Attach,
}

/// Terminal size.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Size {
    /// Width in columns.
    pub columns: u16,
    /// Height in rows.
    pub rows: u16,
}

/// Process that is about to be started or joined.
#[async_trait]
pub trait ProcessTarget: Send + 'static {
    /// Starts or joins the process. `size`, if already known, is the initial size of its new terminal.
    ///
    /// # Errors
    /// A message for the client.
    async fn start(self: Box<Self>, size: Option<Size>) -> Result<ProcessStreams, String>;
}

/// Streams of a running process. Dropping it leaves the process running, but closes a terminal created for it.
pub struct ProcessStreams {
    /// Standard input; `None` where it was not requested.
    pub stdin: Option<Writer>,
    /// Standard output; must be read even where it was not requested.
    pub stdout: Option<Reader>,
    /// Standard error.
    pub stderr: Option<Reader>,
    /// Terminal of the process, if it has one.
    pub terminal: Option<Box<dyn Terminal>>,
    /// Exit code once the output has ended, 0 for a joined process; or the reason why the code is unknown.
    pub end: BoxFuture<'static, Result<i32, String>>,
}

/// Terminal of a process.
#[async_trait]
pub trait Terminal: Send + Sync {
    /// Sets the terminal size. Does nothing where the process has exited.
    async fn resize(&self, size: Size);
}

/// Connections of a port-forward to one pod.
#[async_trait]
pub trait PodPorts: Send + Sync {
    /// Sandbox ID.
    fn sandbox(&self) -> &str;

    /// Connects to a TCP port of the pod.
    ///
    /// # Errors
    /// A message for the client.
    async fn dial(&self, port: u16) -> Result<TcpStream, String>;
}
