//! Control socket for `berth images`: root-only Unix socket that accepts image commands.
//!
//! ```text
//!  berth images ──command, descriptor──► $STATE/images/ctl.sock ──► orders::carry_out
//!               ◄──responses, last: done──
//! ```
//! One command per connection. A client that disconnects cancels its pull, unless others wait for the same; other work
//! completes.

use std::{
    io,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use tokio::{
    sync::{Semaphore, mpsc},
    time::timeout,
};
use tokio_util::{sync::CancellationToken, task::TaskTracker};
use tracing::{debug, warn};

use super::{
    commands::{self, CommandResponse, ImageCommand},
    store::ImageStore,
};
use berth_shim::socket::{self, ReceiveResult};
use berth_sys::polled_fd::PolledFd;

/// Concurrent commands; further connections wait.
const MOST: usize = 8;
/// Timeout for a client to send its command, and to accept the next response.
const PATIENCE: Duration = Duration::from_secs(60);
/// Capacity of the queue of responses.
const WAITING: usize = 64;

/// Directory of the socket, below `$STATE`.
pub fn folder(state: &Path) -> PathBuf {
    state.join("images")
}

/// One end of a connection.
struct MessageStream(PolledFd);

impl MessageStream {
    fn new(socket: OwnedFd) -> io::Result<Self> {
        PolledFd::new(socket).map(Self)
    }

    async fn send(&self, what: &impl serde::Serialize, files: &[BorrowedFd<'_>]) -> io::Result<()> {
        let bytes = serde_json::to_vec(what).map_err(io::Error::other)?;
        let sent = async {
            loop {
                let mut ready = self.0.writable().await?;
                if socket::send(self.0.get_ref().as_fd(), &bytes, files)? {
                    return Ok(());
                }
                ready.clear_ready();
            }
        };
        timeout(PATIENCE, sent).await.map_err(|_| io::Error::from(io::ErrorKind::TimedOut))?
    }

    /// The next message; `None` if the peer closed the connection.
    async fn receive<T: serde::de::DeserializeOwned>(&self) -> io::Result<Option<(T, Vec<OwnedFd>)>> {
        loop {
            let mut ready = self.0.readable().await?;
            match socket::receive(self.0.get_ref().as_fd())? {
                ReceiveResult::Nothing => ready.clear_ready(),
                ReceiveResult::End => return Ok(None),
                ReceiveResult::Datagram(bytes, files) => {
                    let message = serde_json::from_slice(&bytes).map_err(io::Error::other)?;
                    return Ok(Some((message, files)));
                }
            }
        }
    }
}

/// Accepts commands until `stop` is cancelled.
pub async fn serve(store: ImageStore, folder: PathBuf, tasks: TaskTracker, stop: CancellationToken) {
    let listening = std::fs::create_dir_all(&folder).and_then(|()| PolledFd::new(socket::listen(&folder)?));
    let listener = match listening {
        Ok(listener) => listener,
        Err(error) => {
            warn!(path = %folder.display(), err = %error, "Failed to listen on the image control socket, `berth images` is unavailable");
            return;
        }
    };
    let places = Arc::new(Semaphore::new(MOST));
    loop {
        let socket = tokio::select! {
            socket = accept(&listener) => socket,
            () = stop.cancelled() => return,
        };
        let socket = match socket {
            Ok(socket) => socket,
            Err(error) => {
                warn!(err = %error, "Failed to accept connection on the image control socket");
                tokio::time::sleep(Duration::from_millis(100)).await; // out of descriptors, most likely
                continue;
            }
        };
        // The semaphore is never closed.
        let Ok(place) = Arc::clone(&places).acquire_owned().await else { return };
        let (store, stop) = (store.clone(), stop.clone());
        tasks.spawn(async move {
            let attended = tokio::select! {
                attended = serve_connection(&store, socket) => attended,
                () = stop.cancelled() => Ok(()),
            };
            if let Err(error) = attended {
                debug!(err = %error, "Failed to serve image command");
            }
            drop(place);
        });
    }
}

async fn accept(listener: &PolledFd) -> io::Result<OwnedFd> {
    loop {
        let mut ready = listener.readable().await?;
        match socket::accept(listener.get_ref().as_fd())? {
            Some(socket) => return Ok(socket),
            None => ready.clear_ready(),
        }
    }
}

async fn serve_connection(store: &ImageStore, socket: OwnedFd) -> io::Result<()> {
    let line = MessageStream::new(socket)?;
    let received = timeout(PATIENCE, line.receive::<ImageCommand>())
        .await
        .map_err(|_| io::Error::from(io::ErrorKind::TimedOut))?;
    let Some((order, files)) = received? else { return Ok(()) };
    let (sender, mut responses) = mpsc::channel(WAITING);
    let work = async {
        let outcome = commands::execute(store, order, files.into_iter().next(), &sender).await;
        // The receiver lives as long as this future.
        let _ = sender.send(commands::final_response(outcome)).await;
    };
    let mut work = std::pin::pin!(work);
    let mut is_done = false;
    loop {
        tokio::select! {
            word = responses.recv() => {
                let Some(word) = word else { return Ok(()) };
                line.send(&word, &[]).await?;
                if matches!(word, CommandResponse::Done | CommandResponse::Failed(..)) {
                    return Ok(());
                }
            }
            () = &mut work, if !is_done => is_done = true,
            gone = line.receive::<ImageCommand>() => match gone? {
                None => return Ok(()),
                Some(_) => return Err(io::Error::other("more than one command on a connection")),
            },
        }
    }
}

/// Why a command could not be sent or completed.
#[derive(Debug, thiserror::Error)]
pub enum CommandError {
    /// No runtime listens on the socket.
    #[error("no runtime listens in {}", folder.display())]
    NotRunning {
        /// Directory of the socket.
        folder: PathBuf,
    },
    /// The socket cannot be opened.
    #[error("{}: {source}", folder.display())]
    Refused {
        /// Directory of the socket.
        folder: PathBuf,
        /// The I/O error.
        source: io::Error,
    },
    /// The connection broke before the last response.
    #[error("connection to the runtime lost: {0}")]
    Broken(String),
}

/// Sends a command to the running runtime, with a descriptor if it needs one; calls `receive` with each response.
///
/// # Errors
/// No runtime listens, or the connection breaks.
pub async fn send_command(
    folder: &Path,
    order: &ImageCommand,
    file: Option<BorrowedFd<'_>>,
    mut receive: impl FnMut(CommandResponse),
) -> Result<(), CommandError> {
    let refused = |source: io::Error| match source.kind() {
        io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused => {
            CommandError::NotRunning { folder: folder.to_owned() }
        }
        _ => CommandError::Refused { folder: folder.to_owned(), source },
    };
    let line = socket::connect(folder).and_then(MessageStream::new).map_err(refused)?;
    let broken = |error: io::Error| CommandError::Broken(error.to_string());
    let files: Vec<BorrowedFd<'_>> = file.into_iter().collect();
    line.send(order, &files).await.map_err(broken)?;
    loop {
        let Some((word, _)) = line.receive::<CommandResponse>().await.map_err(broken)? else {
            return Err(CommandError::Broken("closed by the runtime".to_owned()));
        };
        let is_last = matches!(word, CommandResponse::Done | CommandResponse::Failed(..));
        receive(word);
        if is_last {
            return Ok(());
        }
    }
}
