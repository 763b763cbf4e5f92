//! HTTP GET of a manifest with redirects, timeout, and size limit.
//!
//! The body is read only up to the limit, however much is sent.

use std::{fs, sync::Arc, time::Duration};

use base64::Engine;
use bytes::{Bytes, BytesMut};
use http::{
    HeaderMap, HeaderName, HeaderValue, Request, StatusCode, Uri,
    header::{AUTHORIZATION, LOCATION, USER_AGENT},
};
use http_body_util::{BodyExt, Empty};
use hyper_rustls::{HttpsConnector, HttpsConnectorBuilder};
use hyper_util::{
    client::legacy::{Client, connect::HttpConnector},
    rt::TokioExecutor,
};
use rustls::{
    ClientConfig, RootCertStore,
    pki_types::{CertificateDer, pem::PemObject},
};

use super::redirect;
use crate::sources::MANIFEST_LIMIT;
use berth_config::text::without_password;
use berth_sys::tls::{self, ServerVerifier};

/// Timeout of a whole fetch: redirects, head, and body.
const TIMEOUT: Duration = Duration::from_secs(10);
/// Headers that describe the message itself and cannot be configured.
const OWN_HEADERS: [&str; 4] = ["host", "content-length", "transfer-encoding", "trailer"];
/// Paths of the system's CA bundle; the first that exists is used.
const AUTHORITIES: [&str; 6] = [
    "/etc/ssl/certs/ca-certificates.crt",
    "/etc/pki/tls/certs/ca-bundle.crt",
    "/etc/ssl/ca-bundle.pem",
    "/etc/pki/tls/cacert.pem",
    "/etc/pki/ca-trust/extracted/pem/tls-ca-bundle.pem",
    "/etc/ssl/cert.pem",
];

/// A complete response.
#[derive(Debug)]
pub struct FetchResponse {
    /// Status of the last response.
    pub status: StatusCode,
    /// The body; empty unless the status is 200.
    pub body: Bytes,
}

/// Why there is no response.
#[derive(Debug, thiserror::Error)]
pub enum FetchError {
    /// The URL is malformed or its scheme is unsupported.
    #[error("Get \"{0}\": unsupported protocol scheme or malformed URL")]
    Url(String),
    /// A configured header is invalid.
    #[error("invalid header field name or value of {0:?}")]
    Header(String),
    /// There were too many redirects.
    #[error("Get \"{url}\": stopped after {limit} redirects", limit = redirect::MAX_REQUESTS)]
    Redirects {
        /// URL of the last redirect.
        url: String,
    },
    /// The target of a redirect is invalid.
    #[error("Get \"{url}\": failed to parse Location header {location:?}")]
    Location {
        /// URL that returned the redirect.
        url: String,
        /// The invalid target.
        location: String,
    },
    /// The response did not arrive in time.
    #[error("Get \"{url}\": request canceled: no complete answer within {limit:?}", limit = TIMEOUT)]
    TimedOut {
        /// The configured URL.
        url: String,
    },
    /// Connecting, sending, or receiving failed.
    #[error("Get \"{url}\": {reason}")]
    Transport {
        /// The requested URL.
        url: String,
        /// All causes of the error.
        reason: String,
    },
    /// The body reaches the size limit.
    #[error("{url}: response exceeds the size limit")]
    TooLarge {
        /// The requested URL.
        url: String,
    },
}

/// Fetches one URL.
pub struct Fetcher {
    url: String,
    headers: Result<HeaderMap, String>,
    client: Client<HttpsConnector<HttpConnector>, Empty<Bytes>>,
}

impl Fetcher {
    /// Creates a fetcher for that URL and those headers. If they are invalid, every request fails.
    pub fn new(url: &str, headers: &[(String, String)]) -> Self {
        // No connection pool: an idle connection would be closed by the server between two requests.
        let client = Client::builder(TokioExecutor::new()).pool_max_idle_per_host(0).build(connector());
        Self { url: url.to_owned(), headers: header_map(headers), client }
    }

    /// Sends the request, follows redirects, and reads the body.
    ///
    /// # Errors
    /// Any failure within the timeout of 10 seconds, or that timeout.
    pub async fn get(&self) -> Result<FetchResponse, FetchError> {
        let timed_out = |_| FetchError::TimedOut { url: without_password(&self.url) };
        tokio::time::timeout(TIMEOUT, self.follow()).await.map_err(timed_out)?
    }

    async fn follow(&self) -> Result<FetchResponse, FetchError> {
        let mut headers = self.headers.clone().map_err(FetchError::Header)?;
        let (first, credentials) =
            split_credentials(&self.url).ok_or_else(|| FetchError::Url(without_password(&self.url)))?;
        if let Some(credentials) = credentials
            && !headers.contains_key(AUTHORIZATION)
        {
            headers.insert(AUTHORIZATION, credentials);
        }
        let mut uri = first.clone();
        for _ in 0..redirect::MAX_REQUESTS {
            let shown = without_password(&uri.to_string());
            let transport = |e: &dyn std::error::Error| FetchError::Transport { url: shown.clone(), reason: chain(e) };
            let mut request = Request::new(Empty::new());
            *request.uri_mut() = uri.clone();
            *request.headers_mut() = headers.clone();
            let response = self.client.request(request).await.map_err(|e| transport(&e))?;
            let status = response.status();
            let location = response.headers().get(LOCATION).filter(|_| is_redirect(status)).cloned();
            let Some(location) = location else {
                let body = match status {
                    StatusCode::OK => read(response.into_body(), &shown).await?,
                    _ => Bytes::new(),
                };
                return Ok(FetchResponse { status, body });
            };
            let location = String::from_utf8_lossy(location.as_bytes()).into_owned();
            let target = redirect::target(&uri, &location).map(|uri| uri.to_string());
            let (next, _) = target
                .and_then(|target| split_credentials(&target))
                .ok_or_else(|| FetchError::Location { url: shown.clone(), location: without_password(&location) })?;
            if !redirect::may_send_sensitive(&first, &next) {
                redirect::SENSITIVE.iter().for_each(|name| {
                    headers.remove(*name);
                });
            }
            uri = next;
        }
        Err(FetchError::Redirects { url: without_password(&uri.to_string()) })
    }
}

fn is_redirect(status: StatusCode) -> bool {
    matches!(status.as_u16(), 301 | 302 | 303 | 307 | 308)
}

/// Reads a body; stops as soon as the limit is reached.
async fn read(mut body: hyper::body::Incoming, shown: &str) -> Result<Bytes, FetchError> {
    let limit = usize::try_from(MANIFEST_LIMIT).unwrap_or(usize::MAX);
    let mut bytes = BytesMut::new();
    while let Some(frame) = body.frame().await {
        let frame = frame.map_err(|e| FetchError::Transport { url: shown.to_owned(), reason: chain(&e) })?;
        let Ok(data) = frame.into_data() else { continue };
        if bytes.len().saturating_add(data.len()) >= limit {
            return Err(FetchError::TooLarge { url: shown.to_owned() });
        }
        bytes.extend_from_slice(&data);
    }
    Ok(bytes.freeze())
}

fn header_map(headers: &[(String, String)]) -> Result<HeaderMap, String> {
    let mut map = HeaderMap::new();
    for (name, value) in headers {
        let bad = || name.clone();
        let key = HeaderName::try_from(name.as_str()).map_err(|_| bad())?;
        let value = HeaderValue::try_from(value.as_str()).map_err(|_| bad())?;
        if !OWN_HEADERS.contains(&key.as_str()) {
            map.append(key, value);
        }
    }
    map.entry(USER_AGENT).or_insert(HeaderValue::from_static(concat!("berth/", env!("CARGO_PKG_VERSION"))));
    Ok(map)
}

/// The URL without user and password, and these as a header. `None` if the URL is not usable.
fn split_credentials(url: &str) -> Option<(Uri, Option<HeaderValue>)> {
    let (scheme, rest) = url.split_once("://")?;
    let (authority, path) = match rest.find(['/', '?', '#']) {
        Some(end) => rest.split_at(end),
        None => (rest, ""),
    };
    let (credentials, host) = match authority.rsplit_once('@') {
        Some((credentials, host)) => (Some(credentials), host),
        None => (None, authority),
    };
    let path = path.split('#').next().unwrap_or_default();
    let slash = if path.starts_with('/') { "" } else { "/" };
    let uri: Uri = format!("{scheme}://{host}{slash}{path}").parse().ok()?;
    if !matches!(uri.scheme_str(), Some("http" | "https")) || uri.host().is_none_or(str::is_empty) {
        return None;
    }
    let encoded = |text: &str| base64::engine::general_purpose::STANDARD.encode(decoded(text));
    let header = credentials
        .map(|text| if text.contains(':') { text.to_owned() } else { format!("{text}:") })
        .and_then(|text| HeaderValue::try_from(format!("Basic {}", encoded(&text))).ok());
    Some((uri, header))
}

/// Decodes percent encoding.
fn decoded(text: &str) -> Vec<u8> {
    let mut out = Vec::with_capacity(text.len());
    let mut bytes = text.bytes();
    while let Some(byte) = bytes.next() {
        let mut ahead = bytes.clone();
        let digit = |b: Option<u8>| b.and_then(|b| char::from(b).to_digit(16)).and_then(|d| u8::try_from(d).ok());
        match (byte, digit(ahead.next()), digit(ahead.next())) {
            (b'%', Some(high), Some(low)) => {
                out.push(high << 4 | low);
                bytes = ahead;
            }
            _ => out.push(byte),
        }
    }
    out
}

fn chain(e: &dyn std::error::Error) -> String {
    let mut text = e.to_string();
    let mut cause = e.source();
    while let Some(e) = cause {
        text = format!("{text}: {e}");
        cause = e.source();
    }
    text
}

fn connector() -> HttpsConnector<HttpConnector> {
    let provider = Arc::new(tls::provider());
    let verifier = system_verifier();
    let builder = HttpsConnectorBuilder::new();
    let config = ClientConfig::builder_with_provider(provider.clone()).with_safe_default_protocol_versions();
    let builder = match (verifier, config) {
        (Some(verifier), Ok(config)) => {
            let config = config.dangerous().with_custom_certificate_verifier(Arc::new(verifier));
            builder.with_tls_config(config.with_no_client_auth())
        }
        // Without a CA bundle of the system: the roots that browsers trust.
        _ => builder.with_provider_and_webpki_roots(provider).expect("ring supports the default protocol versions"),
    };
    builder.https_or_http().enable_http1().build()
}

fn system_verifier() -> Option<ServerVerifier> {
    let file = std::env::var_os("SSL_CERT_FILE").map(Into::into);
    let files = file.into_iter().chain(AUTHORITIES.map(std::path::PathBuf::from));
    let bundle = files.into_iter().find_map(|path| fs::read(path).ok())?;
    ServerVerifier::new(RootCertStore::empty(), CertificateDer::pem_slice_iter(&bundle).filter_map(Result::ok)).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn passwords_go_into_the_header_and_not_into_logs() {
        let (uri, header) = split_credentials("http://me:p%40ss@host:1/x?y#z").expect("a URL");
        assert_eq!(uri.to_string(), "http://host:1/x?y");
        assert_eq!(header.expect("a header"), "Basic bWU6cEBzcw==");
        assert_eq!(split_credentials("http://host").map(|(uri, _)| uri.to_string()).as_deref(), Some("http://host/"));
        for bad in ["host/x", "ftp://host/", "http:///x", "http://", "http://a b/"] {
            assert!(split_credentials(bad).is_none(), "{bad}");
        }
    }

    #[test]
    fn headers_keep_their_order_and_the_message_its_own() {
        let pair = |name: &str, value: &str| (name.to_owned(), value.to_owned());
        let map = header_map(&[pair("a", "1"), pair("Host", "x"), pair("A", "2")]).expect("headers");
        assert_eq!(map.get_all("a").iter().collect::<Vec<_>>(), ["1", "2"]);
        assert!(!map.contains_key("host") && map.contains_key("user-agent"));
        assert_eq!(header_map(&[pair("b ad", "1")]), Err("b ad".to_owned()));
    }
}
