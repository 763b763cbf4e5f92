//! Unix sockets of plugins: dialing without following links, calls with a deadline, error texts of gRPC.
//!
//! Used for plugin registration, device plugins, and DRA drivers. Plugins are not trusted: message sizes and error
//! texts are limited. Error texts are those of gRPC's Go library.

use std::{
    io,
    os::fd::AsRawFd,
    path::{Path, PathBuf},
    pin::Pin,
    task::{Context, Poll},
    time::Duration,
};

use hyper_util::rt::TokioIo;
use rustix::fs::{FileType, Mode, OFlags};
use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    net::UnixStream,
    time::{sleep, timeout},
};
use tokio_util::sync::CancellationToken;
use tonic::{
    Code, Response, Status,
    transport::{Channel, Endpoint, Uri, server::Connected},
};

use super::errors::CriError;
use berth_sys::backoff::Backoff;
use berth_types::cut_at_char;

/// Maximum size of a message from a plugin, in bytes: the default of gRPC's Go library.
pub const MESSAGE: usize = 4 << 20;
/// Maximum length of a text from a plugin, in bytes.
pub const TEXT: usize = 1 << 10;
/// Timeout of connecting: the socket may exist before the plugin listens.
const DIAL: Duration = Duration::from_secs(10);
/// Delays between connection attempts.
const BACKOFF: Backoff = Backoff::new(Duration::from_millis(10), Duration::from_millis(500));

/// Connection to a plugin. It is not renewed: after its end all calls fail.
#[derive(Clone, Debug)]
pub struct PluginConnection {
    /// Channel of the calls.
    pub channel: Channel,
    /// Cancelled when the connection has ended.
    pub ended: CancellationToken,
}

/// Why there is no connection to a socket. Texts are those of gRPC's Go library.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum PluginDialError {
    /// The path is not a socket, or the attempt failed with an error that further attempts do not remove.
    #[error("dial unix {}: {cause}", socket.display())]
    Failed {
        /// Path of the socket.
        socket: PathBuf,
        /// Error of the attempt.
        cause: String,
    },
    /// No connection within 10 s.
    #[error("context deadline exceeded: dial unix {}: {cause}", socket.display())]
    TimedOut {
        /// Path of the socket.
        socket: PathBuf,
        /// Error of the last attempt; empty if none has ended.
        cause: String,
    },
}

impl PluginDialError {
    /// Error of the last attempt, without the path; empty if none has ended.
    pub fn cause(&self) -> &str {
        match self {
            Self::Failed { cause, .. } | Self::TimedOut { cause, .. } => cause,
        }
    }
}

/// Error of a call to a plugin.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("{text}")]
pub struct RpcError {
    /// Status code that gRPC's Go library would report.
    pub code: Code,
    /// `rpc error: code = … desc = …`, truncated.
    pub text: String,
}

impl From<Status> for RpcError {
    fn from(status: Status) -> Self {
        let (code, text) = match too_large(&status) {
            Some(text) => (Code::ResourceExhausted, text),
            None => {
                let error = CriError::from(status);
                let code = if let CriError::Rpc { code, .. } = &error { *code } else { Code::Unknown };
                (code, error.to_string())
            }
        };
        Self { code, text: truncated(&text).to_owned() }
    }
}

impl From<RpcError> for String {
    fn from(error: RpcError) -> Self {
        error.text
    }
}

/// Start of a text from a plugin: at most [`TEXT`] bytes, cut before a character.
pub fn truncated(text: &str) -> &str {
    cut_at_char(text, TEXT)
}

/// Connects to a socket. Retries for 10 s while it is missing or nobody listens.
///
/// # Errors
/// `Failed`: the path is not a socket; `TimedOut`: no connection within the timeout.
pub async fn dial(socket: &Path) -> Result<PluginConnection, PluginDialError> {
    let mut last_error = String::new();
    let attempts = async {
        let mut backoff = BACKOFF;
        loop {
            match open_stream(socket).await {
                Ok(stream) => return open_channel(stream).await,
                Err(error) if is_transient(&error) => last_error = error.to_string(),
                Err(error) => return Err(error.to_string()),
            }
            sleep(backoff.next_delay()).await;
        }
    };
    match timeout(DIAL, attempts).await {
        Ok(Ok(connection)) => Ok(connection),
        Ok(Err(cause)) => Err(PluginDialError::Failed { socket: socket.to_owned(), cause }),
        Err(_) => Err(PluginDialError::TimedOut { socket: socket.to_owned(), cause: last_error }),
    }
}

/// Connects to a socket with a single attempt; 10 s.
///
/// # Errors
/// `Failed`: the path is not a socket, nobody listens, or no connection within the timeout.
pub async fn connect(socket: &Path) -> Result<PluginConnection, PluginDialError> {
    let attempt = async {
        let stream = open_stream(socket).await.map_err(|error| error.to_string())?;
        open_channel(stream).await
    };
    let connected = timeout(DIAL, attempt).await.unwrap_or_else(|_| Err("i/o timeout".to_owned()));
    connected.map_err(|cause| PluginDialError::Failed { socket: socket.to_owned(), cause })
}

/// Opens a socket, not the target of a link that has its name.
async fn open_stream(socket: &Path) -> io::Result<UnixStream> {
    let entry = rustix::fs::open(socket, OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC, Mode::empty())?;
    if FileType::from_raw_mode(rustix::fs::fstat(&entry)?.st_mode) != FileType::Socket {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "not a socket"));
    }
    // Our own link to the socket just checked: nobody can replace it. It also avoids the length limit of addresses.
    UnixStream::connect(format!("/proc/self/fd/{}", entry.as_raw_fd())).await
}

/// Whether a later attempt may succeed: the socket is missing, nobody listens yet, or the backlog is full.
fn is_transient(error: &io::Error) -> bool {
    use io::ErrorKind::{ConnectionRefused, Interrupted, NotFound, WouldBlock};
    matches!(error.kind(), NotFound | ConnectionRefused | WouldBlock | Interrupted)
}

/// Channel over one connection; after its end all calls fail.
async fn open_channel(stream: UnixStream) -> Result<PluginConnection, String> {
    let ended = CancellationToken::new();
    let mut stream = Some(TokioIo::new(GuardedStream::new(stream, ended.clone().drop_guard())));
    let once = tower::service_fn(move |_: Uri| {
        let taken = stream.take().ok_or_else(|| io::Error::from(io::ErrorKind::NotConnected));
        async move { taken }
    });
    let endpoint = Endpoint::from_static("http://localhost");
    let channel = endpoint.connect_with_connector(once).await.map_err(|error| error.to_string())?;
    Ok(PluginConnection { channel, ended })
}

/// Stream with a guard that is dropped with it, which the HTTP/2 connection does at its end.
pub struct GuardedStream<G> {
    stream: UnixStream,
    _guard: G,
}

impl<G> GuardedStream<G> {
    /// Drops the guard when the stream is dropped.
    pub fn new(stream: UnixStream, guard: G) -> Self {
        Self { stream, _guard: guard }
    }
}

impl<G> Connected for GuardedStream<G> {
    type ConnectInfo = ();
    fn connect_info(&self) {}
}

impl<G: Unpin> AsyncRead for GuardedStream<G> {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(cx, buf)
    }
}

impl<G: Unpin> AsyncWrite for GuardedStream<G> {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(cx, buf)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write_vectored(cx, bufs)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }
}

/// Awaits a call until the timeout. The timeout is not sent: tonic's own timer would return another status.
///
/// # Errors
/// The call fails, or does not end within the timeout (`DeadlineExceeded`).
pub async fn limited<T>(
    limit: Duration,
    call: impl Future<Output = Result<Response<T>, Status>>,
) -> Result<T, RpcError> {
    match timeout(limit, call).await {
        Ok(answer) => answer.map(Response::into_inner).map_err(RpcError::from),
        Err(_) => Err(RpcError {
            code: Code::DeadlineExceeded,
            text: "rpc error: code = DeadlineExceeded desc = context deadline exceeded".to_owned(),
        }),
    }
}

/// Error of gRPC's Go library for a message above the limit; `None` for any other error.
fn too_large(status: &Status) -> Option<String> {
    let sizes = status.message().strip_prefix("Error, decoded message length too large: found ")?;
    let (size, limit) = sizes.strip_suffix(" bytes")?.split_once(" bytes, the limit is: ")?;
    let (size, limit): (u64, u64) = (size.parse().ok()?, limit.parse().ok()?);
    let text = format!("grpc: received message larger than max ({size} vs. {limit})");
    (status.code() == Code::OutOfRange).then(|| format!("rpc error: code = ResourceExhausted desc = {text}"))
}

#[cfg(test)]
mod tests {
    use std::os::unix::{fs::symlink, net::UnixListener};

    use super::*;

    #[test]
    fn errors_have_the_text_of_go() {
        let large = "Error, decoded message length too large: found 5000000 bytes, the limit is: 4194304 bytes";
        for (status, code, expected) in [
            (Status::internal("no device"), Code::Internal, "rpc error: code = Internal desc = no device"),
            (
                Status::out_of_range(large),
                Code::ResourceExhausted,
                "rpc error: code = ResourceExhausted desc = grpc: received message larger than max \
                 (5000000 vs. 4194304)",
            ),
            (
                Status::out_of_range(large.replace("4194304", "65536")),
                Code::ResourceExhausted,
                "rpc error: code = ResourceExhausted desc = grpc: received message larger than max \
                 (5000000 vs. 65536)",
            ),
            (Status::out_of_range("x"), Code::OutOfRange, "rpc error: code = OutOfRange desc = x"),
        ] {
            assert_eq!(RpcError::from(status), RpcError { code, text: expected.to_owned() });
        }
        assert_eq!(RpcError::from(Status::unknown("x".repeat(1 << 20))).text.len(), TEXT);
    }

    #[tokio::test]
    async fn the_end_of_a_connection_is_reported() {
        let directory = tempfile::tempdir().expect("a directory");
        let socket = directory.path().join("plugin.sock");
        let listener = UnixListener::bind(&socket).expect("bound");
        let connection = connect(&socket).await.expect("connected");
        assert!(!connection.ended.is_cancelled());
        drop(listener.accept().expect("a connection"));
        timeout(DIAL, connection.ended.cancelled()).await.expect("the end is noticed");

        let connection = connect(&socket).await.expect("connected");
        drop(connection.channel);
        timeout(DIAL, connection.ended.cancelled()).await.expect("a dropped channel ends its connection");
    }

    #[tokio::test]
    async fn a_single_attempt_fails_at_once() {
        let directory = tempfile::tempdir().expect("a directory");
        let at = |name: &str| directory.path().join(name);
        let _listener = UnixListener::bind(at("plugin.sock")).expect("bound");
        symlink("plugin.sock", at("link.sock")).expect("linked");
        for (name, cause) in [("link.sock", "not a socket"), ("missing.sock", "No such file or directory (os error 2)")]
        {
            let error = connect(&at(name)).await.expect_err("no socket");
            assert_eq!(error.to_string(), format!("dial unix {}: {cause}", at(name).display()));
            assert_eq!(error.cause(), cause);
        }
    }
}
