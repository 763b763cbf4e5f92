//! Scriptable test server: HTTP/2 or 1.1 over TLS, with a record of all requests per connection.

use std::{
    convert::Infallible,
    net::SocketAddr,
    path::PathBuf,
    sync::{
        Arc, Mutex,
        atomic::{AtomicU64, AtomicUsize, Ordering},
    },
};

use bytes::Bytes;
use http::{HeaderMap, Method, Request, Response};
use http_body_util::{BodyExt, Full, StreamBody, combinators::UnsyncBoxBody};
use hyper::{
    body::{Frame, Incoming},
    server::conn::{http1, http2},
    service::service_fn,
};
use hyper_util::rt::{TokioExecutor, TokioIo};
use rcgen::{BasicConstraints, CertificateParams, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair};
use rustls::pki_types::{CertificateDer, PrivateKeyDer, pem::PemObject};
use tokio::{net::TcpListener, sync::mpsc};
use tokio_rustls::TlsAcceptor;
use tokio_stream::{StreamExt, wrappers::UnboundedReceiverStream};
use tokio_util::sync::CancellationToken;

use crate::transport::*;
use berth_metrics::{ApiClientMetrics, Registry, RestClientMetrics};
use berth_ports::SystemClock;
use berth_sys::tls::SignatureOnly;

/// Certificate authority.
pub struct Authority {
    issuer: Issuer<'static, KeyPair>,
    pub pem: String,
}

impl Authority {
    pub fn new(name: &str) -> Self {
        let key = KeyPair::generate().expect("a key");
        let mut params = CertificateParams::new(Vec::new()).expect("params");
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.distinguished_name.push(rcgen::DnType::CommonName, name);
        let pem = params.self_signed(&key).expect("signed").pem();
        Self { issuer: Issuer::new(params, key), pem }
    }

    /// Issues a certificate; returns it with its key, PEM.
    pub fn issue(&self, name: &str, usage: ExtendedKeyUsagePurpose) -> (String, String) {
        let key = KeyPair::generate().expect("a key");
        let mut params = CertificateParams::new(vec!["127.0.0.1".to_owned(), "localhost".to_owned()]).expect("params");
        params.distinguished_name.push(rcgen::DnType::CommonName, name);
        params.extended_key_usages = vec![usage];
        let certificate = params.signed_by(&key, &self.issuer).expect("signed");
        (certificate.pem(), key.serialize_pem())
    }

    pub fn client(&self, name: &str) -> (String, String) {
        self.issue(name, ExtendedKeyUsagePurpose::ClientAuth)
    }
}

/// Received request.
#[derive(Clone, Debug)]
pub struct ReceivedRequest {
    pub connection: u64,
    pub method: Method,
    pub target: String,
    pub headers: HeaderMap,
    /// Client certificate, DER.
    pub who: Option<Vec<u8>>,
}

/// Response.
pub enum Reply {
    /// Status, additional headers, body.
    Full(u16, Vec<(&'static str, String)>, Vec<u8>),
    /// Streams lines from the channel until its sender is dropped.
    Stream(mpsc::UnboundedReceiver<Bytes>),
    /// No response, ever.
    Hang,
    /// The connection is cut.
    Cut,
}

pub fn json(body: &str) -> Reply {
    Reply::Full(200, vec![("content-type", "application/json".to_owned())], body.as_bytes().to_vec())
}

pub fn status(code: u16) -> Reply {
    Reply::Full(code, Vec::new(), Vec::new())
}

/// Watch that sends nothing and never ends.
pub fn endless() -> Reply {
    let (sender, lines) = mpsc::unbounded_channel();
    std::mem::forget(sender); // dropping it would end the stream
    Reply::Stream(lines)
}

/// Silent watches, and an empty object for every other request.
pub fn quiet(seen: &ReceivedRequest) -> Reply {
    if seen.target.contains("watch=true") { endless() } else { json("{}") }
}

type Answers = Arc<dyn Fn(&ReceivedRequest) -> Reply + Send + Sync>;
type Body = UnsyncBoxBody<Bytes, Infallible>;

/// Settings of the server.
#[derive(Clone, Copy)]
pub struct Settings {
    pub http2: bool,
    pub streams: u32,
}

impl Default for Settings {
    fn default() -> Self {
        Self { http2: true, streams: 100 }
    }
}

/// State shared by the connections.
pub struct State {
    pub seen: Mutex<Vec<ReceivedRequest>>,
    /// Open connections, and all connections ever accepted.
    pub open: AtomicUsize,
    pub made: AtomicU64,
    /// ALPN protocols that clients offered, by connection.
    pub offered: Mutex<Vec<Vec<Vec<u8>>>>,
    answers: Answers,
    settings: Settings,
    /// Cancelled to drain all connections.
    leave: Mutex<CancellationToken>,
    /// Cancelled to cut all connections.
    cut: Mutex<CancellationToken>,
    /// Cancelled to stall all connections, which stay open.
    freeze: Mutex<CancellationToken>,
}

pub struct Server {
    pub address: SocketAddr,
    pub authority: Authority,
    pub state: Arc<State>,
    pub folder: tempfile::TempDir,
    acceptor: TlsAcceptor,
    listening: Mutex<Option<tokio::task::JoinHandle<()>>>,
}

impl Server {
    pub async fn start(
        settings: Settings,
        answers: impl Fn(&ReceivedRequest) -> Reply + Send + Sync + 'static,
    ) -> Self {
        let authority = Authority::new("servers");
        let acceptor = acceptor(&authority, settings.http2);
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let state = Arc::new(State {
            seen: Mutex::default(),
            open: AtomicUsize::new(0),
            made: AtomicU64::new(0),
            offered: Mutex::default(),
            answers: Arc::new(answers),
            settings,
            leave: Mutex::default(),
            cut: Mutex::default(),
            freeze: Mutex::default(),
        });
        let server = Self {
            address: listener.local_addr().expect("an address"),
            authority,
            state,
            folder: tempfile::tempdir().expect("a folder"),
            acceptor,
            listening: Mutex::default(),
        };
        server.listen(listener);
        server
    }

    fn listen(&self, listener: TcpListener) {
        let handle = tokio::spawn(accept(listener, self.acceptor.clone(), self.state.clone()));
        *self.listening.lock().expect("whole") = Some(handle);
    }

    /// Stops listening and cuts all connections.
    pub async fn vanish(&self) {
        let listening = self.listening.lock().expect("whole").take();
        if let Some(listening) = listening {
            listening.abort();
            let _ = listening.await; // it was aborted
        }
        self.cut();
    }

    /// Listens again.
    pub async fn appear(&self) {
        let listener = loop {
            match TcpListener::bind(self.address).await {
                Ok(listener) => break listener,
                Err(_) => tokio::task::yield_now().await, // old connections are still closing
            }
        };
        self.listen(listener);
    }

    /// Restarts with a certificate of that authority.
    pub async fn serve_as(&mut self, authority: &Authority) {
        self.vanish().await;
        self.acceptor = acceptor(authority, self.state.settings.http2);
        self.appear().await;
    }

    pub fn cut(&self) {
        std::mem::take(&mut *self.state.cut.lock().expect("whole")).cancel();
    }

    /// Turns the existing connections into black holes.
    pub fn freeze(&self) {
        std::mem::take(&mut *self.state.freeze.lock().expect("whole")).cancel();
    }

    /// Asks all clients to close their connections once idle.
    pub fn go_away(&self) {
        std::mem::take(&mut *self.state.leave.lock().expect("whole")).cancel();
    }

    pub fn seen(&self) -> Vec<ReceivedRequest> {
        self.state.seen.lock().expect("whole").clone()
    }

    pub fn open(&self) -> usize {
        self.state.open.load(Ordering::SeqCst)
    }

    pub fn made(&self) -> u64 {
        self.state.made.load(Ordering::SeqCst)
    }

    pub fn path(&self, name: &str, content: &str) -> PathBuf {
        let path = self.folder.path().join(name);
        let fresh = self.folder.path().join(format!("{name}.new"));
        std::fs::write(&fresh, content).expect("written");
        std::fs::rename(&fresh, &path).expect("renamed");
        path
    }

    pub fn cluster(&self) -> Cluster {
        Cluster {
            server: format!("https://{}", self.address),
            authorities: Some(InlineOrFile::Text(self.authority.pem.clone().into_bytes())),
            ..Cluster::default()
        }
    }

    pub fn config(&self) -> TransportConfig {
        TransportConfig::new(self.cluster(), User::default())
    }

    pub async fn client(&self) -> Client {
        Client::open(self.config()).await
    }

    /// Waits until the condition is true.
    pub async fn until(&self, what: &str, holds: impl Fn(&Self) -> bool) {
        until(what, || holds(self)).await;
    }
}

/// Waits until the condition is true; yields between checks.
pub async fn until(what: &str, holds: impl Fn() -> bool) {
    let begun = std::time::Instant::now();
    while !holds() {
        assert!(begun.elapsed().as_secs() < 20, "in vain: {what}");
        tokio::time::sleep(std::time::Duration::from_millis(2)).await;
    }
}

/// Transport under test; stops when dropped.
pub struct Client {
    pub transport: Arc<Transport>,
    pub registry: Registry,
    stop: CancellationToken,
}

impl Client {
    pub async fn open(config: TransportConfig) -> Self {
        let (registry, stop) = (Registry::new(), CancellationToken::new());
        let deps = TransportDeps {
            clock: Arc::new(SystemClock),
            requests: RestClientMetrics::new(&registry),
            connections: ApiClientMetrics::new(&registry),
            stop: stop.clone(),
        };
        let (transport, task) = Transport::open(config, deps).await.expect("a transport");
        tokio::spawn(task);
        Self { transport, registry, stop }
    }

    /// Value of a metric series, by the values of its labels.
    pub fn metric(&self, family: &str, labels: &[&str]) -> f64 {
        let families = self.registry.gather();
        let found = families
            .iter()
            .filter(|f| f.name() == family)
            .flat_map(|f| f.get_metric())
            .find(|metric| labels.iter().all(|label| metric.get_label().iter().any(|pair| pair.value() == *label)));
        found.map_or(0.0, |metric| metric.get_counter().get_value() + metric.get_gauge().get_value())
    }
}

impl Drop for Client {
    fn drop(&mut self) {
        self.stop.cancel();
    }
}

/// TLS acceptor with a certificate of that authority.
pub fn acceptor(authority: &Authority, http2: bool) -> TlsAcceptor {
    let (certificate, key) = authority.issue("api", ExtendedKeyUsagePurpose::ServerAuth);
    let chain: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(certificate.as_bytes()).collect();
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let mut config = rustls::ServerConfig::builder_with_provider(provider.clone())
        .with_safe_default_protocol_versions()
        .expect("versions")
        .with_client_cert_verifier(Arc::new(SignatureOnly::of_clients(&[], &provider)))
        .with_single_cert(chain.expect("a chain"), PrivateKeyDer::from_pem_slice(key.as_bytes()).expect("a key"))
        .expect("a pair");
    config.alpn_protocols = if http2 { vec![b"h2".to_vec(), b"http/1.1".to_vec()] } else { vec![b"http/1.1".to_vec()] };
    TlsAcceptor::from(Arc::new(config))
}

async fn accept(listener: TcpListener, tls: TlsAcceptor, state: Arc<State>) {
    while let Ok((stream, _)) = listener.accept().await {
        let (tls, state) = (tls.clone(), state.clone());
        tokio::spawn(async move {
            let Ok(begun) = tokio_rustls::LazyConfigAcceptor::new(Default::default(), stream).await else { return };
            let offered = begun.client_hello().alpn().map(|names| names.map(<[u8]>::to_vec).collect());
            state.offered.lock().expect("whole").push(offered.unwrap_or_default());
            let Ok(stream) = begun.into_stream(tls.config().clone()).await else { return };
            state.open.fetch_add(1, Ordering::SeqCst);
            serve(stream, &state).await;
            state.open.fetch_sub(1, Ordering::SeqCst);
        });
    }
}

async fn serve(stream: tokio_rustls::server::TlsStream<tokio::net::TcpStream>, state: &Arc<State>) {
    let connection = state.made.fetch_add(1, Ordering::SeqCst) + 1;
    let (cut, leave) = (state.cut.lock().expect("whole").clone(), state.leave.lock().expect("whole").clone());
    let is_http2 = stream.get_ref().1.alpn_protocol() == Some(b"h2");
    let who = stream.get_ref().1.peer_certificates().and_then(|chain| chain.first()).map(|leaf| leaf.to_vec());
    let own_cut = cut.child_token();
    let (known, to_cut) = (state.clone(), own_cut.clone());
    let service = service_fn(move |request: Request<Incoming>| {
        let (state, who, cut) = (known.clone(), who.clone(), to_cut.clone());
        async move { Ok::<_, Infallible>(answer(&state, connection, who, request, cut).await) }
    });
    let io = TokioIo::new(stream);
    if is_http2 {
        let mut builder = http2::Builder::new(TokioExecutor::new());
        let mut serving =
            std::pin::pin!(builder.max_concurrent_streams(state.settings.streams).serve_connection(io, service));
        let freeze = state.freeze.lock().expect("whole").clone();
        tokio::select! {
            _ = &mut serving => {}
            () = own_cut.cancelled() => {}
            () = freeze.cancelled() => own_cut.cancelled().await,
            () = leave.cancelled() => {
                serving.as_mut().graceful_shutdown();
                tokio::select! { _ = &mut serving => {} () = own_cut.cancelled() => {} }
            }
        }
    } else {
        let serving = http1::Builder::new().serve_connection(io, service);
        tokio::select! { _ = serving => {} () = own_cut.cancelled() => {} }
    }
}

async fn answer(
    state: &State,
    connection: u64,
    who: Option<Vec<u8>>,
    request: Request<Incoming>,
    cut: CancellationToken,
) -> Response<Body> {
    let (head, body) = request.into_parts();
    let _ = body.collect().await; // the content does not matter
    let target = head.uri.path_and_query().map(ToString::to_string).unwrap_or_default();
    let seen = ReceivedRequest { connection, method: head.method, target, headers: head.headers, who };
    let reply = (state.answers)(&seen);
    state.seen.lock().expect("whole").push(seen);
    match reply {
        Reply::Full(status, headers, body) => {
            let mut response = Response::new(Full::new(Bytes::from(body)).boxed_unsync());
            *response.status_mut() = http::StatusCode::from_u16(status).expect("a status");
            for (name, value) in headers {
                response.headers_mut().append(name, value.parse().expect("a value"));
            }
            response
        }
        Reply::Stream(lines) => {
            let frames = UnboundedReceiverStream::new(lines).map(|line| Ok(Frame::data(line)));
            Response::new(StreamBody::new(frames).boxed_unsync())
        }
        Reply::Hang => std::future::pending().await,
        Reply::Cut => {
            cut.cancel();
            std::future::pending().await
        }
    }
}
