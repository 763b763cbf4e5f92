//! Symbolic links in `/var/log/containers` for log collectors.
//!
//! Implements spec 01 §17.4, 03a §7 step 8, §11 item 4.

use std::{
    collections::HashSet,
    fs, io,
    os::unix::fs::symlink,
    path::{Path, PathBuf},
};

use super::dirs;
use berth_types::{ContainerId, PodRef};

/// Maximum length of a name without `.log`: file names are limited to 255 bytes.
const LONGEST: usize = 251;
/// Minimum length of a container ID.
const SHORTEST_ID: usize = 6;

/// `<pod>_<namespace>_<container>-<id>`, truncated to 251 bytes, and `.log`.
pub fn name(pod: &PodRef, container: &str, id: &ContainerId) -> String {
    let mut name = format!("{}_{}_{container}-{id}", pod.name, pod.namespace);
    let mut end = LONGEST.min(name.len());
    while !name.is_char_boundary(end) {
        end -= 1;
    }
    name.truncate(end);
    name.push_str(".log");
    name
}

/// Creates `link` to `log` if that exists; replaces a link with another target.
///
/// # Errors
/// The link cannot be created.
pub fn link(log: &Path, link: &Path) -> io::Result<()> {
    if fs::metadata(log).is_err_and(|e| e.kind() == io::ErrorKind::NotFound) {
        return Ok(());
    }
    if fs::read_link(link).is_ok_and(|target| target == log) {
        return Ok(());
    }
    dirs::remove(link)?;
    symlink(log, link)
}

/// Dangling links below `root` that do not belong to a container in `alive`.
///
/// # Errors
/// The directory cannot be read; an absent one counts as empty.
pub fn dangling(root: &Path, alive: &HashSet<ContainerId>) -> io::Result<Vec<PathBuf>> {
    let mut found = Vec::new();
    for entry in dirs::absent_is_empty(fs::read_dir(root))?.into_iter().flatten() {
        let entry = entry?;
        let (path, name) = (entry.path(), entry.file_name());
        let Some(name) = name.to_str().and_then(|n| n.strip_suffix(".log")) else { continue };
        let is_link = entry.file_type().is_ok_and(|t| t.is_symlink());
        let is_dangling = is_link && fs::metadata(&path).is_err_and(|e| e.kind() == io::ErrorKind::NotFound);
        if is_dangling && !is_alive(name, alive) {
            found.push(path);
        }
    }
    Ok(found)
}

/// The ID follows the last `-`, truncated with the name.
fn is_alive(name: &str, alive: &HashSet<ContainerId>) -> bool {
    let Some((_, id)) = name.rsplit_once('-').filter(|(_, id)| id.len() >= SHORTEST_ID) else { return false };
    alive.contains(id) || (name.len() >= LONGEST && alive.iter().any(|a| a.as_str().starts_with(id)))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pod(name: &str) -> PodRef {
        PodRef { uid: "u".into(), name: name.into(), namespace: "default".into() }
    }

    #[test]
    fn names_are_cut_at_251_bytes() {
        assert_eq!(name(&pod("web"), "main", &"abc123".into()), "web_default_main-abc123.log");
        let long = name(&pod(&"p".repeat(253)), "main", &"abc123".into());
        assert_eq!((long.len(), long.ends_with("p.log")), (255, true));
        assert_eq!(name(&pod(&"ä".repeat(200)), "main", &"abc123".into()).len(), 254, "whole characters");
    }

    #[test]
    fn only_dead_links_of_dead_containers_go() {
        let root = tempfile::tempdir().expect("a directory");
        let at = |name: &str| root.path().join(name);
        fs::write(at("target"), "x").expect("written");
        link(&at("target"), &at("web_default_main-good00.log")).expect("linked");
        link(&at("absent"), &at("web_default_main-absent.log")).expect("no log, no link");
        assert!(fs::symlink_metadata(at("web_default_main-absent.log")).is_err());
        for id in ["alive1", "gone22", "x"] {
            symlink(at("absent"), at(&format!("web_default_main-{id}.log"))).expect("linked");
        }
        let mut found = dangling(root.path(), &HashSet::from(["alive1".into()])).expect("read");
        found.sort();
        assert_eq!(found, [at("web_default_main-gone22.log"), at("web_default_main-x.log")]);
    }

    #[test]
    fn a_link_is_replaced() {
        let root = tempfile::tempdir().expect("a directory");
        let at = |name: &str| root.path().join(name);
        for name in ["one", "two"] {
            fs::write(at(name), "x").expect("written");
            link(&at(name), &at("l.log")).expect("linked");
        }
        link(&at("two"), &at("l.log")).expect("idempotent");
        assert_eq!(fs::read_link(at("l.log")).expect("a link"), at("two"));
    }
}
