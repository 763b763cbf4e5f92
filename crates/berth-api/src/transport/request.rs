//! Conversion of API calls to HTTP requests. Pure.
//!
//! Implements spec 10 §2.2: requests.

use bytes::Bytes;
use http::{
    HeaderMap, HeaderName, HeaderValue, Method, Request, Uri,
    header::{ACCEPT, ACCEPT_ENCODING, CONTENT_TYPE, HOST, USER_AGENT},
    uri::{Authority, Parts, PathAndQuery, Scheme},
};
use http_body_util::Full;

use super::kubeconfig::Impersonation;
use crate::api::{Call, Verb};

/// Request target: scheme, authority, and path prefix.
#[derive(Clone, Debug)]
pub struct Address {
    /// `http` or `https`.
    pub scheme: Scheme,
    /// `host:port`.
    pub authority: Authority,
    /// Path prefix, without a trailing slash.
    pub prefix: String,
}

/// Request that can be sent repeatedly.
#[derive(Clone, Debug)]
pub struct OutgoingRequest {
    method: Method,
    target: PathAndQuery,
    headers: HeaderMap,
    body: Bytes,
}

/// HTTP method of a verb.
pub fn method(verb: Verb) -> Method {
    match verb {
        Verb::Get | Verb::List | Verb::Watch => Method::GET,
        Verb::Create => Method::POST,
        Verb::Update => Method::PUT,
        Verb::Patch => Method::PATCH,
        Verb::Delete | Verb::DeleteCollection => Method::DELETE,
    }
}

/// Span name of a verb's request.
pub fn span_name(verb: Verb) -> &'static str {
    match verb {
        Verb::Get | Verb::List | Verb::Watch => "HTTP GET",
        Verb::Create => "HTTP POST",
        Verb::Update => "HTTP PUT",
        Verb::Patch => "HTTP PATCH",
        Verb::Delete | Verb::DeleteCollection => "HTTP DELETE",
    }
}

/// Verb as RBAC authorization and metrics spell it.
pub fn verb(verb: Verb) -> &'static str {
    match verb {
        Verb::Get => "get",
        Verb::List => "list",
        Verb::Watch => "watch",
        Verb::Create => "create",
        Verb::Update => "update",
        Verb::Patch => "patch",
        Verb::Delete => "delete",
        Verb::DeleteCollection => "deletecollection",
    }
}

/// User agent: `kubelet/v1.36.2 (linux/amd64) kubernetes/abcdefg`.
///
/// Its product name is the field manager of all our writes, so it is `kubelet` regardless of the program's name, unless
/// another name was chosen on purpose (spec 10 §2.2).
pub fn user_agent(program: &str, version: &str, commit: &str) -> String {
    let name = program.rsplit('/').next().unwrap_or_default();
    let name = if matches!(name, "" | "berth") { "kubelet" } else { name };
    let version = version.split('-').next().unwrap_or_default();
    let commit = commit.get(..7).filter(|commit| commit.bytes().all(|b| b.is_ascii_alphanumeric()));
    let architecture = match std::env::consts::ARCH {
        "x86_64" => "amd64",
        "aarch64" => "arm64",
        other => other,
    };
    format!("{name}/{version} (linux/{architecture}) kubernetes/{}", commit.unwrap_or("$Format"))
}

/// Impersonation headers.
///
/// # Errors
/// A name or value is not valid in a header.
pub fn impersonation_headers(acting: &Impersonation) -> Result<HeaderMap, String> {
    let mut headers = HeaderMap::new();
    let mut add = |name: String, value: &str| {
        let wrong = |what: &str| format!("impersonation: {what} {value:?} cannot be sent");
        let name = HeaderName::try_from(name).map_err(|_| wrong("the name of"))?;
        headers.append(name, HeaderValue::from_str(value).map_err(|_| wrong("the value"))?);
        Ok::<(), String>(())
    };
    for (name, value) in [("impersonate-user", &acting.user), ("impersonate-uid", &acting.uid)] {
        if !value.is_empty() {
            add(name.to_owned(), value)?;
        }
    }
    for group in &acting.groups {
        add("impersonate-group".to_owned(), group)?;
    }
    for (key, values) in &acting.extra {
        for value in values {
            add(
                format!(
                    "impersonate-extra-{}",
                    escaped(&key.to_lowercase(), |b| b.is_ascii_alphanumeric() || b"-._~!#$&'*+^`|".contains(&b))
                ),
                value,
            )?;
        }
    }
    Ok(headers)
}

/// Whether a response may be compressed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Compression {
    /// gzip is accepted.
    Gzip,
    /// No compression is accepted.
    None,
}

impl OutgoingRequest {
    /// Builds the request of a call, with the headers common to all requests.
    ///
    /// # Errors
    /// The path is not a valid request target.
    pub fn new(address: &Address, call: &Call, agent: &HeaderValue, compression: Compression) -> Result<Self, String> {
        let target = target(&address.prefix, call);
        let target = PathAndQuery::try_from(target.as_str()).map_err(|e| format!("{target}: {e}"))?;
        let mut headers = HeaderMap::new();
        headers.insert(USER_AGENT, agent.clone());
        headers.insert(ACCEPT, HeaderValue::from_static("application/json"));
        if compression == Compression::Gzip && call.verb != Verb::Watch {
            headers.insert(ACCEPT_ENCODING, HeaderValue::from_static("gzip"));
        }
        let body = match &call.body {
            Some(body) => {
                headers.insert(CONTENT_TYPE, HeaderValue::from_static(body.content_type));
                body.bytes.clone()
            }
            None => Bytes::new(),
        };
        Ok(Self { method: method(call.verb), target, headers, body })
    }

    /// Adds headers.
    pub fn with(mut self, headers: &HeaderMap) -> Self {
        self.headers.extend(headers.clone());
        self
    }

    /// Length of the body, in bytes.
    pub fn length(&self) -> u64 {
        u64::try_from(self.body.len()).unwrap_or(u64::MAX)
    }

    /// Full URL, as spans show it.
    pub fn url(&self, address: &Address) -> String {
        format!("{}://{}{}", address.scheme, address.authority, self.target)
    }

    /// Builds the HTTP request for a connection of that HTTP version.
    pub fn made(&self, address: &Address, is_http2: bool) -> Request<Full<Bytes>> {
        let mut request = Request::new(Full::new(self.body.clone()));
        *request.method_mut() = self.method.clone();
        *request.headers_mut() = self.headers.clone();
        let mut parts = Parts::default();
        parts.path_and_query = Some(self.target.clone());
        if is_http2 {
            parts.scheme = Some(address.scheme.clone());
            parts.authority = Some(address.authority.clone());
        } else if let Ok(host) = HeaderValue::from_str(address.authority.as_str()) {
            request.headers_mut().insert(HOST, host);
        }
        // Cannot fail: the parts are valid, and are a target alone or with scheme and authority.
        *request.uri_mut() = Uri::from_parts(parts).unwrap_or_default();
        request
    }
}

/// Path and query; the query is sorted by name.
fn target(prefix: &str, call: &Call) -> String {
    let allowed = |b: u8| b.is_ascii_alphanumeric() || b"-._~/:@!$&'()*+,;=".contains(&b);
    let mut target = format!("{prefix}{}", escaped(&call.path(), allowed));
    let mut query: Vec<_> = call.query.iter().collect();
    if query.is_empty() {
        return target;
    }
    query.sort_by_key(|(name, _)| *name);
    let mut encoded = form_urlencoded::Serializer::new(String::new());
    encoded.extend_pairs(query.iter().map(|(name, value)| (name, value)));
    target.push('?');
    target.push_str(&encoded.finish());
    target
}

fn escaped(text: &str, allowed: impl Fn(u8) -> bool) -> String {
    let mut out = String::with_capacity(text.len());
    for byte in text.bytes() {
        if allowed(byte) {
            out.push(char::from(byte));
        } else {
            out.push_str(&format!("%{byte:02X}"));
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::api::Resource;

    fn address() -> Address {
        Address { scheme: Scheme::HTTPS, authority: Authority::from_static("api:6443"), prefix: "/prefix".to_owned() }
    }

    #[test]
    fn a_request_has_the_url_and_headers_of_the_kubelet() {
        let agent = HeaderValue::from_static("kubelet/v1");
        let call = Call::new(Verb::Watch, Resource::PODS, "", "")
            .query("watch", "true")
            .query("fieldSelector", "spec.nodeName=n 1")
            .query("allowWatchBookmarks", "true");
        let outgoing = OutgoingRequest::new(&address(), &call, &agent, Compression::Gzip).expect("a request");
        let expected = "/prefix/api/v1/pods?allowWatchBookmarks=true&fieldSelector=spec.nodeName%3Dn+1&watch=true";
        let second = outgoing.made(&address(), true);
        assert_eq!(second.uri().to_string(), format!("https://api:6443{expected}"));
        assert!(!second.headers().contains_key(ACCEPT_ENCODING), "a watch is never compressed");
        let first = outgoing.made(&address(), false);
        assert_eq!(first.uri().to_string(), expected);
        assert_eq!(first.headers()[HOST], "api:6443");
        let patch = Call::patch(Resource::NODES, "", "n/../x", "{}").sub("status");
        let patch = OutgoingRequest::new(&address(), &patch, &agent, Compression::Gzip).expect("a request");
        let patch = patch.made(&address(), true);
        assert_eq!(patch.method(), "PATCH");
        assert_eq!(patch.headers()[CONTENT_TYPE], "application/strategic-merge-patch+json");
        assert_eq!(patch.headers()[ACCEPT], "application/json");
        assert_eq!(patch.headers()[ACCEPT_ENCODING], "gzip");
        let odd = Call::get(Resource::PODS, "ns", "a?b#c d%");
        assert_eq!(target("", &odd), "/api/v1/namespaces/ns/pods/a%3Fb%23c%20d%25");
    }

    #[test]
    fn the_first_word_is_the_kubelet() {
        for (program, version, commit, expected) in [
            ("/usr/bin/berth", "v1.36.2", "abcdef0123", "kubelet/v1.36.2"),
            ("kubelet", "v1.36.2-berth.1", "", "kubelet/v1.36.2"),
            ("/opt/hyperkube", "v1.36.2", "", "hyperkube/v1.36.2"),
            ("", "v1.36.2", "", "kubelet/v1.36.2"),
        ] {
            let agent = user_agent(program, version, commit);
            assert!(agent.starts_with(&format!("{expected} (linux/")), "{agent}");
        }
        assert!(user_agent("kubelet", "v1", "abcdef0123").ends_with(" kubernetes/abcdef0"));
    }

    #[test]
    fn impersonation_headers_are_built() {
        let result = impersonation_headers(&Impersonation {
            user: "u".into(),
            uid: "7".into(),
            groups: vec!["a".into(), "b".into()],
            extra: [("k/Y".to_owned(), vec!["v".to_owned()])].into(),
        });
        let headers = result.expect("headers");
        assert_eq!(headers.get_all("impersonate-group").iter().count(), 2);
        assert_eq!(headers["impersonate-user"], "u");
        assert_eq!(headers["impersonate-extra-k%2fy"], "v");
        assert!(impersonation_headers(&Impersonation { user: "a\nb".into(), ..Impersonation::default() }).is_err());
    }
}
