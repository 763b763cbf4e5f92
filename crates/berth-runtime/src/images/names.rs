//! Image references, normalized as by Docker. Pure.
//!
//! `busybox` is `docker.io/library/busybox:latest`; a digest takes precedence over a tag. Implements spec 09b §1.

use std::fmt;

use super::{digest::Digest, error::ImageError};

const DEFAULT_HOST: &str = "docker.io";
const LEGACY_HOST: &str = "index.docker.io";
const OFFICIAL: &str = "library/";
const LONGEST: usize = 255;
const LONGEST_TAG: usize = 128;

/// A normalized image reference: `host/path:tag` or `host/path@digest`.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct Name {
    /// Registry host: `docker.io`, `host:5000`.
    pub host: String,
    /// Repository path at the registry: `library/busybox`.
    pub path: String,
    /// Tag or digest.
    pub version: TagOrDigest,
}

/// Version of an image within a repository.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum TagOrDigest {
    /// The image that currently has the tag.
    Tag(String),
    /// The image with this digest.
    Digest(Digest),
}

impl Name {
    /// Parses and normalizes a reference.
    ///
    /// # Errors
    /// `failed to parse image reference "x": invalid reference format`.
    pub fn parse(text: &str) -> Result<Self, ImageError> {
        let wrong =
            || ImageError::invalid(format!("failed to parse image reference {text:?}: invalid reference format"));
        parse(text).ok_or_else(wrong)
    }

    /// `host/path`, without tag or digest.
    pub fn repository(&self) -> String {
        format!("{}/{}", self.host, self.path)
    }

    /// The repository of a text without tag and digest; `None` if it has either, or is no valid reference.
    pub fn repository_in(text: &str) -> Option<String> {
        let has_version = text.contains('@') || text.rsplit('/').next().is_some_and(|last| last.contains(':'));
        Self::parse(text).ok().filter(|_| !has_version).map(|name| name.repository())
    }

    /// Reference to the image with this digest in the same repository.
    #[must_use]
    pub fn at(&self, digest: Digest) -> Self {
        Self { version: TagOrDigest::Digest(digest), ..self.clone() }
    }

    /// The tag, unless the reference has a digest.
    pub fn tag(&self) -> Option<&str> {
        match &self.version {
            TagOrDigest::Tag(tag) => Some(tag),
            TagOrDigest::Digest(_) => None,
        }
    }
}

impl fmt::Display for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.version {
            TagOrDigest::Tag(tag) => write!(f, "{}/{}:{tag}", self.host, self.path),
            TagOrDigest::Digest(digest) => write!(f, "{}/{}@{digest}", self.host, self.path),
        }
    }
}

/// The hex digits of an image ID or of a prefix: lowercase, 1 to 64.
pub fn id_prefix(text: &str) -> Option<&str> {
    let hex = text.strip_prefix("sha256:").unwrap_or(text);
    let is_hex = hex.bytes().all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f'));
    (is_hex && (1..=64).contains(&hex.len())).then_some(hex)
}

fn parse(text: &str) -> Option<Name> {
    if text.len() == 64 && id_prefix(text).is_some() {
        return None;
    }
    let (host, rest) = split_host(text)?;
    let (rest, digest) = match rest.split_once('@') {
        Some((rest, digest)) => (rest, Some(digest.strip_prefix("sha256:").and(digest.parse().ok())?)),
        None => (rest, None),
    };
    let (path, tag) = match rest.split_once(':') {
        Some((path, tag)) => (path, Some(tag)),
        None => (rest, None),
    };
    let is_official = host == DEFAULT_HOST && !path.contains('/');
    let path = if is_official { format!("{OFFICIAL}{path}") } else { path.to_owned() };
    let good = is_host(&host)
        && path.split('/').all(is_component)
        && tag.is_none_or(is_tag)
        && host.len() + 1 + path.len() <= LONGEST;
    let version = match (digest, tag) {
        (Some(digest), _) => TagOrDigest::Digest(digest),
        (None, tag) => TagOrDigest::Tag(tag.unwrap_or("latest").to_owned()),
    };
    good.then_some(Name { host, path, version })
}

fn split_host(text: &str) -> Option<(String, &str)> {
    match text.split_once('/') {
        Some((first, rest)) if first == "localhost" || first.contains(['.', ':']) => {
            let host = if first == LEGACY_HOST { DEFAULT_HOST } else { first };
            Some((host.to_owned(), rest))
        }
        _ => Some((DEFAULT_HOST.to_owned(), text)),
    }
}

fn is_host(host: &str) -> bool {
    let (name, port) = match host.strip_prefix('[').and_then(|rest| rest.split_once(']')) {
        Some((address, rest)) => {
            let is_address = address.parse::<std::net::Ipv6Addr>().is_ok();
            return is_address && (rest.is_empty() || rest.strip_prefix(':').is_some_and(is_port));
        }
        None => host.split_once(':').map_or((host, None), |(name, port)| (name, Some(port))),
    };
    let is_label = |label: &str| {
        let edge = |b: Option<u8>| b.is_some_and(|b| b.is_ascii_alphanumeric());
        edge(label.bytes().next())
            && edge(label.bytes().next_back())
            && label.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'-')
    };
    name.split('.').all(is_label) && port.is_none_or(is_port)
}

fn is_port(port: &str) -> bool {
    port.bytes().all(|b| b.is_ascii_digit()) && port.parse::<u16>().is_ok()
}

/// Runs of lowercase letters and digits, separated by `.`, `_`, `__`, or any number of `-`.
fn is_component(part: &str) -> bool {
    let is_word = |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit();
    let bytes = part.as_bytes();
    let ends = bytes.first().is_some_and(|b| is_word(*b)) && bytes.last().is_some_and(|b| is_word(*b));
    let separators = part.split(|c: char| c.is_ascii_lowercase() || c.is_ascii_digit());
    let is_separator = |text: &str| matches!(text, "" | "." | "_" | "__") || text.bytes().all(|b| b == b'-');
    ends && separators.into_iter().all(is_separator)
}

fn is_tag(tag: &str) -> bool {
    let is_first = |b: u8| b.is_ascii_alphanumeric() || b == b'_';
    tag.bytes().next().is_some_and(is_first)
        && tag.len() <= LONGEST_TAG
        && tag.bytes().all(|b| is_first(b) || matches!(b, b'.' | b'-'))
}

#[cfg(test)]
mod tests {
    use super::*;

    const D: &str = "sha256:e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855";

    #[test]
    fn names_are_normalised() {
        for (text, expected) in [
            ("busybox", "docker.io/library/busybox:latest"),
            ("busybox:1.36", "docker.io/library/busybox:1.36"),
            ("foo/bar:1", "docker.io/foo/bar:1"),
            ("docker.io/busybox", "docker.io/library/busybox:latest"),
            ("index.docker.io/library/x:1", "docker.io/library/x:1"),
            ("localhost/x", "localhost/x:latest"),
            ("host.tld/x", "host.tld/x:latest"),
            ("host:5000/x", "host:5000/x:latest"),
            ("host:5000/a/b__c/d--e:T_a.g-1", "host:5000/a/b__c/d--e:T_a.g-1"),
            ("[::1]:5000/x", "[::1]:5000/x:latest"),
            (&format!("r/x:1@{D}"), &format!("docker.io/r/x@{D}")),
            (&format!("registry.k8s.io/pause@{D}"), &format!("registry.k8s.io/pause@{D}")),
            ("abc123", "docker.io/library/abc123:latest"),
            ("berth.local/demo", "berth.local/demo:latest"),
        ] {
            assert_eq!(Name::parse(text).map(|name| name.to_string()).as_deref(), Ok(expected), "{text}");
            assert_eq!(Name::parse(expected).map(|name| name.to_string()).as_deref(), Ok(expected), "again: {text}");
        }
    }

    #[test]
    fn what_is_no_name_is_refused() {
        let long = "a/".repeat(200);
        for text in [
            "",
            "Not A Ref!!",
            "Busybox",
            "a//b",
            "/a",
            "a/",
            "a:",
            "a:-x",
            "a@",
            "a@sha256:00",
            "a@md5:00",
            "a b",
            "-a",
            "a-",
            "a..b",
            "a___b",
            "a._b",
            "host:99999/x",
            "host:x/y",
            ".tld/x",
            "a\0b",
            "a\n",
            "ä",
            "[::1/x",
            "[zz]:1/x",
            "../../x.y",
            &D[7..],
            &long,
        ] {
            let error = Name::parse(text).expect_err(text);
            assert_eq!(error.text, format!("failed to parse image reference {text:?}: invalid reference format"));
        }
    }

    #[test]
    fn ids_are_recognized_by_hex_digits() {
        for (text, expected) in [
            (D, Some(&D[7..])),
            (&D[7..], Some(&D[7..])),
            ("e3b", Some("e3b")),
            ("sha256:e", Some("e")),
            ("E3", None),
            ("", None),
            ("busybox", None),
            ("sha256:", None),
        ] {
            assert_eq!(id_prefix(text), expected, "{text}");
        }
    }
}
