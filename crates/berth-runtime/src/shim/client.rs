//! Client of a shim's control socket.
//!
//! [`connect`] returns three parts: the [`Shim`] to send requests with (cheap to clone), its [`Events`], and the
//! [`ConnectionReader`], which the caller must run: it reads, delivers replies to their requests, and ends when the
//! connection is lost. A lost connection fails the pending requests and ends the events; the shim keeps running, and
//! repeats events that were not acknowledged. Implements spec 09a §14.

use std::{
    collections::HashMap,
    io,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    path::{Path, PathBuf},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use tokio::{
    sync::{mpsc, oneshot},
    time::{Instant, sleep, timeout_at},
};

use berth_shim::{
    plan::{
        ExecPlan, ExitEvent, FailureKind, Hello, LaunchPlan, Namespace, NamespacePlan, ProcessTarget, Reply, Scope,
        ShimFailure, ShimRequest, StartedProcess,
    },
    socket::{self, ReceiveResult},
    wire::{self, Datagram, DatagramKind, WireError},
};
use berth_sys::polled_fd::PolledFd;

/// Timeout of requests that start no process.
const QUICK: Duration = Duration::from_secs(10);
/// Default timeout of a start where the plan specifies none. Spec 09a §10.
const LIMIT: Duration = Duration::from_secs(60);
/// Additional wait beyond the shim's own timeout.
const GRACE: Duration = Duration::from_secs(5);
/// Delay before a retry while the shim's accept queue is full.
const PAUSE: Duration = Duration::from_millis(5);
/// Maximum number of queued events. More end the connection: the next connection repeats them.
const MOST_EVENTS: usize = 1024;

/// A failed request to a shim.
#[derive(Debug, thiserror::Error)]
pub enum ShimError {
    /// No shim listens on the socket.
    #[error("connect to shim in {}: {source}", folder.display())]
    Gone {
        /// Directory of the shim.
        folder: PathBuf,
        /// Error of the connection attempt.
        source: io::Error,
    },
    /// The connection ended: the shim died, or another daemon connected.
    #[error("connection to the shim lost")]
    Lost,
    /// The shim reports a failure.
    #[error(transparent)]
    Refused(#[from] ShimFailure),
    /// No reply arrived in time.
    #[error("shim did not respond to {what} within {limit:?}")]
    TimedOut {
        /// Name of the request.
        what: &'static str,
        /// Timeout.
        limit: Duration,
    },
    /// The reply does not match the request.
    #[error("unexpected response from shim to {what}")]
    UnexpectedReply {
        /// Name of the request.
        what: &'static str,
    },
    /// The request cannot be encoded.
    #[error(transparent)]
    Wire(#[from] WireError),
    /// The request cannot be sent.
    #[error("send request to shim: {0}")]
    Send(#[source] io::Error),
}

impl ShimError {
    /// The kind of failure that the shim reports; `None` for any other error.
    pub fn kind(&self) -> Option<FailureKind> {
        match self {
            Self::Refused(failure) => Some(failure.kind),
            _ => None,
        }
    }

    /// Whether no shim is connected.
    pub fn is_lost(&self) -> bool {
        matches!(self, Self::Gone { .. } | Self::Lost)
    }
}

/// A reply with its file descriptors.
type Answer = (Reply, Vec<OwnedFd>);

#[derive(Debug, Default)]
struct PendingRequests {
    is_lost: bool,
    last: u32,
    answers: HashMap<u32, oneshot::Sender<Answer>>,
}

#[derive(Debug)]
struct ShimConnection {
    socket: PolledFd,
    waiting: Mutex<PendingRequests>,
}

impl ShimConnection {
    fn waiting(&self) -> MutexGuard<'_, PendingRequests> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner) // consistent after every statement
    }
}

/// Sends requests to a shim.
#[derive(Clone, Debug)]
pub struct Shim(Arc<ShimConnection>);

/// Events of a shim.
#[derive(Debug)]
pub struct Events(mpsc::Receiver<ExitEvent>);

impl From<Events> for mpsc::Receiver<ExitEvent> {
    fn from(events: Events) -> Self {
        events.0
    }
}

impl Events {
    /// The next event; `None` when the connection is lost.
    pub async fn next(&mut self) -> Option<ExitEvent> {
        self.0.recv().await
    }
}

/// Reading half of the connection; see [`ConnectionReader::run`].
#[derive(Debug)]
pub struct ConnectionReader {
    shared: Arc<ShimConnection>,
    events: mpsc::Sender<ExitEvent>,
}

/// Namespaces received from a shim.
#[derive(Debug)]
pub struct Namespaces {
    /// Namespace file descriptors by kind.
    pub descriptors: Vec<(Namespace, OwnedFd)>,
    /// Process id of the pod's process 1, if it has one.
    pub init: Option<u32>,
}

/// Connects to the shim of a directory; must be called within a Tokio runtime.
///
/// # Errors
/// Nothing listens there, or the accept queue stays full until the timeout.
pub async fn connect(folder: &Path, limit: Duration) -> Result<(Shim, Events, ConnectionReader), ShimError> {
    let until = Instant::now() + limit;
    let gone = |source| ShimError::Gone { folder: folder.to_owned(), source };
    let socket = loop {
        match socket::connect(folder) {
            Err(e) if e.kind() == io::ErrorKind::WouldBlock && Instant::now() < until => sleep(PAUSE).await,
            result => break result.map_err(gone)?,
        }
    };
    let socket = PolledFd::new(socket).map_err(gone)?;
    let shared = Arc::new(ShimConnection { socket, waiting: Mutex::default() });
    let (sender, receiver) = mpsc::channel(MOST_EVENTS);
    let connection = ConnectionReader { shared: Arc::clone(&shared), events: sender };
    Ok((Shim(shared), Events(receiver), connection))
}

impl ConnectionReader {
    /// Reads until the connection is lost, and returns the cause.
    pub async fn run(self) -> io::Error {
        loop {
            let received = match self.shared.socket.readable().await {
                Ok(mut guard) => guard.try_io(|socket| match socket::receive(socket.as_fd()) {
                    Ok(ReceiveResult::Nothing) => Err(io::ErrorKind::WouldBlock.into()),
                    other => other,
                }),
                Err(e) => return e,
            };
            let outcome = match received {
                Err(_would_block) => Ok(()),
                Ok(Ok(ReceiveResult::Datagram(bytes, fds))) => self.dispatch(&bytes, fds),
                Ok(Ok(ReceiveResult::Nothing)) => Ok(()),
                Ok(Ok(ReceiveResult::End)) => Err(io::ErrorKind::ConnectionReset.into()),
                Ok(Err(e)) => Err(e),
            };
            if let Err(e) = outcome {
                return e;
            }
        }
    }

    fn dispatch(&self, bytes: &[u8], fds: Vec<OwnedFd>) -> io::Result<()> {
        let datagram = Datagram::read(bytes).map_err(io::Error::other)?;
        match datagram.kind {
            DatagramKind::Reply => {
                let reply = datagram.body().map_err(io::Error::other)?;
                let asked = self.shared.waiting().answers.remove(&datagram.sequence);
                // The caller may have given up; the descriptors are closed then.
                if let Some(asked) = asked {
                    let _gave_up = asked.send((reply, fds));
                }
                Ok(())
            }
            DatagramKind::Event => {
                let event = datagram.body().map_err(io::Error::other)?;
                self.events
                    .try_send(event)
                    .map_err(|_| io::Error::other("event receiver of the shim is full or closed"))
            }
            DatagramKind::Request => Err(io::Error::other("unexpected request from shim")),
        }
    }
}

impl Drop for ConnectionReader {
    fn drop(&mut self) {
        let mut waiting = self.shared.waiting();
        waiting.is_lost = true;
        waiting.answers.clear(); // all pending requests fail
    }
}

/// Removes a pending request, however waiting for its reply ends.
struct PendingRequest<'a> {
    shared: &'a ShimConnection,
    sequence: u32,
}

impl Drop for PendingRequest<'_> {
    fn drop(&mut self) {
        self.shared.waiting().answers.remove(&self.sequence);
    }
}

impl Shim {
    /// Requests the shim's identity, namespaces, and containers. Also subscribes to its events.
    ///
    /// # Errors
    /// See [`ShimError`].
    pub async fn hello(&self) -> Result<(Hello, Namespaces), ShimError> {
        match self.ask("Hello", &ShimRequest::Hello, &[], QUICK).await? {
            (Reply::Hello(hello), fds) => {
                let descriptors = hello.namespaces.iter().copied().zip(fds).collect();
                let namespaces = Namespaces { descriptors, init: hello.init };
                Ok((hello, namespaces))
            }
            _ => Err(ShimError::UnexpectedReply { what: "Hello" }),
        }
    }

    /// Creates the pod's namespaces; at most once per shim.
    ///
    /// # Errors
    /// See [`ShimError`].
    pub async fn make_namespaces(&self, plan: NamespacePlan) -> Result<Namespaces, ShimError> {
        let what = "MakeNamespaces";
        match self.ask(what, &ShimRequest::MakeNamespaces(plan), &[], LIMIT).await? {
            (Reply::Namespaces { made, init }, fds) => {
                Ok(Namespaces { descriptors: made.into_iter().zip(fds).collect(), init })
            }
            _ => Err(ShimError::UnexpectedReply { what }),
        }
    }

    /// Starts a container; returns after its program was executed.
    ///
    /// # Errors
    /// See [`ShimError`]. After a timeout the container may run anyway.
    pub async fn launch(&self, plan: LaunchPlan) -> Result<StartedProcess, ShimError> {
        let limit = if plan.limit_ms == 0 { LIMIT } else { Duration::from_millis(plan.limit_ms) };
        match self.ask("Launch", &ShimRequest::Launch(Box::new(plan)), &[], limit + GRACE).await? {
            (Reply::Started(started), _) => Ok(started),
            _ => Err(ShimError::UnexpectedReply { what: "Launch" }),
        }
    }

    /// Starts an exec process in a container. Without a terminal it uses the three descriptors as stdio; with one, the
    /// non-blocking terminal master is returned, and closing that hangs up the terminal.
    ///
    /// # Errors
    /// See [`ShimError`]. After a timeout the process may run anyway.
    pub async fn exec(
        &self,
        plan: ExecPlan,
        stdio: Option<[BorrowedFd<'_>; 3]>,
    ) -> Result<(StartedProcess, Option<OwnedFd>), ShimError> {
        let fds = stdio.as_ref().map_or(&[][..], |fds| &fds[..]);
        match self.ask("Exec", &ShimRequest::Exec(Box::new(plan)), fds, LIMIT + GRACE).await? {
            (Reply::Started(started), fds) => Ok((started, fds.into_iter().next())),
            _ => Err(ShimError::UnexpectedReply { what: "Exec" }),
        }
    }

    /// Sends a signal.
    ///
    /// # Errors
    /// See [`ShimError`]; [`FailureKind::State`] or [`FailureKind::Unknown`] where the process has ended.
    pub async fn signal(&self, to: ProcessTarget, signal: i32, scope: Scope) -> Result<(), ShimError> {
        self.done("Signal", &ShimRequest::Signal { to, signal, scope }, &[]).await
    }

    /// Sets the size of a container's terminal; no-op without one. The size of an exec process's terminal is set
    /// through its master.
    ///
    /// # Errors
    /// See [`ShimError`].
    pub async fn resize(&self, of: ProcessTarget, columns: u16, rows: u16) -> Result<(), ShimError> {
        self.done("Resize", &ShimRequest::Resize { of, columns, rows }, &[]).await
    }

    /// Copies a container's further output to these descriptors, and its input from `stdin`. The shim closes them after
    /// the container has ended and all output was sent. Without a terminal, `stderr` is separate.
    ///
    /// # Errors
    /// See [`ShimError`].
    pub async fn attach(
        &self,
        container: &str,
        stdin: Option<BorrowedFd<'_>>,
        stdout: BorrowedFd<'_>,
        stderr: Option<BorrowedFd<'_>>,
    ) -> Result<(), ShimError> {
        let fds: Vec<BorrowedFd<'_>> = stdin.into_iter().chain([stdout]).chain(stderr).collect();
        let request = ShimRequest::Attach { container: container.to_owned(), stdin: stdin.is_some() };
        self.done("Attach", &request, &fds).await
    }

    /// Reopens a container's log.
    ///
    /// # Errors
    /// See [`ShimError`]; [`FailureKind::State`] where the container has ended: no file is created then.
    pub async fn reopen_log(&self, container: &str) -> Result<(), ShimError> {
        self.done("ReopenLog", &ShimRequest::ReopenLog(container.to_owned()), &[]).await
    }

    /// Closes a container's stdin permanently.
    ///
    /// # Errors
    /// See [`ShimError`].
    pub async fn close_stdin(&self, container: &str) -> Result<(), ShimError> {
        self.done("CloseStdin", &ShimRequest::CloseStdin(container.to_owned()), &[]).await
    }

    /// Acknowledges events up to this number: the shim does not repeat them.
    ///
    /// # Errors
    /// See [`ShimError`].
    pub async fn acknowledge(&self, number: u64) -> Result<(), ShimError> {
        self.done("Acknowledge", &ShimRequest::Acknowledge(number), &[]).await
    }

    /// Makes the shim forget a container that has ended.
    ///
    /// # Errors
    /// See [`ShimError`].
    pub async fn forget(&self, container: &str) -> Result<(), ShimError> {
        self.done("Forget", &ShimRequest::Forget(container.to_owned()), &[]).await
    }

    /// Makes the shim kill the pod's process 1 and exit; requires that no container runs.
    ///
    /// # Errors
    /// See [`ShimError`]; [`FailureKind::State`] where containers run.
    pub async fn shutdown(&self) -> Result<(), ShimError> {
        self.done("Shutdown", &ShimRequest::Shutdown, &[]).await
    }

    async fn done(&self, what: &'static str, request: &ShimRequest, fds: &[BorrowedFd<'_>]) -> Result<(), ShimError> {
        match self.ask(what, request, fds, QUICK).await? {
            (Reply::Done, _) => Ok(()),
            _ => Err(ShimError::UnexpectedReply { what }),
        }
    }

    async fn ask(
        &self,
        what: &'static str,
        request: &ShimRequest,
        fds: &[BorrowedFd<'_>],
        limit: Duration,
    ) -> Result<Answer, ShimError> {
        let (sender, receiver) = oneshot::channel();
        let asked = self.register_request(sender)?;
        let bytes = wire::write(DatagramKind::Request, asked.sequence, request)?;
        let answered = async {
            self.send(&bytes, fds).await?;
            receiver.await.map_err(|_| ShimError::Lost)
        };
        match timeout_at(Instant::now() + limit, answered).await {
            Ok(Ok((Reply::Failed(failure), _))) => Err(failure.into()),
            Ok(result) => result,
            Err(_elapsed) => Err(ShimError::TimedOut { what, limit }),
        }
    }

    fn register_request(&self, sender: oneshot::Sender<Answer>) -> Result<PendingRequest<'_>, ShimError> {
        let mut waiting = self.0.waiting();
        if waiting.is_lost {
            return Err(ShimError::Lost);
        }
        waiting.last = waiting.last.wrapping_add(1);
        let sequence = waiting.last;
        waiting.answers.insert(sequence, sender);
        Ok(PendingRequest { shared: &self.0, sequence })
    }

    async fn send(&self, bytes: &[u8], fds: &[BorrowedFd<'_>]) -> Result<(), ShimError> {
        loop {
            let mut guard = self.0.socket.writable().await.map_err(ShimError::Send)?;
            let sent = guard.try_io(|socket| match socket::send(socket.as_fd(), bytes, fds) {
                Ok(true) => Ok(()),
                Ok(false) => Err(io::ErrorKind::WouldBlock.into()),
                Err(e) => Err(e),
            });
            match sent {
                Ok(Ok(())) => return Ok(()),
                Ok(Err(e)) if matches!(e.kind(), io::ErrorKind::BrokenPipe | io::ErrorKind::ConnectionReset) => {
                    return Err(ShimError::Lost);
                }
                Ok(Err(e)) => return Err(ShimError::Send(e)),
                Err(_would_block) => {}
            }
        }
    }
}
