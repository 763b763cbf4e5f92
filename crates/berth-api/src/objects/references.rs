//! ConfigMaps and Secrets that a pod references. Pure.
//!
//! Implements spec 07 §9.1.

use std::collections::BTreeSet;

use berth_types::{Pod, api, env, spec};

/// Object names in the pod's namespace.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct ReferencedObjects {
    /// Names of ConfigMaps.
    pub config_maps: BTreeSet<String>,
    /// Names of Secrets.
    pub secrets: BTreeSet<String>,
}

/// Collects all references of a pod: volumes, environments of all its containers, pull secrets.
pub fn referenced_objects(pod: &Pod) -> ReferencedObjects {
    let mut found = ReferencedObjects::default();
    for container in pod.init_containers().iter().chain(pod.containers()) {
        found.environment(container);
    }
    for container in pod.ephemeral_containers() {
        found.environment(&spec::ephemeral_as_container(container));
    }
    for volume in pod.spec().volumes() {
        found.volume(&volume);
    }
    found.secrets.extend(pod.spec().image_pull_secrets.iter().flatten().map(|secret| secret.name.clone()));
    found.config_maps.remove("");
    found.secrets.remove("");
    found
}

impl ReferencedObjects {
    fn environment(&mut self, container: &api::Container) {
        let wanted = env::references(container);
        self.config_maps.extend(wanted.config_maps);
        self.secrets.extend(wanted.secrets);
    }

    fn volume(&mut self, volume: &api::Volume) {
        self.config_maps.extend(volume.config_map.as_ref().map(|source| source.name.clone()));
        self.secrets.extend(volume.secret.as_ref().and_then(|source| source.secret_name.clone()));
        for source in volume.projected.iter().flat_map(|projected| projected.sources.iter().flatten()) {
            self.config_maps.extend(source.config_map.as_ref().map(|source| source.name.clone()));
            self.secrets.extend(source.secret.as_ref().map(|source| source.name.clone()));
        }
        self.secrets.extend(secrets_of_drivers(volume).into_iter().flatten());
    }
}

/// Secrets of CSI and in-tree storage drivers.
fn secrets_of_drivers(volume: &api::Volume) -> [Option<String>; 9] {
    let local = |secret: &Option<api::LocalObjectReference>| secret.as_ref().map(|secret| secret.name.clone());
    [
        volume.csi.as_ref().and_then(|v| local(&v.node_publish_secret_ref)),
        volume.iscsi.as_ref().and_then(|v| local(&v.secret_ref)),
        volume.azure_file.as_ref().map(|v| v.secret_name.clone()),
        volume.cephfs.as_ref().and_then(|v| local(&v.secret_ref)),
        volume.cinder.as_ref().and_then(|v| local(&v.secret_ref)),
        volume.flex_volume.as_ref().and_then(|v| local(&v.secret_ref)),
        volume.rbd.as_ref().and_then(|v| local(&v.secret_ref)),
        volume.scale_io.as_ref().map(|v| v.secret_ref.name.clone()),
        volume.storageos.as_ref().and_then(|v| local(&v.secret_ref)),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn every_place_counts_once() {
        let from =
            |n: &str| json!([{"configMapRef": {"name": format!("cm-{n}")}}, {"secretRef": {"name": format!("s-{n}")}}]);
        let key = |n: &str| {
            json!([
                {"name": "A", "valueFrom": {"configMapKeyRef": {"name": format!("cm-key-{n}"), "key": "k"}}},
                {"name": "B", "valueFrom": {"secretKeyRef": {"name": format!("s-key-{n}"), "key": "k"}}}])
        };
        let object = json!({"metadata": {"name": "p", "namespace": "n", "uid": "u"}, "spec": {
            "initContainers": [{"name": "i", "envFrom": from("i")}],
            "containers": [{"name": "c", "envFrom": from("c"), "env": key("c")}],
            "ephemeralContainers": [{"name": "e", "env": key("e")}],
            "imagePullSecrets": [{"name": "pull"}, {"name": ""}],
            "volumes": [
                {"name": "a", "configMap": {"name": "cm-v"}},
                {"name": "b", "secret": {"secretName": "s-v"}},
                {"name": "c", "projected": {"sources": [
                    {"configMap": {"name": "kube-root-ca.crt"}}, {"secret": {"name": "s-p"}},
                    {"serviceAccountToken": {"path": "token"}}]}},
                {"name": "d", "csi": {"driver": "d", "nodePublishSecretRef": {"name": "s-csi"}}},
                {"name": "e", "emptyDir": {}}]}});
        let named = referenced_objects(&Pod::new(serde_json::from_value(object).expect("a pod")).expect("complete"));
        let list = |names: &BTreeSet<String>| names.iter().cloned().collect::<Vec<_>>().join(" ");
        assert_eq!(list(&named.config_maps), "cm-c cm-i cm-key-c cm-key-e cm-v kube-root-ca.crt");
        assert_eq!(list(&named.secrets), "pull s-c s-csi s-i s-key-c s-key-e s-p s-v");
    }
}
