//! Dialer: name resolution, Happy Eyeballs connect, proxy tunnel, TLS, and HTTP handshake.
//!
//! Implements spec 10 §8.1, 01 §10.2.

use std::{
    future::poll_fn,
    net::SocketAddr,
    pin::pin,
    sync::{
        Arc, Mutex,
        atomic::{AtomicU64, AtomicUsize, Ordering},
    },
    time::Duration,
};

use futures::{
    StreamExt,
    future::{Either, select},
    stream::FuturesUnordered,
};
use hyper::client::conn::{http1, http2};
use hyper_util::rt::TokioIo;
use rustls::{ClientConfig, pki_types::ServerName};
use tokio::{
    io::{AsyncRead, AsyncWrite},
    net::TcpStream,
    sync::oneshot,
    time::{sleep, timeout},
};
use tokio_rustls::TlsConnector;
use tokio_util::{sync::CancellationToken, task::TaskTracker};
use tracing::debug;

use super::{
    addresses::ordered,
    connection::{ApiConnection, Body, Sender, chain},
    keep_alive_pinger::KeepAlivePinger,
    tunnel::Tunnel,
};

/// Timeout until a connection is usable.
const PATIENCE: Duration = Duration::from_secs(10);
/// Time after which a second attempt starts in parallel, for heartbeats.
const SECOND: Duration = Duration::from_secs(3);
/// Largest response head, in bytes.
const HEADERS: u32 = 1 << 20;
/// Head start of an address before the next one is tried.
const HEAD_START: Duration = Duration::from_millis(300);
/// Poll interval while waiting for the peer's HTTP/2 settings.
const SETTINGS_POLL: Duration = Duration::from_millis(2);
/// Sentinel stream limit that no server would send: the value before the peer's settings arrive.
const INITIAL_STREAM_LIMIT: usize = 97;
/// HTTP/2 receive window of a stream, in bytes.
const STREAM_WINDOW: u32 = 1 << 20;
/// HTTP/2 receive window of a connection, in bytes.
const CONNECTION_WINDOW: u32 = 4 << 20;
const TCP_KEEP_ALIVE: Duration = Duration::from_secs(30);
const TCP_USER_TIMEOUT: Duration = Duration::from_secs(45);

/// HTTP/2 keep-alive: detection of dead connections.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pings {
    /// Time without a frame after which a ping is sent.
    pub idle: Duration,
    /// Time without a pong after which the connection counts as dead.
    pub patience: Duration,
}

/// Dialer of one server.
pub struct Dialer {
    /// Host name or IP address of the server.
    pub host: String,
    /// Port of the server.
    pub port: u16,
    /// TLS configuration, and the server name to verify; `None`: HTTP/1.1 in cleartext.
    pub tls: Option<(Arc<ClientConfig>, ServerName<'static>)>,
    /// Proxy to connect through.
    pub proxy: Option<Tunnel>,
    /// Keep-alive settings.
    pub pings: Pings,
    /// Triggers immediate pings.
    pub pinger: KeepAlivePinger,
    /// Runs the connection tasks.
    pub tasks: TaskTracker,
    /// Stops all connections.
    pub stop: CancellationToken,
    /// Number of attempts so far; the number of an attempt becomes the connection's ID.
    pub attempts: AtomicU64,
}

/// Bidirectional byte stream.
pub trait ByteStream: AsyncRead + AsyncWrite + Unpin + Send {}
impl<T: AsyncRead + AsyncWrite + Unpin + Send> ByteStream for T {}

impl Dialer {
    /// Establishes a connection within 10 s.
    ///
    /// # Errors
    /// Human-readable cause.
    pub async fn dial(&self, epoch: u64) -> Result<Arc<ApiConnection>, String> {
        let id = self.attempts.fetch_add(1, Ordering::Relaxed) + 1;
        let late = |_| format!("dial tcp {}:{}: i/o timeout", self.host, self.port);
        timeout(PATIENCE, self.connect(id, epoch)).await.map_err(late)?
    }

    /// As [`Self::dial`], with a second attempt in parallel after 3 s, because one address may be served by many
    /// servers, one of which hangs.
    ///
    /// # Errors
    /// Human-readable cause of the first attempt.
    pub async fn dial_twice(&self, epoch: u64) -> Result<Arc<ApiConnection>, String> {
        let mut first = pin!(self.dial(epoch));
        if let Ok(outcome) = timeout(SECOND, &mut first).await {
            return outcome;
        }
        let second = pin!(self.dial(epoch));
        match select(first, second).await {
            Either::Left((Ok(connection), _)) | Either::Right((Ok(connection), _)) => Ok(connection),
            Either::Left((Err(cause), second)) => second.await.map_err(|_| cause),
            Either::Right((Err(_), first)) => first.await,
        }
    }

    async fn connect(&self, id: u64, epoch: u64) -> Result<Arc<ApiConnection>, String> {
        let stream: Box<dyn ByteStream> = match &self.proxy {
            Some(tunnel) => tunnel.http_connect(&self.host, self.port).await?,
            None => Box::new(race(&self.host, self.port).await?),
        };
        let (stream, is_http2): (Box<dyn ByteStream>, bool) = match &self.tls {
            None => (stream, false),
            Some((config, name)) => {
                let shaking = TlsConnector::from(config.clone()).connect(name.clone(), stream);
                let stream = shaking.await.map_err(|e| format!("tls: {}", chain(&e)))?;
                let is_http2 = stream.get_ref().1.alpn_protocol() == Some(b"h2");
                (Box::new(stream), is_http2)
            }
        };
        let closed = self.stop.child_token();
        // A connection that is abandoned during the handshake is closed.
        let opening = closed.clone().drop_guard();
        let over = CancellationToken::new();
        let sender = match is_http2 {
            true => self.http2(stream, &closed, &over).await?,
            false => self.http1(stream, &closed, &over).await?,
        };
        opening.disarm();
        Ok(Arc::new(ApiConnection { id, sender, epoch, draining: CancellationToken::new(), closed, over }))
    }

    async fn http2(
        &self,
        stream: Box<dyn ByteStream>,
        closed: &CancellationToken,
        over: &CancellationToken,
    ) -> Result<Sender, String> {
        let spawner = Spawner { tasks: self.tasks.clone(), closed: closed.clone() };
        let mut builder = http2::Builder::new(spawner);
        builder
            .timer(self.pinger.timer(self.pings))
            .initial_max_send_streams(INITIAL_STREAM_LIMIT)
            .max_header_list_size(HEADERS)
            .initial_stream_window_size(STREAM_WINDOW)
            .initial_connection_window_size(CONNECTION_WINDOW)
            .keep_alive_interval(self.pings.idle)
            .keep_alive_timeout(self.pings.patience)
            .keep_alive_while_idle(true);
        let (sender, driver) = builder.handshake::<_, Body>(TokioIo::new(stream)).await.map_err(|e| chain(&e))?;
        let limit = Arc::new(AtomicUsize::new(INITIAL_STREAM_LIMIT));
        let (ready, is_ready) = oneshot::channel();
        self.drive(followed(driver, limit.clone(), ready), closed, over);
        // Without the peer's settings more streams would be opened than it accepts; and a peer that never sends any is
        // no HTTP/2 server.
        let ended = |_| "connection closed before the server sent HTTP/2 settings".to_owned();
        is_ready.await.map_err(ended)?;
        Ok(Sender::Http2(sender, limit))
    }

    async fn http1(
        &self,
        stream: Box<dyn ByteStream>,
        closed: &CancellationToken,
        over: &CancellationToken,
    ) -> Result<Sender, String> {
        let (sender, driver) = http1::handshake::<_, Body>(TokioIo::new(stream)).await.map_err(|e| chain(&e))?;
        self.drive(driver, closed, over);
        Ok(Sender::Http1(Mutex::new(Some(sender))))
    }

    fn drive(
        &self,
        driver: impl Future<Output = hyper::Result<()>> + Send + 'static,
        closed: &CancellationToken,
        over: &CancellationToken,
    ) {
        let (closed, over) = (closed.clone(), over.clone().drop_guard());
        self.tasks.spawn(async move {
            if let Some(Err(error)) = closed.run_until_cancelled(driver).await {
                debug!(err = %chain(&error), "Connection to the API server closed");
            }
            drop(over);
        });
    }
}

type Driver = http2::Connection<TokioIo<Box<dyn ByteStream>>, Body, Spawner>;

/// Drives a connection and keeps `limit` at the peer's maximum of concurrent streams; notifies `ready` once the peer's
/// settings have arrived. Polls, because hyper has no event for that.
async fn followed(driver: Driver, limit: Arc<AtomicUsize>, ready: oneshot::Sender<()>) -> hyper::Result<()> {
    let mut driver = pin!(driver);
    while driver.current_max_send_streams() == INITIAL_STREAM_LIMIT {
        tokio::select! {
            ended = &mut driver => return ended,
            () = sleep(SETTINGS_POLL) => {}
        }
    }
    limit.store(driver.current_max_send_streams(), Ordering::Relaxed);
    let _ = ready.send(()); // the dial was cancelled
    poll_fn(|context| {
        let polled = driver.as_mut().poll(context);
        limit.store(driver.current_max_send_streams(), Ordering::Relaxed);
        polled
    })
    .await
}

/// Executor of hyper's tasks; stops them when the connection is closed.
#[derive(Clone)]
struct Spawner {
    tasks: TaskTracker,
    closed: CancellationToken,
}

impl<F> hyper::rt::Executor<F> for Spawner
where
    F: Future + Send + 'static,
    F::Output: Send,
{
    fn execute(&self, future: F) {
        let closed = self.closed.clone();
        self.tasks.spawn(async move {
            closed.run_until_cancelled(future).await;
        });
    }
}

/// Connects to the first address that answers.
pub async fn race(host: &str, port: u16) -> Result<TcpStream, String> {
    let bare = host.trim_start_matches('[').trim_end_matches(']');
    let found = tokio::net::lookup_host((bare, port)).await;
    let found = found.map_err(|e| format!("dial tcp: lookup {host}: {e}"))?;
    let mut addresses = ordered(found).into_iter();
    let (mut trying, mut failed) = (FuturesUnordered::new(), None);
    loop {
        match addresses.next() {
            Some(address) => trying.push(connect(address)),
            None if trying.is_empty() => break,
            None => {}
        }
        let outcome = match addresses.len() {
            0 => trying.next().await,
            _ => timeout(HEAD_START, trying.next()).await.ok().flatten(),
        };
        match outcome {
            Some(Ok(stream)) => return Ok(stream),
            Some(Err(error)) => failed = failed.or(Some(error)),
            None => {}
        }
    }
    Err(failed.unwrap_or_else(|| format!("dial tcp: lookup {host}: no such host")))
}

async fn connect(address: SocketAddr) -> Result<TcpStream, String> {
    let describe = |error: std::io::Error| match error.kind() {
        std::io::ErrorKind::ConnectionRefused => format!("dial tcp {address}: connect: connection refused"),
        _ => format!("dial tcp {address}: connect: {error}"),
    };
    let stream = TcpStream::connect(address).await.map_err(describe)?;
    for outcome in tuned(&stream) {
        if let Err(error) = outcome {
            debug!(err = %error, "Failed to set socket options on connection to the API server");
        }
    }
    Ok(stream)
}

/// Sets TCP options: no delay, and detection of a dead peer on an idle connection.
fn tuned(stream: &TcpStream) -> [std::io::Result<()>; 5] {
    use rustix::net::sockopt;
    let milliseconds = u32::try_from(TCP_USER_TIMEOUT.as_millis()).unwrap_or(u32::MAX);
    [
        stream.set_nodelay(true),
        sockopt::set_socket_keepalive(stream, true).map_err(Into::into),
        sockopt::set_tcp_keepidle(stream, TCP_KEEP_ALIVE).map_err(Into::into),
        sockopt::set_tcp_keepintvl(stream, TCP_KEEP_ALIVE).map_err(Into::into),
        sockopt::set_tcp_user_timeout(stream, milliseconds).map_err(Into::into),
    ]
}
