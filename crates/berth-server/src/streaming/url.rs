//! Validation of the streaming URL that a container runtime returns (spec 04 §10, 04b §2.1). Pure.
//!
//! The runtime chooses the URL and kubelet dials it with its own privileges; therefore only this machine and hosts
//! named by the operator are allowed, and a client's query never becomes part of the URL.

use std::net::IpAddr;

use http::Uri;

/// Validated streaming URL.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StreamUrl {
    /// Address to dial.
    pub place: DialTarget,
    /// Whether to use TLS.
    pub tls: bool,
    /// Value of the `Host` header.
    pub authority: String,
    /// Path and query of the request.
    pub path: String,
}

/// Address to dial.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum DialTarget {
    /// TCP address.
    Host {
        /// Host name or IP address.
        host: String,
        /// TCP port; without one in the URL 80 for `http`, 443 for `https`.
        port: u16,
        /// Whether the host must be an address of this machine; the dialer checks it.
        must_be_local: bool,
    },
    /// Unix socket path, from `http+unix://%2Frun%2Fstream.sock/exec/token`.
    Unix(String),
}

/// Reason why a URL is rejected.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum UrlError {
    /// Not a valid URL.
    #[error("the runtime's streaming URL {0:?} is invalid")]
    Malformed(String),
    /// Unsupported scheme.
    #[error("the runtime's streaming URL has the unsupported scheme {0:?}")]
    Scheme(String),
    /// Host of another machine that is not allowed.
    #[error("the runtime's streaming URL has host {0:?}, expected this machine or one of --streaming-allowed-hosts")]
    Foreign(String),
}

/// Parses a runtime's URL. `allowed` lists hosts beyond this machine.
///
/// # Errors
/// For an invalid URL, and for a name of another machine. An IP address that may be local is accepted with
/// `must_be_local`.
pub fn read(url: &str, allowed: &[String]) -> Result<StreamUrl, UrlError> {
    let malformed = || UrlError::Malformed(url.to_owned());
    if let Some(rest) = url.strip_prefix("http+unix://") {
        let (host, path) = rest.split_once('/').ok_or_else(malformed)?;
        let place = DialTarget::Unix(socket(host).ok_or_else(malformed)?);
        return Ok(StreamUrl { place, tls: false, authority: "localhost".to_owned(), path: format!("/{path}") });
    }
    let uri: Uri = url.parse().map_err(|_| malformed())?;
    let scheme = uri.scheme_str().ok_or_else(malformed)?;
    let authority = uri.authority().ok_or_else(malformed)?;
    let path = uri.path_and_query().map_or("/", |path| path.as_str()).to_owned();
    if authority.as_str().contains('@') {
        return Err(malformed());
    }
    let (tls, default_port) = match scheme {
        "http" => (false, 80),
        "https" => (true, 443),
        other => return Err(UrlError::Scheme(other.to_owned())),
    };
    let host = authority.host().trim_start_matches('[').trim_end_matches(']').to_owned();
    if host.is_empty() {
        return Err(malformed());
    }
    let must_be_ours = reach(&host, allowed)?;
    let place =
        DialTarget::Host { host, port: authority.port_u16().unwrap_or(default_port), must_be_local: must_be_ours };
    Ok(StreamUrl { place, tls, authority: authority.as_str().to_owned(), path })
}

/// Whether the host must prove to be a local address before it is dialed.
fn reach(host: &str, allowed: &[String]) -> Result<bool, UrlError> {
    if allowed.iter().any(|name| name.eq_ignore_ascii_case(host)) || host.eq_ignore_ascii_case("localhost") {
        return Ok(false);
    }
    match host.parse::<IpAddr>() {
        Ok(address) => Ok(!address.to_canonical().is_loopback()),
        Err(_) => Err(UrlError::Foreign(host.to_owned())),
    }
}

/// Decodes a socket path in the place of a host, `%2Frun%2Fx.sock`.
fn socket(authority: &str) -> Option<String> {
    let mut path = String::new();
    let mut rest = authority;
    while let Some((before, escape)) = rest.split_once('%') {
        path.push_str(before);
        let code = u8::from_str_radix(escape.get(..2)?, 16).ok().filter(u8::is_ascii)?;
        path.push(char::from(code));
        rest = escape.get(2..)?;
    }
    path.push_str(rest);
    path.starts_with('/').then_some(path)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_this_machine_and_allowed_hosts() {
        let allowed = ["streams.internal".to_owned()];
        let host = |url: &str| match read(url, &allowed) {
            Ok(StreamUrl {
                place: DialTarget::Host { host, port, must_be_local: must_be_ours }, tls, path, ..
            }) => {
                format!("{host} {port} {} {} {path}", if must_be_ours { "ours?" } else { "ok" }, u8::from(tls))
            }
            Ok(StreamUrl { place: DialTarget::Unix(socket), path, .. }) => format!("{socket} {path}"),
            Err(error) => error.to_string(),
        };
        let foreign = |name: &str| {
            format!(
                "the runtime's streaming URL has host {name:?}, expected this machine or one of --streaming-allowed-hosts"
            )
        };
        let malformed = |url: &str| format!("the runtime's streaming URL {url:?} is invalid");
        let rows = [
            ("http://127.0.0.1:40000/exec/abc", "127.0.0.1 40000 ok 0 /exec/abc".to_owned()),
            ("https://localhost/exec/abc?x=1", "localhost 443 ok 1 /exec/abc?x=1".to_owned()),
            ("http://[::1]:1/a", "::1 1 ok 0 /a".to_owned()),
            ("http://[::ffff:127.0.0.1]:1/a", "::ffff:127.0.0.1 1 ok 0 /a".to_owned()),
            ("http://10.0.0.7:1/a", "10.0.0.7 1 ours? 0 /a".to_owned()),
            ("http://169.254.169.254/latest", "169.254.169.254 80 ours? 0 /latest".to_owned()),
            ("http://streams.internal:1/a", "streams.internal 1 ok 0 /a".to_owned()),
            ("http+unix://%2Frun%2Fs.sock/exec/t", "/run/s.sock /exec/t".to_owned()),
            ("http://evil.example/a", foreign("evil.example")),
            ("http://localhost.evil.example/a", foreign("localhost.evil.example")),
            ("http://localhost@evil.example/a", malformed("http://localhost@evil.example/a")),
            ("http+unix://run/a", malformed("http+unix://run/a")),
            ("/exec/abc", malformed("/exec/abc")),
            ("", malformed("")),
            ("ftp://127.0.0.1/a", "the runtime's streaming URL has the unsupported scheme \"ftp\"".to_owned()),
        ];
        for (url, expected) in rows {
            assert_eq!(host(url), expected, "{url}");
        }
    }
}
