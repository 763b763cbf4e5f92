//! Image reference parser by Docker's familiar-name rules (spec 03b §1.1 step 1). Pure.
//!
//! `busybox` means `docker.io/library/busybox`; the tagged form is passed in CRI calls, the normalized
//! repository is the lookup key of credentials and records.

use std::sync::LazyLock;

use regex_lite::Regex;

const DEFAULT_DOMAIN: &str = "docker.io";
const LEGACY_DOMAIN: &str = "index.docker.io";
const OFFICIAL: &str = "library/";
const NAME_LIMIT: usize = 255;

/// Why a text is not an image reference; texts are those of Docker's reference library.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ReferenceError {
    /// The name looks like an image ID.
    #[error("invalid repository name ({0}), cannot specify 64-byte hexadecimal strings")]
    Identifier(String),
    /// The repository has upper-case letters.
    #[error("invalid reference format: repository name ({0}) must be lowercase")]
    Uppercase(String),
    /// The repository is longer than 255 characters.
    #[error("repository name must not be more than 255 characters")]
    TooLong,
    /// The algorithm of the digest is unknown.
    #[error("unsupported digest algorithm")]
    DigestAlgorithm,
    /// The digest has the wrong length for its algorithm.
    #[error("invalid checksum digest length")]
    DigestLength,
    /// The digest has characters other than lower-case hex digits.
    #[error("invalid checksum digest format")]
    DigestFormat,
    /// Any other syntax error.
    #[error("invalid reference format")]
    Format,
}

/// A parsed image reference.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ImageReference {
    /// Registry host and path, fully normalized: `docker.io/library/busybox`.
    pub repository: String,
    /// The tag, if given.
    pub tag: Option<String>,
    /// The digest, if given.
    pub digest: Option<String>,
}

static IDENTIFIER: LazyLock<Regex> =
    LazyLock::new(|| Regex::new("^[a-f0-9]{64}$").expect("a constant that the tests use"));

static REFERENCE: LazyLock<Regex> = LazyLock::new(|| {
    let label = "(?:[a-zA-Z0-9]|[a-zA-Z0-9][a-zA-Z0-9-]*[a-zA-Z0-9])";
    let host = format!(r"(?:{label}(?:\.{label})*|\[[a-fA-F0-9:]+\])(?::[0-9]+)?");
    let component = "[a-z0-9]+(?:(?:[._]|__|[-]+)[a-z0-9]+)*";
    let name = format!("{host}/({component}(?:/{component})*)");
    let tag = "[a-zA-Z0-9_][a-zA-Z0-9_.-]{0,127}";
    let digest = "[A-Za-z][A-Za-z0-9]*(?:[-_+.][A-Za-z][A-Za-z0-9]*)*:[0-9a-fA-F]{32,}";
    Regex::new(&format!("^({name})(?::({tag}))?(?:@({digest}))?$")).expect("a constant that the tests use")
});

impl ImageReference {
    /// Parses a name by the familiar-name rules.
    ///
    /// # Errors
    /// The text is not a reference.
    pub fn parse(text: &str) -> Result<Self, ReferenceError> {
        if IDENTIFIER.is_match(text) {
            return Err(ReferenceError::Identifier(text.to_owned()));
        }
        let (domain, rest) = split_domain(text);
        let path = rest.split_once(':').map_or(rest.as_str(), |(path, _)| path);
        if path.to_lowercase() != path {
            return Err(ReferenceError::Uppercase(path.to_owned()));
        }
        let whole = format!("{domain}/{rest}");
        let found = REFERENCE.captures(&whole).ok_or(ReferenceError::Format)?;
        let group = |i: usize| found.get(i).map(|m| m.as_str().to_owned());
        if found.get(2).is_some_and(|path| path.len() > NAME_LIMIT) {
            return Err(ReferenceError::TooLong);
        }
        let digest = group(4);
        if let Some(digest) = &digest {
            check_digest(digest)?;
        }
        Ok(Self { repository: group(1).ok_or(ReferenceError::Format)?, tag: group(3), digest })
    }

    /// The canonical text: repository, tag (`latest` without tag and digest), digest.
    pub fn canonical(&self) -> String {
        let mut text = self.repository.clone();
        match (&self.tag, &self.digest) {
            (Some(tag), _) => text = format!("{text}:{tag}"),
            (None, None) => text.push_str(":latest"),
            (None, Some(_)) => {}
        }
        if let Some(digest) = &self.digest {
            text = format!("{text}@{digest}");
        }
        text
    }
}

/// The name for CRI calls: the text itself, with `:latest` if it has neither tag nor digest. No
/// registry is added.
///
/// # Errors
/// The text is not a reference.
pub fn with_default_tag(image: &str) -> Result<(String, ImageReference), ReferenceError> {
    let parsed = ImageReference::parse(image)?;
    let tagged = if parsed.tag.is_none() && parsed.digest.is_none() { format!("{image}:latest") } else { image.into() };
    Ok((tagged, parsed))
}

fn split_domain(text: &str) -> (String, String) {
    let (domain, rest) = match text.split_once('/') {
        Some((first, rest)) if first == "localhost" || first.contains(['.', ':']) || first.to_lowercase() != first => {
            (first, rest)
        }
        _ => (DEFAULT_DOMAIN, text),
    };
    let domain = if domain == LEGACY_DOMAIN { DEFAULT_DOMAIN } else { domain };
    let official = domain == DEFAULT_DOMAIN && !rest.contains('/');
    (domain.to_owned(), if official { format!("{OFFICIAL}{rest}") } else { rest.to_owned() })
}

fn check_digest(digest: &str) -> Result<(), ReferenceError> {
    let (algorithm, hex) = digest.split_once(':').ok_or(ReferenceError::Format)?;
    let length = match algorithm {
        "sha256" => 64,
        "sha384" => 96,
        "sha512" => 128,
        _ => return Err(ReferenceError::DigestAlgorithm),
    };
    if hex.len() != length {
        return Err(ReferenceError::DigestLength);
    }
    if hex.bytes().all(|b| b.is_ascii_digit() || (b'a'..=b'f').contains(&b)) {
        Ok(())
    } else {
        Err(ReferenceError::DigestFormat)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const HEX: &str = "0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef";

    #[test]
    fn familiar_names_are_normalised() {
        let digested = format!("busybox@sha256:{HEX}");
        let both = format!("quay.io/a/b:1@sha256:{HEX}");
        let canonical_digest = format!("docker.io/library/busybox@sha256:{HEX}");
        let rows: &[(&str, &str, &str, &str)] = &[
            // written, repository, sent to the runtime (AC-03b-1, AC-03b-2), canonical
            ("busybox", "docker.io/library/busybox", "busybox:latest", "docker.io/library/busybox:latest"),
            ("busybox:1.36", "docker.io/library/busybox", "busybox:1.36", "docker.io/library/busybox:1.36"),
            (&digested, "docker.io/library/busybox", &digested, &canonical_digest),
            (&both, "quay.io/a/b", &both, &both),
            ("me/app", "docker.io/me/app", "me/app:latest", "docker.io/me/app:latest"),
            (
                "index.docker.io/redis",
                "docker.io/library/redis",
                "index.docker.io/redis:latest",
                "docker.io/library/redis:latest",
            ),
            ("localhost/x", "localhost/x", "localhost/x:latest", "localhost/x:latest"),
            ("r.io:5000/x/y:v1", "r.io:5000/x/y", "r.io:5000/x/y:v1", "r.io:5000/x/y:v1"),
            ("[::1]:5000/x", "[::1]:5000/x", "[::1]:5000/x:latest", "[::1]:5000/x:latest"),
            (
                "a__b/c-d--e.f_g",
                "docker.io/a__b/c-d--e.f_g",
                "a__b/c-d--e.f_g:latest",
                "docker.io/a__b/c-d--e.f_g:latest",
            ),
        ];
        for (written, repository, sent, canonical) in rows {
            let (tagged, parsed) = with_default_tag(written).unwrap_or_else(|e| panic!("{written}: {e}"));
            assert_eq!((tagged.as_str(), parsed.repository.as_str()), (*sent, *repository));
            assert_eq!(parsed.canonical(), *canonical);
        }
    }

    #[test]
    fn invalid_references_give_docker_errors() {
        let long = format!("r.io/{}", "a".repeat(256));
        let rows = [
            // AC-03b-3
            ("BusyBox", "invalid reference format: repository name (library/BusyBox) must be lowercase"),
            (HEX, &format!("invalid repository name ({HEX}), cannot specify 64-byte hexadecimal strings")),
            ("", "invalid reference format"),
            ("a b", "invalid reference format"),
            ("busybox:", "invalid reference format"),
            ("busybox@sha256:12", "invalid reference format"),
            ("/x", "invalid reference format"),
            ("x/", "invalid reference format"),
            ("https://x/y", "invalid reference format"),
            (&format!("busybox@sha512:{HEX}"), "invalid checksum digest length"),
            (&format!("busybox@md5:{HEX}"), "unsupported digest algorithm"),
            (&format!("busybox@sha256:{}", HEX.to_uppercase()), "invalid checksum digest format"),
            (&long, "repository name must not be more than 255 characters"),
        ];
        for (written, expected) in rows {
            let error = ImageReference::parse(written).expect_err(written);
            assert_eq!(error.to_string(), expected, "{written}");
        }
    }
}
