//! SPDY upgrade negotiation, server side: protocol selection and refusals (spec 04b §3). Pure.

use http::{HeaderMap, StatusCode, header};

/// Header that offers and selects the stream protocol.
pub const PROTOCOL: &str = "x-stream-protocol-version";
/// Header that lists the accepted protocols in a refusal.
pub const ACCEPTED: &str = "x-accepted-stream-protocol-versions";
/// Upgrade token of the connection protocol.
pub const SPDY: &str = "SPDY/3.1";
/// Stream protocols of exec and attach, preferred first.
pub const COMMAND: &[&str] = &["v4.channel.k8s.io", "v3.channel.k8s.io", "v2.channel.k8s.io", "channel.k8s.io"];
/// Stream protocols of port-forward.
pub const FORWARD: &[&str] = &["portforward.k8s.io"];

/// Reason why the upgrade is refused.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UpgradeRejection {
    /// Status code of the response.
    pub status: StatusCode,
    /// Body of the response.
    pub text: String,
    /// Whether the response lists the accepted protocols, one header line each.
    pub lists_accepted: bool,
}

/// Selects the first protocol of the client's list that is accepted; the response is then 101.
///
/// # Errors
/// The response, where no protocol matches or no upgrade was requested.
pub fn negotiate(headers: &HeaderMap, accepted: &[&'static str]) -> Result<&'static str, UpgradeRejection> {
    let bad = |text| UpgradeRejection { status: StatusCode::BAD_REQUEST, text, lists_accepted: false };
    let lines: Vec<&str> = headers.get_all(PROTOCOL).iter().filter_map(|line| line.to_str().ok()).collect();
    if lines.is_empty() {
        let text = "unable to upgrade: header X-Stream-Protocol-Version does not exist in request with";
        return Err(bad(format!("{text} {} headers\n", headers.keys_len())));
    }
    let offered: Vec<&str> =
        lines.iter().flat_map(|line| line.split(',')).map(str::trim).filter(|p| !p.is_empty()).collect();
    if offered.is_empty() {
        let text = "unable to upgrade: header X-Stream-Protocol-Version contains";
        return Err(bad(format!("{text} {lines:?}, but no valid protocols\n")));
    }
    let known = offered.iter().find_map(|offer| accepted.iter().copied().find(|known| known == offer));
    let Some(protocol) = known else {
        let text = "unable to upgrade: unable to negotiate protocol: client supports";
        let text = format!("{text} [{}], server accepts [{}]\n", offered.join(" "), accepted.join(" "));
        return Err(UpgradeRejection { status: StatusCode::FORBIDDEN, text, lists_accepted: true });
    };
    let header_contains = |name: header::HeaderName, word: &str| {
        let values = headers.get_all(name).iter();
        values.filter_map(|v| v.to_str().ok()).any(|v| v.to_ascii_lowercase().contains(&word.to_ascii_lowercase()))
    };
    if !header_contains(header::CONNECTION, "upgrade") || !header_contains(header::UPGRADE, SPDY) {
        return Err(bad(format!("unable to upgrade: missing upgrade headers in request: {headers:?}\n")));
    }
    Ok(protocol)
}

#[cfg(test)]
mod tests {
    use http::HeaderValue;

    use super::*;

    fn head(lines: &[(&'static str, &'static str)]) -> HeaderMap {
        let mut headers = HeaderMap::new();
        for (name, value) in lines {
            headers.append(*name, HeaderValue::from_static(value));
        }
        headers
    }

    #[test]
    fn the_first_known_protocol_of_the_client_is_negotiated() {
        let upgrade = [("connection", "Upgrade"), ("upgrade", "SPDY/3.1")];
        let offer = |lines: &[&'static str]| {
            let mut all = upgrade.to_vec();
            all.extend(lines.iter().map(|line| (PROTOCOL, *line)));
            negotiate(&head(&all), COMMAND)
        };
        // AC-04b-S3
        assert_eq!(offer(&["v5.channel.k8s.io", "v4.channel.k8s.io"]), Ok("v4.channel.k8s.io"));
        assert_eq!(offer(&["v5.channel.k8s.io, v3.channel.k8s.io,v4.channel.k8s.io"]), Ok("v3.channel.k8s.io"));
        assert_eq!(offer(&["", "channel.k8s.io"]), Ok("channel.k8s.io"));
        // AC-04b-S4
        let refused = offer(&["v9"]).expect_err("unknown");
        assert_eq!((refused.status.as_u16(), refused.lists_accepted), (403, true));
        assert_eq!(
            refused.text,
            "unable to upgrade: unable to negotiate protocol: client supports [v9], server accepts \
             [v4.channel.k8s.io v3.channel.k8s.io v2.channel.k8s.io channel.k8s.io]\n"
        );
        let text = |answer: Result<_, UpgradeRejection>| {
            let refusal = answer.expect_err("refused");
            assert_eq!((refusal.status.as_u16(), refusal.lists_accepted), (400, false));
            refusal.text
        };
        assert_eq!(
            text(offer(&[])),
            "unable to upgrade: header X-Stream-Protocol-Version does not exist in request with 2 headers\n"
        );
        assert_eq!(
            text(offer(&["", " , "])),
            "unable to upgrade: header X-Stream-Protocol-Version contains [\"\", \" , \"], but no valid protocols\n"
        );
        let plain = negotiate(&head(&[(PROTOCOL, "v4.channel.k8s.io")]), COMMAND);
        assert!(text(plain).starts_with("unable to upgrade: missing upgrade headers in request: "));
    }
}
