//! What a volume of a pod comes down to, and what it is called. Pure. Behaviour: spec 07 §2.1, §3.3.

use std::{fmt, sync::Arc};

use berth_types::{PodUid, api};

/// How a pod gets a volume.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum Mode {
    /// As a directory.
    Filesystem,
    /// As a device.
    Block,
}

impl Mode {
    /// As the API spells it.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Filesystem => "Filesystem",
            Self::Block => "Block",
        }
    }
}

/// A claim, and the persistent volume bound to it.
#[derive(Clone, PartialEq, Debug)]
pub struct Persistent {
    /// The volume.
    pub volume: Arc<api::PersistentVolume>,
    /// The claim.
    pub claim: Arc<api::PersistentVolumeClaim>,
    /// Whether the pod asked for it read-only.
    pub read_only: bool,
}

/// Where a volume comes from.
#[derive(Clone, PartialEq, Debug)]
pub enum Source {
    /// The pod itself says.
    Inline(Box<api::Volume>),
    /// A claim.
    Persistent(Persistent),
}

/// One volume of one pod, resolved.
#[derive(Clone, PartialEq, Debug)]
pub struct VolumeSpec {
    /// That of the volume in the pod, or of the persistent volume.
    pub name: String,
    /// Where it comes from.
    pub source: Source,
    /// It was said by a name that was built in once (spec 07 §3.3).
    pub is_migrated: bool,
}

impl VolumeSpec {
    /// A volume that the pod itself describes.
    pub fn inline(volume: &api::Volume) -> Self {
        Self { name: volume.name.clone(), source: Source::Inline(Box::new(volume.clone())), is_migrated: false }
    }

    /// A volume behind a claim.
    pub fn persistent(
        volume: Arc<api::PersistentVolume>,
        claim: Arc<api::PersistentVolumeClaim>,
        read_only: bool,
    ) -> Self {
        let name = volume.metadata.name.clone().unwrap_or_default();
        Self { name, source: Source::Persistent(Persistent { volume, claim, read_only }), is_migrated: false }
    }

    /// The same, translated from a name that was built in once.
    #[must_use]
    pub fn migrated(self) -> Self {
        Self { is_migrated: true, ..self }
    }

    /// The name of its directory: names of disks have slashes, which are escaped as those of plugins are.
    pub fn directory(&self) -> String {
        self.name.replace('/', "~")
    }

    /// What the pod says, where it does.
    pub fn as_inline(&self) -> Option<&api::Volume> {
        match &self.source {
            Source::Inline(volume) => Some(volume),
            Source::Persistent(_) => None,
        }
    }

    /// The claim and its volume, where there is one.
    pub fn as_persistent(&self) -> Option<&Persistent> {
        match &self.source {
            Source::Persistent(persistent) => Some(persistent),
            Source::Inline(_) => None,
        }
    }

    /// Specification of the persistent volume.
    pub fn volume(&self) -> Option<&api::PersistentVolumeSpec> {
        self.as_persistent()?.volume.spec.as_ref()
    }

    /// Namespace and name of the claim; empty ones for a volume rebuilt from disk, or translated from the pod's own.
    pub fn claim(&self) -> Option<(&str, &str)> {
        let metadata = &self.as_persistent()?.claim.metadata;
        Some((metadata.namespace.as_deref().unwrap_or_default(), metadata.name.as_deref().unwrap_or_default()))
    }

    /// Whether the pod may only read it.
    pub fn read_only(&self) -> bool {
        match &self.source {
            Source::Persistent(persistent) => persistent.read_only,
            Source::Inline(volume) => {
                let nfs = volume.nfs.as_ref().and_then(|source| source.read_only);
                let csi = volume.csi.as_ref().and_then(|source| source.read_only);
                let iscsi = volume.iscsi.as_ref().and_then(|source| source.read_only);
                let fc = volume.fc.as_ref().and_then(|source| source.read_only);
                [nfs, csi, iscsi, fc].into_iter().flatten().any(|is| is)
            }
        }
    }

    /// How the volume is made: a directory unless it says otherwise.
    pub fn mode(&self) -> Mode {
        match self.volume().and_then(|spec| spec.volume_mode.as_deref()) {
            Some("Block") => Mode::Block,
            _ => Mode::Filesystem,
        }
    }

    /// Access modes of the persistent volume.
    pub fn access_modes(&self) -> &[String] {
        self.volume().and_then(|spec| spec.access_modes.as_deref()).unwrap_or_default()
    }

    /// Whether one pod may use it and no other.
    pub fn is_for_one_pod(&self) -> bool {
        self.access_modes() == ["ReadWriteOncePod"]
    }

    /// Mount options of the persistent volume: those of the old annotation win (spec 07 §14).
    pub fn mount_options(&self) -> Vec<String> {
        let Some(persistent) = self.as_persistent() else { return Vec::new() };
        let annotations = persistent.volume.metadata.annotations.as_ref();
        if let Some(options) = annotations.and_then(|all| all.get("volume.beta.kubernetes.io/mount-options")) {
            return options.split(',').map(str::to_owned).collect();
        }
        self.volume().and_then(|spec| spec.mount_options.clone()).unwrap_or_default()
    }

    /// The supplemental group that the volume asks for its pods.
    pub fn group(&self) -> Option<i64> {
        let annotations = self.as_persistent()?.volume.metadata.annotations.as_ref()?;
        annotations.get("pv.beta.kubernetes.io/gid")?.parse().ok()
    }

    /// The volume as if the pod itself had said it, for kinds that lie in no device.
    pub fn localised(&self) -> Option<api::Volume> {
        match &self.source {
            Source::Inline(volume) => Some((**volume).clone()),
            Source::Persistent(_) => {
                let host_path = Some(self.volume()?.host_path.clone()?);
                Some(api::Volume { name: self.name.clone(), host_path, ..api::Volume::default() })
            }
        }
    }
}

/// What a volume is called on this node: equal for all pods that share it.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct UniqueName(String);

impl UniqueName {
    /// Of a volume that pods share: `volume` is what its plugin calls it.
    pub fn shared(plugin: &str, volume: &str) -> Self {
        Self(format!("{plugin}/{volume}"))
    }

    /// Of a volume that is its pod's own.
    pub fn of_pod(plugin: &str, pod: &PodUid, spec: &str) -> Self {
        Self(format!("{plugin}/{pod}-{spec}"))
    }

    /// The text.
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
    fn a_volume_says_how_it_is_used() {
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
