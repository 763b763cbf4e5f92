//! Bearer token extraction: `Authorization` header, and WebSocket subprotocol. Pure. Spec 04 §6.1.
//!
//! Browsers cannot set `Authorization` on a WebSocket request and send the token as a subprotocol.

use base64::Engine;
use http::{
    HeaderMap, HeaderValue,
    header::{AUTHORIZATION, SEC_WEBSOCKET_PROTOCOL},
};

use crate::streaming::upgrade_protocol::is_web_socket;

/// Prefix of the subprotocol that contains the token.
const PREFIX: &str = "base64url.bearer.authorization.k8s.io.";

/// Reason why the subprotocol with the token is invalid.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ProtocolError {
    /// More than one token.
    #[error("multiple base64.bearer.authorization tokens specified")]
    Several,
    /// Invalid base64url.
    #[error("invalid base64.bearer.authorization token encoding")]
    Encoding,
    /// Not UTF-8.
    #[error("invalid base64.bearer.authorization token")]
    Text,
    /// No other subprotocol that the server could select.
    #[error("missing additional subprotocol")]
    Alone,
}

/// Token in the list of subprotocols, and the list without it.
#[derive(Clone, PartialEq, Eq)]
pub struct SubprotocolToken {
    /// Decoded token.
    pub token: String,
    rest: String,
}

/// Token of the `Authorization` header.
pub fn of_header(headers: &HeaderMap) -> Option<String> {
    let value = std::str::from_utf8(headers.get(AUTHORIZATION)?.as_bytes()).ok()?;
    let mut parts = value.trim().splitn(3, ' ');
    let (scheme, token) = (parts.next()?, parts.next()?);
    (scheme.eq_ignore_ascii_case("bearer") && !token.is_empty()).then(|| token.to_owned())
}

/// Removes the header of an authenticated request, so that no handler can use or leak the token.
pub fn strip_header(headers: &mut HeaderMap) {
    headers.remove(AUTHORIZATION);
}

/// Token among the subprotocols of a WebSocket request.
///
/// # Errors
/// Why the subprotocol is invalid.
pub fn of_protocols(headers: &HeaderMap) -> Result<Option<SubprotocolToken>, ProtocolError> {
    if !is_web_socket(headers) {
        return Ok(None);
    }
    let mut token = None;
    let mut others = Vec::new();
    for line in headers.get_all(SEC_WEBSOCKET_PROTOCOL) {
        let line = std::str::from_utf8(line.as_bytes()).map_err(|_| ProtocolError::Text)?;
        for protocol in line.split(',').map(str::trim) {
            let Some(encoded) = protocol.strip_prefix(PREFIX) else {
                others.push(protocol);
                continue;
            };
            if token.is_some() {
                return Err(ProtocolError::Several);
            }
            let engine = base64::engine::general_purpose::URL_SAFE_NO_PAD;
            let decoded = engine.decode(encoded).map_err(|_| ProtocolError::Encoding)?;
            token = Some(String::from_utf8(decoded).map_err(|_| ProtocolError::Text)?);
        }
    }
    let Some(token) = token else { return Ok(None) };
    if others.is_empty() {
        return Err(ProtocolError::Alone);
    }
    let rest = others.join(",");
    Ok((!token.is_empty()).then_some(SubprotocolToken { token, rest }))
}

/// Removes the token's subprotocol from an authenticated request.
pub fn strip_protocol(headers: &mut HeaderMap, offered: &SubprotocolToken) {
    match HeaderValue::try_from(offered.rest.as_str()) {
        Ok(rest) => headers.insert(SEC_WEBSOCKET_PROTOCOL, rest),
        Err(_) => headers.remove(SEC_WEBSOCKET_PROTOCOL), // unreachable: the value came from a header
    };
}

#[cfg(test)]
mod tests {
    use super::*;

    fn headers(lines: &[(&'static str, &str)]) -> HeaderMap {
        lines.iter().map(|(name, value)| (name.parse().expect("a name"), value.parse().expect("a value"))).collect()
    }

    #[test]
    fn the_second_word_after_the_scheme_is_the_token() {
        for (value, token) in [
            ("Bearer abc", Some("abc")),
            ("bEARER abc", Some("abc")),
            ("  Bearer abc  ", Some("abc")),
            ("Bearer abc def", Some("abc")),
            ("Bearer  abc", None),
            ("Bearer ", None),
            ("Bearer", None),
            ("Basic abc", None),
            ("", None),
        ] {
            assert_eq!(of_header(&headers(&[("authorization", value)])).as_deref(), token, "{value:?}");
        }
        assert_eq!(of_header(&HeaderMap::new()), None);
        let mut both = headers(&[("authorization", "Bearer a"), ("authorization", "Bearer b"), ("accept", "x")]);
        assert_eq!(of_header(&both).as_deref(), Some("a"));
        strip_header(&mut both);
        assert_eq!(both, headers(&[("accept", "x")]));
    }

    #[test]
    fn a_web_socket_may_carry_the_token_among_its_subprotocols() {
        let token = |text: &str| format!("{PREFIX}{text}");
        let ask = |lines: &[&str]| {
            let mut all = headers(&[("upgrade", "WebSocket"), ("connection", "keep-alive, Upgrade")]);
            for line in lines {
                all.append(SEC_WEBSOCKET_PROTOCOL, line.parse().expect("a value"));
            }
            of_protocols(&all).map(|offered| offered.map(|o| (o.token, o.rest)))
        };
        let good = |rest: &str| Ok(Some(("token".to_owned(), rest.to_owned())));
        // "dG9rZW4" is "token"; "_w" is one byte that is not UTF-8.
        for (lines, expected) in [
            (vec![format!("v5.channel.k8s.io, {}", token("dG9rZW4"))], good("v5.channel.k8s.io")),
            (vec![token("dG9rZW4"), "a, b".to_owned(), "c".to_owned()], good("a,b,c")),
            (vec!["a".to_owned()], Ok(None)),
            (vec![], Ok(None)),
            (vec![format!("a, {}", token(""))], Ok(None)),
            (vec![token("dG9rZW4")], Err(ProtocolError::Alone)),
            (vec![token("dG9rZW4"), token("dG9rZW4"), "a".to_owned()], Err(ProtocolError::Several)),
            (vec![token("dG9rZW4="), "a".to_owned()], Err(ProtocolError::Encoding)),
            (vec![token("_w"), "a".to_owned()], Err(ProtocolError::Text)),
        ] {
            let lines: Vec<&str> = lines.iter().map(String::as_str).collect();
            assert_eq!(ask(&lines), expected, "{lines:?}");
        }
        let plain = headers(&[("sec-websocket-protocol", &format!("a, {}", token("dG9rZW4")))]);
        assert!(of_protocols(&plain).is_ok_and(|offered| offered.is_none()), "without an upgrade it is just a header");
    }

    #[test]
    fn the_subprotocol_is_gone_once_it_has_served() {
        let value = format!("a, {PREFIX}dG9rZW4, b");
        let mut asked =
            headers(&[("upgrade", "websocket"), ("connection", "upgrade"), ("sec-websocket-protocol", &value)]);
        let offered = of_protocols(&asked).expect("a good one").expect("a token");
        strip_protocol(&mut asked, &offered);
        assert_eq!(asked.get(SEC_WEBSOCKET_PROTOCOL).map(HeaderValue::as_bytes), Some(&b"a,b"[..]));
    }
}
