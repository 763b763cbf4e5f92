//! Address of the OTLP collector, in the forms of gRPC's name syntax that kubelet accepts. Pure (spec 01 §16).

use std::path::PathBuf;

/// `tracing.endpoint` if it is not configured.
const DEFAULT: &str = "localhost:4317";
/// Port of a name without one, as in gRPC's DNS resolver.
const DEFAULT_PORT: u16 = 443;

/// Where the collector listens.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) enum CollectorAddress {
    /// Host and port, as in a URI's authority.
    Tcp(String),
    /// Path of a Unix socket.
    Unix(PathBuf),
    /// Name of an abstract Unix socket, without the leading zero byte.
    Abstract(Vec<u8>),
}

/// An endpoint that is no address of a collector.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("tracing.endpoint: {endpoint:?}: {problem}")]
pub struct InvalidCollectorAddress {
    endpoint: String,
    problem: &'static str,
}

impl CollectorAddress {
    /// Parses `host:port`, `dns:[//authority/]host:port`, `unix:path`, `unix:///path`, and `unix-abstract:name`;
    /// `None` stands for the default.
    ///
    /// # Errors
    /// An authority of a Unix socket, or a part that is missing.
    pub(crate) fn parse(endpoint: Option<&str>) -> Result<Self, InvalidCollectorAddress> {
        let endpoint = endpoint.unwrap_or(DEFAULT);
        let invalid = |problem| InvalidCollectorAddress { endpoint: endpoint.to_owned(), problem };
        if let Some(rest) = endpoint.strip_prefix("unix-abstract:") {
            let name = without_authority(rest).ok_or_else(|| invalid(AUTHORITY))?;
            return match name {
                "" => Err(invalid("the name of the socket is missing")),
                name => Ok(Self::Abstract(name.as_bytes().to_vec())),
            };
        }
        if let Some(rest) = endpoint.strip_prefix("unix:") {
            let path = without_authority(rest).ok_or_else(|| invalid(AUTHORITY))?;
            return match path {
                "" => Err(invalid("the path of the socket is missing")),
                path => Ok(Self::Unix(PathBuf::from(path))),
            };
        }
        let name = match endpoint.strip_prefix("dns:") {
            None => endpoint,
            // The authority names a DNS server; names are resolved by the system's resolver.
            Some(rest) => match rest.strip_prefix("//") {
                None => rest,
                Some(full) => full.split_once('/').ok_or_else(|| invalid("expected dns:///host:port"))?.1,
            },
        };
        match with_port(name) {
            Some(authority) => Ok(Self::Tcp(authority)),
            None => Err(invalid("expected host:port")),
        }
    }
}

const AUTHORITY: &str = "a Unix socket has no authority: expected unix:///path";

/// The part after an empty authority; `None` if there is an authority.
fn without_authority(rest: &str) -> Option<&str> {
    match rest.strip_prefix("//") {
        None => Some(rest),
        Some(path) if path.is_empty() || path.starts_with('/') => Some(path),
        Some(_) => None,
    }
}

/// Host and port as an authority; `None` if it is not valid.
fn with_port(name: &str) -> Option<String> {
    let authority: http::uri::Authority = name.parse().ok()?;
    if authority.host().is_empty() || name.contains('@') {
        return None;
    }
    match (authority.port_u16(), name.ends_with(':')) {
        (Some(_), _) => Some(name.to_owned()),
        (None, false) if authority.host().len() == name.len() => Some(format!("{name}:{DEFAULT_PORT}")),
        (None, _) => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_forms_of_an_endpoint() {
        let tcp = |text: &str| Ok(CollectorAddress::Tcp(text.to_owned()));
        let unix = |path: &str| Ok(CollectorAddress::Unix(PathBuf::from(path)));
        let named = |name: &str| Ok(CollectorAddress::Abstract(name.as_bytes().to_vec()));
        let parse =
            |text| CollectorAddress::parse(Some(text)).map_err(|error: InvalidCollectorAddress| error.to_string());
        assert_eq!(CollectorAddress::parse(None), Ok(CollectorAddress::Tcp("localhost:4317".to_owned())));
        for (endpoint, expected) in [
            ("collector:4317", tcp("collector:4317")),
            ("collector", tcp("collector:443")),
            ("[::1]:4317", tcp("[::1]:4317")),
            ("dns:collector:1", tcp("collector:1")),
            ("dns:///collector:1", tcp("collector:1")),
            ("dns://10.0.0.1/collector:1", tcp("collector:1")),
            ("unix:run/otel.sock", unix("run/otel.sock")),
            ("unix:///run/otel.sock", unix("/run/otel.sock")),
            ("unix-abstract:otel", named("otel")),
            ("unix-abstract:///otel", named("/otel")),
        ] {
            assert_eq!(parse(endpoint), expected, "{endpoint}");
        }
    }

    #[test]
    fn an_endpoint_that_is_no_address_is_named_with_what_was_expected() {
        for (endpoint, problem) in [
            ("", "expected host:port"),
            (":4317", "expected host:port"),
            ("host:port", "expected host:port"),
            ("host:", "expected host:port"),
            ("host:70000", "expected host:port"),
            ("user@host:1", "expected host:port"),
            ("dns://host:1", "expected dns:///host:port"),
            ("unix://run/otel.sock", AUTHORITY),
            ("unix:", "the path of the socket is missing"),
            ("unix-abstract:", "the name of the socket is missing"),
        ] {
            let error = CollectorAddress::parse(Some(endpoint)).unwrap_err();
            assert_eq!(error.to_string(), format!("tracing.endpoint: {endpoint:?}: {problem}"));
        }
    }
}
