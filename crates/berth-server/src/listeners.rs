//! Listeners: TCP, TLS where asked for, HTTP/1.1 and 2, each with limits, and their orderly end.
//!
//! One task accepts, one task owns a connection. Nobody can hold more than a share: connections
//! are counted (`connection_budget`); handshakes have an end, and what follows has limits of its
//! own (`connection`). Spec 04 §2, §10.

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
    connection::{Protocol, connection},
    connection_budget::{ConnectionBudget, ConnectionPlace},
    pipeline::{Peer, Site},
};

/// Longest TLS handshake.
const HANDSHAKE_LIMIT: Duration = Duration::from_secs(10);
/// How long a peer may be silent before the kernel asks whether it is there and between such
/// questions, and how many may stay without an answer, as in Go: who lost power in the middle of
/// a silent stream would hold it for ever.
const KEEPALIVE: (Duration, u32) = (Duration::from_secs(15), 9);
/// Pause between tries to open the healthz port.
const RETRY: Duration = Duration::from_secs(5);

/// Gives the acceptor that holds now; certificates change while the agent runs.
pub type TlsSource = Arc<dyn Fn() -> tokio_rustls::TlsAcceptor + Send + Sync>;

/// What a listener serves.
#[derive(Clone)]
pub enum Serves {
    /// The pipeline.
    Site(Arc<Site>),
    /// A router, for the healthz port.
    Router(axum::Router),
}

/// A bound listener.
#[derive(Debug)]
pub struct Listening(TcpListener);

impl Listening {
    /// The address it listens on, with the port the kernel chose where 0 was asked for.
    ///
    /// # Errors
    /// The kernel's.
    pub fn address(&self) -> io::Result<SocketAddr> {
        self.0.local_addr()
    }
}

/// Binds a TCP port.
///
/// # Errors
/// The kernel's error.
pub async fn bind(address: IpAddr, port: u16) -> io::Result<Listening> {
    TcpListener::bind((address, port)).await.map(Listening)
}

/// Serves until cancelled, then lets open requests finish up to a limit.
pub async fn serve(listening: Listening, serves: Serves, tls: Option<TlsSource>, cancel: CancellationToken) {
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
                // Out of descriptors, or a connection that died in the queue: neither ends the listener.
                debug!(err = %error, "Cannot accept a connection");
                tokio::time::sleep(Duration::from_millis(50)).await;
                continue;
            }
        };
        let place = Arc::new(budget.accept(address.ip()));
        prepare(&stream);
        let (serves, acceptor, stop) = (serves.clone(), tls.as_ref().map(|source| source()), cancel.clone());
        tasks.spawn(async move {
            let held = place.clone();
            let served = match acceptor {
                None => plain(stream, (address, place), serves, &stop).boxed(),
                Some(acceptor) => {
                    async move { secured(stream, (address, place), serves, &acceptor, &stop).await }.boxed()
                }
            };
            tokio::select! {
                () = served => {}
                () = held.evicted() => debug!(srcIP = %address.ip(), "Too many connections; this one is closed"),
            }
        });
    }
    drop(listening); // nobody waits in a queue that is not served any more
    tasks.close();
    tasks.wait().await;
}

/// Best effort: without it answers are slower, and who went without a word is missed later.
fn prepare(stream: &TcpStream) {
    let _ = stream.set_nodelay(true);
    let _ = sockopt::set_tcp_keepidle(stream, KEEPALIVE.0)
        .and_then(|()| sockopt::set_tcp_keepintvl(stream, KEEPALIVE.0))
        .and_then(|()| sockopt::set_tcp_keepcnt(stream, KEEPALIVE.1))
        .and_then(|()| sockopt::set_socket_keepalive(stream, true));
}

async fn plain(
    stream: TcpStream,
    (address, place): (SocketAddr, Arc<ConnectionPlace>),
    serves: Serves,
    stop: &CancellationToken,
) {
    let peer = Peer { address, certificates: Arc::from([]), place };
    // One protocol, known beforehand: finding out which would have no deadline.
    connection(stream, Protocol::One, peer, serves, stop).await;
}

async fn secured(
    stream: TcpStream,
    (address, place): (SocketAddr, Arc<ConnectionPlace>),
    serves: Serves,
    acceptor: &tokio_rustls::TlsAcceptor,
    stop: &CancellationToken,
) {
    let stream = tokio::select! {
        () = stop.cancelled() => return,
        shaken = tokio::time::timeout(HANDSHAKE_LIMIT, shake_hands(stream, acceptor)) => match shaken {
            Ok(Ok(Some(stream))) => stream,
            Ok(Ok(None)) => return debug!(srcIP = %address, "A client speaks HTTP where TLS is spoken"),
            Ok(Err(error)) => return debug!(srcIP = %address, err = %error, "TLS handshake failed"),
            Err(_) => return debug!(srcIP = %address, "TLS handshake took too long"),
        }
    };
    let (_, session) = stream.get_ref();
    let certificates: Arc<[CertificateDer<'static>]> =
        session.peer_certificates().unwrap_or_default().iter().map(|c| c.clone().into_owned()).collect();
    let protocol = if session.alpn_protocol() == Some(b"h2") { Protocol::Two } else { Protocol::One };
    connection(stream, protocol, Peer { address, certificates, place }, serves, stop).await;
}

/// What a client is told that has forgotten the `s` of `https`, as the reference says it.
const NOT_TLS: &[u8] = b"HTTP/1.0 400 Bad Request\r\n\r\nClient sent an HTTP request to an HTTPS server.\n";

/// `None` where the client speaks HTTP without TLS; it has been told.
async fn shake_hands(
    mut stream: TcpStream,
    acceptor: &tokio_rustls::TlsAcceptor,
) -> io::Result<Option<tokio_rustls::server::TlsStream<TcpStream>>> {
    let mut head = [0; 5];
    let seen = stream.peek(&mut head).await?;
    if seen == head.len() && matches!(&head, b"GET /" | b"HEAD " | b"POST " | b"PUT /" | b"OPTIO" | b"DELET" | b"PATCH")
    {
        // What is read is not answered with a reset, which would take the words with it.
        let mut asked = [0; 4096];
        let _ = stream.try_read(&mut asked);
        stream.write_all(NOT_TLS).await?;
        stream.shutdown().await?;
        return Ok(None);
    }
    acceptor.accept(stream).await.map(Some)
}

/// Like [`serve`], binding again every 5 s where the port cannot be had: the healthz port is
/// never fatal (spec 01 §7.1).
///
/// The first try is over when this returns: whoever is told then that the agent has started may ask.
pub async fn serve_persistently(
    address: IpAddr,
    port: u16,
    serves: Serves,
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
