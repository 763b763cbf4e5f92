//! What of a volume matters to its driver, wherever it comes from. Pure. Spec 07 §12.

use std::collections::BTreeMap;

use super::{
    paths::{self, BadName},
    record::Lifecycle,
};
use crate::spec::{Source, VolumeSpec};
use berth_types::{PodUid, api};

/// Namespace and name of a secret.
pub type SecretName = (String, String);

/// A CSI volume.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct CsiVolume {
    /// The driver.
    pub driver: String,
    /// What it calls the volume.
    pub handle: String,
    /// Whether the pod itself describes it.
    pub is_inline: bool,
    /// File system; empty for the driver's own choice.
    pub fs_type: String,
    /// What the driver wants to know.
    pub attributes: BTreeMap<String, String>,
    /// The secret for staging.
    pub stage_secret: Option<SecretName>,
    /// The secret for publishing.
    pub publish_secret: Option<SecretName>,
    /// The secret for expanding.
    pub expand_secret: Option<SecretName>,
}

impl CsiVolume {
    /// What `spec` says; `None` where it is no CSI volume.
    pub fn of(spec: &VolumeSpec, namespace: &str, pod: &PodUid) -> Option<Self> {
        match &spec.source {
            Source::Inline(volume) => volume.csi.as_ref().map(|csi| inline(csi, &volume.name, namespace, pod)),
            Source::Persistent(persistent) => {
                persistent.volume.spec.as_ref().and_then(|spec| spec.csi.as_ref()).map(persisted)
            }
        }
    }

    /// How long it lives.
    pub fn lifecycle(&self) -> Lifecycle {
        if self.is_inline { Lifecycle::Ephemeral } else { Lifecycle::Persistent }
    }

    /// What the plugin calls it.
    pub fn name(&self) -> String {
        format!("{}^{}", self.driver, self.handle)
    }

    /// Label `volume_plugin` of metrics.
    pub fn label(&self) -> String {
        format!("{}:{}", paths::PLUGIN, self.driver)
    }

    /// Whether its names can be those of directories.
    ///
    /// # Errors
    /// The driver's cannot.
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
