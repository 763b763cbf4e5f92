//! Proxy of pod `log`, `exec`, `attach`, and `portforward` to the kubelet of the pod's node.

use std::sync::Arc;

use berth::certificates::{Authority, Validity};
use berth_sys::tls::SignatureOnly;
use http::{Request as HttpRequest, Response};
use http_body_util::{BodyExt, Limited};
use hyper::body::Incoming;
use jiff::Timestamp;
use rustls::{
    ClientConfig,
    pki_types::{CertificateDer, PrivateKeyDer, pem::PemObject},
};
use serde_json::Value;

use super::{
    ServerState,
    request_pipeline::Body,
    resources::ObjectPath,
    rules,
    view::{Caller, Refusal, Request, View},
    wire::AbortError,
};
use crate::kube_front::{Kubelet, pass_on, target};

/// Maximum size of a kubelet's error text that is passed on, in bytes.
const LONGEST: usize = 10_000;

/// Whether the request is proxied to a kubelet.
pub(super) fn is_meant(place: &ObjectPath) -> bool {
    ["log", "exec", "attach", "portforward"].contains(&place.subresource.as_str())
}

/// Proxies the request to the kubelet and returns its response.
///
/// # Errors
/// 403, 404, 500: not allowed, no such pod, or the kubelet is unreachable.
pub(super) async fn pass(
    shared: &Arc<ServerState>,
    caller: &Caller,
    place: &ObjectPath,
    mut request: HttpRequest<Incoming>,
) -> Result<Response<Body>, Refusal> {
    let (kubelet, container) = kubelet(shared, caller, place, request.method() == http::Method::GET)?;
    let mut query = request.uri().query().unwrap_or_default().to_owned();
    if !form_urlencoded::parse(query.as_bytes()).any(|(key, value)| key == "container" && !value.is_empty()) {
        query = format!("{query}&container={container}");
    }
    let failed = |e: anyhow::Error| Refusal::internal(&format!("error dialing backend: {e:#}"));
    let target = target(&kubelet, &place.namespace, &place.name, &place.subresource, &query).await.map_err(failed)?;
    *request.version_mut() = http::Version::HTTP_11; // whatever version the client used
    let answer = pass_on(&kubelet, request, &target).await.map_err(failed)?;
    if place.subresource == "log" && !answer.status().is_success() {
        return Err(refusal_of(answer).await);
    }
    Ok(answer.map(|body| body.map_err(|_| AbortError).boxed_unsync()))
}

/// Converts a kubelet's plain-text error into a `Status`, as the API server does.
async fn refusal_of(answer: Response<axum::body::Body>) -> Refusal {
    let (code, body) = (answer.status().as_u16(), Limited::new(answer.into_body(), LONGEST).collect().await);
    let text = body.map(|body| String::from_utf8_lossy(&body.to_bytes()).into_owned()).unwrap_or_default();
    match code {
        400 => Refusal::bad_request(text),
        500 => Refusal::internal(&text),
        code => Refusal::new(code, "UnexpectedServerResponse", text),
    }
}

/// Kubelet of a pod, and the pod's first container.
fn kubelet(
    shared: &ServerState,
    caller: &Caller,
    place: &ObjectPath,
    is_get: bool,
) -> Result<(Kubelet, String), Refusal> {
    let core = shared.core();
    let asked = Request {
        caller: caller.clone(),
        verb: if is_get { "get" } else { "create" },
        resource: "pods".to_owned(),
        kind: "Pod",
        api_version: "v1".to_owned(),
        subresource: place.subresource.clone(),
        namespace: place.namespace.clone(),
        name: place.name.clone(),
        ..Request::default()
    };
    rules::authorize(&*core, &asked)?;
    let missing = || Refusal::not_found("pods", &place.name);
    let pod = core.get("pods", &place.namespace, &place.name).ok_or_else(missing)?;
    let name = pod["spec"]["nodeName"].as_str().unwrap_or_default();
    let unscheduled = || Refusal::bad_request(format!("pod {} does not have a host assigned", place.name));
    let node = core.get("nodes", "", name).ok_or_else(unscheduled)?;
    let address = address(&node).ok_or_else(|| Refusal::internal("no preferred addresses found"))?;
    let container = pod["spec"]["containers"][0]["name"].as_str().unwrap_or_default().to_owned();
    Ok((Kubelet { address, tls: shared.kubelets.get_or_init(|| tls(&core.rules.authority)).clone() }, container))
}

fn address(node: &Value) -> Option<std::net::SocketAddr> {
    let addresses = node["status"]["addresses"].as_array()?;
    let internal = addresses.iter().find(|address| address["type"] == "InternalIP")?;
    let port = node["status"]["daemonEndpoints"]["kubeletEndpoint"]["Port"].as_u64()?;
    Some((internal["address"].as_str()?.parse::<std::net::IpAddr>().ok()?, u16::try_from(port).ok()?).into())
}

/// TLS client identity towards kubelets; their certificates are not verified, as by default.
fn tls(authority: &berth::certificates::CertificatePair) -> Arc<ClientConfig> {
    let signer = Authority::load(authority.clone()).expect("failed to load the CA");
    let own = signer
        .client("kube-apiserver-kubelet-client", &["system:masters"], Validity::days(Timestamp::now(), 365))
        .expect("failed to issue client certificate");
    let chain: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(own.certificate.as_bytes()).collect();
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let config = ClientConfig::builder_with_provider(provider.clone())
        .with_safe_default_protocol_versions()
        .expect("versions")
        .dangerous()
        .with_custom_certificate_verifier(Arc::new(SignatureOnly::of_servers(&provider)))
        .with_client_auth_cert(
            chain.expect("failed to parse certificate chain"),
            PrivateKeyDer::from_pem_slice(own.key.as_bytes()).expect("failed to parse private key"),
        )
        .expect("certificate and private key do not match");
    Arc::new(config)
}
