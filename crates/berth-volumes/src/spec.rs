//! Resolved volume of a pod (`VolumeSpec`), its mode, and its unique name on the node. Pure.
//!
//! Implements spec 07 §2.1, §3.3.

use std::{fmt, sync::Arc};

use berth_types::{PodUid, api};

/// Volume mode: how a pod uses the volume.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum Mode {
    /// As a mounted directory.
    Filesystem,
    /// As a raw block device.
    Block,
}

impl Mode {
    /// Returns the API spelling.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Filesystem => "Filesystem",
            Self::Block => "Block",
        }
    }
}

/// Persistent volume with the claim that is bound to it.
#[derive(Clone, PartialEq, Debug)]
pub struct Persistent {
    /// Persistent volume.
    pub volume: Arc<api::PersistentVolume>,
    /// Persistent volume claim.
    pub claim: Arc<api::PersistentVolumeClaim>,
    /// Whether the pod requests the claim read-only.
    pub read_only: bool,
}

/// Inline volume of a pod, or persistent volume behind a claim.
#[derive(Clone, PartialEq, Debug)]
pub enum VolumeSource {
    /// Inline source in the pod spec.
    Inline(Box<api::Volume>),
    /// Persistent volume behind a claim.
    Persistent(Persistent),
}

/// Resolved volume of one pod.
#[derive(Clone, PartialEq, Debug)]
pub struct VolumeSpec {
    /// Name of the volume in the pod, or of the persistent volume.
    pub name: String,
    /// Source of the volume.
    pub source: VolumeSource,
    /// Translated from an in-tree plugin to CSI (spec 07 §3.3).
    pub is_migrated: bool,
}

impl VolumeSpec {
    /// Creates the spec of an inline volume.
    pub fn inline(volume: &api::Volume) -> Self {
        Self { name: volume.name.clone(), source: VolumeSource::Inline(Box::new(volume.clone())), is_migrated: false }
    }

    /// Creates the spec of a persistent volume.
    pub fn persistent(
        volume: Arc<api::PersistentVolume>,
        claim: Arc<api::PersistentVolumeClaim>,
        read_only: bool,
    ) -> Self {
        let name = volume.metadata.name.clone().unwrap_or_default();
        Self { name, source: VolumeSource::Persistent(Persistent { volume, claim, read_only }), is_migrated: false }
    }

    /// Marks the spec as translated from an in-tree plugin.
    #[must_use]
    pub fn migrated(self) -> Self {
        Self { is_migrated: true, ..self }
    }

    /// Returns the directory name: names of cloud disks contain slashes, which are escaped as those of plugin names
    /// are.
    pub fn directory(&self) -> String {
        self.name.replace('/', "~")
    }

    /// Returns the inline source, if it is one.
    pub fn as_inline(&self) -> Option<&api::Volume> {
        match &self.source {
            VolumeSource::Inline(volume) => Some(volume),
            VolumeSource::Persistent(_) => None,
        }
    }

    /// Returns the persistent volume and its claim, if it is one.
    pub fn as_persistent(&self) -> Option<&Persistent> {
        match &self.source {
            VolumeSource::Persistent(persistent) => Some(persistent),
            VolumeSource::Inline(_) => None,
        }
    }

    /// Returns the spec of the persistent volume.
    pub fn volume(&self) -> Option<&api::PersistentVolumeSpec> {
        self.as_persistent()?.volume.spec.as_ref()
    }

    /// Returns namespace and name of the claim; both empty for a volume rebuilt from disk or translated from an inline
    /// source.
    pub fn claim(&self) -> Option<(&str, &str)> {
        let metadata = &self.as_persistent()?.claim.metadata;
        Some((metadata.namespace.as_deref().unwrap_or_default(), metadata.name.as_deref().unwrap_or_default()))
    }

    /// Whether the pod mounts the volume read-only.
    pub fn read_only(&self) -> bool {
        match &self.source {
            VolumeSource::Persistent(persistent) => persistent.read_only,
            VolumeSource::Inline(volume) => {
                let nfs = volume.nfs.as_ref().and_then(|source| source.read_only);
                let csi = volume.csi.as_ref().and_then(|source| source.read_only);
                let iscsi = volume.iscsi.as_ref().and_then(|source| source.read_only);
                let fc = volume.fc.as_ref().and_then(|source| source.read_only);
                [nfs, csi, iscsi, fc].into_iter().flatten().any(|is| is)
            }
        }
    }

    /// Returns the volume mode; a file system by default.
    pub fn mode(&self) -> Mode {
        match self.volume().and_then(|spec| spec.volume_mode.as_deref()) {
            Some("Block") => Mode::Block,
            _ => Mode::Filesystem,
        }
    }

    /// Returns the access modes of the persistent volume.
    pub fn access_modes(&self) -> &[String] {
        self.volume().and_then(|spec| spec.access_modes.as_deref()).unwrap_or_default()
    }

    /// Whether only one pod may use the volume (`ReadWriteOncePod` as its sole access mode).
    pub fn is_for_one_pod(&self) -> bool {
        self.access_modes() == ["ReadWriteOncePod"]
    }

    /// Returns the mount options of the persistent volume; the legacy annotation takes precedence (spec 07 §14).
    pub fn mount_options(&self) -> Vec<String> {
        let Some(persistent) = self.as_persistent() else { return Vec::new() };
        let annotations = persistent.volume.metadata.annotations.as_ref();
        if let Some(options) = annotations.and_then(|all| all.get("volume.beta.kubernetes.io/mount-options")) {
            return options.split(',').map(str::to_owned).collect();
        }
        self.volume().and_then(|spec| spec.mount_options.clone()).unwrap_or_default()
    }

    /// Returns the supplemental group that the volume requests for its pods.
    pub fn group(&self) -> Option<i64> {
        let annotations = self.as_persistent()?.volume.metadata.annotations.as_ref()?;
        annotations.get("pv.beta.kubernetes.io/gid")?.parse().ok()
    }

    /// Returns the volume as an inline source, for types without a device plugin.
    pub fn localised(&self) -> Option<api::Volume> {
        match &self.source {
            VolumeSource::Inline(volume) => Some((**volume).clone()),
            VolumeSource::Persistent(_) => {
                let host_path = Some(self.volume()?.host_path.clone()?);
                Some(api::Volume { name: self.name.clone(), host_path, ..api::Volume::default() })
            }
        }
    }
}

/// Unique name of a volume on this node: equal for all pods that share it.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct UniqueName(String);

impl UniqueName {
    /// Creates the name of a shared volume; `volume` is the plugin's name for it.
    pub fn shared(plugin: &str, volume: &str) -> Self {
        Self(format!("{plugin}/{volume}"))
    }

    /// Creates the name of a volume that belongs to one pod.
    pub fn of_pod(plugin: &str, pod: &PodUid, spec: &str) -> Self {
        Self(format!("{plugin}/{pod}-{spec}"))
    }

    /// Returns the name as text.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for UniqueName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn persistent(volume: serde_json::Value) -> VolumeSpec {
        let volume = serde_json::from_value(volume).expect("a volume");
        VolumeSpec::persistent(Arc::new(volume), Arc::default(), false)
    }

    #[test]
    fn names_are_shared_where_volumes_are() {
        let shared = UniqueName::shared("kubernetes.io/csi", "d^h");
        assert_eq!(shared.as_str(), "kubernetes.io/csi/d^h");
        let own = UniqueName::of_pod("kubernetes.io/nfs", &"u".into(), "v");
        assert_eq!(own.to_string(), "kubernetes.io/nfs/u-v");
    }

    #[test]
    fn a_spec_returns_mode_group_and_mount_options() {
        let spec = persistent(json!({"metadata": {"name": "pv", "annotations": {"pv.beta.kubernetes.io/gid": "7"}},
            "spec": {"volumeMode": "Block", "accessModes": ["ReadWriteOncePod"], "mountOptions": ["b", "a"]}}));
        assert_eq!((spec.name.as_str(), spec.mode(), spec.group()), ("pv", Mode::Block, Some(7)));
        assert!(spec.is_for_one_pod() && spec.localised().is_none());
        assert_eq!(spec.mount_options(), ["b", "a"]);
        let spec = persistent(json!({"metadata": {"name": "pv", "annotations": {
            "volume.beta.kubernetes.io/mount-options": "ro,soft", "pv.beta.kubernetes.io/gid": "x"}},
            "spec": {"accessModes": ["ReadWriteOnce", "ReadWriteOncePod"], "hostPath": {"path": "/x"}}}));
        assert_eq!((spec.mode(), spec.group(), spec.is_for_one_pod()), (Mode::Filesystem, None, false));
        assert_eq!(spec.mount_options(), ["ro", "soft"]);
        let local = spec.localised().expect("a path of the host");
        assert_eq!((local.name.as_str(), local.host_path.map(|path| path.path)), ("pv", Some("/x".to_owned())));
    }
}
