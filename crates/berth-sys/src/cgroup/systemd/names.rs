//! Mapping between systemd unit names and cgroup paths. Pure.
//!
//! Implements spec 06a §3, §7, 09a §9.1.

use crate::cgroup::GroupPath;

/// Suffix of slice names.
const SLICE: &str = ".slice";
/// The root slice.
pub const ROOT: &str = "-.slice";
/// Default slice of system units.
pub const DEFAULT: &str = "system.slice";

/// A name that is not a valid slice name.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("invalid slice name: {0}")]
pub struct InvalidSlice(pub String);

/// Unit of a cgroup; `None` if the cgroup has no unit.
pub fn unit_of(group: &GroupPath) -> Option<&str> {
    let name = group.name()?;
    [SLICE, ".scope", ".service"].iter().any(|kind| name.ends_with(kind) && name.len() > kind.len()).then_some(name)
}

/// Whether the unit is a slice.
pub fn is_slice(unit: &str) -> bool {
    unit.ends_with(SLICE)
}

/// Parent slice, as implied by the name.
pub fn parent_of(slice: &str) -> String {
    match slice.strip_suffix(SLICE).unwrap_or(slice).rsplit_once('-') {
        Some((parent, _)) if !parent.is_empty() => format!("{parent}{SLICE}"),
        _ => ROOT.to_owned(),
    }
}

/// Cgroup path of a slice: below the slices that are prefixes of its name.
///
/// # Errors
/// If the name is not a valid slice name.
pub fn path_of(slice: &str) -> Result<GroupPath, InvalidSlice> {
    let invalid = || InvalidSlice(slice.to_owned());
    let name = slice.strip_suffix(SLICE).ok_or_else(invalid)?;
    if slice == ROOT {
        return GroupPath::parse("/").ok_or_else(invalid);
    }
    let parts: Vec<&str> = name.split('-').collect();
    if parts.iter().any(|part| part.is_empty()) || name.contains('/') {
        return Err(invalid());
    }
    let slices: Vec<String> =
        (1..=parts.len()).filter_map(|n| parts.get(..n)).map(|begin| format!("{}{SLICE}", begin.join("-"))).collect();
    GroupPath::parse(&slices.join("/")).ok_or_else(invalid)
}

/// Slice that a cgroup parent refers to: its last name; an empty parent is the default slice.
pub fn slice_of(parent: &str) -> Option<&str> {
    let parent = parent.trim_end_matches('/');
    let last = parent.rsplit('/').next().unwrap_or_default();
    match last {
        "" => Some(DEFAULT),
        slice => path_of(slice).is_ok().then_some(slice),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slices_lie_below_what_their_names_begin_with() {
        for (slice, path) in [
            ("kubepods.slice", "/kubepods.slice"),
            // AC-06a-1
            (
                "kubepods-burstable-pod1234_abcd.slice",
                "/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod1234_abcd.slice",
            ),
            ("-.slice", "/"),
        ] {
            assert_eq!(path_of(slice).map(|p| p.to_string()).as_deref(), Ok(path), "{slice}");
        }
        for bad in ["-a.slice", "a--b.slice", "a-.slice", ".slice", "a.scope", "a/b.slice", ""] {
            assert_eq!(path_of(bad).map_err(|e| e.to_string()), Err(format!("invalid slice name: {bad}")));
        }
        for (slice, parent) in [
            ("kubepods.slice", "-.slice"),
            ("kubepods-burstable.slice", "kubepods.slice"),
            ("a-b-c.slice", "a-b.slice"),
        ] {
            assert_eq!(parent_of(slice), parent);
        }
    }

    #[test]
    fn the_parent_of_a_scope_is_the_last_name() {
        for (parent, slice) in [
            ("/kubepods.slice/kubepods-burstable.slice", Some("kubepods-burstable.slice")),
            ("/test.slice", Some("test.slice")),
            ("test.slice/", Some("test.slice")),
            ("", Some("system.slice")),
            ("/", Some("system.slice")),
            ("/kubepods/burstable", None),
            ("/a--b.slice", None),
        ] {
            assert_eq!(slice_of(parent), slice, "{parent}");
        }
    }

    #[test]
    fn units_are_identified_by_the_last_path_component() {
        let unit = |path| GroupPath::parse(path).and_then(|group| unit_of(&group).map(str::to_owned));
        assert_eq!(unit("/system.slice/a.service").as_deref(), Some("a.service"));
        assert_eq!(unit("/a.slice/berth-1.scope").as_deref(), Some("berth-1.scope"));
        assert_eq!(unit("/a.slice").as_deref(), Some("a.slice"));
        assert_eq!((unit("/"), unit("/a.slice/x"), unit("/.slice")), (None, None, None));
        assert!(is_slice("a.slice") && !is_slice("a.scope"));
    }
}
