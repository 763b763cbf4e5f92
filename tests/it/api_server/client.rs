//! Minimal HTTP client for tests of the API server; it shares no code with the agent's.

use std::{sync::Arc, time::Duration};

use bytes::{Bytes, BytesMut};
use http::{HeaderMap, Request, Response};
use http_body_util::{BodyExt, Full};
use hyper::body::Incoming;
use hyper_util::rt::{TokioExecutor, TokioIo};
use rustls::{
    ClientConfig, RootCertStore,
    pki_types::{CertificateDer, PrivateKeyDer, ServerName, pem::PemObject},
};
use serde_json::Value;
use tokio::net::TcpStream;

use berth_testkit::api_server::ApiServer;

/// Timeout of a request.
const QUICK: Duration = Duration::from_secs(60);

enum Sender {
    One(hyper::client::conn::http1::SendRequest<Full<Bytes>>),
    Two(hyper::client::conn::http2::SendRequest<Full<Bytes>>),
}

/// One connection.
pub struct Client {
    sender: Sender,
    token: Option<String>,
}

/// A response.
#[derive(Debug)]
pub struct Answer {
    pub code: u16,
    pub headers: HeaderMap,
    pub text: String,
    /// Body as JSON; null if the text is not JSON.
    pub body: Value,
}

fn config(server: &ApiServer, user: Option<(&str, &[&str])>, alpn: &[u8]) -> ClientConfig {
    let mut roots = RootCertStore::empty();
    roots.add(CertificateDer::from_pem_slice(server.authority_pem().as_bytes()).expect("PEM")).expect("a root");
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let builder =
        ClientConfig::builder_with_provider(provider).with_safe_default_protocol_versions().expect("versions");
    let builder = builder.with_root_certificates(roots);
    let mut config = match user {
        None => builder.with_no_client_auth(),
        Some((name, groups)) => {
            let own = server.client(name, groups, 1);
            let chain: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(own.certificate.as_bytes()).collect();
            let key = PrivateKeyDer::from_pem_slice(own.key.as_bytes()).expect("a key");
            builder.with_client_auth_cert(chain.expect("a chain"), key).expect("a pair")
        }
    };
    config.alpn_protocols = vec![alpn.to_vec()];
    config
}

impl Client {
    /// Connects as administrator, over HTTP/2.
    pub async fn admin(server: &ApiServer) -> Self {
        Self::connect(server, Some(("admin", &["system:masters"])), "h2").await.expect("connected")
    }

    /// Connects as that node, over HTTP/2.
    pub async fn node(server: &ApiServer, node: &str) -> Self {
        let name = format!("system:node:{node}");
        Self::connect(server, Some((&name, &["system:nodes"])), "h2").await.expect("connected")
    }

    /// Connects as a user, or without a certificate, over that ALPN protocol.
    pub async fn connect(server: &ApiServer, user: Option<(&str, &[&str])>, alpn: &str) -> Option<Self> {
        let tls = tokio_rustls::TlsConnector::from(Arc::new(config(server, user, alpn.as_bytes())));
        let stream = TcpStream::connect(server.address()).await.ok()?;
        stream.set_nodelay(true).ok()?;
        let name = ServerName::IpAddress(server.address().ip().into());
        let stream = TokioIo::new(tls.connect(name, stream).await.ok()?);
        let sender = if alpn == "h2" {
            let (sender, connection) =
                hyper::client::conn::http2::handshake(TokioExecutor::new(), stream).await.ok()?;
            tokio::spawn(connection);
            Sender::Two(sender)
        } else {
            let (sender, connection) = hyper::client::conn::http1::handshake(stream).await.ok()?;
            tokio::spawn(connection);
            Sender::One(sender)
        };
        Some(Self { sender, token: None })
    }

    pub fn bearer(mut self, token: &str) -> Self {
        self.token = Some(token.to_owned());
        self
    }

    /// Sends a request and returns the response head; `None` if the connection broke.
    pub async fn send(&mut self, method: &str, path: &str, body: Option<&Value>) -> Option<Response<Incoming>> {
        let content_type =
            if method == "PATCH" { "application/strategic-merge-patch+json" } else { "application/json" };
        let mut request = Request::builder().method(method).header("user-agent", "kubelet/v1.36.2 (test)");
        request = match self.sender {
            Sender::One(_) => request.uri(path).header("host", "127.0.0.1"),
            Sender::Two(_) => request.uri(format!("https://127.0.0.1{path}")),
        };
        if body.is_some() {
            request = request.header("content-type", content_type);
        }
        if let Some(token) = &self.token {
            request = request.header("authorization", format!("Bearer {token}"));
        }
        let bytes = body.map(|body| Bytes::from(body.to_string())).unwrap_or_default();
        let request = request.body(Full::new(bytes)).expect("a request");
        match &mut self.sender {
            Sender::One(sender) => {
                sender.ready().await.ok()?;
                sender.send_request(request).await.ok()
            }
            Sender::Two(sender) => sender.send_request(request).await.ok(),
        }
    }

    /// Sends a request and returns the whole response; `None` if the connection broke.
    pub async fn try_ask(&mut self, method: &str, path: &str, body: Option<&Value>) -> Option<Answer> {
        let asked = async {
            let (head, body) = self.send(method, path, body).await?.into_parts();
            let bytes = body.collect().await.ok()?.to_bytes();
            let text = String::from_utf8_lossy(&bytes).into_owned();
            let body = serde_json::from_str(&text).unwrap_or_default();
            Some(Answer { code: head.status.as_u16(), headers: head.headers, text, body })
        };
        tokio::time::timeout(QUICK, asked).await.expect("an answer in time")
    }

    /// Sends a request and returns the whole response.
    pub async fn ask(&mut self, method: &str, path: &str, body: Option<&Value>) -> Answer {
        self.try_ask(method, path, body).await.expect("an answer")
    }

    pub async fn get(&mut self, path: &str) -> Answer {
        self.ask("GET", path, None).await
    }

    /// Opens a watch, read line by line.
    pub async fn watch(&mut self, path: &str) -> Lines {
        let answer = self.send("GET", path, None).await.expect("an answer");
        assert_eq!(answer.status(), 200, "{path}");
        Lines { body: answer.into_body(), rest: BytesMut::new() }
    }
}

/// Lines of a watch response.
pub struct Lines {
    body: Incoming,
    rest: BytesMut,
}

/// Result of reading a watch.
#[derive(Debug, PartialEq)]
pub enum Next {
    /// Event type and object.
    Event(String, Value),
    /// Regular end of the response, with the text of an incomplete line.
    End(String),
    /// The connection broke, with the text of an incomplete line.
    Broken(String),
}

impl Lines {
    pub async fn next(&mut self) -> Next {
        loop {
            if let Some(at) = self.rest.iter().position(|byte| *byte == b'\n') {
                let line = self.rest.split_to(at + 1);
                let mut event: Value = serde_json::from_slice(&line).expect("JSON");
                return Next::Event(event["type"].as_str().unwrap_or_default().to_owned(), event["object"].take());
            }
            let rest = || String::from_utf8_lossy(&self.rest).into_owned();
            match tokio::time::timeout(QUICK, self.body.frame()).await.expect("a line in time") {
                None => return Next::End(rest()),
                Some(Err(_)) => return Next::Broken(rest()),
                Some(Ok(frame)) => self.rest.extend(frame.into_data().unwrap_or_default()),
            }
        }
    }

    /// Type, name, and resource version of the next event.
    pub async fn event(&mut self) -> (String, String, u64) {
        match self.next().await {
            Next::Event(kind, object) => {
                let (name, rv) = (object["metadata"]["name"].as_str().unwrap_or_default(), rv(&object));
                (kind, name.to_owned(), rv)
            }
            other => panic!("no event but {other:?}"),
        }
    }
}

/// Resource version of an object; 0 if it has none.
pub fn rv(object: &Value) -> u64 {
    object["metadata"]["resourceVersion"].as_str().and_then(|text| text.parse().ok()).unwrap_or_default()
}
