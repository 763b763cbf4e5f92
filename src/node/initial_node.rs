//! Initial node object for registration. Pure. Implements spec 05 §4.2, 01 §12.3.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;

use super::facts::{labels, taints};
use super::status::StatusSettings;
use berth_types::api;

/// Annotation: the attach-detach controller attaches volumes.
pub(super) const ATTACH_DETACH: &str = "volumes.kubernetes.io/controller-managed-attach-detach";

/// Settings that apply only when the node object is created.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct RegistrationSettings {
    /// `providerID`.
    pub provider_id: String,
    /// `enableControllerAttachDetach`.
    pub attach_detach: bool,
}

/// Builds the node object without a status.
pub fn initial(settings: &StatusSettings, origin: &RegistrationSettings) -> api::Node {
    let some = |text: &String| (!text.is_empty()).then(|| text.clone());
    let taints = taints(&settings.node);
    let spec = api::NodeSpec {
        provider_id: some(&origin.provider_id),
        taints: (!taints.is_empty()).then_some(taints),
        ..api::NodeSpec::default()
    };
    let annotations = origin.attach_detach.then(|| [(ATTACH_DETACH.to_owned(), "true".to_owned())].into());
    let labels = labels(&settings.hostname, &settings.node.labels);
    api::Node {
        metadata: ObjectMeta {
            name: Some(settings.name.clone()),
            labels: Some(labels),
            annotations,
            ..ObjectMeta::default()
        },
        spec: Some(spec),
        status: None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::node::status::tests::settings;

    #[test]
    fn a_new_node_has_labels_taints_and_provider() {
        // AC-05-22 (metadata and spec)
        let mut settings = settings();
        settings.node.labels = [("zone".to_owned(), "a".to_owned())].into();
        settings.node.is_cloud_external = true;
        let origin = RegistrationSettings { provider_id: "cloud://1".to_owned(), attach_detach: true };
        let node = serde_json::to_value(initial(&settings, &origin)).expect("JSON");
        assert_eq!(node["metadata"]["name"], "n");
        assert_eq!(node["metadata"]["labels"]["kubernetes.io/os"], "linux");
        assert_eq!(node["metadata"]["labels"]["zone"], "a");
        assert_eq!(node["metadata"]["annotations"][ATTACH_DETACH], "true");
        assert_eq!(node["spec"]["providerID"], "cloud://1");
        assert_eq!(node["spec"]["taints"][0]["key"], "node.cloudprovider.kubernetes.io/uninitialized");
        let plain = initial(&super::super::status::tests::settings(), &RegistrationSettings::default());
        assert_eq!((plain.metadata.annotations, plain.spec), (None, Some(api::NodeSpec::default())));
    }
}
