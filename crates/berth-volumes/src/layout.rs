//! Where things of a pod lie on disk: other programs read this layout. Pure. Behaviour: spec 07 §1.

use std::path::{Path, PathBuf};

use berth_types::PodUid;

/// Directory of emptyDir volumes, and of the markers of all volumes that are backed by one.
pub const EMPTY_DIR: &str = "kubernetes.io~empty-dir";
/// Directory of downwardAPI volumes.
pub const DOWNWARD_API: &str = "kubernetes.io~downward-api";
/// Directory of configMap volumes.
pub const CONFIG_MAP: &str = "kubernetes.io~configmap";
/// Directory of secret volumes.
pub const SECRET: &str = "kubernetes.io~secret";
/// Directory of projected volumes.
pub const PROJECTED: &str = "kubernetes.io~projected";
/// Directories whose volumes are ours to remove: nothing but this agent writes their roots.
pub const OWNED: [&str; 5] = [EMPTY_DIR, DOWNWARD_API, CONFIG_MAP, SECRET, PROJECTED];
/// All that a pod's directory has, whoever of the agent writes it. What else is in it, or beside it, is somebody else's.
pub const PARTS: [&str; 7] =
    ["volumes", "volumeDevices", "volume-subpaths", "plugins", "containers", "etc-hosts", "userns"];

/// A pod's UID cannot be the name of a directory.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("pod UID {0:?} cannot be the name of a directory")]
pub struct BadUid(String);

/// The directories of one pod.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct PodLayout {
    root: PathBuf,
}

impl PodLayout {
    /// `<root>/pods/<uid>`.
    ///
    /// # Errors
    /// UIDs come from manifests too: one that would lead elsewhere is refused.
    pub fn new(root: &Path, uid: &PodUid) -> Result<Self, BadUid> {
        let name = uid.as_str();
        if matches!(name, "" | "." | "..") || name.contains(['/', '\0']) {
            return Err(BadUid(name.to_owned()));
        }
        Ok(Self { root: pods(root).join(name) })
    }

    /// The pod's directory.
    pub fn pod(&self) -> &Path {
        &self.root
    }

    /// Where volumes lie, a directory per plugin.
    pub fn volumes(&self) -> PathBuf {
        self.root.join("volumes")
    }

    /// A volume.
    pub fn volume(&self, plugin: &str, name: &str) -> PathBuf {
        self.volumes().join(plugin).join(name)
    }

    /// The link to a volume that is a device.
    pub fn device(&self, plugin: &str, name: &str) -> PathBuf {
        self.root.join("volumeDevices").join(plugin).join(name)
    }

    /// Where plugins keep their own data.
    pub fn plugins(&self) -> PathBuf {
        self.root.join("plugins")
    }

    /// The directory of the marker that says that a volume is complete. Volumes of other kinds
    /// that lie in an emptyDir are `wrapped_<name>` there.
    pub fn marker(&self, plugin: &str, name: &str) -> PathBuf {
        let wrapped = if plugin == EMPTY_DIR { name.to_owned() } else { format!("wrapped_{name}") };
        self.plugins().join(EMPTY_DIR).join(wrapped)
    }

    /// Where sub-paths are bound, `<volume>/<container>/<index>`.
    pub fn sub_paths(&self) -> PathBuf {
        self.root.join("volume-subpaths")
    }
}

/// Where the directories of all pods lie.
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
