//! Fixture: a listener on loopback with fake handlers, and a client.

use std::{
    net::{IpAddr, Ipv4Addr, SocketAddr},
    sync::{
        Arc, Mutex,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use async_trait::async_trait;
use axum::{
    http::{StatusCode, header::AUTHORIZATION, request},
    response::{IntoResponse, Response},
};
use berth::{
    certificates::{Authority, CertificatePairPaths, Validity},
    serving::runtime_tls,
};
use berth_metrics::{Registry, ServerMetrics, SliMetrics, StreamingMetrics, exposition::ExpositionFormat};
use berth_server::{
    AuthLayer, Endpoints, ListenerContext, ListenerService, RequestAuthorizer, TlsSource, Tools,
    auth::{AuthenticatedBy, UserInfo},
    ports::{
        CheckpointError, Checkpoints, ContainerLogs, DeviceEntry, DeviceList, Health, LogError, LogQuery, LogSink,
        LogSource, MemoryView, MetricsPage, NodeEntry, NodeLogError, NodeLogs, PodDiagnostics, PodDirectory,
        ProfileError, Profiles, RunningPods, SnapshotPages, Statistics, SummaryForm, TopologyMap, Verbosity,
        streams::{Sandbox, StreamError, StreamProvider, StreamSet},
    },
    routes::statusz::Statusz,
    routing::EnabledEndpoints,
    streaming::{StreamingConfig, StreamingContext},
    tls::{Tls, TlsSettings},
};
use berth_types::{ContainerId, Pod, PodUid, SandboxId, api};
use bytes::Bytes;
use futures::SinkExt;
use jiff::Timestamp;
use rustls::pki_types::CertificateDer;
use serde_json::json;
use tokio::{
    io::{AsyncRead, AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
};
use tokio_util::sync::{CancellationToken, DropGuard};

/// Timeout of a step.
pub const PATIENCE: Duration = Duration::from_secs(60);

/// Latency of the list of running pods.
pub const SLOW: Duration = Duration::from_millis(50);

/// All switches on.
pub const ALL: EnabledEndpoints = EnabledEndpoints {
    debugging: true,
    system_log: true,
    profiling: true,
    debug_flags: true,
    checkpoint: true,
    flagz: true,
    statusz: true,
};

/// Authenticates one token, and authorizes its owner for a list of verbs and subresources.
pub struct FakeAuthFilter {
    pub allowed: Vec<(&'static str, &'static str)>,
    pub asked: Mutex<Vec<String>>,
}

#[async_trait]
impl RequestAuthorizer for FakeAuthFilter {
    async fn authenticate(
        &self,
        parts: &mut request::Parts,
        _: &[CertificateDer<'static>],
    ) -> Result<UserInfo, Response> {
        if parts.headers.get(AUTHORIZATION).is_some_and(|value| value == "Bearer good") {
            return Ok(UserInfo {
                name: "U".to_owned(),
                via: AuthenticatedBy::Token,
                ..UserInfo::unauthenticated_listener()
            });
        }
        Err((StatusCode::UNAUTHORIZED, "Unauthorized").into_response())
    }

    async fn authorize(&self, _: &UserInfo, verb: &str, subresources: &[&str]) -> Result<(), Response> {
        for subresource in subresources {
            self.asked.lock().expect("whole").push(format!("{verb} {subresource}"));
            if self.allowed.iter().any(|(v, s)| (*v == verb || *v == "*") && (s == subresource || *s == "*")) {
                return Ok(());
            }
        }
        Err((StatusCode::FORBIDDEN, "Forbidden").into_response())
    }
}

/// Fake pages, checks, lists, and logs with distinct content.
pub struct FakeHandlers {
    pub panics: bool,
    /// Log followers that are reading now.
    pub readers: AtomicUsize,
    /// Bytes of a statistics page; 0 for one line with its name.
    pub page_bytes: AtomicUsize,
}

impl SnapshotPages for FakeHandlers {
    fn pods(&self) -> Bytes {
        assert!(!self.panics, "as it was told to");
        Bytes::from_static(b"pods\n")
    }

    fn metrics(&self, _: ExpositionFormat, is_zipped: bool) -> Result<Bytes, String> {
        Ok(Bytes::from_static(if is_zipped { b"zipped" } else { b"metrics" }))
    }

    fn process_start(&self) -> u64 {
        7
    }
}

impl Health for FakeHandlers {
    fn names(&self) -> &[&'static str] {
        &["syncloop"]
    }

    fn check(&self, _: &str) -> Option<String> {
        None
    }
}

#[async_trait]
impl RunningPods for FakeHandlers {
    /// Takes [`SLOW`].
    async fn list(&self) -> Result<Bytes, String> {
        tokio::time::sleep(SLOW).await;
        Err("the runtime says no".to_owned())
    }
}

impl PodDiagnostics for FakeHandlers {
    fn why(&self, _: &str, pod: &str) -> Option<Bytes> {
        (pod == "p").then(|| Bytes::from_static(b"{}\n"))
    }
}

impl DeviceList for FakeHandlers {
    fn devices(&self) -> Vec<DeviceEntry> {
        Vec::new()
    }
}

impl Verbosity for FakeHandlers {
    fn set(&self, _: u32) {}
}

#[async_trait]
impl NodeLogs for FakeHandlers {
    async fn open(&self, path: &str) -> Result<NodeEntry, NodeLogError> {
        Err(NodeLogError::Missing(path.to_owned()))
    }

    async fn units(&self) -> Option<String> {
        None
    }

    fn journal(&self, _: &[String]) -> std::io::Result<Box<dyn AsyncRead + Send + Unpin>> {
        Err(std::io::ErrorKind::NotFound.into())
    }
}

#[async_trait]
impl Profiles for FakeHandlers {
    async fn processor(&self, _: Duration) -> Result<Bytes, ProfileError> {
        Err(ProfileError::Busy)
    }

    async fn memory(&self, _: MemoryView, _: Option<Duration>) -> Result<Bytes, ProfileError> {
        Ok(Bytes::from_static(b"memory"))
    }

    fn threads(&self) -> String {
        "threads: 0\n".to_owned()
    }

    fn command_line(&self) -> Bytes {
        Bytes::from_static(b"kubelet")
    }
}

impl PodDirectory for FakeHandlers {
    fn pods(&self) -> Arc<Vec<Arc<Pod>>> {
        Arc::default()
    }

    fn is_active(&self, _: &Pod) -> bool {
        false
    }

    fn status(&self, _: &PodUid) -> Option<Arc<api::PodStatus>> {
        None
    }
}

#[async_trait]
impl Checkpoints for FakeHandlers {
    async fn checkpoint(&self, _: &Arc<Pod>, _: &str, _: Option<i64>) -> Result<String, CheckpointError> {
        Err(CheckpointError::Busy)
    }
}

/// Streams without any pod.
#[async_trait]
impl StreamProvider for FakeHandlers {
    fn pod(&self, _: &str, _: &str) -> Option<Arc<Pod>> {
        None
    }

    async fn running(&self, _: &Pod, _: &str) -> Option<ContainerId> {
        None
    }

    async fn sandbox(&self, _: &Pod) -> Sandbox {
        Sandbox::NotRunning
    }

    async fn exec(&self, _: &ContainerId, _: Vec<String>, _: StreamSet) -> Result<String, StreamError> {
        Err(StreamError::Other("nothing runs".to_owned()))
    }

    async fn attach(&self, _: &ContainerId, _: StreamSet) -> Result<String, StreamError> {
        Err(StreamError::Other("nothing runs".to_owned()))
    }

    async fn port_forward(&self, _: &SandboxId, _: &[u16]) -> Result<String, StreamError> {
        Err(StreamError::Other("nothing runs".to_owned()))
    }

    async fn run(&self, _: &ContainerId, _: &[String]) -> Result<Vec<u8>, StreamError> {
        Err(StreamError::Other("nothing runs".to_owned()))
    }
}

struct ReaderGuard<'a>(&'a AtomicUsize);

impl Drop for ReaderGuard<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::SeqCst);
    }
}

#[async_trait]
impl ContainerLogs for FakeHandlers {
    async fn find(&self, _: &str, pod: &str, container: &str) -> Result<LogSource, LogError> {
        if pod != "p" {
            return Err(LogError::NotFound(format!("pod {pod:?} does not exist")));
        }
        let object = json!({"metadata": {"uid": "u", "name": container, "namespace": "n"}, "spec": {"containers": []}});
        let pod = Pod::new(serde_json::from_value(object).expect("a pod")).expect("complete");
        Ok(LogSource { pod: Arc::new(pod), status: None, instance: None })
    }

    fn instance(&self, source: &LogSource, container: &str, is_previous: bool) -> Result<LogSource, String> {
        if is_previous {
            return Err(format!("previous terminated container {container:?} in pod \"p\" not found"));
        }
        Ok(source.clone())
    }

    /// The pod's name selects the behavior: `endless` writes forever, `silent` never, `broken` fails halfway.
    async fn read(&self, source: &LogSource, _: &LogQuery, out: &mut LogSink<'_>) -> Result<(), String> {
        self.readers.fetch_add(1, Ordering::SeqCst);
        let _reading = ReaderGuard(&self.readers);
        let gone = |e: std::io::Error| e.to_string();
        match source.pod.name() {
            "endless" => loop {
                out.send(vec![b'x'; 64 << 10]).await.map_err(gone)?;
            },
            "silent" => std::future::pending().await,
            "broken" => {
                out.send(b"half\n".to_vec()).await.map_err(gone)?;
                Err("unable to retrieve container logs for containerd://x".to_owned())
            }
            _ => out.send(b"a line\n".to_vec()).await.map_err(gone),
        }
    }
}

#[async_trait]
impl Statistics for FakeHandlers {
    async fn summary(&self, form: SummaryForm) -> Result<Bytes, String> {
        Ok(Bytes::from(format!("{{\"form\":\"{form:?}\"}}")))
    }

    async fn metrics(&self, page: MetricsPage, _: ExpositionFormat, _: bool) -> Result<Bytes, String> {
        match self.page_bytes.load(Ordering::SeqCst) {
            0 => Ok(Bytes::from(format!("# {page:?}\n"))),
            bytes => Ok(Bytes::from(vec![b'#'; bytes])),
        }
    }

    fn process_start(&self) -> u64 {
        1
    }
}

/// A running listener.
pub struct RunningListener {
    pub address: SocketAddr,
    pub auth_filter: Arc<FakeAuthFilter>,
    pub players: Arc<FakeHandlers>,
    pub registry: Registry,
    _stop: DropGuard,
}

impl RunningListener {
    /// Starts a listener with all switches on, and authorization; `allowed` are verbs and subresources.
    pub async fn guarded(allowed: &[(&'static str, &'static str)]) -> Self {
        Self::start(ALL, Some(allowed.to_vec()), false).await
    }

    /// The same over TLS, which HTTP/2 requires; for clients that do not verify the certificate.
    pub async fn secured(allowed: &[(&'static str, &'static str)]) -> Self {
        let authority = Authority::create("test", Validity::days(Timestamp::now(), 1)).expect("an authority");
        let issued = authority.serving("x", &["x".to_owned()], Validity::days(Timestamp::now(), 1)).expect("issued");
        let folder = tempfile::tempdir().expect("a folder");
        let files = CertificatePairPaths::of(folder.path(), "serving");
        files.write(&issued).expect("written");
        let settings = TlsSettings { cert_file: files.certificate, key_file: files.key, ..TlsSettings::default() };
        let tls = Tls::new(settings).await.expect("TLS");
        let source: TlsSource = Arc::new(move || tls.acceptor());
        Self::start_with(ALL, Some(allowed.to_vec()), false, Some(source), None).await
    }

    pub async fn start(
        switches: EnabledEndpoints,
        allowed: Option<Vec<(&'static str, &'static str)>>,
        panics: bool,
    ) -> Self {
        Self::start_with(switches, allowed, panics, None, None).await
    }

    /// Starts a listener without authorization, whose streams are those of a runtime.
    pub async fn streaming(streams: Arc<dyn StreamProvider>) -> Self {
        Self::start_with(ALL, None, false, None, Some(streams)).await
    }

    async fn start_with(
        switches: EnabledEndpoints,
        allowed: Option<Vec<(&'static str, &'static str)>>,
        panics: bool,
        tls: Option<TlsSource>,
        streams: Option<Arc<dyn StreamProvider>>,
    ) -> Self {
        let registry = Registry::new();
        let players =
            Arc::new(FakeHandlers { panics, readers: AtomicUsize::default(), page_bytes: AtomicUsize::default() });
        let has_auth = allowed.is_some();
        let auth_filter = Arc::new(FakeAuthFilter { allowed: allowed.unwrap_or_default(), asked: Mutex::default() });
        let site = ListenerContext {
            switches,
            guard: has_auth.then(|| AuthLayer { authorizer: auth_filter.clone(), streaming_requires_create: true }),
            endpoints: Arc::new(Endpoints {
                health: players.clone(),
                pages: players.clone(),
                running: players.clone(),
                logs: players.clone(),
                follows: berth_server::CallerLimit::new(berth_server::FOLLOWS),
                statistics: players.clone(),
                split_streams: false,
                configz: Bytes::from_static(b"{}"),
                tools: Tools {
                    slis: SliMetrics::new(0.0),
                    statusz: Arc::new(Statusz {
                        started: Timestamp::UNIX_EPOCH,
                        compiler: "rustc".to_owned(),
                        version: "1.36.2".to_owned(),
                        emulated: "1.36".to_owned(),
                    }),
                    flags: Arc::default(),
                    verbosity: players.clone(),
                    node_logs: players.clone(),
                    log_queries: false,
                    profiles: players.clone(),
                    pods: players.clone(),
                    checkpoints: players.clone(),
                    why: players.clone(),
                    devices: players.clone(),
                    topology: Arc::new(TopologyMap::default()),
                },
                streams: StreamingContext::new(
                    StreamingConfig::default(),
                    streams.unwrap_or_else(|| players.clone()),
                    runtime_tls(),
                    StreamingMetrics::new(&registry),
                    CancellationToken::new(),
                ),
            }),
            metrics: ServerMetrics::new(&registry),
        };
        let listening = berth_server::bind(IpAddr::V4(Ipv4Addr::LOCALHOST), 0).await.expect("a port");
        let address = listening.address().expect("bound");
        let stop = CancellationToken::new();
        tokio::spawn(berth_server::serve(listening, ListenerService::Site(Arc::new(site)), tls, stop.clone()));
        Self { address, auth_filter, players, registry, _stop: stop.drop_guard() }
    }

    /// Starts the healthz listener.
    pub async fn healthz() -> Self {
        let registry = Registry::new();
        let players = Arc::new(FakeHandlers {
            panics: false,
            readers: AtomicUsize::default(),
            page_bytes: AtomicUsize::default(),
        });
        let auth_filter = Arc::new(FakeAuthFilter { allowed: Vec::new(), asked: Mutex::default() });
        let listening = berth_server::bind(IpAddr::V4(Ipv4Addr::LOCALHOST), 0).await.expect("a port");
        let (address, stop) = (listening.address().expect("bound"), CancellationToken::new());
        let router = ListenerService::Router(berth_server::healthz_router(players.clone()));
        tokio::spawn(berth_server::serve(listening, router, None, stop.clone()));
        Self { address, auth_filter, players, registry, _stop: stop.drop_guard() }
    }

    pub async fn connect(&self) -> TcpStream {
        TcpStream::connect(self.address).await.expect("it listens")
    }

    /// Sends a raw request, and reads until the server closes.
    pub async fn raw(&self, request: &str) -> String {
        let mut stream = self.connect().await;
        stream.write_all(request.as_bytes()).await.expect("taken");
        let mut answer = Vec::new();
        let _ = tokio::time::timeout(PATIENCE, stream.read_to_end(&mut answer)).await.expect("an end");
        String::from_utf8_lossy(&answer).into_owned()
    }

    /// Sends one request with the valid token; returns status, headers in lower case, and body.
    pub async fn ask(&self, method: &str, target: &str, headers: &str) -> (u16, String, String) {
        let request = format!(
            "{method} {target} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nAuthorization: Bearer good\r\n{headers}\r\n"
        );
        split(&self.raw(&request).await)
    }

    /// The same without a token.
    pub async fn ask_as_stranger(&self, method: &str, target: &str) -> (u16, String, String) {
        split(&self.raw(&format!("{method} {target} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")).await)
    }

    /// Value of a counter or gauge of the server.
    pub fn metric(&self, name: &str, labels: &[(&str, &str)]) -> f64 {
        let families = self.registry.gather();
        let Some(family) = families.iter().find(|family| family.name() == name) else { return 0.0 };
        let has = |metric: &prometheus::proto::Metric| {
            labels.iter().all(|(k, v)| metric.get_label().iter().any(|l| l.name() == *k && l.value() == *v))
        };
        family
            .get_metric()
            .iter()
            .filter(|m| has(m))
            .map(|m| m.get_counter().get_value() + m.get_gauge().get_value() + m.get_histogram().get_sample_sum())
            .sum()
    }
}

/// Sends one raw request to any listener; returns status, headers in lower case, and body.
pub async fn raw(address: SocketAddr, request: &str) -> (u16, String, String) {
    let exchange = async {
        let mut stream = TcpStream::connect(address).await.expect("it listens");
        stream.write_all(request.as_bytes()).await.expect("taken");
        let mut answer = Vec::new();
        let _ = stream.read_to_end(&mut answer).await; // the bytes received so far count
        answer
    };
    let answer = tokio::time::timeout(PATIENCE, exchange).await.expect("an end");
    split(&String::from_utf8_lossy(&answer))
}

fn split(answer: &str) -> (u16, String, String) {
    let (head, body) = answer.split_once("\r\n\r\n").unwrap_or((answer, ""));
    let status = head.split(' ').nth(1).and_then(|code| code.parse().ok()).unwrap_or(0);
    let body = if head.to_lowercase().contains("transfer-encoding: chunked") { unchunk(body) } else { body.to_owned() };
    (status, head.to_lowercase(), body)
}

fn unchunk(mut rest: &str) -> String {
    let mut body = String::new();
    while let Some((size, after)) = rest.split_once("\r\n") {
        let size = usize::from_str_radix(size, 16).unwrap_or(0);
        if size == 0 {
            break;
        }
        body.push_str(after.get(..size).unwrap_or(after));
        rest = after.get(size + 2..).unwrap_or_default();
    }
    body
}
