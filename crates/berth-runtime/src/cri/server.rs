//! Serves the CRI services on a Unix socket or over in-memory connections.

use std::{
    fs, io,
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
    sync::Arc,
};

use futures::StreamExt;
use tokio::{io::DuplexStream, net::UnixListener, sync::mpsc};
use tokio_stream::wrappers::{ReceiverStream, UnixListenerStream};
use tokio_util::sync::CancellationToken;
use tonic::transport::{Server, server::Router};

use super::{connection_limit::ConnectionLimiter, images::ImageCalls, service::RuntimeCalls};
use crate::{
    errors::{RuntimeError, RuntimeResult},
    runtime::Runtime,
    streams::IN_PROCESS,
};
use berth_proto::cri::{image_service_server::ImageServiceServer, runtime_service_server::RuntimeServiceServer};
use berth_sys::grpc_deadline::Deadline;

/// Maximum size of a received message, and of one sent over a socket, bytes.
const MAX_MESSAGE: usize = 16 << 20;
/// Buffer of an in-memory connection in each direction, bytes.
const PIPE: usize = 64 << 10;
/// Capacity of the queue of in-memory connections.
const WAITING: usize = 16;
/// Maximum number of socket connections. Clients leak them: the CRI validation suite never closes any.
const CONNECTIONS: usize = 4096;
/// File mode of the socket: owner and group may connect.
const MODE: u32 = 0o660;

/// Connects to the services inside this process.
#[derive(Clone, Debug)]
pub struct InProcessConnector(mpsc::Sender<io::Result<DuplexStream>>);

impl InProcessConnector {
    /// Opens a new connection.
    ///
    /// # Errors
    /// The services have ended.
    pub async fn connect(&self) -> io::Result<DuplexStream> {
        let (ours, theirs) = tokio::io::duplex(PIPE);
        let gone = |_| io::Error::from(io::ErrorKind::ConnectionRefused);
        self.0.send(Ok(theirs)).await.map_err(gone)?;
        Ok(ours)
    }
}

fn router(runtime: &Arc<Runtime>, largest: usize, streams: Arc<str>) -> Router {
    let calls = RuntimeServiceServer::new(RuntimeCalls { runtime: runtime.clone(), streams })
        .max_decoding_message_size(MAX_MESSAGE)
        .max_encoding_message_size(largest);
    let images = ImageServiceServer::new(ImageCalls(runtime.clone()))
        .max_decoding_message_size(MAX_MESSAGE)
        .max_encoding_message_size(largest);
    Server::builder().add_service(Deadline(calls)).add_service(Deadline(images))
}

/// Serves connections within this process until `stop` is cancelled. Streaming URLs begin with [`IN_PROCESS`].
pub fn over_memory(runtime: &Arc<Runtime>, stop: CancellationToken) -> InProcessConnector {
    let (sender, incoming) = mpsc::channel(WAITING);
    let serving = router(runtime, usize::MAX, IN_PROCESS.into())
        .serve_with_incoming_shutdown(ReceiverStream::new(incoming), async move { stop.cancelled().await });
    runtime.shell.spawn(async move {
        if let Err(error) = serving.await {
            tracing::error!(err = %error, "CRI server of the embedded runtime stopped");
        }
    });
    InProcessConnector(sender)
}

/// Serves the Unix socket until `stop` is cancelled; replaces an existing socket. Streaming URLs begin with `streams`
/// (`http://127.0.0.1:port`), where the streaming server must listen.
///
/// # Errors
/// The socket cannot be created, or serving fails.
pub async fn over_socket(
    runtime: &Arc<Runtime>,
    path: PathBuf,
    streams: &str,
    stop: CancellationToken,
) -> RuntimeResult<()> {
    let listener = bind(&path)?;
    let places = Arc::new(ConnectionLimiter::new(CONNECTIONS));
    let incoming = UnixListenerStream::new(listener).then(move |stream| {
        let places = places.clone();
        async move { Ok::<_, io::Error>(places.admit(stream?).await) }
    });
    let serving = router(runtime, MAX_MESSAGE, streams.into())
        .serve_with_incoming_shutdown(incoming, async move { stop.cancelled().await });
    let served = serving.await;
    // Another process may have replaced the socket in the meantime; a socket without a server is harmless.
    let _ = fs::remove_file(&path);
    served.map_err(|error| RuntimeError::other(format!("serve {}: {error}", path.display())))
}

fn bind(path: &Path) -> RuntimeResult<UnixListener> {
    let failed = |what: &str, error: &io::Error| RuntimeError::file(what, path, error);
    if let Some(directory) = path.parent() {
        fs::create_dir_all(directory).map_err(|e| failed("create directory of", &e))?;
    }
    match fs::remove_file(path) {
        Err(e) if e.kind() != io::ErrorKind::NotFound => return Err(failed("replace", &e)),
        _ => {}
    }
    let listener = UnixListener::bind(path).map_err(|e| failed("listen on", &e))?;
    fs::set_permissions(path, fs::Permissions::from_mode(MODE)).map_err(|e| failed("protect", &e))?;
    Ok(listener)
}
