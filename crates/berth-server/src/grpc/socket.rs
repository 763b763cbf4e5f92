//! A gRPC server on a unix socket that appears at once or not at all, and comes back.

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

/// Mode of the directory the socket is in.
const DIRECTORY_MODE: u32 = 0o750;
/// First pause after a failure; it doubles.
const FIRST_PAUSE: Duration = Duration::from_millis(500);
/// Longest pause.
const LONGEST_PAUSE: Duration = Duration::from_secs(30);
/// How long open calls may take once the agent stops.
const SHUTDOWN_LIMIT: Duration = Duration::from_secs(5);
/// Calls a connection may have open at once.
const STREAMS: u32 = 100;
/// Resets a connection may have pending before it is closed.
const RESETS: usize = 20;

/// A socket and what answers on it.
pub struct Socket {
    path: PathBuf,
    routes: Routes,
    trouble: watch::Sender<Option<String>>,
}

impl Socket {
    /// A socket at `path`; the second value says why it is not open, `None` while it is.
    pub fn new(path: PathBuf, routes: Routes) -> (Self, watch::Receiver<Option<String>>) {
        let (trouble, seen) = watch::channel(Some("not opened yet".to_owned()));
        (Self { path, routes, trouble }, seen)
    }

    /// Serves until stopped. A failure is told and tried again, later and later.
    pub async fn run(self, stop: CancellationToken) {
        let mut pause = FIRST_PAUSE;
        loop {
            let trouble = match self.listen() {
                Ok(listener) => {
                    info!(path = %self.path.display(), "Starting to serve");
                    self.trouble.send_replace(None);
                    pause = FIRST_PAUSE;
                    match self.serve(listener, &stop).await {
                        Ok(()) => return,
                        Err(error) => error.to_string(),
                    }
                }
                Err(error) => error.to_string(),
            };
            error!(path = %self.path.display(), err = trouble, "Failed to serve, trying again");
            self.trouble.send_replace(Some(trouble));
            tokio::select! {
                () = stop.cancelled() => return,
                () = sleep(pause) => pause = (pause * 2).min(LONGEST_PAUSE),
            }
        }
    }

    /// Binds beside the final name and renames: whoever sees the socket can connect to it.
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
        // Who is slower is cut off.
        timeout(SHUTDOWN_LIMIT, serving).await.unwrap_or(Ok(()))
    }
}
