//! URLs of HTTP probes: built from a path, and resolved for a redirect. Pure.
//!
//! Implements spec 05 §1.8.
//!
//! A path is parsed like Go's `url.Parse`; one that it rejects is used literally.

use std::fmt;

/// URL of a request.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Url {
    /// Scheme: `http` or `https`, or that of a redirect.
    pub scheme: String,
    /// Host, without brackets.
    pub host: String,
    /// Port, if given.
    pub port: Option<u16>,
    /// Escaped path; begins with a slash.
    pub path: String,
    /// Query: the part after the question mark.
    pub query: Option<String>,
}

/// URL reference, before it is resolved.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
struct UrlReference {
    scheme: Option<String>,
    authority: Option<(String, Option<u16>)>,
    path: String,
    query: Option<String>,
}

impl Url {
    /// Creates the URL of a probe; only path and query of `path` are used.
    pub fn of(scheme: &str, host: &str, port: u16, path: &str) -> Self {
        let scheme = if scheme.is_empty() { "http".to_owned() } else { scheme.to_ascii_lowercase() };
        let (path, query) = match parse(path) {
            Ok(reference) => (reference.path, reference.query),
            Err(_) => (escaped(path, Escape::All), None),
        };
        let host = host.strip_prefix('[').and_then(|h| h.strip_suffix(']')).unwrap_or(host);
        Self { scheme, host: host.to_owned(), port: Some(port), path: rooted(path), query }
    }

    /// Resolves a `Location` header against this URL; returns the URL, and whether the location was absolute.
    ///
    /// # Errors
    /// The location is no valid URL.
    pub fn join(&self, location: &str) -> Result<(Self, bool), String> {
        let to = parse(location).map_err(|e| format!("failed to parse Location header {location:?}: {e}"))?;
        let is_absolute = to.scheme.is_some();
        let (host, port) = match to.authority {
            Some(authority) => authority,
            None if is_absolute => (String::new(), None),
            None => (self.host.clone(), self.port),
        };
        let moved = host != self.host || port != self.port || is_absolute;
        let (path, query) = if to.path.is_empty() && !moved {
            (self.path.clone(), to.query.or_else(|| self.query.clone()))
        } else if to.path.starts_with('/') || moved {
            (to.path, to.query)
        } else {
            let folder = self.path.rsplit_once('/').map_or("", |(folder, _)| folder);
            (format!("{folder}/{}", to.path), to.query)
        };
        let scheme = to.scheme.unwrap_or_else(|| self.scheme.clone());
        Ok((Self { scheme, host, port, path: without_dots(&rooted(path)), query }, is_absolute))
    }

    /// Host and port, as in a `Host` header.
    pub fn authority(&self) -> String {
        let host = if self.host.contains(':') { format!("[{}]", self.host) } else { self.host.clone() };
        match self.port {
            Some(port) => format!("{host}:{port}"),
            None => host,
        }
    }

    /// Port of the connection: the given one, or the default of the scheme.
    pub fn dialled_port(&self) -> u16 {
        self.port.unwrap_or(if self.scheme == "https" { 443 } else { 80 })
    }

    /// Path and query, as in a request line.
    pub fn target(&self) -> String {
        match &self.query {
            Some(query) => format!("{}?{query}", self.path),
            None => self.path.clone(),
        }
    }
}

impl fmt::Display for Url {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}://{}{}", self.scheme, self.authority(), self.target())
    }
}

fn rooted(path: String) -> String {
    if path.starts_with('/') { path } else { format!("/{path}") }
}

fn parse(text: &str) -> Result<UrlReference, &'static str> {
    if text.bytes().any(|b| b.is_ascii_control()) {
        return Err("net/url: invalid control character in URL");
    }
    let text = text.split_once('#').map_or(text, |(before, _)| before);
    let (text, query) = match text.split_once('?') {
        Some((path, query)) => (path, Some(escaped(query, Escape::Unfit))),
        None => (text, None),
    };
    let (scheme, rest) = split_scheme(text)?;
    let (authority, path) = match rest.strip_prefix("//") {
        Some(rest) => {
            let (authority, path) = rest.split_at(rest.find('/').unwrap_or(rest.len()));
            (Some(parse_authority(authority)?), path)
        }
        None => (None, rest),
    };
    if !has_sound_escapes(path) {
        return Err("invalid URL escape");
    }
    Ok(UrlReference { scheme, authority, path: escaped(path, Escape::Unfit), query })
}

fn split_scheme(text: &str) -> Result<(Option<String>, &str), &'static str> {
    let Some((before, rest)) = text.split_once(':') else { return Ok((None, text)) };
    if before.contains('/') {
        return Ok((None, text));
    }
    let fits = |c: char| c.is_ascii_alphanumeric() || "+-.".contains(c);
    if before.starts_with(|c: char| c.is_ascii_alphabetic()) && before.chars().all(fits) {
        return Ok((Some(before.to_ascii_lowercase()), rest));
    }
    Err("first path segment in URL cannot contain colon")
}

fn parse_authority(text: &str) -> Result<(String, Option<u16>), &'static str> {
    let text = text.rsplit_once('@').map_or(text, |(_, host)| host);
    let (host, port) = match text.strip_prefix('[') {
        Some(rest) => rest.split_once(']').ok_or("missing ']' in host")?,
        None => text.split_at(text.find(':').unwrap_or(text.len())),
    };
    let is_odd = |c: char| c.is_whitespace() || !c.is_ascii() || "\"<>\\^`{|}%".contains(c);
    if host.contains(is_odd) {
        return Err("invalid character in host name");
    }
    let port = match port.strip_prefix(':') {
        None if port.is_empty() => None,
        Some("") => None,
        Some(port) => Some(port.parse().map_err(|_| "invalid port after host")?),
        None => return Err("invalid port after host"),
    };
    Ok((host.to_owned(), port))
}

/// Returns whether every `%` begins a valid escape.
fn has_sound_escapes(text: &str) -> bool {
    text.split('%')
        .skip(1)
        .all(|after| after.as_bytes().first_chunk::<2>().is_some_and(|digits| digits.iter().all(u8::is_ascii_hexdigit)))
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Escape {
    /// Characters that are not allowed in a URL.
    Unfit,
    /// Also characters that have a meaning in a URL.
    All,
}

fn escaped(text: &str, what: Escape) -> String {
    let mut out = String::with_capacity(text.len());
    for byte in text.bytes() {
        let is_unfit = !byte.is_ascii_graphic() || br#""<>\^`{|}"#.contains(&byte);
        if is_unfit || (what == Escape::All && b"%?#".contains(&byte)) {
            out.push_str(&format!("%{byte:02X}"));
        } else {
            out.push(char::from(byte));
        }
    }
    out
}

/// Path with `.` and `..` resolved.
fn without_dots(path: &str) -> String {
    let mut kept: Vec<&str> = Vec::new();
    let is_folder = path.ends_with('/') || path.ends_with("/.") || path.ends_with("/..");
    for part in path.split('/').skip(1) {
        match part {
            "." => {}
            ".." => drop(kept.pop()),
            part => kept.push(part),
        }
    }
    if is_folder && kept.last().is_some_and(|last| !last.is_empty()) {
        kept.push("");
    }
    format!("/{}", kept.join("/"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_path_is_a_reference_of_which_path_and_query_count() {
        for (path, expected) in [
            ("", "http://10.0.0.1:80/"),
            ("/", "http://10.0.0.1:80/"),
            ("healthz", "http://10.0.0.1:80/healthz"),
            ("/a?b=c&d=%20", "http://10.0.0.1:80/a?b=c&d=%20"),
            ("/a b", "http://10.0.0.1:80/a%20b"),
            ("/a%20b", "http://10.0.0.1:80/a%20b"),
            ("/a%zz?x", "http://10.0.0.1:80/a%25zz%3Fx"),
            ("/a#b", "http://10.0.0.1:80/a"),
            ("http://elsewhere:1/a?b", "http://10.0.0.1:80/a?b"),
            ("//elsewhere/a", "http://10.0.0.1:80/a"),
            ("/ü", "http://10.0.0.1:80/%C3%BC"),
            ("/a\r\nX: y", "http://10.0.0.1:80/a%0D%0AX:%20y"),
            ("1:x", "http://10.0.0.1:80/1:x"),
            ("/?q=a b", "http://10.0.0.1:80/?q=a%20b"),
        ] {
            assert_eq!(Url::of("", "10.0.0.1", 80, path).to_string(), expected, "{path:?}");
        }
        assert_eq!(Url::of("HTTPS", "fd00::1", 443, "/").to_string(), "https://[fd00::1]:443/");
        assert_eq!(Url::of("HTTPS", "[fd00::1]", 443, "/").host, "fd00::1");
    }

    #[test]
    fn a_location_leads_somewhere() {
        let from = Url::of("http", "10.0.0.1", 80, "/a/b?x=1");
        for (location, expected) in [
            ("/c", "http://10.0.0.1:80/c"),
            ("c", "http://10.0.0.1:80/a/c"),
            ("../c", "http://10.0.0.1:80/c"),
            ("../../../c/", "http://10.0.0.1:80/c/"),
            ("./", "http://10.0.0.1:80/a/"),
            ("?y=2", "http://10.0.0.1:80/a/b?y=2"),
            ("", "http://10.0.0.1:80/a/b?x=1"),
            ("//10.0.0.2/c", "http://10.0.0.2/c"),
            ("https://10.0.0.1/c", "https://10.0.0.1/c"),
            ("http://10.0.0.1:8080", "http://10.0.0.1:8080/"),
            ("http://user:password@10.0.0.1/", "http://10.0.0.1/"),
            ("ftp://10.0.0.1/", "ftp://10.0.0.1/"),
            ("mailto:x", "mailto:///x"),
        ] {
            let target = from.join(location).map(|(url, _)| url.to_string());
            assert_eq!(target, Ok(expected.to_owned()), "{location:?}");
        }
        for bad in ["http://[::1", "http://10.0.0.1:99999/", "http://a b/", "/%zz", "\u{7f}", ":x"] {
            assert!(from.join(bad).is_err(), "{bad:?}");
        }
        assert_eq!(from.join("https://10.0.0.1/c").map(|(_, is_absolute)| is_absolute), Ok(true));
        assert_eq!(from.join("/c").map(|(_, is_absolute)| is_absolute), Ok(false));
    }

    #[test]
    fn ports_that_are_not_named_are_the_schemes() {
        let from = Url::of("http", "h", 81, "/");
        let port = |location: &str| from.join(location).map(|(url, _)| url.dialled_port());
        assert_eq!((port("http://h/"), port("https://h/"), port("/x")), (Ok(80), Ok(443), Ok(81)));
    }
}
