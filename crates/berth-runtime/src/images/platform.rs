//! Platform selection: chooses the image of an index for a machine. Pure.
//!
//! Linux, same architecture, highest variant that the processor supports; attestations are no images.
//! Implements spec 09b §4.3, §7.

use serde::{Deserialize, Serialize};

use super::{
    error::ImageError,
    model::{Descriptor, Index},
    record::Platform,
};

/// Annotation of attestations that build tools attach to images.
const REFERENCE_TYPE: &str = "vnd.docker.reference.type";

/// Platforms to select.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum PlatformSelection {
    /// This machine's.
    #[default]
    Host,
    /// Another one.
    Only(Platform),
    /// All platforms of the index.
    All,
}

impl PlatformSelection {
    /// The platform whose image gets the names.
    pub fn machine(&self) -> Platform {
        match self {
            Self::Only(platform) => platform.clone(),
            Self::Host | Self::All => host(),
        }
    }
}

/// Parses `os/architecture/variant`, `os/architecture`, or `architecture`.
///
/// # Errors
/// The text has another form.
pub fn parse(text: &str) -> Result<Platform, ImageError> {
    let is_word = |word: &&str| {
        !word.is_empty()
            && word.bytes().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || matches!(b, b'.' | b'_' | b'-'))
    };
    let words: Vec<&str> = text.split('/').collect();
    let (os, architecture, variant) = match *words.as_slice() {
        _ if !words.iter().all(is_word) => None,
        [architecture] => Some(("linux", architecture, "")),
        [os, architecture] => Some((os, architecture, "")),
        [os, architecture, variant] => Some((os, architecture, variant)),
        _ => None,
    }
    .ok_or_else(|| {
        ImageError::invalid(format!("invalid platform {text:?}: expected os/architecture or os/architecture/variant"))
    })?;
    let architecture = match architecture {
        "x86_64" => "amd64",
        "aarch64" => "arm64",
        other => other,
    };
    Ok(Platform { os: os.into(), architecture: architecture.into(), variant: variant.into() })
}

/// Platform of this machine.
pub fn host() -> Platform {
    let (architecture, variant) = match std::env::consts::ARCH {
        "x86_64" => ("amd64", ""),
        "aarch64" => ("arm64", "v8"),
        "arm" => ("arm", "v7"),
        "x86" => ("386", ""),
        "powerpc64" => ("ppc64le", ""),
        other => (other, ""),
    };
    Platform { os: "linux".into(), architecture: architecture.into(), variant: variant.into() }
}

/// The entry of an index that matches the machine best.
///
/// # Errors
/// `no match for platform in manifest: not found`.
pub fn choose<'a>(index: &'a Index, machine: &Platform) -> Result<&'a Descriptor, ImageError> {
    let mut best: Option<(u32, &Descriptor)> = None;
    for entry in images(index) {
        let Some(rank) = rank(entry.platform.as_ref(), machine) else { continue };
        // The first of equals wins.
        if best.is_none_or(|(highest, _)| rank > highest) {
            best = Some((rank, entry));
        }
    }
    best.map(|(_, entry)| entry).ok_or_else(no_match)
}

/// The entries of an index that are images.
pub fn images(index: &Index) -> impl Iterator<Item = &Descriptor> {
    let is_image = |entry: &&Descriptor| {
        !entry.annotations.contains_key(REFERENCE_TYPE) && entry.platform.as_ref().is_none_or(|p| p.os != "unknown")
    };
    index.manifests.iter().filter(is_image)
}

/// Error: no image for that platform.
pub fn no_match() -> ImageError {
    ImageError::not_found("no match for platform in manifest: not found")
}

/// Rank of an image for a machine, by the platform in its configuration; `None`: no match.
pub fn rank_image(image: &Platform, machine: &Platform) -> Option<u32> {
    rank(Some(image).filter(|image| !image.os.is_empty() && !image.architecture.is_empty()), machine)
}

/// Rank of an entry; `None`: no match.
fn rank(entry: Option<&Platform>, machine: &Platform) -> Option<u32> {
    // An index entry may omit the platform: the configuration decides.
    let Some(entry) = entry else { return Some(0) };
    if entry.os != machine.os || entry.architecture != machine.architecture {
        return None;
    }
    let level = |platform: &Platform| match (platform.variant.strip_prefix('v'), platform.architecture.as_str()) {
        (Some(level), _) => level.parse::<u32>().ok(),
        (None, "arm64") => Some(8),
        (None, "arm") => Some(7),
        (None, _) => Some(1),
    };
    let (wanted, has) = (level(entry)?, level(machine)?);
    (wanted <= has).then_some(wanted + 1)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::images::digest::Digest;

    fn index(entries: &[&str]) -> Index {
        let descriptor = |(at, text): (usize, &&str)| {
            let mut entry = Descriptor::new("x", Digest::of(at.to_string().as_bytes()), 1);
            let mut parts = text.trim_start_matches('!').split('/').map(str::to_owned);
            let mut next = || parts.next().unwrap_or_default();
            entry.platform = Some(Platform { os: next(), architecture: next(), variant: next() });
            if text.starts_with('!') {
                entry.annotations.insert(REFERENCE_TYPE.into(), "attestation-manifest".into());
            }
            entry
        };
        Index {
            schema_version: 2,
            media_type: String::new(),
            manifests: entries.iter().enumerate().map(descriptor).collect(),
        }
    }

    #[test]
    fn platforms_are_read() {
        let platform = |os: &str, architecture: &str, variant: &str| {
            Some(Platform { os: os.into(), architecture: architecture.into(), variant: variant.into() })
        };
        for (text, expected) in [
            ("linux/arm64/v8", platform("linux", "arm64", "v8")),
            ("linux/s390x", platform("linux", "s390x", "")),
            ("aarch64", platform("linux", "arm64", "")),
            ("x86_64", platform("linux", "amd64", "")),
            ("", None),
            ("linux/", None),
            ("Linux/amd64", None),
            ("a/b/c/d", None),
        ] {
            assert_eq!(parse(text).ok(), expected, "{text:?}");
        }
        let read = |text: &str| parse(text).expect("a platform");
        assert!(rank_image(&read("linux/amd64"), &read("amd64")).is_some());
        assert!(rank_image(&read("linux/arm64"), &read("amd64")).is_none());
        assert!(rank_image(&Platform::default(), &read("amd64")).is_some(), "no platform matches any");
    }

    #[test]
    fn the_best_image_for_the_machine_is_chosen() {
        for (what, entries, machine, expected) in [
            ("AC-09b-I8", &["unknown/unknown", "!linux/amd64", "linux/arm64/v8", "linux/amd64"][..], "amd64", Some(3)),
            ("variants", &["linux/arm/v5", "linux/arm/v7", "linux/arm/v6", "linux/arm/v8"], "arm/v7", Some(1)),
            ("arm64 without a variant", &["linux/amd64", "linux/arm64"], "arm64/v8", Some(1)),
            ("newer than the processor", &["linux/amd64/v3", "linux/amd64"], "amd64", Some(1)),
            ("another system", &["windows/amd64", "linux/s390x"], "amd64", None),
            ("nothing", &[], "amd64", None),
            ("first of equals", &["linux/amd64", "linux/amd64"], "amd64", Some(0)),
        ] {
            let index = index(entries);
            let (architecture, variant) = machine.split_once('/').unwrap_or((machine, ""));
            let machine = Platform { os: "linux".into(), architecture: architecture.into(), variant: variant.into() };
            let chosen = choose(&index, &machine).ok().map(|entry| entry.digest);
            assert_eq!(chosen, expected.map(|at: usize| index.manifests[at].digest), "{what}");
        }
    }
}
