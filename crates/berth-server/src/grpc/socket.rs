//! gRPC server on a Unix socket: atomic bind, retry with back-off, and graceful shutdown.

use std::{io, path::PathBuf, time::Duration};

use tokio::{
    net::UnixListener,
    sync::watch,
    time::{sleep, timeout},
};
use tokio_stream::wrappers::UnixListenerStream;
use tokio_util::sync::CancellationToken;
use tonic::{service::Routes, transport::Server};
use tracing::{error, info};

use berth_sys::backoff::Backoff;

/// Mode of the socket's directory.
const DIRECTORY_MODE: u32 = 0o750;
/// Back-off after failures.
const BACKOFF: Backoff = Backoff::new(Duration::from_millis(500), Duration::from_secs(30));
/// Grace period for open calls when the agent stops.
const SHUTDOWN_LIMIT: Duration = Duration::from_secs(5);
/// Maximum number of concurrent calls per connection.
const STREAMS: u32 = 100;
/// Maximum number of pending resets of a connection before it is closed.
const RESETS: usize = 20;

/// Unix socket and its gRPC services.
pub struct Socket {
    path: PathBuf,
    routes: Routes,
    trouble: watch::Sender<Option<String>>,
}

impl Socket {
    /// Creates a socket at `path`; the receiver contains the reason why it is not open, `None` while it is.
    pub fn new(path: PathBuf, routes: Routes) -> (Self, watch::Receiver<Option<String>>) {
        let (trouble, seen) = watch::channel(Some("socket is not open yet".to_owned()));
        (Self { path, routes, trouble }, seen)
    }

    /// Serves until stopped. Logs failures and retries with exponential back-off.
    pub async fn run(self, stop: CancellationToken) {
        let mut backoff = BACKOFF;
        loop {
            let trouble = match self.listen() {
                Ok(listener) => {
                    info!(path = %self.path.display(), "Starting to serve");
                    self.trouble.send_replace(None);
                    backoff.reset();
                    match self.serve(listener, &stop).await {
                        Ok(()) => return,
                        Err(error) => error.to_string(),
                    }
                }
                Err(error) => error.to_string(),
            };
            error!(path = %self.path.display(), err = trouble, "Failed to serve, retrying after back-off");
            self.trouble.send_replace(Some(trouble));
            tokio::select! {
                () = stop.cancelled() => return,
                () = sleep(backoff.next_delay()) => {}
            }
        }
    }

    /// Binds under a temporary name and renames: a client that sees the socket can connect to it.
    fn listen(&self) -> io::Result<UnixListener> {
        use std::os::unix::fs::DirBuilderExt;
        let directory = self.path.parent().ok_or(io::ErrorKind::InvalidInput)?;
        std::fs::DirBuilder::new().recursive(true).mode(DIRECTORY_MODE).create(directory)?;
        let beside = self.path.with_extension("new");
        match std::fs::remove_file(&beside) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        let listener = UnixListener::bind(&beside)?;
        std::fs::rename(&beside, &self.path)?;
        Ok(listener)
    }

    async fn serve(&self, listener: UnixListener, stop: &CancellationToken) -> Result<(), tonic::transport::Error> {
        let server = Server::builder()
            .max_concurrent_streams(STREAMS)
            .http2_max_pending_accept_reset_streams(Some(RESETS))
            .add_routes(self.routes.clone());
        let stopped = stop.clone().cancelled_owned();
        let serving = server.serve_with_incoming_shutdown(UnixListenerStream::new(listener), stopped);
        tokio::pin!(serving);
        tokio::select! {
            ended = &mut serving => return ended,
            () = stop.cancelled() => {}
        }
        // Slower calls are aborted.
        timeout(SHUTDOWN_LIMIT, serving).await.unwrap_or(Ok(()))
    }
}
