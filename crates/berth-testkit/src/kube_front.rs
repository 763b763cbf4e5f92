//! Minimal API server facade for kubectl in front of one kubelet.
//!
//! Serves discovery and the pods that the kubelet lists, and proxies `log`, `exec`, `attach`, and `portforward` to
//! the kubelet with a client certificate, upgrades included.

use std::{convert::Infallible, net::SocketAddr, sync::Arc, time::Duration};

use anyhow::{Context, Result, anyhow};
use axum::body::Body;
use http::{Method, Request, Response, StatusCode, Uri, header};
use http_body_util::BodyExt;
use hyper::body::Incoming;
use hyper_util::rt::TokioIo;
use rustls::{ClientConfig, pki_types::ServerName};
use serde_json::{Value, json};
use tokio::net::{TcpListener, TcpStream};
use tokio_rustls::TlsConnector;
use tokio_util::sync::{CancellationToken, DropGuard};

/// Address and credentials of a kubelet.
pub struct Kubelet {
    /// Listen address.
    pub address: SocketAddr,
    /// Trusts the kubelet's certificate, and has a client certificate of group `system:masters`.
    pub tls: Arc<ClientConfig>,
}

/// Running facade; drop stops it.
pub struct KubeFront {
    /// URL for kubectl's `--server`.
    pub url: String,
    _stop: DropGuard,
}

impl KubeFront {
    /// Starts a facade for a kubelet.
    ///
    /// # Errors
    /// The listener cannot be opened.
    pub async fn start(kubelet: Kubelet) -> Result<Self> {
        let listener = TcpListener::bind("127.0.0.1:0").await?;
        let url = format!("http://{}", listener.local_addr()?);
        let (stop, kubelet) = (CancellationToken::new(), Arc::new(kubelet));
        let stopped = stop.clone();
        tokio::spawn(async move {
            loop {
                let accepted = tokio::select! {
                    () = stopped.cancelled() => return,
                    accepted = listener.accept() => accepted,
                };
                let Ok((stream, _)) = accepted else { continue };
                let (kubelet, stopped) = (kubelet.clone(), stopped.clone());
                tokio::spawn(async move {
                    let service = hyper::service::service_fn(move |request| {
                        let kubelet = kubelet.clone();
                        async move { Ok::<_, Infallible>(answer(&kubelet, request).await) }
                    });
                    let connection = hyper::server::conn::http1::Builder::new()
                        .serve_connection(TokioIo::new(stream), service)
                        .with_upgrades();
                    tokio::select! {
                        () = stopped.cancelled() => {}
                        _ = connection => {}
                    }
                });
            }
        });
        Ok(Self { url, _stop: stop.drop_guard() })
    }
}

async fn answer(kubelet: &Kubelet, request: Request<Incoming>) -> Response<Body> {
    match respond(kubelet, request).await {
        Ok(response) => response,
        Err(error) => status(StatusCode::INTERNAL_SERVER_ERROR, &format!("{error:#}")),
    }
}

async fn respond(kubelet: &Kubelet, request: Request<Incoming>) -> Result<Response<Body>> {
    let path = request.uri().path().trim_start_matches('/').to_owned();
    let parts: Vec<&str> = path.split('/').collect();
    match parts.as_slice() {
        ["version"] => Ok(json_page(&json!({"major": "1", "minor": "36", "gitVersion": "v1.36.2"}))),
        ["api"] => Ok(json_page(&json!({"kind": "APIVersions", "versions": ["v1"]}))),
        ["apis"] => Ok(json_page(&json!({"kind": "APIGroupList", "apiVersion": "v1", "groups": []}))),
        ["api", "v1"] => Ok(json_page(&resources())),
        ["api", "v1", "namespaces", namespace, "pods"] => {
            let items: Vec<Value> =
                pods(kubelet).await?.into_iter().filter(|pod| of(pod, "namespace", namespace)).collect();
            Ok(json_page(&json!({"kind": "PodList", "apiVersion": "v1", "metadata": {}, "items": items})))
        }
        ["api", "v1", "namespaces", namespace, "pods", name] => {
            let is_meant = |pod: &Value| of(pod, "namespace", namespace) && of(pod, "name", name);
            match pods(kubelet).await?.into_iter().find(is_meant) {
                Some(mut pod) => {
                    pod["kind"] = "Pod".into();
                    pod["apiVersion"] = "v1".into();
                    Ok(json_page(&pod))
                }
                None => Ok(status(StatusCode::NOT_FOUND, &format!("pods {name:?} not found"))),
            }
        }
        ["api", "v1", "namespaces", namespace, "pods", name, what] => {
            let query = request.uri().query().unwrap_or_default().to_owned();
            let target = target(kubelet, namespace, name, what, &query).await?;
            pass_on(kubelet, request, &target).await
        }
        _ => Ok(status(StatusCode::NOT_FOUND, "the server could not find the requested resource")),
    }
}

/// Path and query on the kubelet for a subresource of a pod.
pub(super) async fn target(kubelet: &Kubelet, namespace: &str, name: &str, what: &str, query: &str) -> Result<String> {
    let pairs: Vec<(String, String)> = form_urlencoded::parse(query.as_bytes()).into_owned().collect();
    let asked = pairs.iter().find(|(key, value)| key == "container" && !value.is_empty()).map(|(_, v)| v.clone());
    let container = match asked {
        Some(container) => container,
        None => {
            let all = pods(kubelet).await?;
            let pod = all.iter().find(|pod| of(pod, "namespace", namespace) && of(pod, "name", name));
            let first = pod.and_then(|pod| pod["spec"]["containers"][0]["name"].as_str());
            first.context("pod not found")?.to_owned()
        }
    };
    // The kubelet's flag names differ from those of the API.
    let mut kubelets = form_urlencoded::Serializer::new(String::new());
    for (key, value) in &pairs {
        let flag = if value == "true" { "1" } else { "0" };
        match (key.as_str(), what) {
            ("container", _) => {}
            ("stdin", "exec" | "attach") => drop(kubelets.append_pair("input", flag)),
            ("stdout", "exec" | "attach") => drop(kubelets.append_pair("output", flag)),
            ("stderr", "exec" | "attach") => drop(kubelets.append_pair("error", flag)),
            ("tty", "exec" | "attach") => drop(kubelets.append_pair("tty", flag)),
            _ => drop(kubelets.append_pair(key, value)),
        }
    }
    let query = kubelets.finish();
    Ok(match what {
        "log" => format!("/containerLogs/{namespace}/{name}/{container}?{query}"),
        "exec" | "attach" => format!("/{what}/{namespace}/{name}/{container}?{query}"),
        "portforward" => format!("/portForward/{namespace}/{name}?{query}"),
        other => return Err(anyhow!("unsupported subresource {other}")),
    })
}

async fn send(kubelet: &Kubelet, request: Request<Body>) -> Result<Response<Incoming>> {
    let stream = TcpStream::connect(kubelet.address).await?;
    let name = ServerName::IpAddress(kubelet.address.ip().into());
    let stream = TlsConnector::from(kubelet.tls.clone()).connect(name, stream).await?;
    let (mut sender, connection) = hyper::client::conn::http1::handshake(TokioIo::new(stream)).await?;
    tokio::spawn(connection.with_upgrades());
    Ok(sender.send_request(request).await?)
}

async fn pods(kubelet: &Kubelet) -> Result<Vec<Value>> {
    let request = Request::get("/pods").header(header::HOST, kubelet.address.to_string()).body(Body::empty())?;
    let answer = send(kubelet, request).await?;
    let code = answer.status();
    let body = answer.into_body().collect().await?.to_bytes();
    anyhow::ensure!(code.is_success(), "/pods: {code}: {}", String::from_utf8_lossy(&body));
    let list: Value = serde_json::from_slice(&body)?;
    Ok(list["items"].as_array().cloned().unwrap_or_default())
}

pub(super) async fn pass_on(kubelet: &Kubelet, mut request: Request<Incoming>, target: &str) -> Result<Response<Body>> {
    let upgrade = request.headers().contains_key(header::UPGRADE).then(|| hyper::upgrade::on(&mut request));
    let (mut parts, body) = request.into_parts();
    parts.uri = target.parse::<Uri>()?;
    parts.headers.insert(header::HOST, kubelet.address.to_string().parse()?);
    parts.headers.remove(header::AUTHORIZATION);
    let body = if parts.method == Method::GET || upgrade.is_some() { Body::empty() } else { Body::new(body) };
    let mut answer = send(kubelet, Request::from_parts(parts, body)).await?;
    if answer.status() == StatusCode::SWITCHING_PROTOCOLS
        && let Some(client) = upgrade
    {
        let server = hyper::upgrade::on(&mut answer);
        tokio::spawn(async move {
            let both = async { tokio::try_join!(client, server) };
            if let Ok(Ok((client, server))) = tokio::time::timeout(Duration::from_secs(10), both).await {
                let (mut client, mut server) = (TokioIo::new(client), TokioIo::new(server));
                let _ = tokio::io::copy_bidirectional(&mut client, &mut server).await;
            }
        });
        let (parts, _) = answer.into_parts();
        return Ok(Response::from_parts(parts, Body::empty()));
    }
    Ok(answer.map(Body::new))
}

fn of(pod: &Value, key: &str, value: &str) -> bool {
    pod["metadata"][key] == value
}

fn resources() -> Value {
    let one = |name: &str, verbs: &[&str]| json!({"name": name, "singularName": "", "namespaced": true, "kind": "Pod", "verbs": verbs, "shortNames": []});
    let list = [
        one("pods", &["get", "list"]),
        one("pods/log", &["get"]),
        one("pods/exec", &["create", "get"]),
        one("pods/attach", &["create", "get"]),
        one("pods/portforward", &["create", "get"]),
    ];
    json!({"kind": "APIResourceList", "groupVersion": "v1", "resources": list})
}

fn json_page(value: &Value) -> Response<Body> {
    let mut response = Response::new(Body::from(value.to_string()));
    response.headers_mut().insert(header::CONTENT_TYPE, header::HeaderValue::from_static("application/json"));
    response
}

fn status(code: StatusCode, message: &str) -> Response<Body> {
    let body =
        json!({"kind": "Status", "apiVersion": "v1", "status": "Failure", "message": message, "code": code.as_u16()});
    let mut response = json_page(&body);
    *response.status_mut() = code;
    response
}
