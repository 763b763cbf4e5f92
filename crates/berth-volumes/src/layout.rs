//! Directory layout of pods on disk, which other programs read too. Pure. Implements spec 07 §1.

use std::path::{Path, PathBuf};

use berth_types::PodUid;

/// Directory of `emptyDir` volumes, and of the ready markers of all volumes that are backed by one.
pub const EMPTY_DIR: &str = "kubernetes.io~empty-dir";
/// Directory of `downwardAPI` volumes.
pub const DOWNWARD_API: &str = "kubernetes.io~downward-api";
/// Directory of `configMap` volumes.
pub const CONFIG_MAP: &str = "kubernetes.io~configmap";
/// Directory of `secret` volumes.
pub const SECRET: &str = "kubernetes.io~secret";
/// Directory of `projected` volumes.
pub const PROJECTED: &str = "kubernetes.io~projected";
/// Plugin directories whose volumes may be removed with their content: only this agent writes their roots.
pub const OWNED: [&str; 5] = [EMPTY_DIR, DOWNWARD_API, CONFIG_MAP, SECRET, PROJECTED];
/// All entries that the agent creates in a pod directory. Every other entry is foreign.
pub const PARTS: [&str; 7] =
    ["volumes", "volumeDevices", "volume-subpaths", "plugins", "containers", "etc-hosts", "userns"];

/// Error: a pod's UID cannot be a directory name.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("pod UID {0:?} is not a valid directory name")]
pub struct BadUid(String);

/// Paths of one pod.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct PodLayout {
    root: PathBuf,
}

impl PodLayout {
    /// Creates the layout of `<root>/pods/<uid>`.
    ///
    /// # Errors
    /// If the UID, which may come from a manifest, would lead to another directory.
    pub fn new(root: &Path, uid: &PodUid) -> Result<Self, BadUid> {
        let name = uid.as_str();
        if matches!(name, "" | "." | "..") || name.contains(['/', '\0']) {
            return Err(BadUid(name.to_owned()));
        }
        Ok(Self { root: pods(root).join(name) })
    }

    /// Returns the pod directory.
    pub fn pod(&self) -> &Path {
        &self.root
    }

    /// Returns the directory of volumes, with one directory per plugin.
    pub fn volumes(&self) -> PathBuf {
        self.root.join("volumes")
    }

    /// Returns the directory of a volume.
    pub fn volume(&self, plugin: &str, name: &str) -> PathBuf {
        self.volumes().join(plugin).join(name)
    }

    /// Returns the symlink of a block volume.
    pub fn device(&self, plugin: &str, name: &str) -> PathBuf {
        self.root.join("volumeDevices").join(plugin).join(name)
    }

    /// Returns the directory for the plugins' own data.
    pub fn plugins(&self) -> PathBuf {
        self.root.join("plugins")
    }

    /// Returns the directory of the marker of a complete volume. Volumes of other types that are backed by an
    /// `emptyDir` are named `wrapped_<name>` there.
    pub fn marker(&self, plugin: &str, name: &str) -> PathBuf {
        let wrapped = if plugin == EMPTY_DIR { name.to_owned() } else { format!("wrapped_{name}") };
        self.plugins().join(EMPTY_DIR).join(wrapped)
    }

    /// Returns the directory in which sub-paths are bound, as `<volume>/<container>/<index>`.
    pub fn sub_paths(&self) -> PathBuf {
        self.root.join("volume-subpaths")
    }
}

/// Returns the parent of all pod directories.
pub fn pods(root: &Path) -> PathBuf {
    root.join("pods")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_are_those_that_others_expect() {
        let layout = PodLayout::new(Path::new("/var/lib/kubelet"), &"u1".into()).expect("a good UID");
        let shown = |path: PathBuf| path.display().to_string();
        assert_eq!(shown(layout.volume(EMPTY_DIR, "v")), "/var/lib/kubelet/pods/u1/volumes/kubernetes.io~empty-dir/v");
        assert_eq!(shown(layout.marker(EMPTY_DIR, "v")), "/var/lib/kubelet/pods/u1/plugins/kubernetes.io~empty-dir/v");
        assert_eq!(
            shown(layout.marker(DOWNWARD_API, "v")),
            "/var/lib/kubelet/pods/u1/plugins/kubernetes.io~empty-dir/wrapped_v"
        );
    }

    #[test]
    fn uids_that_lead_elsewhere_are_refused() {
        for bad in ["", ".", "..", "../x", "a/b", "/etc", "a\0b"] {
            assert!(PodLayout::new(Path::new("/r"), &bad.into()).is_err(), "{bad:?}");
        }
    }
}
