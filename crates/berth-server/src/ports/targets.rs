//! What stands behind the streams that are served here, where the runtime is ours: processes and ports of pods.

use async_trait::async_trait;
use futures::future::BoxFuture;
use tokio::{
    io::{AsyncRead, AsyncWrite},
    net::TcpStream,
};

use super::streams::StreamSet;

/// What a process prints.
pub type Reader = Box<dyn AsyncRead + Send + Unpin>;
/// What a process reads; dropping it ends its input.
pub type Writer = Box<dyn AsyncWrite + Send + Unpin>;

/// Streams that were prepared, each under a path that is met once.
pub trait Targets: Send + Sync + 'static {
    /// What waits under a path (`/exec/token`); `None` where nothing does, or not any more.
    fn take(&self, path: &str) -> Option<Target>;
}

/// What was prepared.
pub enum Target {
    /// A process, new or the container's own.
    Command {
        /// Whose process it is.
        verb: Verb,
        /// The streams that were asked for.
        set: StreamSet,
        /// How it comes about.
        process: Box<dyn Process>,
    },
    /// Connections into a pod.
    Forward {
        /// The ports, where the client does not name one with each connection.
        ports: Vec<u16>,
        /// The pod.
        pod: Box<dyn PodPorts>,
    },
}

/// Whose process a client talks to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verb {
    /// A new one.
    Exec,
    /// The container's own.
    Attach,
}

/// The size of a terminal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Size {
    /// Columns.
    pub columns: u16,
    /// Rows.
    pub rows: u16,
}

/// A process that is about to be started or joined.
#[async_trait]
pub trait Process: Send + 'static {
    /// Starts or joins it. A size that is known already is that of its new terminal.
    ///
    /// # Errors
    /// Why not, for people.
    async fn start(self: Box<Self>, size: Option<Size>) -> Result<Running, String>;
}

/// A process whose streams are ours. Dropping it leaves the process alone, but for a terminal that was made for it.
pub struct Running {
    /// What it reads; `None` where that was not asked for.
    pub stdin: Option<Writer>,
    /// What it prints; to be read also where it was not asked for.
    pub stdout: Option<Reader>,
    /// What it complains.
    pub stderr: Option<Reader>,
    /// Its terminal, where it has one.
    pub terminal: Option<Box<dyn Terminal>>,
    /// Its exit code, once its output has ended; 0 where the process was joined. Else why nobody knows.
    pub end: BoxFuture<'static, Result<i32, String>>,
}

/// A terminal.
#[async_trait]
pub trait Terminal: Send + Sync {
    /// Tells it its size. Who sits at it may have gone.
    async fn resize(&self, size: Size);
}

/// The ports of a pod.
#[async_trait]
pub trait PodPorts: Send + Sync {
    /// The sandbox.
    fn sandbox(&self) -> &str;

    /// Connects to a port.
    ///
    /// # Errors
    /// Why not, for people.
    async fn dial(&self, port: u16) -> Result<TcpStream, String>;
}
