//! HTTP client for `httpGet` lifecycle hooks (spec 03b §8).
//!
//! Any response counts as success; only a request that cannot be made fails. Certificates are not
//! verified: a container may serve any certificate. An HTTPS hook that is answered in plain HTTP is
//! retried over HTTP without credentials.

use std::{error::Error, net::IpAddr, sync::Arc, time::Duration};

use bytes::Bytes;
use http::{HeaderMap, HeaderName, HeaderValue, Request, Response, Uri, header};
use http_body_util::{BodyExt, Empty};
use hyper::body::{Body, Incoming};
use hyper_rustls::{HttpsConnector, HttpsConnectorBuilder};
use hyper_util::{
    client::legacy::{Client, connect::HttpConnector},
    rt::TokioExecutor,
};
use rustls::ClientConfig;

use berth_sys::tls::{self, NoVerification};
use berth_types::api;

/// Longest response body that is read, in bytes.
const MAX_BODY: u64 = 10 * 1024;
/// Maximum number of redirects.
const MAX_REDIRECTS: usize = 10;
/// Timeout of every hook; a preStop hook is limited by the grace period before that.
const LONGEST: Duration = Duration::from_secs(30 * 60);

type HookClient = Client<HttpsConnector<HttpConnector>, Empty<Bytes>>;

/// A resolved request.
pub(super) struct HttpHook {
    uri: Uri,
    headers: HeaderMap,
    authority: String,
}

/// Why a request could not be made.
struct RequestError {
    text: String,
    /// Whether an HTTPS request was answered in plain HTTP.
    plain_answer: bool,
}

impl HttpHook {
    /// Resolves host, port, path, and headers.
    ///
    /// # Errors
    /// No address is known, the port cannot be resolved, or the URL is invalid.
    pub(super) fn new(
        action: &api::HTTPGetAction,
        ips: &[IpAddr],
        ports: &[api::ContainerPort],
    ) -> Result<Self, String> {
        let host = match action.host.as_deref().filter(|h| !h.is_empty()) {
            Some(host) => host.to_owned(),
            None => ips.first().ok_or("failed to find networking container")?.to_string(),
        };
        let host = if host.contains(':') && !host.starts_with('[') { format!("[{host}]") } else { host };
        let port = port_number(&action.port, ports)?;
        let scheme = action.scheme.as_deref().filter(|s| !s.is_empty()).unwrap_or("http").to_lowercase();
        let path = action.path.as_deref().unwrap_or_default();
        let slash = if path.starts_with('/') { "" } else { "/" };
        let authority = format!("{host}:{port}");
        let url = format!("{scheme}://{authority}{slash}{}", escaped(path));
        let uri = url.parse().map_err(|e| format!("parse {url:?}: {e}"))?;
        Ok(Self { uri, headers: headers(action)?, authority })
    }

    /// `host:port`, as in the event about the fallback.
    pub(super) fn authority(&self) -> &str {
        &self.authority
    }

    /// Sends the request; returns whether it fell back to HTTP.
    ///
    /// # Errors
    /// The transport error.
    pub(super) async fn run(&self) -> Result<bool, String> {
        match tokio::time::timeout(LONGEST, self.run_unbounded()).await {
            Ok(answer) => answer,
            Err(_) => Err(format!("Get \"{}\": timed out after 30m0s", self.uri)),
        }
    }

    async fn run_unbounded(&self) -> Result<bool, String> {
        let client = client()?;
        let failed = match follow(&client, self.uri.clone(), &self.headers).await {
            Ok(()) => return Ok(false),
            Err(failed) if !failed.plain_answer => return Err(failed.text),
            Err(failed) => failed,
        };
        let mut parts = self.uri.clone().into_parts();
        parts.scheme = Some(http::uri::Scheme::HTTP);
        let plain = Uri::from_parts(parts).map_err(|e| e.to_string())?;
        let mut headers = self.headers.clone();
        headers.remove(header::AUTHORIZATION);
        match follow(&client, plain, &headers).await {
            Ok(()) => Ok(true),
            Err(_) => Err(failed.text),
        }
    }
}

/// Escapes all characters that are not allowed in a URI; existing escapes are kept.
fn escaped(path: &str) -> String {
    let mut out = String::with_capacity(path.len());
    for byte in path.bytes() {
        if byte.is_ascii_graphic() && !br#""<>\^`{|}"#.contains(&byte) {
            out.push(char::from(byte));
        } else {
            out.push_str(&format!("%{byte:02X}"));
        }
    }
    out
}

/// Resolves the container port of a hook, by number or name.
fn port_number(
    port: &k8s_openapi::apimachinery::pkg::util::intstr::IntOrString,
    ports: &[api::ContainerPort],
) -> Result<u16, String> {
    use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;
    let number = match port {
        IntOrString::Int(number) => *number,
        IntOrString::String(name) => match ports.iter().find(|p| p.name.as_deref() == Some(name)) {
            Some(found) => found.container_port,
            None => name.parse().map_err(|_| format!("couldn't find port: {name:?} in the container"))?,
        },
    };
    u16::try_from(number).ok().filter(|n| *n > 0).ok_or_else(|| format!("invalid port number: {number}"))
}

/// The hook's headers in order, and default headers where not given; given but empty removes a header.
fn headers(action: &api::HTTPGetAction) -> Result<HeaderMap, String> {
    let mut headers = HeaderMap::new();
    for given in action.http_headers.iter().flatten() {
        let name: HeaderName = given.name.parse().map_err(|_| format!("invalid header name {:?}", given.name))?;
        let value: HeaderValue =
            given.value.parse().map_err(|_| format!("invalid value of header {:?}", given.name))?;
        headers.append(name, value);
    }
    for (name, default) in [(header::USER_AGENT, "kube-lifecycle/1.36"), (header::ACCEPT, "*/*")] {
        match headers.get(&name) {
            None => {
                headers.insert(name, HeaderValue::from_static(default));
            }
            Some(given) if given.is_empty() => {
                headers.remove(name);
            }
            Some(_) => {}
        }
    }
    Ok(headers)
}

/// Sends the request and follows redirects to the same host; a redirect to another host counts as the
/// response.
async fn follow(client: &HookClient, mut uri: Uri, headers: &HeaderMap) -> Result<(), RequestError> {
    for _ in 0..=MAX_REDIRECTS {
        let answer = get(client, &uri, headers).await?;
        let next = redirect(&uri, &answer);
        discard(answer.into_body()).await;
        match next {
            Some(next) => uri = next,
            None => return Ok(()),
        }
    }
    let text = format!("Get \"{uri}\": stopped after {MAX_REDIRECTS} redirects");
    Err(RequestError { text, plain_answer: false })
}

async fn get(client: &HookClient, uri: &Uri, headers: &HeaderMap) -> Result<Response<Incoming>, RequestError> {
    let mut request = Request::new(Empty::new());
    *request.uri_mut() = uri.clone();
    *request.headers_mut() = headers.clone();
    client.request(request).await.map_err(|e| {
        let chain: Vec<String> = causes(&e).map(ToString::to_string).collect();
        let plain_answer = uri.scheme_str() == Some("https") && causes(&e).any(is_plain_answer);
        RequestError { text: format!("Get \"{uri}\": {}", chain.join(": ")), plain_answer }
    })
}

fn causes<'a>(error: &'a (dyn Error + 'static)) -> impl Iterator<Item = &'a (dyn Error + 'static)> {
    std::iter::successors(Some(error), |&e| below(e))
}

/// An I/O error returns the source of its inner error, and so hides the inner error itself.
fn below<'a>(error: &'a (dyn Error + 'static)) -> Option<&'a (dyn Error + 'static)> {
    match error.downcast_ref::<std::io::Error>().and_then(std::io::Error::get_ref) {
        Some(inner) => Some(inner),
        None => error.source(),
    }
}

/// A TLS record never begins like `HTTP/1.1`.
fn is_plain_answer(error: &(dyn Error + 'static)) -> bool {
    let invalid = rustls::Error::InvalidMessage(rustls::InvalidMessage::InvalidContentType);
    error.downcast_ref::<rustls::Error>() == Some(&invalid)
}

fn redirect(from: &Uri, answer: &Response<Incoming>) -> Option<Uri> {
    if !matches!(answer.status().as_u16(), 301 | 302 | 303 | 307 | 308) {
        return None;
    }
    let location = answer.headers().get(header::LOCATION)?.to_str().ok()?;
    let to = resolve(from, location)?;
    (to.host() == from.host()).then_some(to)
}

/// The target of a redirect: absolute, or relative to the redirecting URL.
fn resolve(from: &Uri, location: &str) -> Option<Uri> {
    if location.contains("://") {
        return location.parse().ok();
    }
    let (scheme, authority) = (from.scheme_str()?, from.authority()?);
    if let Some(rest) = location.strip_prefix("//") {
        return format!("{scheme}://{rest}").parse().ok();
    }
    let folder = from.path().rsplit_once('/').map_or("", |(folder, _)| folder);
    let path = if location.starts_with('/') { location.to_owned() } else { format!("{folder}/{location}") };
    format!("{scheme}://{authority}{path}").parse().ok()
}

/// Reads and drops a short body, so that the server sees its response consumed.
async fn discard(body: Incoming) {
    if body.size_hint().upper().is_some_and(|length| length <= MAX_BODY) {
        let _content = body.collect().await;
    }
}

fn client() -> Result<HookClient, String> {
    let provider = Arc::new(tls::provider());
    let tls = ClientConfig::builder_with_provider(provider.clone())
        .with_safe_default_protocol_versions()
        .map_err(|e| e.to_string())?
        .dangerous()
        .with_custom_certificate_verifier(Arc::new(NoVerification::new(&provider)))
        .with_no_client_auth();
    let connector = HttpsConnectorBuilder::new().with_tls_config(tls).https_or_http().enable_http1().build();
    let mut client = Client::builder(TokioExecutor::new());
    // Header names are written as Go does, and malformed headers of the response are ignored as Go
    // does.
    client.pool_max_idle_per_host(0).http1_title_case_headers(true).http1_ignore_invalid_headers_in_responses(true);
    Ok(client.build(connector))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn redirects_resolve_against_where_they_came_from() {
        let from: Uri = "http://10.0.0.1:80/a/b?x=1".parse().expect("a URI");
        for (location, expected) in [
            ("/c", Some("http://10.0.0.1:80/c")),
            ("c", Some("http://10.0.0.1:80/a/c")),
            ("//10.0.0.2/c", Some("http://10.0.0.2/c")),
            ("https://10.0.0.1/c", Some("https://10.0.0.1/c")),
            ("http://[", None),
        ] {
            assert_eq!(resolve(&from, location).map(|u| u.to_string()).as_deref(), expected, "{location}");
        }
    }

    #[tokio::test]
    async fn names_of_headers_are_written_as_go_writes_them() {
        use tokio::io::{AsyncReadExt, AsyncWriteExt};
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let port = listener.local_addr().expect("bound").port();
        let server = tokio::spawn(async move {
            let (mut stream, _) = listener.accept().await.expect("a client");
            let mut head = Vec::new();
            while !head.ends_with(b"\r\n\r\n") {
                head.push(stream.read_u8().await.expect("a head"));
            }
            stream.write_all(b"HTTP/1.1 200 OK\r\nX Y: odd\r\nContent-Length: 0\r\n\r\n").await.expect("sent");
            String::from_utf8(head).expect("text")
        });
        let action = serde_json::json!({"port": port, "httpHeaders": [{"name": "x-api-KEY", "value": "v"}]});
        let action: api::HTTPGetAction = serde_json::from_value(action).expect("an action");
        let hook = HttpHook::new(&action, &["127.0.0.1".parse().expect("an address")], &[]).expect("a hook");
        assert_eq!(hook.run().await, Ok(false));
        let head = server.await.expect("no panic");
        let mut names: Vec<&str> = head.lines().skip(1).filter_map(|line| Some(line.split_once(':')?.0)).collect();
        names.sort_unstable();
        assert_eq!(names, ["Accept", "Host", "User-Agent", "X-Api-Key"]);
    }

    #[test]
    fn hosts_and_ports_are_resolved() {
        let action =
            |value: serde_json::Value| -> api::HTTPGetAction { serde_json::from_value(value).expect("an action") };
        let ports: Vec<api::ContainerPort> =
            serde_json::from_value(serde_json::json!([{"name": "web", "containerPort": 8080}])).expect("ports");
        let url = |value, ips: &[&str]| {
            let ips: Vec<IpAddr> = ips.iter().map(|ip| ip.parse().expect("an address")).collect();
            HttpHook::new(&action(value), &ips, &ports).map(|hook| hook.uri.to_string())
        };
        use serde_json::json;
        assert_eq!(url(json!({"port": "web", "path": "x"}), &["10.0.0.1"]), Ok("http://10.0.0.1:8080/x".to_owned()));
        assert_eq!(url(json!({"port": 80, "scheme": "HTTPS"}), &["fd00::1"]), Ok("https://[fd00::1]:80/".to_owned()));
        assert_eq!(url(json!({"port": "81", "host": "h"}), &[]), Ok("http://h:81/".to_owned()));
        assert_eq!(url(json!({"port": 80}), &[]), Err("failed to find networking container".to_owned()));
        assert!(url(json!({"port": "nope"}), &["10.0.0.1"]).is_err());
        assert!(url(json!({"port": 70000}), &["10.0.0.1"]).is_err());
        let odd = url(json!({"port": 80, "path": "/a b%20c?d=é"}), &["10.0.0.1"]);
        assert_eq!(odd, Ok("http://10.0.0.1:80/a%20b%20c?d=%C3%A9".to_owned()));
    }
}
