//! Makes connections: name, addresses raced against each other, proxy, TLS, HTTP (spec 10 §8.1,
//! 01 §10.2).

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
    connection::{Body, Connection, Sender, chain},
    hurry::Hurry,
    tunnel::Tunnel,
};

/// Longest time until a connection can be used.
const PATIENCE: Duration = Duration::from_secs(10);
/// A connection that takes longer than this is not waited for alone, where it must not be waited for.
const SECOND: Duration = Duration::from_secs(3);
/// Longest head of an answer, in bytes.
const HEADERS: u32 = 1 << 20;
/// The next address gets its chance after so long, whatever the first ones do.
const HEAD_START: Duration = Duration::from_millis(300);
/// How often we look whether the peer has told its settings.
const LOOK: Duration = Duration::from_millis(2);
/// Places that no server would offer: the value before the peer has told its settings.
const UNTOLD: usize = 97;
/// What the server may send of one answer before we have taken it, in bytes.
const STREAM_WINDOW: u32 = 1 << 20;
/// What it may send of all answers.
const CONNECTION_WINDOW: u32 = 4 << 20;
const TCP_KEEP_ALIVE: Duration = Duration::from_secs(30);
const TCP_USER_TIMEOUT: Duration = Duration::from_secs(45);

/// How a dead connection is noticed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pings {
    /// A ping after so long without a frame.
    pub idle: Duration,
    /// Dead so long after it.
    pub patience: Duration,
}

/// Where to, and how.
pub struct Dialer {
    /// Name or address of the server.
    pub host: String,
    /// Port.
    pub port: u16,
    /// TLS, and the name the server must have; without it HTTP/1.1 in the clear.
    pub tls: Option<(Arc<ClientConfig>, ServerName<'static>)>,
    /// A proxy on the way.
    pub proxy: Option<Tunnel>,
    /// How a dead connection is noticed.
    pub pings: Pings,
    /// Has it noticed at once.
    pub hurry: Hurry,
    /// Runs connections.
    pub tasks: TaskTracker,
    /// Ends them.
    pub stop: CancellationToken,
    /// Attempts so far; a connection has its number.
    pub attempts: AtomicU64,
}

/// Bytes both ways.
pub trait Stream: AsyncRead + AsyncWrite + Unpin + Send {}
impl<T: AsyncRead + AsyncWrite + Unpin + Send> Stream for T {}

impl Dialer {
    /// Makes a connection within 10 s.
    ///
    /// # Errors
    /// What stands in the way, in words.
    pub async fn dial(&self, epoch: u64) -> Result<Arc<Connection>, String> {
        let id = self.attempts.fetch_add(1, Ordering::Relaxed) + 1;
        let late = |_| format!("dial tcp {}:{}: i/o timeout", self.host, self.port);
        timeout(PATIENCE, self.connect(id, epoch)).await.map_err(late)?
    }

    /// As [`Self::dial`]; what takes longer than 3 s is tried a second time beside it, because
    /// behind one address there may be many servers, of which one hangs.
    ///
    /// # Errors
    /// What stands in the way of the first attempt, in words.
    pub async fn dial_twice(&self, epoch: u64) -> Result<Arc<Connection>, String> {
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

    async fn connect(&self, id: u64, epoch: u64) -> Result<Arc<Connection>, String> {
        let stream: Box<dyn Stream> = match &self.proxy {
            Some(tunnel) => tunnel.dig(&self.host, self.port).await?,
            None => Box::new(race(&self.host, self.port).await?),
        };
        let (stream, is_http2): (Box<dyn Stream>, bool) = match &self.tls {
            None => (stream, false),
            Some((config, name)) => {
                let shaking = TlsConnector::from(config.clone()).connect(name.clone(), stream);
                let stream = shaking.await.map_err(|e| format!("tls: {}", chain(&e)))?;
                let is_http2 = stream.get_ref().1.alpn_protocol() == Some(b"h2");
                (Box::new(stream), is_http2)
            }
        };
        let closed = self.stop.child_token();
        // What is given up before it is done does not stay open.
        let opening = closed.clone().drop_guard();
        let over = CancellationToken::new();
        let sender = match is_http2 {
            true => self.http2(stream, &closed, &over).await?,
            false => self.http1(stream, &closed, &over).await?,
        };
        opening.disarm();
        Ok(Arc::new(Connection { id, sender, epoch, condemned: CancellationToken::new(), closed, over }))
    }

    async fn http2(
        &self,
        stream: Box<dyn Stream>,
        closed: &CancellationToken,
        over: &CancellationToken,
    ) -> Result<Sender, String> {
        let spawner = Spawner { tasks: self.tasks.clone(), closed: closed.clone() };
        let mut builder = http2::Builder::new(spawner);
        builder
            .timer(self.hurry.timer(self.pings))
            .initial_max_send_streams(UNTOLD)
            .max_header_list_size(HEADERS)
            .initial_stream_window_size(STREAM_WINDOW)
            .initial_connection_window_size(CONNECTION_WINDOW)
            .keep_alive_interval(self.pings.idle)
            .keep_alive_timeout(self.pings.patience)
            .keep_alive_while_idle(true);
        let (sender, driver) = builder.handshake::<_, Body>(TokioIo::new(stream)).await.map_err(|e| chain(&e))?;
        let limit = Arc::new(AtomicUsize::new(UNTOLD));
        let (told, is_told) = oneshot::channel();
        self.drive(followed(driver, limit.clone(), told), closed, over);
        // Without the peer's word more would be sent than it takes; and one that says nothing is no server.
        let ended = |_| "the connection was closed before the server said anything".to_owned();
        is_told.await.map_err(ended)?;
        Ok(Sender::Http2(sender, limit))
    }

    async fn http1(
        &self,
        stream: Box<dyn Stream>,
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
                debug!(err = %chain(&error), "A connection to the API server ended");
            }
            drop(over);
        });
    }
}

type Driver = http2::Connection<TokioIo<Box<dyn Stream>>, Body, Spawner>;

/// Drives a connection and keeps `limit` at the number of requests the peer takes; says so when it
/// has told the first time. hyper has no event for that.
async fn followed(driver: Driver, limit: Arc<AtomicUsize>, told: oneshot::Sender<()>) -> hyper::Result<()> {
    let mut driver = pin!(driver);
    while driver.current_max_send_streams() == UNTOLD {
        tokio::select! {
            ended = &mut driver => return ended,
            () = sleep(LOOK) => {}
        }
    }
    limit.store(driver.current_max_send_streams(), Ordering::Relaxed);
    let _ = told.send(()); // who dials has given up
    poll_fn(|context| {
        let polled = driver.as_mut().poll(context);
        limit.store(driver.current_max_send_streams(), Ordering::Relaxed);
        polled
    })
    .await
}

/// Runs what hyper spawns, until the connection is closed.
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

/// Connects to the address that answers first.
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
    let told = |error: std::io::Error| match error.kind() {
        std::io::ErrorKind::ConnectionRefused => format!("dial tcp {address}: connect: connection refused"),
        _ => format!("dial tcp {address}: connect: {error}"),
    };
    let stream = TcpStream::connect(address).await.map_err(told)?;
    for outcome in tuned(&stream) {
        if let Err(error) = outcome {
            debug!(err = %error, "Cannot tune a connection to the API server");
        }
    }
    Ok(stream)
}

/// A peer that is gone is noticed also where nothing is sent.
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
