//! Paths and names of CSI volumes, which other programs read too. Pure. Implements spec 07 §1, §2.1.

use std::path::{Path, PathBuf};

use sha2::{Digest, Sha256};

use berth_types::PodUid;

/// Plugin name.
pub const PLUGIN: &str = "kubernetes.io/csi";
/// Directory of block volumes, beside those of drivers.
pub const BLOCK: &str = "volumeDevices";
/// File name of the volume record.
pub const RECORD: &str = "vol_data.json";

/// Returns the SHA-256 digest as lower-case hex.
fn digest(text: &str) -> String {
    hex::encode(Sha256::digest(text.as_bytes()))
}

/// Returns the name of the `VolumeAttachment` of a volume on a node.
pub fn attachment(handle: &str, driver: &str, node: &str) -> String {
    format!("csi-{}", digest(&format!("{handle}{driver}{node}")))
}

/// Returns the volume handle of an inline (ephemeral) volume.
pub fn inline_handle(pod: &PodUid, volume: &str) -> String {
    format!("csi-{}", digest(&format!("{pod}{volume}")))
}

/// Error: a name cannot be a directory name.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("{0:?} is not a valid directory name")]
pub struct BadName(String);

/// Returns the name if it is a valid directory name.
///
/// # Errors
/// If the name, which comes from an API object or a driver, would lead to another directory.
pub fn safe(name: &str) -> Result<&str, BadName> {
    let is_safe = !matches!(name, "" | "." | "..") && name.len() <= 255 && !name.contains(['/', '\0']);
    if is_safe { Ok(name) } else { Err(BadName(name.to_owned())) }
}

/// CSI directories shared by all pods.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct CsiLayout {
    root: PathBuf,
}

/// Directories of one block volume.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct BlockLayout {
    /// Staging path of the driver.
    pub staging: PathBuf,
    /// Directory of the volume record.
    pub data: PathBuf,
    /// Directory with an entry per pod that uses the device (`globalMapPath`).
    pub mapped: PathBuf,
    published: PathBuf,
}

impl CsiLayout {
    /// Creates the layout below the agent's root directory.
    pub fn new(root: &Path) -> Self {
        Self { root: root.join("plugins").join(PLUGIN) }
    }

    /// Returns the directory of all CSI volumes.
    pub fn root(&self) -> &Path {
        &self.root
    }

    /// Returns the staging path of a volume; its record is in the parent directory.
    ///
    /// # Errors
    /// If the driver's name is not a valid directory name.
    pub fn staging(&self, driver: &str, handle: &str) -> Result<PathBuf, BadName> {
        Ok(self.root.join(safe(driver)?).join(digest(handle)).join("globalmount"))
    }

    /// Returns the directories of a block volume, by the name of its spec.
    ///
    /// # Errors
    /// If the name is not a valid directory name.
    pub fn block(&self, spec: &str) -> Result<BlockLayout, BadName> {
        let (root, name) = (self.root.join(BLOCK), safe(spec)?);
        Ok(BlockLayout {
            staging: root.join("staging").join(name),
            data: root.join(name).join("data"),
            mapped: root.join(name).join("dev"),
            published: root.join("publish").join(name),
        })
    }

    /// Returns the directory with an entry per pod that uses the device (`globalMapPath`).
    pub fn map_dir(&self, spec: &str) -> PathBuf {
        // Slashes in names are escaped as in plugin names.
        self.root.join(BLOCK).join(spec.replace('/', "~")).join("dev")
    }
}

impl BlockLayout {
    /// Returns the path at which the driver publishes the device for a pod.
    ///
    /// # Errors
    /// If the pod's UID is not a valid directory name.
    pub fn published(&self, pod: &PodUid) -> Result<PathBuf, BadName> {
        Ok(self.published.join(safe(pod.as_str())?))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_those_that_others_compute() {
        // Digests computed by `sha256sum` from the concatenations.
        let ab = "fb8e20fc2e4c3f248c60c39bd652f3c1347298bb977b8b4d5903b85055620603";
        assert_eq!(attachment("a", "b", ""), format!("csi-{ab}"));
        assert_eq!(attachment("", "a", "b"), format!("csi-{ab}"));
        assert_eq!(inline_handle(&"a".into(), "b"), format!("csi-{ab}"));
    }

    #[test]
    fn paths_are_those_that_others_expect() {
        let layout = CsiLayout::new(Path::new("/r"));
        let shown = |path: PathBuf| path.display().to_string();
        let ab = "fb8e20fc2e4c3f248c60c39bd652f3c1347298bb977b8b4d5903b85055620603";
        assert_eq!(
            layout.staging("d.example.com", "ab").map(shown),
            Ok(format!("/r/plugins/kubernetes.io/csi/d.example.com/{ab}/globalmount"))
        );
        let block = layout.block("pv").expect("a good name");
        assert_eq!(shown(block.staging.clone()), "/r/plugins/kubernetes.io/csi/volumeDevices/staging/pv");
        assert_eq!(shown(block.data.clone()), "/r/plugins/kubernetes.io/csi/volumeDevices/pv/data");
        assert_eq!(
            block.published(&"u".into()).map(shown),
            Ok("/r/plugins/kubernetes.io/csi/volumeDevices/publish/pv/u".to_owned())
        );
        for bad in ["", ".", "..", "a/b", "../../etc", "a\0b"] {
            assert!(layout.staging(bad, "h").is_err() && layout.block(bad).is_err(), "{bad:?}");
            assert!(block.published(&bad.into()).is_err(), "{bad:?}");
        }
    }
}
