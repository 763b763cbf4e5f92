//! Upgrade protocol of a stream request, decided from its headers (spec 04b §2, 04 §10). Pure.

use http::{HeaderMap, header};

/// Upgrade of an exec or attach request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CommandUpgrade {
    /// No upgrade requested, so streams are impossible.
    None,
    /// SPDY, or a WebSocket protocol that runtimes support: the bytes are proxied unchanged.
    Splice,
    /// WebSocket version 5, which runtimes do not support: terminated here and translated to SPDY.
    Translate,
}

/// Upgrade of a port-forward request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ForwardUpgrade {
    /// No upgrade requested, so streams are impossible.
    None,
    /// Upgrade to anything but WebSocket, handled as SPDY.
    Spdy,
    /// WebSocket with two channels per port; the query must name the ports.
    WebSocket,
    /// WebSocket that tunnels SPDY: terminated here.
    Tunnel,
}

/// WebSocket subprotocol that supports half-closed streams.
pub const V5: &str = "v5.channel.k8s.io";
const TUNNEL: &str = "SPDY/3.1+";

/// Whether the client requests a protocol upgrade.
pub fn is_upgrade(headers: &HeaderMap) -> bool {
    let mut values = headers.get_all(header::CONNECTION).iter();
    values.any(|value| contains_ignore_case(value.as_bytes(), b"upgrade"))
}

fn contains_ignore_case(text: &[u8], word: &[u8]) -> bool {
    text.windows(word.len()).any(|window| window.eq_ignore_ascii_case(word))
}

/// Whether the client requests a WebSocket.
pub fn is_web_socket(headers: &HeaderMap) -> bool {
    let first = headers.get(header::UPGRADE);
    is_upgrade(headers) && first.is_some_and(|value| value.as_bytes().eq_ignore_ascii_case(b"websocket"))
}

/// Subprotocols in the first header line; none where the line is not visible ASCII.
pub fn subprotocols(headers: &HeaderMap) -> Vec<&str> {
    let line = headers.get(header::SEC_WEBSOCKET_PROTOCOL).and_then(|value| value.to_str().ok());
    line.map(|line| line.split(',').map(str::trim).collect()).unwrap_or_default()
}

/// Upgrade of exec and attach; `terminate` is the feature gate `ExtendWebSocketsToKubelet`.
pub fn command(headers: &HeaderMap, terminate: bool) -> CommandUpgrade {
    if !is_upgrade(headers) {
        return CommandUpgrade::None;
    }
    let translate = terminate && is_web_socket(headers) && subprotocols(headers).contains(&V5);
    if translate { CommandUpgrade::Translate } else { CommandUpgrade::Splice }
}

/// Upgrade of port-forward; `terminate` is the feature gate `ExtendWebSocketsToKubelet`.
pub fn forward(headers: &HeaderMap, terminate: bool) -> ForwardUpgrade {
    if !is_upgrade(headers) {
        return ForwardUpgrade::None;
    }
    if !is_web_socket(headers) {
        return ForwardUpgrade::Spdy;
    }
    let tunnel = terminate && subprotocols(headers).into_iter().any(|offered| tunnelled(offered).is_some());
    if tunnel { ForwardUpgrade::Tunnel } else { ForwardUpgrade::WebSocket }
}

/// SPDY subprotocol inside a tunnel's subprotocol: `SPDY/3.1+portforward.k8s.io`.
pub fn tunnelled(subprotocol: &str) -> Option<&str> {
    subprotocol.strip_prefix(TUNNEL).filter(|inner| inner.ends_with(".k8s.io"))
}

/// Subprotocol of a tunnel that carries `inner`.
pub fn tunnel_of(inner: &str) -> String {
    format!("{TUNNEL}{inner}")
}

/// Kind of credential, as far as web pages can abuse it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CredentialKind {
    /// Client certificate of the connection, which a browser presents for requests of any page.
    Certificate,
    /// Credential that a page cannot make a browser send.
    Other,
}

/// Whether a web page of another origin may have sent the request: such requests are refused where the credential is a
/// browser's certificate (spec 04 §10).
pub fn is_cross_site(headers: &HeaderMap, proof: CredentialKind) -> bool {
    let Some(origin) = headers.get(header::ORIGIN) else { return false };
    if proof == CredentialKind::Other {
        return false;
    }
    let host = headers.get(header::HOST).and_then(|value| value.to_str().ok());
    let from = origin.to_str().ok().and_then(|origin| origin.split_once("://")).map(|(_, host)| host);
    !matches!((from, host), (Some(from), Some(host)) if from.eq_ignore_ascii_case(host))
}

#[cfg(test)]
mod tests {
    use http::{HeaderName, HeaderValue};

    use super::*;

    fn head(lines: &[(&str, &str)]) -> HeaderMap {
        let mut headers = HeaderMap::new();
        for (name, value) in lines {
            let name = HeaderName::from_bytes(name.as_bytes()).expect("a name");
            headers.append(name, HeaderValue::from_str(value).expect("a value"));
        }
        headers
    }

    #[test]
    fn exec_and_attach() {
        use CommandUpgrade::{None, Splice, Translate};
        let offers = |value| ("sec-websocket-protocol", value);
        let ws = |protocols| head(&[("connection", "Upgrade"), ("upgrade", "WebSocket"), offers(protocols)]);
        let rows = [
            ("plain", head(&[]), None),
            ("upgrade without connection", head(&[("upgrade", "SPDY/3.1")]), None),
            ("spdy", head(&[("connection", "keep-alive, uPgRaDe"), ("upgrade", "SPDY/3.1")]), Splice),
            ("connection alone", head(&[("connection", "upgrade")]), Splice),
            ("no protocol", head(&[("connection", "upgrade"), ("upgrade", "websocket")]), Splice),
            // AC-04b-S7
            ("v4", ws("v4.channel.k8s.io"), Splice),
            ("v5", ws("v5.channel.k8s.io"), Translate),
            ("v5 anywhere", ws("v4.channel.k8s.io, v5.channel.k8s.io"), Translate),
            ("case", ws("V5.channel.k8s.io"), Splice),
            (
                "the first line only",
                head(&[
                    ("connection", "upgrade"),
                    ("upgrade", "websocket"),
                    offers("v4.channel.k8s.io"),
                    offers("v5.channel.k8s.io"),
                ]),
                Splice,
            ),
            (
                "v5 over spdy",
                head(&[("connection", "upgrade"), ("upgrade", "SPDY/3.1"), offers("v5.channel.k8s.io")]),
                Splice,
            ),
        ];
        for (name, headers, expected) in rows {
            assert_eq!(command(&headers, true), expected, "{name}");
        }
        assert_eq!(command(&ws("v5.channel.k8s.io"), false), Splice, "the gate is off");
    }

    #[test]
    fn port_forward() {
        use ForwardUpgrade::{None, Spdy, Tunnel, WebSocket};
        let ws = |protocols| {
            head(&[("connection", "Upgrade"), ("upgrade", "websocket"), ("sec-websocket-protocol", protocols)])
        };
        assert_eq!(forward(&head(&[]), true), None);
        assert_eq!(forward(&head(&[("connection", "upgrade"), ("upgrade", "SPDY/3.1")]), true), Spdy);
        assert_eq!(forward(&ws("v4.channel.k8s.io"), true), WebSocket);
        // AC-04b-S10
        assert_eq!(forward(&ws("SPDY/3.1+portforward.k8s.io"), true), Tunnel);
        assert_eq!(forward(&ws("x, SPDY/3.1+portforward.k8s.io"), true), Tunnel);
        assert_eq!(forward(&ws("spdy/3.1+portforward.k8s.io"), true), WebSocket);
        assert_eq!(forward(&ws("SPDY/3.1+portforward"), true), WebSocket);
        assert_eq!(forward(&ws("SPDY/3.1+portforward.k8s.io"), false), WebSocket, "the gate is off");
        assert_eq!(tunnelled("SPDY/3.1+portforward.k8s.io"), Some("portforward.k8s.io"));
        assert_eq!(tunnel_of("portforward.k8s.io"), "SPDY/3.1+portforward.k8s.io");
    }

    #[test]
    fn web_pages_of_other_hosts() {
        let from = |origin| head(&[("origin", origin), ("host", "node:10250")]);
        for (headers, proof, expected) in [
            (head(&[("host", "node:10250")]), CredentialKind::Certificate, false),
            (from("https://node:10250"), CredentialKind::Certificate, false),
            (from("https://NODE:10250"), CredentialKind::Certificate, false),
            (from("https://evil.example"), CredentialKind::Certificate, true),
            (from("https://node"), CredentialKind::Certificate, true),
            (from("null"), CredentialKind::Certificate, true),
            (from("https://evil.example"), CredentialKind::Other, false),
        ] {
            assert_eq!(is_cross_site(&headers, proof), expected, "{headers:?} {proof:?}");
        }
    }
}
