//! Where things of CSI volumes lie, and what they are called: other programs read this. Pure. Spec 07 §1, §2.1.

use std::path::{Path, PathBuf};

use sha2::{Digest, Sha256};

use berth_types::PodUid;

/// The plugin's name.
pub const PLUGIN: &str = "kubernetes.io/csi";
/// The directory of block volumes, beside those of drivers.
pub const BLOCK: &str = "volumeDevices";
/// The file that says what a volume is.
pub const RECORD: &str = "vol_data.json";

/// Lower-case hex.
fn digest(text: &str) -> String {
    Sha256::digest(text.as_bytes()).iter().map(|byte| format!("{byte:02x}")).collect()
}

/// The name of the object that says that a volume is attached to a node.
pub fn attachment(handle: &str, driver: &str, node: &str) -> String {
    format!("csi-{}", digest(&format!("{handle}{driver}{node}")))
}

/// The handle of a volume that lives and dies with its pod.
pub fn inline_handle(pod: &PodUid, volume: &str) -> String {
    format!("csi-{}", digest(&format!("{pod}{volume}")))
}

/// A name cannot be that of a directory.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("{0:?} cannot be the name of a directory")]
pub struct BadName(String);

/// The name, if it leads nowhere else.
///
/// # Errors
/// Names come from objects and from drivers: one that leads elsewhere is refused.
pub fn safe(name: &str) -> Result<&str, BadName> {
    let is_safe = !matches!(name, "" | "." | "..") && name.len() <= 255 && !name.contains(['/', '\0']);
    if is_safe { Ok(name) } else { Err(BadName(name.to_owned())) }
}

/// The directories that pods share.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct CsiLayout {
    root: PathBuf,
}

/// The directories of one block volume.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct BlockLayout {
    /// Where its driver stages it.
    pub staging: PathBuf,
    /// Where its record lies.
    pub data: PathBuf,
    /// Where each pod that has it finds it.
    pub mapped: PathBuf,
    published: PathBuf,
}

impl CsiLayout {
    /// Below the agent's root directory.
    pub fn new(root: &Path) -> Self {
        Self { root: root.join("plugins").join(PLUGIN) }
    }

    /// The directory of all of it.
    pub fn root(&self) -> &Path {
        &self.root
    }

    /// Where a volume is staged; its record lies in the parent.
    ///
    /// # Errors
    /// The driver's name leads elsewhere.
    pub fn staging(&self, driver: &str, handle: &str) -> Result<PathBuf, BadName> {
        Ok(self.root.join(safe(driver)?).join(digest(handle)).join("globalmount"))
    }

    /// A block volume by the name of its spec.
    ///
    /// # Errors
    /// The name leads elsewhere.
    pub fn block(&self, spec: &str) -> Result<BlockLayout, BadName> {
        let (root, name) = (self.root.join(BLOCK), safe(spec)?);
        Ok(BlockLayout {
            staging: root.join("staging").join(name),
            data: root.join(name).join("data"),
            mapped: root.join(name).join("dev"),
            published: root.join("publish").join(name),
        })
    }

    /// Where each pod that has a device finds it.
    pub fn map_dir(&self, spec: &str) -> PathBuf {
        // Names with slashes are escaped as those of plugins are.
        self.root.join(BLOCK).join(spec.replace('/', "~")).join("dev")
    }
}

impl BlockLayout {
    /// Where a pod's device appears.
    ///
    /// # Errors
    /// The pod's UID leads elsewhere.
    pub fn published(&self, pod: &PodUid) -> Result<PathBuf, BadName> {
        Ok(self.published.join(safe(pod.as_str())?))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_those_that_others_compute() {
        // What `sha256sum` makes of the concatenations.
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
