//! Which image of an index is for this machine. Pure.
//!
//! Linux, the own architecture, the best variant the processor can run; attestations are no images. Behaviour: spec 09b §4.3.

use super::{
    error::ImageError,
    model::{Descriptor, Index},
    record::Platform,
};

/// Key of what build tools attach to images.
const REFERENCE_TYPE: &str = "vnd.docker.reference.type";

/// This machine.
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

/// The entry of an index that suits a machine best.
///
/// # Errors
/// `no match for platform in manifest: not found`.
pub fn choose<'a>(index: &'a Index, machine: &Platform) -> Result<&'a Descriptor, ImageError> {
    let mut best: Option<(u32, &Descriptor)> = None;
    for entry in index.manifests.iter().filter(|entry| !entry.annotations.contains_key(REFERENCE_TYPE)) {
        let Some(rank) = rank(entry.platform.as_ref(), machine) else { continue };
        // Of equals the first wins.
        if best.is_none_or(|(highest, _)| rank > highest) {
            best = Some((rank, entry));
        }
    }
    let missing = || ImageError::not_found("no match for platform in manifest: not found");
    best.map(|(_, entry)| entry).ok_or_else(missing)
}

/// How well an entry suits; `None`: not at all.
fn rank(entry: Option<&Platform>, machine: &Platform) -> Option<u32> {
    // An index may say nothing: the configuration will.
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
    use crate::embedded::images::digest::Digest;

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
