//! An API server on loopback, as much of one as the tests need: TLS with an authority of its own, a log of
//! requests, troubles on demand. What it answers is in a file per group of resources; [`route`] is the list.

pub mod reviews;

use std::{
    collections::{HashMap, VecDeque},
    net::SocketAddr,
    path::PathBuf,
    sync::{Arc, Mutex, MutexGuard},
    time::Duration,
};

use berth::agent::certificates::{Authority, Issued, Validity};
use bytes::Bytes;
use http::{HeaderMap, Method, Request, Response, StatusCode};
use http_body_util::{BodyExt, Full};
use hyper::body::Incoming;
use hyper_util::rt::{TokioExecutor, TokioIo};
use jiff::Timestamp;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, pem::PemObject};
use serde_json::{Value, json};
use tokio::{net::TcpListener, sync::Semaphore};
use tokio_rustls::TlsAcceptor;
use tokio_util::sync::CancellationToken;

/// A request that came.
#[derive(Clone, Debug)]
pub struct Logged {
    pub method: Method,
    /// Path and query.
    pub path: String,
    pub headers: HeaderMap,
    /// The body; null where it was no JSON.
    pub body: Value,
}

/// What goes wrong with a request.
#[derive(Clone, Debug)]
pub enum Trouble {
    /// Nothing, after a while.
    Late(Duration),
    /// A status, with `Retry-After` in seconds or without, and no body of use.
    Status(u16, Option<u32>),
    /// The connection is cut.
    Cut,
    /// No answer, ever.
    Hang,
    /// 200 and nothing that makes sense.
    Garbage,
}

/// What it knows; [`reviews`] adds the ways to tell it.
#[derive(Default)]
pub struct State {
    log: Vec<Logged>,
    /// Per path; each is used once, in order.
    troubles: HashMap<String, VecDeque<Trouble>>,
    pub(super) reviews: reviews::Verdicts,
}

/// The server.
pub struct ApiServer {
    address: SocketAddr,
    state: Arc<Mutex<State>>,
    folder: tempfile::TempDir,
    /// Signs its own certificate and those of clients.
    pub authority: Authority,
    listening: tokio::task::JoinHandle<()>,
    /// Ends its connections.
    cut: CancellationToken,
}

impl ApiServer {
    /// Answers from now on.
    pub async fn start() -> Self {
        let validity = Validity::days(Timestamp::now(), 30);
        let authority = Authority::create("test API server", validity).expect("an authority");
        let issued = authority.serving("api", &["127.0.0.1".to_owned()], validity).expect("a certificate");
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let address = listener.local_addr().expect("an address");
        let state: Arc<Mutex<State>> = Arc::default();
        let cut = CancellationToken::new();
        let listening = tokio::spawn(accept(listener, acceptor(&issued), state.clone(), cut.clone()));
        let folder = tempfile::tempdir().expect("a folder");
        let server = Self { address, state, folder, authority, listening, cut };
        std::fs::write(server.kubeconfig(), server.kubeconfig_text()).expect("written");
        server
    }

    /// How to reach it, as administrator.
    pub fn kubeconfig(&self) -> PathBuf {
        self.folder.path().join("kubeconfig")
    }

    fn kubeconfig_text(&self) -> String {
        use base64::Engine;
        let encode = |text: &str| base64::engine::general_purpose::STANDARD.encode(text);
        let validity = Validity::days(Timestamp::now(), 30);
        let admin = self.authority.client("admin", &["system:masters"], validity).expect("a certificate");
        json!({
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "test",
            "contexts": [{"name": "test", "context": {"cluster": "test", "user": "admin"}}],
            "clusters": [{"name": "test", "cluster": {
                "server": format!("https://{}", self.address),
                "certificate-authority-data": encode(&self.authority.own().certificate),
            }}],
            "users": [{"name": "admin", "user": {
                "client-certificate-data": encode(&admin.certificate),
                "client-key-data": encode(&admin.key),
            }}],
        })
        .to_string()
    }

    /// Nobody listens any more; connections there are go on.
    pub async fn stop_listening(&mut self) {
        self.listening.abort();
        let _ = (&mut self.listening).await; // cancelled, as it was told
    }

    /// It is gone: nobody listens, and all connections are cut.
    pub async fn vanish(&mut self) {
        self.stop_listening().await;
        self.cut.cancel();
    }

    /// The next requests for that path have these troubles, one each.
    pub fn trouble(&self, path: &str, troubles: impl IntoIterator<Item = Trouble>) {
        self.state().troubles.entry(path.to_owned()).or_default().extend(troubles);
    }

    /// Requests for that path, as they came.
    pub fn requests(&self, path: &str) -> Vec<Logged> {
        self.state().log.iter().filter(|logged| logged.path == path).cloned().collect()
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().expect("whole")
    }
}

impl Drop for ApiServer {
    fn drop(&mut self) {
        self.listening.abort();
        self.cut.cancel();
    }
}

fn acceptor(issued: &Issued) -> TlsAcceptor {
    let chain: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(issued.certificate.as_bytes()).collect();
    let key = PrivateKeyDer::from_pem_slice(issued.key.as_bytes()).expect("a key");
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let config = rustls::ServerConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .expect("versions")
        .with_no_client_auth()
        .with_single_cert(chain.expect("a chain"), key)
        .expect("a pair");
    TlsAcceptor::from(Arc::new(config))
}

async fn accept(listener: TcpListener, tls: TlsAcceptor, state: Arc<Mutex<State>>, cut: CancellationToken) {
    let connections = Arc::new(Semaphore::new(1000));
    while let Ok((stream, _)) = listener.accept().await {
        let (tls, state, cut) = (tls.clone(), state.clone(), cut.clone());
        let place = connections.clone().acquire_owned().await.expect("open");
        tokio::spawn(async move {
            let Ok(stream) = tls.accept(stream).await else { return };
            let service = hyper::service::service_fn(move |request| answer(state.clone(), request));
            let builder = hyper_util::server::conn::auto::Builder::new(TokioExecutor::new());
            tokio::select! {
                () = cut.cancelled() => {}
                _ = builder.serve_connection_with_upgrades(TokioIo::new(stream), service) => {} // cut on purpose, maybe
            }
            drop(place);
        });
    }
}

/// The connection is to be cut.
#[derive(Debug, thiserror::Error)]
#[error("cut")]
struct Cut;

async fn answer(state: Arc<Mutex<State>>, request: Request<Incoming>) -> Result<Response<Full<Bytes>>, Cut> {
    let (head, body) = request.into_parts();
    let body = body.collect().await.map_err(|_| Cut)?.to_bytes();
    let path = head.uri.path_and_query().map(ToString::to_string).unwrap_or_default();
    let body = serde_json::from_slice(&body).unwrap_or_default();
    let logged = Logged { method: head.method, path, headers: head.headers, body };
    let trouble = {
        let mut state = state.lock().expect("whole");
        state.log.push(logged.clone());
        state.troubles.get_mut(&logged.path).and_then(VecDeque::pop_front)
    };
    match trouble {
        None => {}
        Some(Trouble::Late(by)) => tokio::time::sleep(by).await,
        Some(Trouble::Cut) => return Err(Cut),
        Some(Trouble::Hang) => std::future::pending().await,
        Some(Trouble::Garbage) => return Ok(reply(StatusCode::OK, "{\"kind\":")),
        Some(Trouble::Status(status, after)) => {
            let mut response = reply(StatusCode::from_u16(status).expect("a status"), "");
            response.headers_mut().extend(after.map(|s| (http::header::RETRY_AFTER, s.into())));
            return Ok(response);
        }
    }
    Ok(route(&mut state.lock().expect("whole"), &logged))
}

/// Every resource it has.
fn route(state: &mut State, request: &Logged) -> Response<Full<Bytes>> {
    match (&request.method, request.path.as_str()) {
        (&Method::POST, reviews::TOKENS) => created(&state.reviews.token(&request.body)),
        (&Method::POST, reviews::ACCESSES) => created(&state.reviews.access(&request.body)),
        (_, path) => {
            let message = format!("the server could not find the requested resource ({path})");
            let status = json!({"kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": "NotFound",
                                "code": 404, "message": message});
            reply(StatusCode::NOT_FOUND, &status.to_string())
        }
    }
}

fn created(object: &Value) -> Response<Full<Bytes>> {
    reply(StatusCode::CREATED, &object.to_string())
}

fn reply(status: StatusCode, body: &str) -> Response<Full<Bytes>> {
    let body = Full::new(Bytes::copy_from_slice(body.as_bytes()));
    let builder = Response::builder().status(status).header("content-type", "application/json");
    builder.body(body).expect("an answer")
}
