//! Proxy selection: `proxy-url`, or else `HTTPS_PROXY`, `HTTP_PROXY`, and `NO_PROXY`. Pure.
//!
//! Implements spec 01 §10.1, proxies.

use std::net::IpAddr;

use http::Uri;
use percent_encoding::percent_decode_str;

/// Proxy protocol.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ProxyKind {
    /// `http`: `CONNECT` in cleartext.
    Http,
    /// `https`: `CONNECT` within TLS.
    Https,
    /// `socks5`, `socks5h`: SOCKS 5; the proxy resolves the server's name.
    Socks5,
}

impl ProxyKind {
    fn of(scheme: &str) -> Option<Self> {
        match scheme {
            "http" => Some(Self::Http),
            "https" => Some(Self::Https),
            "socks5" | "socks5h" => Some(Self::Socks5),
            _ => None,
        }
    }

    fn usual_port(self) -> u16 {
        match self {
            Self::Http => 80,
            Self::Https => 443,
            Self::Socks5 => 1080,
        }
    }
}

/// Proxy address and credentials.
#[derive(Clone, PartialEq, Eq)]
pub struct Proxy {
    /// Protocol.
    pub kind: ProxyKind,
    /// Host name or IP address.
    pub host: String,
    /// Port; default by protocol: 80, 443, 1080.
    pub port: u16,
    /// User name and password.
    pub credentials: Option<(String, String)>,
}

impl std::fmt::Debug for Proxy {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        // Omits the password from logs.
        write!(f, "Proxy({:?} {}:{})", self.kind, self.host, self.port)
    }
}

/// Parses a proxy URL.
///
/// # Errors
/// It is malformed or has an unsupported scheme. The error omits the URL, which may contain a password.
pub fn proxy_url(text: &str) -> Result<Proxy, String> {
    let full = if text.contains("://") { text.to_owned() } else { format!("http://{text}") };
    let uri: Uri = full.parse().map_err(|e| format!("cannot parse URL: {e}"))?;
    let scheme = uri.scheme_str().unwrap_or_default();
    let kind = ProxyKind::of(scheme)
        .ok_or_else(|| format!("unsupported scheme {scheme:?}, must be http, https, or socks5"))?;
    let host = uri.host().filter(|host| !host.is_empty()).ok_or("the URL has no host")?;
    let authority = uri.authority().map(http::uri::Authority::as_str).unwrap_or_default();
    let (credentials, place) = match authority.rsplit_once('@') {
        Some((credentials, place)) => (Some(credentials), place),
        None => (None, authority),
    };
    if uri.port_u16().is_none() && place.trim_end_matches(':') != host {
        return Err("invalid port in URL".to_owned());
    }
    Ok(Proxy {
        kind,
        host: host.to_owned(),
        port: uri.port_u16().unwrap_or_else(|| kind.usual_port()),
        credentials: credentials.map(|credentials| {
            let (user, password) = credentials.split_once(':').unwrap_or((credentials, ""));
            let decoded = |text: &str| percent_decode_str(text).decode_utf8_lossy().into_owned();
            (decoded(user), decoded(password))
        }),
    })
}

/// Proxy for a host, from environment variables; `None`: connect directly.
///
/// # Errors
/// The variable has an unusable URL.
pub fn proxy_of(
    is_tls: bool,
    host: &str,
    port: u16,
    variable: impl Fn(&str) -> Option<String>,
) -> Result<Option<Proxy>, String> {
    let either = |upper: &str| {
        let given = variable(upper).or_else(|| variable(&upper.to_lowercase()));
        given.filter(|text| !text.is_empty())
    };
    let Some(url) = either(if is_tls { "HTTPS_PROXY" } else { "HTTP_PROXY" }) else { return Ok(None) };
    if is_direct(host, port, &either("NO_PROXY").unwrap_or_default()) {
        return Ok(None);
    }
    proxy_url(&url).map(Some)
}

/// Whether a host is reached without a proxy: loopback, and matches of `NO_PROXY`.
fn is_direct(host: &str, port: u16, list: &str) -> bool {
    let host = host.trim_start_matches('[').trim_end_matches(']').to_ascii_lowercase();
    let address: Option<IpAddr> = host.parse().ok();
    if host == "localhost" || address.is_some_and(|address| address.is_loopback()) {
        return true;
    }
    list.split(',').map(str::trim).filter(|entry| !entry.is_empty()).any(|entry| {
        let entry = entry.to_ascii_lowercase();
        if entry == "*" {
            return true;
        }
        if let (Some((network, bits)), Some(address)) = (entry.split_once('/'), address) {
            return is_within(address, network, bits);
        }
        let (name, wanted) = match entry.rsplit_once(':') {
            Some((name, number)) if !name.contains(':') || name.ends_with(']') => (name, number.parse::<u16>().ok()),
            _ => (entry.as_str(), None),
        };
        if wanted.is_some_and(|wanted| wanted != port) {
            return false;
        }
        let name = name.trim_start_matches('[').trim_end_matches(']');
        match (name.parse::<IpAddr>().ok(), address) {
            (Some(named), Some(address)) => named == address,
            _ => {
                let domain = name.trim_start_matches('*').trim_start_matches('.');
                let is_below = host.strip_suffix(domain).is_some_and(|rest| rest.ends_with('.'));
                is_below || (host == domain && !name.starts_with(['*', '.']))
            }
        }
    })
}

fn is_within(address: IpAddr, network: &str, bits: &str) -> bool {
    let Ok(bits) = bits.parse::<u32>() else { return false };
    let same = |a: u128, b: u128, width: u32| {
        bits <= width && (bits == 0 || a.checked_shr(width - bits) == b.checked_shr(width - bits))
    };
    match (address, network.parse()) {
        (IpAddr::V4(a), Ok(IpAddr::V4(b))) => same(u32::from(a).into(), u32::from(b).into(), 32),
        (IpAddr::V6(a), Ok(IpAddr::V6(b))) => same(u128::from(a), u128::from(b), 128),
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn proxies_are_urls() {
        use ProxyKind::{Http, Https, Socks5};
        for (url, kind, host, port, credentials) in [
            ("http://p:3128", Http, "p", 3128, None),
            ("u:s@p", Http, "p", 80, Some(("u", "s"))),
            ("https://p", Https, "p", 443, None),
            ("https://u%40x:s%3a%2Ft@p:8443/", Https, "p", 8443, Some(("u@x", "s:/t"))),
            ("socks5://p", Socks5, "p", 1080, None),
            ("socks5h://u@[::1]:9", Socks5, "[::1]", 9, Some(("u", ""))),
        ] {
            let credentials = credentials.map(|(user, password): (&str, &str)| (user.to_owned(), password.to_owned()));
            assert_eq!(proxy_url(url), Ok(Proxy { kind, host: host.to_owned(), port, credentials }), "{url}");
        }
        for wrong in ["socks4://u:secret@p:1", "ftp://u:secret@p", "http://", "http://u:secret@p:x"] {
            let error = proxy_url(wrong).expect_err(wrong);
            assert!(!error.contains("secret"), "{error}");
        }
        assert_eq!(format!("{:?}", proxy_url("http://u:secret@p").expect("a proxy")), "Proxy(Http p:80)");
    }

    #[test]
    fn some_hosts_are_called_directly() {
        for (host, list, expected) in [
            ("api", "", false),
            ("localhost", "", true),
            ("127.0.0.1", "", true),
            ("[::1]", "", true),
            ("api.example.com", "example.com", true),
            ("example.com", "example.com", true),
            ("example.com", ".example.com", false),
            ("badexample.com", "example.com", false),
            ("api.example.com", "other, *.example.com", true),
            ("10.1.2.3", "10.0.0.0/8", true),
            ("11.1.2.3", "10.0.0.0/8", false),
            ("10.1.2.3", "0.0.0.0/0", true),
            ("10.1.2.3", "10.0.0.0/99", false),
            ("fd00::1", "fd00::/16", true),
            ("10.1.2.3", "10.1.2.3:6443", true),
            ("10.1.2.3", "10.1.2.3:443", false),
            ("anything", "*", true),
        ] {
            assert_eq!(is_direct(host, 6443, list), expected, "{host} in {list:?}");
        }
        let environment = |name: &str| match name {
            "https_proxy" => Some("http://p:1".to_owned()),
            "NO_PROXY" => Some("near".to_owned()),
            _ => None,
        };
        let port = |is_tls, host| proxy_of(is_tls, host, 443, environment).map(|proxy| proxy.map(|proxy| proxy.port));
        assert_eq!((port(true, "far"), port(true, "near"), port(false, "far")), (Ok(Some(1)), Ok(None), Ok(None)));
    }
}
