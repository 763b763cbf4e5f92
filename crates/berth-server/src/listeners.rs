//! HTTP listeners: accept loop, TLS handshake, HTTP/1.1 and HTTP/2, limits, and graceful shutdown.
//!
//! One task accepts, and one task owns each connection. No client can use more than its share: `connection_budget`
//! counts connections, handshakes have a timeout, and `connection` enforces the limits after that. Implements spec 04
//! §2, §10.

use std::{
    io,
    net::{IpAddr, SocketAddr},
    sync::Arc,
    time::Duration,
};

use futures::FutureExt;
use rustix::net::sockopt;
use rustls::pki_types::CertificateDer;
use tokio::{
    io::AsyncWriteExt,
    net::{TcpListener, TcpStream},
};
use tokio_util::{sync::CancellationToken, task::TaskTracker};
use tracing::{debug, error};

use super::{
    connection::{HttpVersion, connection},
    connection_budget::{ConnectionBudget, ConnectionSlot},
    pipeline::{ListenerContext, Peer},
};

/// Timeout of the TLS handshake.
const HANDSHAKE_LIMIT: Duration = Duration::from_secs(10);
/// TCP keep-alive, as in Go: idle time before the first probe and interval between probes, and the number of unanswered
/// probes. Without it, a peer that loses power during a silent stream would occupy the connection forever.
const KEEPALIVE: (Duration, u32) = (Duration::from_secs(15), 9);
/// Retry interval for binding the healthz port.
const RETRY: Duration = Duration::from_secs(5);

/// Returns the current TLS acceptor; certificates change while the agent runs.
pub type TlsSource = Arc<dyn Fn() -> tokio_rustls::TlsAcceptor + Send + Sync>;

/// Service behind a listener.
#[derive(Clone)]
pub enum ListenerService {
    /// The request pipeline.
    Site(Arc<ListenerContext>),
    /// A plain router without authentication, for the healthz port.
    Router(axum::Router),
}

/// Bound TCP listener.
#[derive(Debug)]
pub struct BoundListener(TcpListener);

impl BoundListener {
    /// The local address, with the port that the kernel chose where 0 was requested.
    ///
    /// # Errors
    /// The kernel's error.
    pub fn address(&self) -> io::Result<SocketAddr> {
        self.0.local_addr()
    }
}

/// Binds a TCP port.
///
/// # Errors
/// The kernel's error.
pub async fn bind(address: IpAddr, port: u16) -> io::Result<BoundListener> {
    TcpListener::bind((address, port)).await.map(BoundListener)
}

/// Serves connections until `cancel`, then waits for the open ones, which end within their grace period.
pub async fn serve(
    listening: BoundListener,
    serves: ListenerService,
    tls: Option<TlsSource>,
    cancel: CancellationToken,
) {
    let budget = ConnectionBudget::default();
    let tasks = TaskTracker::new();
    loop {
        let accepted = tokio::select! {
            biased;
            () = cancel.cancelled() => break,
            accepted = listening.0.accept() => accepted,
        };
        let (stream, address) = match accepted {
            Ok(accepted) => accepted,
            Err(error) => {
                // Out of file descriptors, or a connection aborted in the backlog: neither ends the listener.
                debug!(err = %error, "Failed to accept connection");
                tokio::time::sleep(Duration::from_millis(50)).await;
                continue;
            }
        };
        let place = Arc::new(budget.accept(address.ip()));
        prepare(&stream);
        let (serves, acceptor, stop) = (serves.clone(), tls.as_ref().map(|source| source()), cancel.clone());
        tasks.spawn(async move {
            let slot = place.clone();
            let served = match acceptor {
                None => plain(stream, (address, place), serves, &stop).boxed(),
                Some(acceptor) => {
                    async move { secured(stream, (address, place), serves, &acceptor, &stop).await }.boxed()
                }
            };
            tokio::select! {
                () = served => {}
                () = slot.evicted() => debug!(srcIP = %address.ip(), "Too many connections, closing connection"),
            }
        });
    }
    drop(listening); // closes the socket, so that the backlog takes no connections that nobody serves
    tasks.close();
    tasks.wait().await;
}

/// Sets socket options, best effort: without them responses are slower, and a dead peer is detected later.
fn prepare(stream: &TcpStream) {
    let _ = stream.set_nodelay(true);
    let _ = sockopt::set_tcp_keepidle(stream, KEEPALIVE.0)
        .and_then(|()| sockopt::set_tcp_keepintvl(stream, KEEPALIVE.0))
        .and_then(|()| sockopt::set_tcp_keepcnt(stream, KEEPALIVE.1))
        .and_then(|()| sockopt::set_socket_keepalive(stream, true));
}

async fn plain(
    stream: TcpStream,
    (address, place): (SocketAddr, Arc<ConnectionSlot>),
    serves: ListenerService,
    stop: &CancellationToken,
) {
    let peer = Peer { address, certificates: Arc::from([]), slot: place };
    // Fixed protocol: protocol detection would have no deadline.
    connection(stream, HttpVersion::One, peer, serves, stop).await;
}

async fn secured(
    stream: TcpStream,
    (address, place): (SocketAddr, Arc<ConnectionSlot>),
    serves: ListenerService,
    acceptor: &tokio_rustls::TlsAcceptor,
    stop: &CancellationToken,
) {
    let stream = tokio::select! {
        () = stop.cancelled() => return,
        shaken = tokio::time::timeout(HANDSHAKE_LIMIT, tls_handshake(stream, acceptor)) => match shaken {
            Ok(Ok(Some(stream))) => stream,
            Ok(Ok(None)) => return debug!(srcIP = %address, "Client sent an HTTP request to an HTTPS server"),
            Ok(Err(error)) => return debug!(srcIP = %address, err = %error, "TLS handshake failed"),
            Err(_) => return debug!(srcIP = %address, "TLS handshake timed out"),
        }
    };
    let (_, session) = stream.get_ref();
    let certificates: Arc<[CertificateDer<'static>]> =
        session.peer_certificates().unwrap_or_default().iter().map(|c| c.clone().into_owned()).collect();
    let protocol = if session.alpn_protocol() == Some(b"h2") { HttpVersion::Two } else { HttpVersion::One };
    connection(stream, protocol, Peer { address, certificates, slot: place }, serves, stop).await;
}

/// Response to plain HTTP on the TLS port, with kubelet's text.
const NOT_TLS: &[u8] = b"HTTP/1.0 400 Bad Request\r\n\r\nClient sent an HTTP request to an HTTPS server.\n";

/// Completes the TLS handshake; `None` where the client sent plain HTTP, which is answered with [`NOT_TLS`].
async fn tls_handshake(
    mut stream: TcpStream,
    acceptor: &tokio_rustls::TlsAcceptor,
) -> io::Result<Option<tokio_rustls::server::TlsStream<TcpStream>>> {
    let mut head = [0; 5];
    let seen = stream.peek(&mut head).await?;
    if seen == head.len() && matches!(&head, b"GET /" | b"HEAD " | b"POST " | b"PUT /" | b"OPTIO" | b"DELET" | b"PATCH")
    {
        // Reads the request first: closing with unread data resets the connection, and the response would be lost.
        let mut asked = [0; 4096];
        let _ = stream.try_read(&mut asked);
        stream.write_all(NOT_TLS).await?;
        stream.shutdown().await?;
        return Ok(None);
    }
    acceptor.accept(stream).await.map(Some)
}

/// Like [`serve`], but retries every 5 s to bind the port: a failure of the healthz port is never fatal (spec 01 §7.1).
///
/// The first attempt completes before this function returns, so that clients that are notified of the agent's start can
/// connect.
pub async fn serve_persistently(
    address: IpAddr,
    port: u16,
    serves: ListenerService,
    cancel: CancellationToken,
) -> impl Future<Output = ()> + Send {
    let mut tried = bind(address, port).await;
    async move {
        loop {
            match tried {
                Ok(listening) => return serve(listening, serves, None, cancel).await,
                Err(error) => error!(err = %error, "Failed to start healthz server"),
            }
            tokio::select! {
                () = cancel.cancelled() => return,
                () = tokio::time::sleep(RETRY) => {}
            }
            tried = bind(address, port).await;
        }
    }
}
