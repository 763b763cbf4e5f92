//! The daemon's side of a shim's control socket.
//!
//! [`connect`] gives three parts: the [`Shim`] that is asked (cheap to copy), the [`Events`] it tells, and the
//! [`Connection`] somebody must run: it reads, hands replies to those who asked, and ends when the connection is lost.
//! A lost connection fails what is under way, and ends the events; the shim goes on, and tells again what was not
//! acknowledged. Behaviour: spec 09a §14.

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
        Event, ExecPlan, Failure, FailureKind, Hello, LaunchPlan, Namespace, NamespacePlan, Reply, Request, Scope,
        Started, Target,
    },
    socket::{self, Received},
    wire::{self, Datagram, Kind, WireError},
};
use berth_sys::watched::Watched;

/// How long a shim may take for what needs no process.
const QUICK: Duration = Duration::from_secs(10);
/// How long starting may take where the plan does not say. Spec 09a §10.
const LIMIT: Duration = Duration::from_secs(60);
/// How much longer than the shim's own limit is waited.
const GRACE: Duration = Duration::from_secs(5);
/// Pause before a shim whose queue of connections is full is asked again.
const PAUSE: Duration = Duration::from_millis(5);
/// Events nobody has taken yet. More are a lost connection: the next one tells them again.
const MOST_EVENTS: usize = 1024;

/// Why a shim did not do what it was asked.
#[derive(Debug, thiserror::Error)]
pub enum ShimError {
    /// There is no shim.
    #[error("no shim listens in {}: {source}", folder.display())]
    Gone {
        /// Its folder.
        folder: PathBuf,
        /// What the kernel said.
        source: io::Error,
    },
    /// The connection ended: the shim died, or another daemon took over.
    #[error("the connection to the shim is lost")]
    Lost,
    /// It says why.
    #[error(transparent)]
    Refused(#[from] Failure),
    /// No answer came.
    #[error("the shim did not answer {what} within {limit:?}")]
    TimedOut {
        /// What it was asked.
        what: &'static str,
        /// How long was waited.
        limit: Duration,
    },
    /// It answered something else than what was asked.
    #[error("the shim answered {what} with something else")]
    Confused {
        /// What it was asked.
        what: &'static str,
    },
    /// The message cannot be written.
    #[error(transparent)]
    Wire(#[from] WireError),
    /// The message cannot be sent.
    #[error("send to the shim: {0}")]
    Send(#[source] io::Error),
}

impl ShimError {
    /// Which kind of failure the shim tells of.
    pub fn kind(&self) -> Option<FailureKind> {
        match self {
            Self::Refused(failure) => Some(failure.kind),
            _ => None,
        }
    }

    /// Whether nobody is there to be asked.
    pub fn is_lost(&self) -> bool {
        matches!(self, Self::Gone { .. } | Self::Lost)
    }
}

/// What a shim sent for a question.
type Answer = (Reply, Vec<OwnedFd>);

#[derive(Debug, Default)]
struct Waiting {
    is_lost: bool,
    last: u32,
    answers: HashMap<u32, oneshot::Sender<Answer>>,
}

#[derive(Debug)]
struct Shared {
    socket: Watched,
    waiting: Mutex<Waiting>,
}

impl Shared {
    fn waiting(&self) -> MutexGuard<'_, Waiting> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner) // it is whole between any two lines
    }
}

/// A shim that can be asked.
#[derive(Clone, Debug)]
pub struct Shim(Arc<Shared>);

/// What a shim tells.
#[derive(Debug)]
pub struct Events(mpsc::Receiver<Event>);

impl From<Events> for mpsc::Receiver<Event> {
    fn from(events: Events) -> Self {
        events.0
    }
}

impl Events {
    /// The next event; none: the connection is lost.
    pub async fn next(&mut self) -> Option<Event> {
        self.0.recv().await
    }
}

/// The reading half, to be run by somebody.
#[derive(Debug)]
pub struct Connection {
    shared: Arc<Shared>,
    events: mpsc::Sender<Event>,
}

/// Namespaces as a shim hands them over.
#[derive(Debug)]
pub struct Namespaces {
    /// Their descriptors.
    pub held: Vec<(Namespace, OwnedFd)>,
    /// The pod's process 1.
    pub init: Option<u32>,
}

/// Connects to the shim of a folder; must be called within a runtime.
///
/// # Errors
/// Where nobody listens there, or too many wait to be accepted until the limit.
pub async fn connect(folder: &Path, limit: Duration) -> Result<(Shim, Events, Connection), ShimError> {
    let until = Instant::now() + limit;
    let gone = |source| ShimError::Gone { folder: folder.to_owned(), source };
    let socket = loop {
        match socket::connect(folder) {
            Err(e) if e.kind() == io::ErrorKind::WouldBlock && Instant::now() < until => sleep(PAUSE).await,
            result => break result.map_err(gone)?,
        }
    };
    let socket = Watched::new(socket).map_err(gone)?;
    let shared = Arc::new(Shared { socket, waiting: Mutex::default() });
    let (sender, receiver) = mpsc::channel(MOST_EVENTS);
    let connection = Connection { shared: Arc::clone(&shared), events: sender };
    Ok((Shim(shared), Events(receiver), connection))
}

impl Connection {
    /// Reads until the connection is lost, and says why it was.
    pub async fn run(self) -> io::Error {
        loop {
            let received = match self.shared.socket.readable().await {
                Ok(mut guard) => guard.try_io(|socket| match socket::receive(socket.as_fd()) {
                    Ok(Received::Nothing) => Err(io::ErrorKind::WouldBlock.into()),
                    other => other,
                }),
                Err(e) => return e,
            };
            let heard = match received {
                Err(_would_block) => Ok(()),
                Ok(Ok(Received::Datagram(bytes, fds))) => self.hear(&bytes, fds),
                Ok(Ok(Received::Nothing)) => Ok(()),
                Ok(Ok(Received::End)) => Err(io::ErrorKind::ConnectionReset.into()),
                Ok(Err(e)) => Err(e),
            };
            if let Err(e) = heard {
                return e;
            }
        }
    }

    fn hear(&self, bytes: &[u8], fds: Vec<OwnedFd>) -> io::Result<()> {
        let datagram = Datagram::read(bytes).map_err(io::Error::other)?;
        match datagram.kind {
            Kind::Reply => {
                let reply = datagram.body().map_err(io::Error::other)?;
                let asked = self.shared.waiting().answers.remove(&datagram.sequence);
                // Who asked may have given up; descriptors are closed then.
                if let Some(asked) = asked {
                    let _gave_up = asked.send((reply, fds));
                }
                Ok(())
            }
            Kind::Event => {
                let event = datagram.body().map_err(io::Error::other)?;
                self.events.try_send(event).map_err(|_| io::Error::other("nobody takes the shim's events"))
            }
            Kind::Request => Err(io::Error::other("a shim asks nothing")),
        }
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        let mut waiting = self.shared.waiting();
        waiting.is_lost = true;
        waiting.answers.clear(); // everybody who waits hears of it
    }
}

/// Takes the question off the list, however waiting for its answer ends.
struct Asked<'a> {
    shared: &'a Shared,
    sequence: u32,
}

impl Drop for Asked<'_> {
    fn drop(&mut self) {
        self.shared.waiting().answers.remove(&self.sequence);
    }
}

impl Shim {
    /// Who are you, and what do you hold? Also asks to be told events from now on.
    ///
    /// # Errors
    /// See [`ShimError`].
    pub async fn hello(&self) -> Result<(Hello, Namespaces), ShimError> {
        match self.ask("Hello", &Request::Hello, &[], QUICK).await? {
            (Reply::Hello(hello), fds) => {
                let held = hello.namespaces.iter().copied().zip(fds).collect();
                let namespaces = Namespaces { held, init: hello.init };
                Ok((hello, namespaces))
            }
            _ => Err(ShimError::Confused { what: "Hello" }),
        }
    }

    /// Makes the pod's namespaces; once.
    ///
    /// # Errors
    /// See [`ShimError`].
    pub async fn make_namespaces(&self, plan: NamespacePlan) -> Result<Namespaces, ShimError> {
        let what = "MakeNamespaces";
        match self.ask(what, &Request::MakeNamespaces(plan), &[], LIMIT).await? {
            (Reply::Namespaces { made, init }, fds) => {
                Ok(Namespaces { held: made.into_iter().zip(fds).collect(), init })
            }
            _ => Err(ShimError::Confused { what }),
        }
    }

    /// Starts a container; returns when its program is executed.
    ///
    /// # Errors
    /// See [`ShimError`]. Where no answer came it may run all the same.
    pub async fn launch(&self, plan: LaunchPlan) -> Result<Started, ShimError> {
        let limit = if plan.limit_ms == 0 { LIMIT } else { Duration::from_millis(plan.limit_ms) };
        match self.ask("Launch", &Request::Launch(Box::new(plan)), &[], limit + GRACE).await? {
            (Reply::Started(started), _) => Ok(started),
            _ => Err(ShimError::Confused { what: "Launch" }),
        }
    }

    /// Starts another process in a container. Without a terminal it reads from and writes to the three descriptors;
    /// with one its master is returned, which does not block; closing it hangs up.
    ///
    /// # Errors
    /// See [`ShimError`]. Where no answer came it may run all the same.
    pub async fn exec(
        &self,
        plan: ExecPlan,
        stdio: Option<[BorrowedFd<'_>; 3]>,
    ) -> Result<(Started, Option<OwnedFd>), ShimError> {
        let fds = stdio.as_ref().map_or(&[][..], |fds| &fds[..]);
        match self.ask("Exec", &Request::Exec(Box::new(plan)), fds, LIMIT + GRACE).await? {
            (Reply::Started(started), fds) => Ok((started, fds.into_iter().next())),
            _ => Err(ShimError::Confused { what: "Exec" }),
        }
    }

    /// Sends a signal.
    ///
    /// # Errors
    /// See [`ShimError`]; [`FailureKind::State`] or [`FailureKind::Unknown`] where the process has ended.
    pub async fn signal(&self, to: Target, signal: i32, scope: Scope) -> Result<(), ShimError> {
        self.done("Signal", &Request::Signal { to, signal, scope }, &[]).await
    }

    /// Tells the size of a container's terminal; without one nothing happens. (That of another process is set through
    /// its master.)
    ///
    /// # Errors
    /// See [`ShimError`].
    pub async fn resize(&self, of: Target, columns: u16, rows: u16) -> Result<(), ShimError> {
        self.done("Resize", &Request::Resize { of, columns, rows }, &[]).await
    }

    /// Sends what a container writes from now on also to these, and its input from `stdin`. When the container has
    /// ended and everything was sent they are closed. Without a terminal `stderr` is one of its own.
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
        let request = Request::Attach { container: container.to_owned(), stdin: stdin.is_some() };
        self.done("Attach", &request, &fds).await
    }

    /// Opens a container's log anew.
    ///
    /// # Errors
    /// See [`ShimError`]; [`FailureKind::State`] where it has ended, and no file is made.
    pub async fn reopen_log(&self, container: &str) -> Result<(), ShimError> {
        self.done("ReopenLog", &Request::ReopenLog(container.to_owned()), &[]).await
    }

    /// Closes a container's stdin for ever.
    ///
    /// # Errors
    /// See [`ShimError`].
    pub async fn close_stdin(&self, container: &str) -> Result<(), ShimError> {
        self.done("CloseStdin", &Request::CloseStdin(container.to_owned()), &[]).await
    }

    /// Events up to this number need not be told again.
    ///
    /// # Errors
    /// See [`ShimError`].
    pub async fn acknowledge(&self, number: u64) -> Result<(), ShimError> {
        self.done("Acknowledge", &Request::Acknowledge(number), &[]).await
    }

    /// Forgets a container that has ended.
    ///
    /// # Errors
    /// See [`ShimError`].
    pub async fn forget(&self, container: &str) -> Result<(), ShimError> {
        self.done("Forget", &Request::Forget(container.to_owned()), &[]).await
    }

    /// Kills the pod's process 1 and ends, once no container runs.
    ///
    /// # Errors
    /// See [`ShimError`]; [`FailureKind::State`] where containers run.
    pub async fn shutdown(&self) -> Result<(), ShimError> {
        self.done("Shutdown", &Request::Shutdown, &[]).await
    }

    async fn done(&self, what: &'static str, request: &Request, fds: &[BorrowedFd<'_>]) -> Result<(), ShimError> {
        match self.ask(what, request, fds, QUICK).await? {
            (Reply::Done, _) => Ok(()),
            _ => Err(ShimError::Confused { what }),
        }
    }

    async fn ask(
        &self,
        what: &'static str,
        request: &Request,
        fds: &[BorrowedFd<'_>],
        limit: Duration,
    ) -> Result<Answer, ShimError> {
        let (sender, receiver) = oneshot::channel();
        let asked = self.enlist(sender)?;
        let bytes = wire::write(Kind::Request, asked.sequence, request)?;
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

    fn enlist(&self, sender: oneshot::Sender<Answer>) -> Result<Asked<'_>, ShimError> {
        let mut waiting = self.0.waiting();
        if waiting.is_lost {
            return Err(ShimError::Lost);
        }
        waiting.last = waiting.last.wrapping_add(1);
        let sequence = waiting.last;
        waiting.answers.insert(sequence, sender);
        Ok(Asked { shared: &self.0, sequence })
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
