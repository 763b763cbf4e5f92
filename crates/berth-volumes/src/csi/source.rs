//! CSI source of a volume, whether inline or persistent. Pure. Implements spec 07 §12.

use std::collections::BTreeMap;

use super::{
    paths::{self, BadName},
    record::Lifecycle,
};
use crate::spec::{VolumeSource, VolumeSpec};
use berth_types::{PodUid, api};

/// Namespace and name of a secret.
pub type SecretName = (String, String);

/// Fields of a CSI volume source, the same for inline and persistent volumes.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct CsiVolume {
    /// Name of the driver.
    pub driver: String,
    /// Volume handle of the driver.
    pub handle: String,
    /// Whether it is an inline (ephemeral) volume.
    pub is_inline: bool,
    /// File system type; empty for the driver's default.
    pub fs_type: String,
    /// Volume attributes, passed to the driver.
    pub attributes: BTreeMap<String, String>,
    /// Secret for staging.
    pub stage_secret: Option<SecretName>,
    /// Secret for publishing.
    pub publish_secret: Option<SecretName>,
    /// Secret for expansion.
    pub expand_secret: Option<SecretName>,
}

impl CsiVolume {
    /// Returns the CSI source of `spec`; `None` if it is not a CSI volume.
    pub fn of(spec: &VolumeSpec, namespace: &str, pod: &PodUid) -> Option<Self> {
        match &spec.source {
            VolumeSource::Inline(volume) => volume.csi.as_ref().map(|csi| inline(csi, &volume.name, namespace, pod)),
            VolumeSource::Persistent(persistent) => {
                persistent.volume.spec.as_ref().and_then(|spec| spec.csi.as_ref()).map(persisted)
            }
        }
    }

    /// Returns the lifecycle mode.
    pub fn lifecycle(&self) -> Lifecycle {
        if self.is_inline { Lifecycle::Ephemeral } else { Lifecycle::Persistent }
    }

    /// Returns the plugin's name for the volume, `<driver>^<handle>`.
    pub fn name(&self) -> String {
        format!("{}^{}", self.driver, self.handle)
    }

    /// Returns the value of the metrics label `volume_plugin`.
    pub fn label(&self) -> String {
        format!("{}:{}", paths::PLUGIN, self.driver)
    }

    /// Checks that the driver's name is a valid directory name.
    ///
    /// # Errors
    /// If it is not.
    pub fn checked(self) -> Result<Self, BadName> {
        paths::safe(&self.driver)?;
        Ok(self)
    }
}

fn inline(csi: &api::CSIVolumeSource, volume: &str, namespace: &str, pod: &PodUid) -> CsiVolume {
    let secret = csi.node_publish_secret_ref.as_ref().map(|secret| (namespace.to_owned(), secret.name.clone()));
    CsiVolume {
        driver: csi.driver.clone(),
        handle: paths::inline_handle(pod, volume),
        is_inline: true,
        fs_type: csi.fs_type.clone().unwrap_or_default(),
        attributes: csi.volume_attributes.clone().unwrap_or_default(),
        publish_secret: secret,
        ..CsiVolume::default()
    }
}

fn persisted(csi: &api::CSIPersistentVolumeSource) -> CsiVolume {
    let secret = |reference: &Option<api::SecretReference>| {
        let reference = reference.as_ref()?;
        Some((reference.namespace.clone().unwrap_or_default(), reference.name.clone().unwrap_or_default()))
    };
    CsiVolume {
        driver: csi.driver.clone(),
        handle: csi.volume_handle.clone(),
        is_inline: false,
        fs_type: csi.fs_type.clone().unwrap_or_default(),
        attributes: csi.volume_attributes.clone().unwrap_or_default(),
        stage_secret: secret(&csi.node_stage_secret_ref),
        publish_secret: secret(&csi.node_publish_secret_ref),
        expand_secret: secret(&csi.node_expand_secret_ref),
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use serde_json::json;

    use super::*;

    #[test]
    fn volumes_of_pods_and_of_claims_come_down_to_the_same() {
        let volume = serde_json::from_value(json!({"name": "v", "csi": {"driver": "d", "fsType": "xfs",
            "volumeAttributes": {"a": "b"}, "nodePublishSecretRef": {"name": "s"}}}));
        let spec = VolumeSpec::inline(&volume.expect("a volume"));
        let found = CsiVolume::of(&spec, "ns", &"u".into()).expect("a CSI volume");
        assert_eq!(found.handle, paths::inline_handle(&"u".into(), "v"));
        assert_eq!((found.is_inline, found.fs_type.as_str(), found.attributes["a"].as_str()), (true, "xfs", "b"));
        assert_eq!(found.publish_secret, Some(("ns".to_owned(), "s".to_owned())));
        assert_eq!(found.lifecycle(), Lifecycle::Ephemeral);

        let volume = serde_json::from_value(json!({"metadata": {"name": "pv"}, "spec": {"csi": {"driver": "d",
            "volumeHandle": "h", "nodeStageSecretRef": {"name": "s", "namespace": "x"}}}}));
        let spec = VolumeSpec::persistent(Arc::new(volume.expect("a volume")), Arc::default(), false);
        let found = CsiVolume::of(&spec, "ns", &"u".into()).expect("a CSI volume");
        assert_eq!((found.name().as_str(), found.label().as_str()), ("d^h", "kubernetes.io/csi:d"));
        assert_eq!((found.stage_secret, found.publish_secret), (Some(("x".to_owned(), "s".to_owned())), None));
        let other = serde_json::from_value(json!({"name": "v", "emptyDir": {}})).expect("a volume");
        assert_eq!(CsiVolume::of(&VolumeSpec::inline(&other), "ns", &"u".into()), None);
        let bad = CsiVolume { driver: "../x".to_owned(), ..CsiVolume::default() };
        assert!(bad.checked().is_err());
    }
}
