//! Fixture for API parity: the simulator or a real server, and a client without agent code.

use std::{path::Path, sync::Arc, time::Duration};

use base64::{Engine, engine::general_purpose::STANDARD};
use bytes::{Bytes, BytesMut};
use futures::FutureExt;
use http::{Request, Response};
use http_body_util::{BodyExt, Full};
use hyper::body::Incoming;
use hyper_util::rt::TokioIo;
use rustls::{
    ClientConfig, RootCertStore,
    pki_types::{CertificateDer, PrivateKeyDer, ServerName, pem::PemObject},
};
use serde_json::{Value, json};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;

use berth_testkit::api_server::ApiServer;

const PATIENCE: Duration = Duration::from_secs(60);
const SMP: &str = "application/strategic-merge-patch+json";

/// A server, with a namespace and a node of the script.
pub struct Fixture {
    /// Client with administrator rights.
    pub admin: KubeconfigClient,
    /// Client with the node's identity.
    pub node: KubeconfigClient,
    /// API path of the namespace.
    pub space: String,
    /// Name of both the namespace and the node.
    pub name: String,
    _simulator: Option<ApiServer>,
}

/// A response.
#[derive(Debug)]
pub struct Answer {
    pub code: u16,
    /// `Warning` header.
    pub warning: String,
    pub body: Value,
}

impl Answer {
    pub fn at(&self, pointer: &str) -> &Value {
        self.body.pointer(pointer).unwrap_or(&Value::Null)
    }

    pub fn text(&self, pointer: &str) -> String {
        self.at(pointer).as_str().unwrap_or_default().to_owned()
    }

    #[track_caller]
    pub fn is(self, code: u16) -> Self {
        assert_eq!(self.code, code, "{}", self.body);
        self
    }

    #[track_caller]
    pub fn fails_with(self, code: u16, message: &str) -> Self {
        assert_eq!((self.code, self.text("/message").as_str()), (code, message));
        self
    }
}

/// Server address and client credentials of a kubeconfig.
#[derive(Clone)]
pub struct KubeconfigClient {
    address: String,
    name: ServerName<'static>,
    tls: TlsConnector,
    token: Option<String>,
    impersonated: Option<String>,
}

impl KubeconfigClient {
    /// Reads a kubeconfig's current context.
    fn of(kubeconfig: &Path) -> Self {
        let text = std::fs::read_to_string(kubeconfig).expect("a kubeconfig");
        let read: Value = serde_saphyr::from_str(&text).expect("YAML");
        let named = |list: &str, name: &Value| {
            let found = read[list].as_array().and_then(|all| all.iter().find(|one| one["name"] == *name)).cloned();
            found.unwrap_or_else(|| panic!("{name} is not among the {list}"))
        };
        let context = named("contexts", &read["current-context"])["context"].take();
        let (cluster, user) = (named("clusters", &context["cluster"]), named("users", &context["user"]));
        let (cluster, user) = (&cluster["cluster"], &user["user"]);
        let server: http::Uri = cluster["server"].as_str().and_then(|uri| uri.parse().ok()).expect("a server");
        let host = server.host().expect("a host").trim_matches(['[', ']']).to_owned();
        let mut roots = RootCertStore::empty();
        for root in CertificateDer::pem_slice_iter(&pem(cluster, "certificate-authority").expect("an authority")) {
            roots.add(root.expect("PEM")).expect("a root");
        }
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let builder = ClientConfig::builder_with_provider(provider).with_safe_default_protocol_versions();
        let builder = builder.expect("versions").with_root_certificates(roots);
        let config = match (pem(user, "client-certificate"), pem(user, "client-key")) {
            (Some(chain), Some(key)) => {
                let chain: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(&chain).collect();
                let key = PrivateKeyDer::from_pem_slice(&key).expect("a key");
                builder.with_client_auth_cert(chain.expect("a chain"), key).expect("a pair")
            }
            _ => builder.with_no_client_auth(),
        };
        Self {
            address: format!("{}:{}", server.host().expect("a host"), server.port_u16().unwrap_or(443)),
            name: ServerName::try_from(host).expect("a name"),
            tls: TlsConnector::from(Arc::new(config)),
            token: user["token"].as_str().map(str::to_owned),
            impersonated: None,
        }
    }

    /// Sends one request on its own connection.
    async fn ask(&self, method: &str, path: &str, content_type: &str, body: Option<&Value>) -> Response<Incoming> {
        let stream = TcpStream::connect(&self.address).await.expect("connected");
        let stream = self.tls.connect(self.name.clone(), stream).await.expect("TLS");
        let (mut sender, connection) =
            hyper::client::conn::http1::handshake(TokioIo::new(stream)).await.expect("HTTP/1.1");
        tokio::spawn(connection);
        let mut request = Request::builder().method(method).uri(path).header("host", &self.address);
        request = request.header("user-agent", "kubelet/parity").header("content-type", content_type);
        if let Some(token) = &self.token {
            request = request.header("authorization", format!("Bearer {token}"));
        }
        if let Some(user) = &self.impersonated {
            request = request.header("impersonate-user", user).header("impersonate-group", "system:nodes");
            request = request.header("impersonate-group", "system:authenticated");
        }
        let bytes = body.map(|body| Bytes::from(body.to_string())).unwrap_or_default();
        sender.send_request(request.body(Full::new(bytes)).expect("a request")).await.expect("an answer")
    }

    async fn send(&self, method: &str, path: &str, content_type: &str, body: Option<&Value>) -> Answer {
        let answered = async {
            let (head, body) = self.ask(method, path, content_type, body).await.into_parts();
            let bytes = body.collect().await.expect("a body").to_bytes();
            let warning = head.headers.get("warning").and_then(|text| text.to_str().ok()).unwrap_or_default();
            let body = serde_json::from_slice(&bytes).unwrap_or_default();
            Answer { code: head.status.as_u16(), warning: warning.to_owned(), body }
        };
        tokio::time::timeout(PATIENCE, answered).await.expect("in time")
    }

    pub async fn get(&self, path: &str) -> Answer {
        self.send("GET", path, "application/json", None).await
    }

    pub async fn post(&self, path: &str, body: &Value) -> Answer {
        self.send("POST", path, "application/json", Some(body)).await
    }

    pub async fn put(&self, path: &str, body: &Value) -> Answer {
        self.send("PUT", path, "application/json", Some(body)).await
    }

    pub async fn patch(&self, path: &str, body: &Value) -> Answer {
        self.send("PATCH", path, SMP, Some(body)).await
    }

    pub async fn delete(&self, path: &str, options: &Value) -> Answer {
        self.send("DELETE", path, "application/json", Some(options)).await
    }

    /// Opens a watch from the current resource version.
    pub async fn watch(&self, path: &str) -> Events {
        let rv = self.get(path).await.is(200).text("/metadata/resourceVersion");
        self.watch_from(path, &format!("resourceVersion={rv}")).await
    }

    /// Opens a watch with those parameters.
    pub async fn watch_from(&self, path: &str, how: &str) -> Events {
        let joint = if path.contains('?') { '&' } else { '?' };
        let answer = self.ask("GET", &format!("{path}{joint}watch=true&{how}"), "application/json", None).await;
        assert_eq!(answer.status(), 200, "{path}");
        Events { body: answer.into_body(), rest: BytesMut::new() }
    }
}

/// Events of a watch.
pub struct Events {
    body: Incoming,
    rest: BytesMut,
}

impl Events {
    /// Type and object of the next event; `None` at the end.
    async fn read(&mut self) -> Option<(String, Value)> {
        loop {
            if let Some(at) = self.rest.iter().position(|byte| *byte == b'\n') {
                let line = self.rest.split_to(at + 1);
                let mut event: Value = serde_json::from_slice(&line).expect("JSON");
                return Some((event["type"].as_str().unwrap_or_default().to_owned(), event["object"].take()));
            }
            let frame = tokio::time::timeout(PATIENCE, self.body.frame()).await.expect("in time")?;
            self.rest.extend(frame.expect("a whole stream").into_data().unwrap_or_default());
        }
    }

    /// The next event.
    pub async fn next(&mut self) -> (String, Value) {
        self.read().await.expect("an event")
    }

    /// All events until the end.
    pub async fn rest(mut self) -> Vec<(String, Value)> {
        let mut all = Vec::new();
        while let Some(event) = self.read().await {
            all.push(event);
        }
        all
    }

    /// Asserts that no event is pending.
    #[track_caller]
    pub fn none_yet(&mut self) {
        let next = self.read().now_or_never();
        assert!(next.is_none(), "{next:?}");
    }
}

/// PEM bytes of a kubeconfig field, inline or in a file.
fn pem(of: &Value, key: &str) -> Option<Vec<u8>> {
    let inline = of[format!("{key}-data")].as_str().map(|text| STANDARD.decode(text).expect("base64"));
    inline.or_else(|| of[key].as_str().map(|file| std::fs::read(file).expect("readable")))
}

impl Fixture {
    /// Creates a namespace and a node for a rule.
    pub async fn new(rule: &str) -> Self {
        let name = format!("parity-{rule}-{}", std::process::id());
        let (admin, node, simulator) = match std::env::var_os("BERTH_TEST_APISERVER") {
            Some(file) => {
                let admin = KubeconfigClient::of(file.as_ref());
                (admin.clone(), KubeconfigClient { impersonated: Some(format!("system:node:{name}")), ..admin }, None)
            }
            None => {
                let server = ApiServer::start().await;
                (
                    KubeconfigClient::of(&server.kubeconfig()),
                    KubeconfigClient::of(&server.node_kubeconfig(&name)),
                    Some(server),
                )
            }
        };
        let space = format!("/api/v1/namespaces/{name}");
        let world = Self { admin, node, space, name: name.clone(), _simulator: simulator };
        let named = |kind: &str| json!({"kind": kind, "apiVersion": "v1", "metadata": {"name": name}});
        world.admin.post("/api/v1/namespaces", &named("Namespace")).await.is(201);
        world.admin.post("/api/v1/nodes", &named("Node")).await.is(201);
        let account = format!("{}/serviceaccounts/default", world.space);
        world.until(|| world.admin.get(&account), |answer| answer.code == 200).await;
        world
    }

    pub async fn until<F: Future<Output = Answer>>(
        &self,
        ask: impl Fn() -> F,
        is_it: impl Fn(&Answer) -> bool,
    ) -> Answer {
        let found = async {
            loop {
                let answer = ask().await;
                if is_it(&answer) {
                    return answer;
                }
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        };
        tokio::time::timeout(PATIENCE, found).await.expect("in time")
    }

    /// A pod with a scheduler name that nobody serves.
    pub fn pod(&self, name: &str, node: &str) -> Value {
        json!({"kind": "Pod", "apiVersion": "v1", "metadata": {"name": name},
            "spec": {"nodeName": node, "schedulerName": "nobody", "containers": [{"name": "c", "image": "i:1"}]}})
    }

    /// Creates a pod bound to the script's node; returns its path and itself.
    pub async fn bound(&self, name: &str) -> (String, Answer) {
        let pod = self.admin.post(&format!("{}/pods", self.space), &self.pod(name, &self.name)).await.is(201);
        (format!("{}/pods/{name}", self.space), pod)
    }

    pub async fn end(self) {
        self.admin.delete(&format!("{}/pods", self.space), &json!({"gracePeriodSeconds": 0})).await;
        self.admin.delete(&self.space, &json!({})).await;
        self.admin.delete(&format!("/api/v1/nodes/{}", self.name), &json!({})).await;
    }
}
