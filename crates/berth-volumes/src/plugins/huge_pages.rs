//! Page size of `emptyDir` volumes with medium HugePages. Pure. Implements spec 07 §7.1.

use std::collections::BTreeMap;

use berth_types::{
    Pod, api,
    quantity::Amount,
    resources::{HUGEPAGES_PREFIX, page_size_of},
};

/// Prefix of a medium that names a size, such as `HugePages-2Mi`.
const SIZED: &str = "HugePages-";
/// Medium that takes the size from the pod's requests.
pub const MEDIUM: &str = "HugePages";

/// Error where the page size cannot be determined.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum PagesError {
    /// The pod requests several sizes, and the medium names none.
    #[error("medium: HugePages can't be used if container requests multiple huge page sizes")]
    Several,
    /// The pod requests no huge pages, or none of the size in the medium.
    #[error("medium {0}: hugePages storage requested, but there is no resource request for huge pages")]
    None(String),
    /// The size in the medium is not a valid quantity.
    #[error("unknown storage medium {0:?}")]
    Medium(String),
}

/// Whether the medium is huge pages.
pub fn is_medium(medium: &str) -> bool {
    medium == MEDIUM || medium.starts_with(SIZED)
}

/// Returns the page size as spelled in the pod (`2Mi`), and in bytes.
///
/// # Errors
/// If the pod's requests do not determine one size.
pub fn size(medium: &str, pod: &Pod) -> Result<(String, u64), PagesError> {
    let asked = asked(pod);
    let Some(text) = medium.strip_prefix(SIZED) else {
        let mut sizes = asked.into_iter();
        return match (sizes.next(), sizes.next()) {
            (Some((bytes, text)), None) => Ok((text, bytes)),
            (None, _) => Err(PagesError::None(medium.to_owned())),
            (Some(_), Some(_)) => Err(PagesError::Several),
        };
    };
    let bytes = Amount::parse(text).ok().and_then(|size| u64::try_from(size.value()).ok()).filter(|bytes| *bytes > 0);
    let bytes = bytes.ok_or_else(|| PagesError::Medium(medium.to_owned()))?;
    match asked.contains_key(&bytes) {
        true => Ok((text.to_owned(), bytes)),
        false => Err(PagesError::None(medium.to_owned())),
    }
}

/// Returns the page sizes in bytes that the pod or any of its containers requests, with their spelling.
fn asked(pod: &Pod) -> BTreeMap<u64, String> {
    let of_containers = pod.init_containers().iter().chain(pod.containers()).filter_map(|c| c.resources.as_ref());
    let names = of_containers.chain(pod.spec().resources.as_ref()).flat_map(names);
    names.filter_map(|name| Some((page_size_of(name)?, name.strip_prefix(HUGEPAGES_PREFIX)?.to_owned()))).collect()
}

/// Limits count as requests: for huge pages both must be equal.
fn names(resources: &api::ResourceRequirements) -> impl Iterator<Item = &str> {
    let all = resources.requests.iter().chain(&resources.limits).flat_map(BTreeMap::keys);
    all.map(String::as_str)
}

/// Whether a mounted file system has that page size, according to its options in the mount table (`pagesize=2M`).
pub fn is_of_size(options: &str, bytes: u64) -> bool {
    let shown = options.split(',').find_map(|option| option.strip_prefix("pagesize="));
    let shown = shown.and_then(|text| {
        let digits = text.trim_end_matches(|c: char| !c.is_ascii_digit());
        let unit = match text.get(digits.len()..)? {
            "" => 1,
            "K" => 1 << 10,
            "M" => 1 << 20,
            "G" => 1 << 30,
            _ => return None,
        };
        digits.parse::<u64>().ok()?.checked_mul(unit)
    });
    // A mount without a recognizable page size is accepted.
    shown.is_none_or(|shown| shown == bytes)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    fn size_or_error(medium: &str, containers: Value, init: Value, level: Value) -> String {
        let object = json!({"metadata": {"name": "p", "namespace": "n", "uid": "u"},
            "spec": {"containers": containers, "initContainers": init, "resources": level}});
        let pod = Pod::new(serde_json::from_value(object).expect("a pod")).expect("complete");
        size(medium, &pod).map_or_else(|e| e.to_string(), |(text, bytes)| format!("{text} {bytes}"))
    }

    #[test]
    fn pages_are_of_the_one_size_that_is_asked_for() {
        let of = |sizes: &[&str]| {
            let requests: BTreeMap<String, &str> = sizes.iter().map(|s| (format!("hugepages-{s}"), "1Gi")).collect();
            json!({"name": "c", "resources": {"requests": requests}})
        };
        let (none, level) = (json!([]), json!(null));
        let several = "medium: HugePages can't be used if container requests multiple huge page sizes";
        let missing = |medium: &str| {
            format!("medium {medium}: hugePages storage requested, but there is no resource request for huge pages")
        };
        for (medium, containers, init, level, expected) in [
            ("HugePages", json!([of(&["2Mi"])]), none.clone(), level.clone(), "2Mi 2097152".to_owned()),
            // AC-07-3
            ("HugePages", json!([of(&["2Mi"]), of(&["1Gi"])]), none.clone(), level.clone(), several.to_owned()),
            ("HugePages", json!([of(&["2Mi"])]), json!([of(&["1Gi"])]), level.clone(), several.to_owned()),
            ("HugePages", json!([of(&["2Mi"]), of(&["2048Ki"])]), none.clone(), level.clone(), "2048Ki 2097152".into()),
            ("HugePages", json!([of(&[])]), none.clone(), level.clone(), missing("HugePages")),
            (
                "HugePages",
                json!([of(&[])]),
                none.clone(),
                json!({"limits": {"hugepages-1Gi": "1Gi"}}),
                "1Gi 1073741824".into(),
            ),
            ("HugePages-2Mi", json!([of(&["2Mi", "1Gi"])]), none.clone(), level.clone(), "2Mi 2097152".to_owned()),
            ("HugePages-2Mi", json!([of(&["1Gi"])]), none.clone(), level.clone(), missing("HugePages-2Mi")),
            (
                "HugePages-x",
                json!([of(&["1Gi"])]),
                none.clone(),
                level.clone(),
                "unknown storage medium \"HugePages-x\"".into(),
            ),
            ("HugePages-", json!([of(&["1Gi"])]), none, level, "unknown storage medium \"HugePages-\"".into()),
        ] {
            assert_eq!(size_or_error(medium, containers, init, level), expected, "{medium}");
        }
    }

    #[test]
    fn the_mount_table_shows_the_size() {
        for (options, bytes, expected) in [
            ("rw,pagesize=2M", 2 << 20, true),
            ("rw,pagesize=2M", 1 << 30, false),
            ("rw,pagesize=1024M,size=1G", 1 << 30, true),
            ("rw,pagesize=odd", 1, true),
            ("rw", 1, true),
        ] {
            assert_eq!(is_of_size(options, bytes), expected, "{options}");
        }
    }
}
