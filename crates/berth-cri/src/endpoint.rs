//! Parses the CRI endpoint setting into a Unix socket path (spec 03a §2.1 "Parsing"). Pure.

use std::path::PathBuf;

/// Reason why an endpoint is invalid; operators depend on these texts.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum EndpointError {
    /// `tcp` is a known scheme, but not supported on Linux.
    #[error("only support unix socket endpoint")]
    NotUnix,
    /// Any other scheme.
    #[error("protocol \"{0}\" not supported")]
    Unsupported(String),
    /// The endpoint contains no path.
    #[error("endpoint \"{0}\" has no socket path")]
    NoPath(String),
}

/// Socket path of an endpoint: `unix:///run/x.sock`, or a bare path (deprecated).
///
/// # Errors
/// For any other scheme, and where the path is empty.
pub fn socket_path(endpoint: &str) -> Result<PathBuf, EndpointError> {
    let path = match scheme(endpoint) {
        None => endpoint,
        Some(("unix", rest)) => match rest.strip_prefix("//") {
            // The part between the slashes is a host, which a socket does not have.
            Some(authority) => authority.find('/').and_then(|at| authority.get(at..)).unwrap_or(""),
            None => rest,
        },
        Some(("tcp", _)) => return Err(EndpointError::NotUnix),
        Some((other, _)) => return Err(EndpointError::Unsupported(other.to_owned())),
    };
    if path.is_empty() { Err(EndpointError::NoPath(endpoint.to_owned())) } else { Ok(PathBuf::from(path)) }
}

/// Splits the scheme of a URL from the part after the colon.
fn scheme(endpoint: &str) -> Option<(&str, &str)> {
    let (scheme, rest) = endpoint.split_once(':')?;
    let mut letters = scheme.chars();
    let starts = letters.next().is_some_and(|c| c.is_ascii_alphabetic());
    let goes_on = letters.all(|c| c.is_ascii_alphanumeric() || "+-.".contains(c));
    (starts && goes_on).then_some((scheme, rest))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn endpoints() {
        let path = |text: &str| socket_path(text).map(|p| p.display().to_string()).map_err(|e| e.to_string());
        let ok = |text: &str| Ok::<_, String>(text.to_owned());
        let bad = |text: &str| Err::<String, _>(text.to_owned());
        let rows = [
            ("unix:///run/containerd/containerd.sock", ok("/run/containerd/containerd.sock")),
            ("unix:/run/x.sock", ok("/run/x.sock")),
            ("/run/x.sock", ok("/run/x.sock")),
            ("run/x.sock", ok("run/x.sock")),
            ("/run/a:b.sock", ok("/run/a:b.sock")),
            ("unix://host/x.sock", ok("/x.sock")),
            ("tcp://127.0.0.1:4", bad("only support unix socket endpoint")),
            ("http://x", bad("protocol \"http\" not supported")),
            ("npipe:////./pipe/x", bad("protocol \"npipe\" not supported")),
            ("unix://", bad("endpoint \"unix://\" has no socket path")),
            ("", bad("endpoint \"\" has no socket path")),
        ];
        for (given, expected) in rows {
            assert_eq!(path(given), expected, "{given}");
        }
    }
}
