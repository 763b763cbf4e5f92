//! What a server answers to a client that wants SPDY (spec 04b §3). Pure.

use http::{HeaderMap, StatusCode, header};

/// The header in which protocols are offered and chosen.
pub const PROTOCOL: &str = "x-stream-protocol-version";
/// The header in which protocols are listed that would have been accepted.
pub const ACCEPTED: &str = "x-accepted-stream-protocol-versions";
/// The protocol of the connection itself.
pub const SPDY: &str = "SPDY/3.1";
/// Protocols of exec and attach, the best first.
pub const COMMAND: &[&str] = &["v4.channel.k8s.io", "v3.channel.k8s.io", "v2.channel.k8s.io", "channel.k8s.io"];
/// Protocols of port-forward.
pub const FORWARD: &[&str] = &["portforward.k8s.io"];

/// Why there will be no SPDY.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refusal {
    /// The answer's status.
    pub status: StatusCode,
    /// The answer's body.
    pub text: String,
    /// Whether the answer lists what is accepted, a header line each.
    pub lists_accepted: bool,
}

/// The protocol both sides know, the client's wishes first. With it the answer is 101.
///
/// # Errors
/// The answer, where there is no such protocol or no upgrade was asked for.
pub fn negotiate(headers: &HeaderMap, accepted: &[&'static str]) -> Result<&'static str, Refusal> {
    let bad = |text| Refusal { status: StatusCode::BAD_REQUEST, text, lists_accepted: false };
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
        return Err(Refusal { status: StatusCode::FORBIDDEN, text, lists_accepted: true });
    };
    let says = |name: header::HeaderName, word: &str| {
        let values = headers.get_all(name).iter();
        values.filter_map(|v| v.to_str().ok()).any(|v| v.to_ascii_lowercase().contains(&word.to_ascii_lowercase()))
    };
    if !says(header::CONNECTION, "upgrade") || !says(header::UPGRADE, SPDY) {
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
    fn the_clients_first_wish_that_we_know() {
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
        let text = |answer: Result<_, Refusal>| {
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
