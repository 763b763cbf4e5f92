//! Connections of the test API server: TLS, HTTP/1.1 or HTTP/2 by ALPN, and connection faults.
//!
//! Implements spec 10a §1, §9.

use std::{
    collections::HashMap,
    fmt, io,
    pin::{Pin, pin},
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering},
    },
    task::{Context, Poll, Waker},
};

use hyper_util::rt::{TokioExecutor, TokioIo};
use rustls::{
    ServerConfig,
    pki_types::{CertificateDer, PrivateKeyDer, pem::PemObject},
};
use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    net::{TcpListener, TcpStream},
    sync::Notify,
    task::JoinHandle,
};
use tokio_rustls::TlsAcceptor;
use tokio_util::sync::CancellationToken;

use super::{ServerState, request_pipeline};
use berth::certificates::CertificatePair;
use berth_sys::tls::SignatureOnly;

/// Connection of a client, with its fault controls.
#[derive(Debug)]
pub struct Connection {
    /// Number, from 1 in the order of arrival.
    pub id: u64,
    /// Negotiated protocol: `h2` or `http/1.1`; empty during the handshake.
    pub alpn: std::sync::OnceLock<&'static str>,
    /// Client certificate chain, leaf first.
    pub(super) certificates: std::sync::OnceLock<Vec<CertificateDer<'static>>>,
    ended: CancellationToken,
    goaway_requested: Notify,
    is_reset: AtomicBool,
    is_black_hole: AtomicBool,
    sleepers: Mutex<Vec<Waker>>,
}

impl Connection {
    fn new(id: u64, is_black: bool) -> Self {
        Self {
            id,
            alpn: std::sync::OnceLock::new(),
            certificates: std::sync::OnceLock::new(),
            ended: CancellationToken::new(),
            goaway_requested: Notify::new(),
            is_reset: AtomicBool::new(false),
            is_black_hole: AtomicBool::new(is_black),
            sleepers: Mutex::default(),
        }
    }

    /// Closes the connection (FIN).
    pub fn close(&self) {
        self.ended.cancel();
    }

    /// Resets the connection (RST).
    pub fn reset(&self) {
        self.is_reset.store(true, Ordering::Relaxed);
        self.ended.cancel();
    }

    /// Whether the connection has been closed.
    pub fn is_ended(&self) -> bool {
        self.ended.is_cancelled()
    }

    /// Waits until the connection has been closed.
    pub async fn closed(&self) {
        self.ended.cancelled().await;
    }

    /// Shuts down gracefully with GOAWAY; requests in progress finish.
    pub fn go_away(&self) {
        self.goaway_requested.notify_one();
    }

    /// Stops all reads and writes of the socket, or resumes them.
    pub fn set_black_hole(&self, is_black: bool) {
        self.is_black_hole.store(is_black, Ordering::Relaxed);
        let sleepers = std::mem::take(&mut *self.sleepers.lock().unwrap_or_else(PoisonError::into_inner));
        sleepers.into_iter().for_each(Waker::wake);
    }

    fn is_black(&self, context: &Context<'_>) -> bool {
        if !self.is_black_hole.load(Ordering::Relaxed) {
            return false;
        }
        let mut sleepers = self.sleepers.lock().unwrap_or_else(PoisonError::into_inner);
        sleepers.retain(|waker| !waker.will_wake(context.waker()));
        sleepers.push(context.waker().clone());
        // Checks again: the flag may have been cleared before this waker was registered.
        self.is_black_hole.load(Ordering::Relaxed)
    }
}

/// TCP socket below TLS, with reset and black-hole behavior.
struct Wire {
    stream: TcpStream,
    connection: Arc<Connection>,
}

impl Drop for Wire {
    fn drop(&mut self) {
        if self.connection.is_reset.load(Ordering::Relaxed) {
            let _ = rustix::net::sockopt::set_socket_linger(&self.stream, Some(std::time::Duration::ZERO)); // else FIN
        }
    }
}

impl AsyncRead for Wire {
    fn poll_read(mut self: Pin<&mut Self>, context: &mut Context<'_>, into: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        if self.connection.is_black(context) {
            return Poll::Pending;
        }
        Pin::new(&mut self.stream).poll_read(context, into)
    }
}

impl AsyncWrite for Wire {
    fn poll_write(mut self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        if self.connection.is_black(context) {
            return Poll::Pending;
        }
        Pin::new(&mut self.stream).poll_write(context, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(context)
    }
}

/// Listener, TLS configuration, and open connections.
pub(super) struct TestListener {
    tls: Mutex<TlsAcceptor>,
    listening: Mutex<Option<JoinHandle<()>>>,
    connections: Mutex<HashMap<u64, Arc<Connection>>>,
    last: AtomicU64,
    /// Whether new connections are black holes.
    pub is_black_hole: AtomicBool,
    /// Maximum of concurrent streams of new HTTP/2 connections.
    pub streams: AtomicU32,
    /// Whether HTTP/2 is not offered.
    pub is_http1_only: AtomicBool,
    identity: Mutex<CertificatePair>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl TestListener {
    pub fn new(identity: CertificatePair) -> Self {
        Self {
            tls: Mutex::new(acceptor(&identity, false)),
            listening: Mutex::default(),
            connections: Mutex::default(),
            last: AtomicU64::new(0),
            is_black_hole: AtomicBool::new(false),
            streams: AtomicU32::new(100),
            is_http1_only: AtomicBool::new(false),
            identity: Mutex::new(identity),
        }
    }

    /// Sets the serving certificate, if given, and rebuilds the TLS configuration of new connections.
    pub fn show(&self, identity: Option<CertificatePair>) {
        if let Some(identity) = identity {
            *lock(&self.identity) = identity;
        }
        *lock(&self.tls) = acceptor(&lock(&self.identity), self.is_http1_only.load(Ordering::Relaxed));
    }

    pub fn listen(&self, shared: &Arc<ServerState>, listener: TcpListener) {
        *lock(&self.listening) = Some(tokio::spawn(accept(shared.clone(), listener)));
    }

    /// Stops accepting connections.
    pub async fn stop(&self) {
        let listening = lock(&self.listening).take();
        if let Some(listening) = listening {
            listening.abort();
            let _ = listening.await; // the expected cancellation error
        }
    }

    pub fn abort(&self) {
        lock(&self.listening).take().inspect(JoinHandle::abort);
        self.connections().iter().for_each(|connection| connection.close());
    }

    /// Open connections, oldest first.
    pub fn connections(&self) -> Vec<Arc<Connection>> {
        let mut all: Vec<_> = lock(&self.connections).values().cloned().collect();
        all.sort_by_key(|connection| connection.id);
        all
    }

    /// Number of connections accepted so far.
    pub fn accepted(&self) -> u64 {
        self.last.load(Ordering::Relaxed)
    }
}

async fn accept(shared: Arc<ServerState>, listener: TcpListener) {
    while let Ok((stream, _)) = listener.accept().await {
        let id = shared.listener.last.fetch_add(1, Ordering::Relaxed) + 1;
        let connection = Arc::new(Connection::new(id, shared.listener.is_black_hole.load(Ordering::Relaxed)));
        lock(&shared.listener.connections).insert(id, connection.clone());
        shared.notify();
        let shared = shared.clone();
        tokio::spawn(async move {
            tokio::select! {
                () = connection.ended.cancelled() => {}
                () = speak(&shared, stream, &connection) => {}
            }
            lock(&shared.listener.connections).remove(&id);
            shared.notify();
        });
    }
}

async fn speak(shared: &Arc<ServerState>, stream: TcpStream, connection: &Arc<Connection>) {
    let _ = stream.set_nodelay(true); // best effort: affects latency only
    let (tls, ending) = (lock(&shared.listener.tls).clone(), shared.ending());
    let Ok(stream) = tls.accept(Wire { stream, connection: connection.clone() }).await else { return };
    let session = stream.get_ref().1;
    let is_two = session.alpn_protocol() == Some(b"h2");
    let certificates = session.peer_certificates().unwrap_or_default();
    let _ = connection.certificates.set(certificates.iter().map(|c| c.clone().into_owned()).collect()); // set only here
    let _ = connection.alpn.set(if is_two { "h2" } else { "http/1.1" }); // set only here
    let service =
        hyper::service::service_fn(|request| request_pipeline::answer(shared.clone(), connection.clone(), request));
    let io = TokioIo::new(stream);
    // A macro, because hyper's two connection types share no trait for this.
    macro_rules! drive {
        ($served:expr) => {{
            let mut served = pin!($served);
            loop {
                tokio::select! {
                    biased;
                    () = connection.goaway_requested.notified() => served.as_mut().graceful_shutdown(),
                    () = ending.cancelled(), if !connection.ended.is_cancelled() => {
                        served.as_mut().graceful_shutdown();
                        let _ = served.as_mut().await; // ends either way
                        return;
                    }
                    _ = served.as_mut() => return,
                }
            }
        }};
    }
    if is_two {
        let mut builder = hyper::server::conn::http2::Builder::new(TokioExecutor::new());
        builder.max_concurrent_streams(shared.listener.streams.load(Ordering::Relaxed));
        drive!(builder.serve_connection(io, service))
    } else {
        let builder = hyper::server::conn::http1::Builder::new();
        drive!(builder.serve_connection(io, service).with_upgrades())
    }
}

fn acceptor(identity: &CertificatePair, is_old: bool) -> TlsAcceptor {
    let chain: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(identity.certificate.as_bytes()).collect();
    let key = PrivateKeyDer::from_pem_slice(identity.key.as_bytes()).expect("failed to parse private key");
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    // Each request validates the certificate itself, on the server's own clock, as a real server does.
    let clients = Arc::new(SignatureOnly::of_clients(&[], &provider));
    let mut config = ServerConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .expect("versions")
        .with_client_cert_verifier(clients)
        .with_single_cert(chain.expect("failed to parse certificate chain"), key)
        .expect("certificate and private key do not match");
    // No session resumption: a resumed session would have no client certificate, or an old one.
    config.session_storage = Arc::new(rustls::server::NoServerSessionStorage {});
    config.send_tls13_tickets = 0;
    config.alpn_protocols =
        if is_old { vec![b"http/1.1".to_vec()] } else { vec![b"h2".to_vec(), b"http/1.1".to_vec()] };
    TlsAcceptor::from(Arc::new(config))
}

/// Error that makes hyper abort the connection.
#[derive(Debug)]
pub struct AbortError;

impl fmt::Display for AbortError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("cut")
    }
}

impl std::error::Error for AbortError {}
