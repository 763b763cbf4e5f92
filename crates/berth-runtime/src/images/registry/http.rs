//! Registry HTTP requests: authentication, redirects, retries, timeouts.
//!
//! Credentials and configured headers are sent to one host only: a redirect to another host drops them, and a challenge
//! from that host is ignored. Redirects and token realms from HTTPS to plain HTTP are refused.
//! Implements spec 09b §4.2, §4.3.

use std::time::{Duration, Instant};

use bytes::Bytes;
use http::{HeaderMap, HeaderValue, Method, Request, Response, StatusCode, Uri, header};
use http_body_util::{BodyExt, Full};
use hyper::body::Incoming;

use super::{
    auth::{self, Challenge, RegistryAuth},
    client::{self, HttpClient},
    hosts::Endpoint,
};
use crate::images::error::ImageError;

/// Timeout until the response headers arrive, including connect and TLS; also the timeout of a short body.
const FIRST_BYTE: Duration = Duration::from_secs(50);
const MOST_REDIRECTS: usize = 10;
/// Maximum retries of a request when the server sends `Retry-After`.
const RETRIES: u32 = 3;
/// Delay before the only retry of a request that failed without `Retry-After`.
const PAUSE: Duration = Duration::from_millis(250);
/// A request that failed later than this is not retried here: other pulls may wait for this one, and the kubelet's
/// back-off retries it.
const QUICK: Duration = Duration::from_secs(3);
/// Maximum `Retry-After` that is honored, seconds.
const LONGEST_WAIT: u64 = 60;
/// Maximum size of a token server's response, bytes.
const LONGEST_TOKEN: u64 = 1 << 20;

/// Why an endpoint did not serve a request.
#[derive(Clone, Debug)]
pub enum EndpointFailure {
    /// The content does not exist there.
    NotFound,
    /// Authentication or authorization failed.
    Denied(String),
    /// The endpoint is unreachable or failed temporarily.
    Unavailable(String),
    /// A permanent failure.
    Other(ImageError),
}

/// A registry endpoint with its HTTP client and authentication.
pub struct EndpointClient {
    /// Configuration of the endpoint.
    pub endpoint: Endpoint,
    client: HttpClient,
    identity: RegistryAuth,
    /// Token scope if the challenge names none.
    scope: String,
    authorization: tokio::sync::Mutex<Option<String>>,
}

impl EndpointClient {
    /// Creates an endpoint's client; does not connect.
    ///
    /// # Errors
    /// The CA certificates or client certificates cannot be read.
    pub fn new(endpoint: Endpoint, identity: RegistryAuth, path: &str) -> Result<Self, ImageError> {
        let client = client::of(&endpoint)?;
        let token = match &identity {
            RegistryAuth::Bearer(token) => Some(format!("Bearer {token}")),
            _ => None,
        };
        let scope = format!("repository:{path}:pull");
        Ok(Self { endpoint, client, identity, scope, authorization: tokio::sync::Mutex::new(token) })
    }

    /// The plain HTTP endpoint to fall back to, if that is allowed.
    pub fn http_fallback(&self) -> Option<Endpoint> {
        let can = self.endpoint.falls_back && self.endpoint.scheme == "https";
        can.then(|| Endpoint { scheme: "http".into(), ..self.endpoint.clone() })
    }

    /// Sends a request, with retries where they may help; returns a response with success status or 416.
    ///
    /// # Errors
    /// The refusal after the last attempt.
    pub async fn request(
        &self,
        method: Method,
        path: &str,
        headers: HeaderMap,
    ) -> Result<Response<Incoming>, EndpointFailure> {
        let url = format!("{}://{}{}{path}", self.endpoint.scheme, self.endpoint.authority, self.endpoint.prefix);
        let mut attempt = 0;
        loop {
            attempt += 1;
            let begun = Instant::now();
            let answer = self.authorized(&method, &url, &headers).await;
            let once = (attempt == 1 && begun.elapsed() < QUICK).then_some(PAUSE);
            let pause = match &answer {
                Ok(answer) => match retry_after(answer) {
                    Some(Some(asked)) => (attempt <= RETRIES).then_some(asked),
                    Some(None) => once,
                    None => None,
                },
                // With a plain HTTP fallback, that is tried without delay.
                Err(EndpointFailure::Unavailable(_)) if self.http_fallback().is_none() => once,
                Err(_) => None,
            };
            let Some(pause) = pause else {
                return self.check_status(&method, &url, answer?);
            };
            let jitter = Duration::from_millis(rand::random::<u64>() % 250);
            tokio::time::sleep(pause + jitter).await;
        }
    }

    fn check_status(
        &self,
        method: &Method,
        url: &str,
        answer: Response<Incoming>,
    ) -> Result<Response<Incoming>, EndpointFailure> {
        let status = answer.status();
        let unexpected = || format!("unexpected status from {method} request to {url}: {status}");
        match status {
            _ if status.is_success() => Ok(answer),
            StatusCode::RANGE_NOT_SATISFIABLE => Ok(answer),
            StatusCode::NOT_FOUND => Err(EndpointFailure::NotFound),
            StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN => Err(EndpointFailure::Denied(unexpected())),
            _ if status.is_server_error() || status == StatusCode::TOO_MANY_REQUESTS => {
                Err(EndpointFailure::Unavailable(unexpected()))
            }
            _ => Err(EndpointFailure::Other(ImageError::bad_content(unexpected()))),
        }
    }

    /// Sends a request, and after a challenge of the registry once more with authorization. A challenge of a host that
    /// the registry redirected to is ignored: its realm would receive the registry's credentials.
    async fn authorized(
        &self,
        method: &Method,
        url: &str,
        headers: &HeaderMap,
    ) -> Result<Response<Incoming>, EndpointFailure> {
        let known = self.authorization.lock().await.clone();
        let (answer, is_registry) = self.follow(method, url, headers, known.as_deref()).await?;
        if answer.status() != StatusCode::UNAUTHORIZED || !is_registry {
            return Ok(answer);
        }
        let challenges =
            answer.headers().get_all(header::WWW_AUTHENTICATE).iter().filter_map(|value| value.to_str().ok());
        let Some(challenge) = challenges.filter_map(auth::challenge).next() else { return Ok(answer) };
        let authorization = match (challenge, &self.identity) {
            (Challenge::Basic, RegistryAuth::Basic(user, password)) => auth::basic(user, password),
            (Challenge::Basic, _) | (_, RegistryAuth::Bearer(_)) => return Ok(answer),
            (Challenge::Bearer { realm, service, scope }, _) => {
                let scope = if scope.is_empty() { self.scope.clone() } else { scope };
                format!("Bearer {}", self.token(&realm, &service, &scope).await?)
            }
        };
        *self.authorization.lock().await = Some(authorization.clone());
        Ok(self.follow(method, url, headers, Some(&authorization)).await?.0)
    }

    async fn token(&self, realm: &str, service: &str, scope: &str) -> Result<String, EndpointFailure> {
        let failed = |text: String| EndpointFailure::Denied(format!("failed to authorize: {text}"));
        let (method, url, headers, body) = self.token_request(realm, service, scope).map_err(failed)?;
        let answer =
            self.send(&method, &url, &headers, body.into()).await.map_err(|error| failed(refusal_text(&error)))?;
        let status = answer.status();
        if !status.is_success() {
            return Err(failed(format!("unexpected status from {method} request to {realm}: {status}")));
        }
        let bytes = body_bytes(answer, LONGEST_TOKEN).await.map_err(|error| failed(error.text))?;
        auth::token(&bytes).map_err(|error| failed(error.text))
    }

    /// Token request: method, URL, headers, body.
    fn token_request(
        &self,
        realm: &str,
        service: &str,
        scope: &str,
    ) -> Result<(Method, String, HeaderMap, String), String> {
        let uri: Uri = realm.parse().map_err(|_| format!("invalid token realm {realm:?}"))?;
        let is_plain = uri.scheme_str() == Some("http") && self.endpoint.scheme == "https";
        if is_plain || !matches!(uri.scheme_str(), Some("http" | "https")) {
            return Err(format!("token realm {realm:?} is refused"));
        }
        let mut query = form_urlencoded::Serializer::new(String::new());
        query.append_pair("service", service).append_pair("scope", scope);
        let mut headers = HeaderMap::new();
        if let RegistryAuth::Refresh(token) = &self.identity {
            query.append_pair("grant_type", "refresh_token").append_pair("refresh_token", token);
            query.append_pair("client_id", "berth");
            let kind = HeaderValue::from_static("application/x-www-form-urlencoded");
            headers.insert(header::CONTENT_TYPE, kind);
            return Ok((Method::POST, realm.to_owned(), headers, query.finish()));
        }
        if let RegistryAuth::Basic(user, password) = &self.identity {
            query.append_pair("account", user);
            let value = HeaderValue::from_str(&auth::basic(user, password)).map_err(|error| error.to_string())?;
            headers.insert(header::AUTHORIZATION, value);
        }
        let separator = if realm.contains('?') { '&' } else { '?' };
        Ok((Method::GET, format!("{realm}{separator}{}", query.finish()), headers, String::new()))
    }

    /// Follows redirects. Returns the last response, and whether only the first host was contacted.
    async fn follow(
        &self,
        method: &Method,
        url: &str,
        headers: &HeaderMap,
        authorization: Option<&str>,
    ) -> Result<(Response<Incoming>, bool), EndpointFailure> {
        let (mut url, mut is_registry) = (url.to_owned(), true);
        let mut headers = headers.clone();
        for (name, value) in &self.endpoint.headers {
            let name = http::HeaderName::try_from(name.as_str());
            if let (Ok(name), Ok(value)) = (name, HeaderValue::from_str(value)) {
                headers.append(name, value);
            }
        }
        if let Some(value) = authorization.and_then(|text| HeaderValue::from_str(text).ok()) {
            headers.insert(header::AUTHORIZATION, value);
        }
        for _ in 0..=MOST_REDIRECTS {
            let answer = self.send(method, &url, &headers, Bytes::new()).await?;
            let is_redirect = matches!(answer.status().as_u16(), 301 | 302 | 303 | 307 | 308);
            let location = answer.headers().get(header::LOCATION).and_then(|value| value.to_str().ok());
            let Some(location) = location.filter(|_| is_redirect) else { return Ok((answer, is_registry)) };
            let next =
                redirect(&url, location).map_err(|text| EndpointFailure::Other(ImageError::bad_content(text)))?;
            let host = |url: &str| url.parse::<Uri>().ok().and_then(|uri| uri.authority().map(ToString::to_string));
            if host(&next) != host(&url) {
                is_registry = false;
                headers.remove(header::AUTHORIZATION);
                for (name, _) in &self.endpoint.headers {
                    headers.remove(name.as_str());
                }
            }
            url = next;
        }
        Err(EndpointFailure::Other(ImageError::bad_content(format!("stopped after {MOST_REDIRECTS} redirects"))))
    }

    async fn send(
        &self,
        method: &Method,
        url: &str,
        headers: &HeaderMap,
        body: Bytes,
    ) -> Result<Response<Incoming>, EndpointFailure> {
        let mut request = Request::builder().method(method).uri(url);
        if let Some(all) = request.headers_mut() {
            all.extend(headers.clone());
            all.insert(header::USER_AGENT, HeaderValue::from_static(concat!("berth/", env!("CARGO_PKG_VERSION"))));
        }
        let request = request.body(Full::new(body));
        let request =
            request.map_err(|error| EndpointFailure::Other(ImageError::invalid(format!("{url}: {error}"))))?;
        let unavailable = |text: &dyn std::fmt::Display| {
            EndpointFailure::Unavailable(format!("failed to do request: {method} {url}: {text}"))
        };
        match tokio::time::timeout(FIRST_BYTE, self.client.request(request)).await {
            Err(_) => Err(unavailable(&format!("no response within {} s", FIRST_BYTE.as_secs()))),
            Ok(Err(error)) => Err(unavailable(&chain(&error))),
            Ok(Ok(answer)) => Ok(answer),
        }
    }
}

/// Whether a response permits a retry, and the delay it requests, if any.
fn retry_after(answer: &Response<Incoming>) -> Option<Option<Duration>> {
    let status = answer.status();
    let can = status.is_server_error() || matches!(status, StatusCode::REQUEST_TIMEOUT | StatusCode::TOO_MANY_REQUESTS);
    let seconds = answer.headers().get(header::RETRY_AFTER).and_then(|value| value.to_str().ok()?.parse::<u64>().ok());
    match seconds {
        Some(seconds) if seconds > LONGEST_WAIT => None,
        seconds => can.then(|| seconds.map(Duration::from_secs)),
    }
}

/// Target URL of a redirect.
fn redirect(from: &str, location: &str) -> Result<String, String> {
    let uri: Uri = from.parse().map_err(|_| format!("invalid URL {from:?}"))?;
    let (scheme, authority) = (uri.scheme_str().unwrap_or_default(), uri.authority().map_or("", |a| a.as_str()));
    let next = match location.split_once("://") {
        Some(("https", _)) => location.to_owned(),
        Some(("http", _)) if scheme == "http" => location.to_owned(),
        Some(_) => return Err(format!("redirect from {scheme} to {location:?} is refused")),
        None if location.starts_with("//") => format!("{scheme}:{location}"),
        None if location.starts_with('/') => format!("{scheme}://{authority}{location}"),
        None => return Err(format!("redirect to {location:?} is refused")),
    };
    Ok(next)
}

/// Reads a short response body.
///
/// # Errors
/// The body exceeds `limit` bytes, times out, or is incomplete.
pub async fn body_bytes(answer: Response<Incoming>, limit: u64) -> Result<Bytes, ImageError> {
    let limited = http_body_util::Limited::new(answer.into_body(), usize::try_from(limit).unwrap_or(usize::MAX));
    let collected = tokio::time::timeout(FIRST_BYTE, limited.collect()).await;
    let collected = collected.map_err(|_| ImageError::bad_content("timed out reading response"))?;
    collected
        .map(http_body_util::Collected::to_bytes)
        .map_err(|error| ImageError::bad_content(format!("read response: {error}")))
}

/// Text of a refusal for people.
pub fn refusal_text(refusal: &EndpointFailure) -> String {
    match refusal {
        EndpointFailure::NotFound => "not found".to_owned(),
        EndpointFailure::Denied(text) | EndpointFailure::Unavailable(text) => text.clone(),
        EndpointFailure::Other(error) => error.text.clone(),
    }
}

fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(error) = source {
        text.push_str(&format!(": {error}"));
        source = error.source();
    }
    text
}

#[cfg(test)]
mod tests {
    use tokio::{
        io::{AsyncReadExt, AsyncWriteExt},
        net::TcpListener,
        sync::mpsc,
    };

    use super::*;

    /// Answers each connection with the response head that `answer` returns; returns the address and the requests.
    async fn server(
        answer: impl Fn(&str) -> String + Send + 'static,
    ) -> (std::net::SocketAddr, mpsc::UnboundedReceiver<String>) {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let address = listener.local_addr().expect("an address");
        let (sender, requests) = mpsc::unbounded_channel();
        tokio::spawn(async move {
            while let Ok((mut stream, _)) = listener.accept().await {
                let mut head = Vec::new();
                while !head.ends_with(b"\r\n\r\n") && stream.read_buf(&mut head).await.is_ok_and(|read| read > 0) {}
                let head = String::from_utf8_lossy(&head).into_owned();
                let reply = format!("HTTP/1.1 {}\r\nContent-Length: 0\r\nConnection: close\r\n\r\n", answer(&head));
                let _ = stream.write_all(reply.as_bytes()).await; // the client may be gone
                let _ = sender.send(head);
            }
        });
        (address, requests)
    }

    fn place(address: std::net::SocketAddr) -> EndpointClient {
        let endpoint = Endpoint {
            scheme: "http".to_owned(),
            authority: address.to_string(),
            prefix: "/v2".to_owned(),
            resolves: true,
            authorities: Vec::new(),
            pairs: Vec::new(),
            dial_timeout: None,
            skips_verification: false,
            headers: vec![("X-Secret".to_owned(), "hush".to_owned())],
            falls_back: false,
        };
        let identity = RegistryAuth::Basic("user".to_owned(), "password".to_owned());
        EndpointClient::new(endpoint, identity, "a").expect("a client")
    }

    /// Regression test for CVE-2020-15157: layers stored on another host.
    #[tokio::test]
    async fn credentials_do_not_go_where_a_redirect_leads() {
        for challenge in ["Basic realm=\"x\"", "Bearer realm=\"http://REALM/token\",service=\"s\""] {
            let (thief, mut stolen) = server(move |head| {
                let host = head.lines().find_map(|line| line.to_lowercase().strip_prefix("host: ").map(str::to_owned));
                let challenge = challenge.replace("REALM", &host.unwrap_or_default());
                format!("401 Unauthorized\r\nWWW-Authenticate: {challenge}")
            })
            .await;
            let (registry, mut asked) =
                server(move |_| format!("307 Temporary Redirect\r\nLocation: http://{thief}/blob")).await;
            let refused = place(registry).request(Method::GET, "/a/blobs/sha256:0", HeaderMap::new()).await;
            assert!(matches!(refused, Err(EndpointFailure::Denied(_))), "{challenge}");
            assert!(asked.recv().await.expect("asked").to_lowercase().contains("x-secret: hush"));
            while let Ok(head) = stolen.try_recv() {
                let head = head.to_lowercase();
                assert!(head.starts_with("get /blob ") && !head.contains("authorization"), "{challenge}: {head}");
                assert!(!head.contains("x-secret"), "{challenge}: {head}");
            }
            assert!(asked.try_recv().is_err(), "{challenge}: one request");
        }
    }

    /// The registry's own challenge is answered; a host it redirects to receives no credentials.
    #[tokio::test]
    async fn the_registrys_own_challenge_is_answered() {
        let (store, mut stored) = server(|_| "200 OK".to_owned()).await;
        let (registry, _asked) = server(move |head| match head.to_lowercase().contains("authorization: basic ") {
            true => format!("307 Temporary Redirect\r\nLocation: http://{store}/blob"),
            false => "401 Unauthorized\r\nWWW-Authenticate: Basic realm=\"x\"".to_owned(),
        })
        .await;
        let answer = place(registry).request(Method::GET, "/a/blobs/sha256:0", HeaderMap::new()).await;
        assert!(answer.is_ok_and(|answer| answer.status() == StatusCode::OK));
        assert!(!stored.recv().await.expect("asked").to_lowercase().contains("authorization"));
    }

    #[test]
    fn redirects_lead_nowhere_unsafe() {
        for (from, location, expected) in [
            ("https://a/x", "https://b/y", Some("https://b/y")),
            ("https://a/x", "/y", Some("https://a/y")),
            ("https://a/x", "//b/y", Some("https://b/y")),
            ("http://a/x", "http://b/y", Some("http://b/y")),
            ("https://a/x", "http://b/y", None),
            ("http://a/x", "file:///etc/passwd", None),
            ("http://a/x", "ftp://b", None),
            ("http://a/x", "y", None),
        ] {
            assert_eq!(redirect(from, location).ok().as_deref(), expected, "{from} to {location}");
        }
    }
}
