//! Which proxy stands on the way. Pure. Spec 01 §10.1: `proxy-url`, else the environment.

use std::net::IpAddr;

use http::Uri;

use super::dial::Proxy;

/// A proxy by its URL; only `http` is spoken to proxies.
///
/// # Errors
/// It is none, or of another kind.
pub fn proxy_url(text: &str) -> Result<Proxy, String> {
    let full = if text.contains("://") { text.to_owned() } else { format!("http://{text}") };
    let uri: Uri = full.parse().map_err(|e| format!("{text:?}: {e}"))?;
    if uri.scheme_str() != Some("http") {
        return Err(format!("{text:?}: unsupported scheme {:?}", uri.scheme_str().unwrap_or_default()));
    }
    let host = uri.host().filter(|host| !host.is_empty()).ok_or_else(|| format!("{text:?}: no host"))?;
    let user = uri.authority().and_then(|authority| authority.as_str().rsplit_once('@'));
    Ok(Proxy {
        host: host.to_owned(),
        port: uri.port_u16().unwrap_or(80),
        credentials: user.map(|(credentials, _)| credentials.to_owned()),
    })
}

/// The proxy the environment wants for that host.
///
/// # Errors
/// It names one that cannot be used.
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

/// Whether no proxy is asked for that host: what is on this machine never, and what `NO_PROXY` names.
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
        let proxy = |host: &str, port, credentials: Option<&str>| Proxy {
            host: host.to_owned(),
            port,
            credentials: credentials.map(str::to_owned),
        };
        assert_eq!(proxy_url("http://p:3128"), Ok(proxy("p", 3128, None)));
        assert_eq!(proxy_url("u:s@p"), Ok(proxy("p", 80, Some("u:s"))));
        for wrong in ["socks5://p:1", "https://p", "http://"] {
            assert!(proxy_url(wrong).is_err(), "{wrong}");
        }
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
