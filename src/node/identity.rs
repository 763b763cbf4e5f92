//! What this node is called, and the addresses it was told. Pure. Behaviour: spec 01 §12.1-12.2.

use std::net::{IpAddr, Ipv4Addr};

/// The node cannot be named or addressed as configured.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum IdentityError {
    /// Neither the override nor the machine gives a name.
    #[error("empty hostname is invalid")]
    EmptyHostname,
    /// More than two addresses, or two of one family.
    #[error("bad --node-ip {0:?}: must contain either a single IP or a dual-stack pair of IPs")]
    NotAPair(String),
    /// A pair with an address that stands for all.
    #[error("bad --node-ip {0:?}: dual-stack node IP cannot include '0.0.0.0' or '::'")]
    Unspecified(String),
}

/// The host name, which is also the node's: the override, else the machine's; trimmed and
/// lower-case.
///
/// # Errors
/// Nothing is left.
pub fn hostname(name_override: &str, machine: &str) -> Result<String, IdentityError> {
    let name = if name_override.is_empty() { machine } else { name_override };
    let name = name.trim().to_lowercase();
    if name.is_empty() { Err(IdentityError::EmptyHostname) } else { Ok(name) }
}

/// What `--node-ip` says.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct NodeIps {
    /// The addresses, in the given order: none, one, or one of each family.
    pub ips: Vec<IpAddr>,
    /// Items that are no addresses: log them as ignored.
    pub ignored: Vec<String>,
}

/// Reads `--node-ip`: a comma list of which unreadable items are dropped.
///
/// # Errors
/// What is left is neither a single address nor a dual-stack pair.
pub fn node_ips(text: &str) -> Result<NodeIps, IdentityError> {
    let mut found = NodeIps::default();
    for item in text.split(',').map(str::trim).filter(|item| !item.is_empty()) {
        match parse_ip(item) {
            Some(ip) => found.ips.push(ip),
            None => found.ignored.push(item.to_owned()),
        }
    }
    match found.ips.as_slice() {
        [] | [_] => Ok(found),
        [a, b] if a.is_ipv4() != b.is_ipv4() => {
            if a.is_unspecified() || b.is_unspecified() {
                return Err(IdentityError::Unspecified(text.to_owned()));
            }
            Ok(found)
        }
        _ => Err(IdentityError::NotAPair(text.to_owned())),
    }
}

/// Tolerates leading zeros in IPv4 octets.
fn parse_ip(text: &str) -> Option<IpAddr> {
    if let Ok(ip) = text.parse::<IpAddr>() {
        return Some(ip.to_canonical());
    }
    let digits = |part: &str| !part.is_empty() && part.bytes().all(|b| b.is_ascii_digit());
    let octets: Option<Vec<u8>> = text.split('.').map(|part| part.parse().ok().filter(|_| digits(part))).collect();
    <[u8; 4]>::try_from(octets?).ok().map(|octets| Ipv4Addr::from(octets).into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_name_is_the_override_or_the_machines() {
        assert_eq!(hostname("", " Node-A\n").as_deref(), Ok("node-a"));
        assert_eq!(hostname(" Edge.Example ", "node-a").as_deref(), Ok("edge.example"));
        assert_eq!(hostname("  ", "node-a").map_err(|e| e.to_string()), Err("empty hostname is invalid".to_owned()));
    }

    #[test]
    fn node_ips_are_single_or_a_pair() {
        let read = |text: &str| {
            node_ips(text)
                .map(|n| n.ips.iter().map(IpAddr::to_string).collect::<Vec<_>>().join(","))
                .map_err(|e| e.to_string())
        };
        let not_a_pair = |text: &str| {
            Err(format!("bad --node-ip {text:?}: must contain either a single IP or a dual-stack pair of IPs"))
        };
        for (text, expected) in [
            ("", Ok(String::new())),
            ("1.2.3.4", Ok("1.2.3.4".to_owned())),
            ("010.002.03.4", Ok("10.2.3.4".to_owned())),
            ("::", Ok("::".to_owned())),
            (" 1.2.3.4 , fd00::1", Ok("1.2.3.4,fd00::1".to_owned())),
            ("nonsense,1.2.3.4", Ok("1.2.3.4".to_owned())),
            // AC-01-35
            ("1.2.3.4,5.6.7.8", not_a_pair("1.2.3.4,5.6.7.8")),
            ("1.2.3.4,fd00::1,5.6.7.8", not_a_pair("1.2.3.4,fd00::1,5.6.7.8")),
            (
                "0.0.0.0,fd00::1",
                Err("bad --node-ip \"0.0.0.0,fd00::1\": dual-stack node IP cannot include '0.0.0.0' or '::'".to_owned()),
            ),
        ] {
            assert_eq!(read(text), expected, "{text}");
        }
        assert_eq!(node_ips("x,1.2.3.4,+1.2.3.4").expect("one is left").ignored, ["x", "+1.2.3.4"]);
    }
}
