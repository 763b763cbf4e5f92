//! Checkpoint content for offline starts: pods and the objects they reference. Pure.
//!
//! Defines how observations update it, how unreferenced data is dropped, and its serialization.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use serde::{Deserialize, Serialize};

use crate::objects::referenced_objects;
use berth_types::{Pod, api};

/// Format version.
const VERSION: u32 = 1;

/// Why a checkpoint cannot be encoded or decoded.
#[derive(Debug, thiserror::Error)]
pub enum KnownError {
    /// It is not valid JSON of this format.
    #[error("invalid format: {0}")]
    Malformed(#[from] serde_json::Error),
    /// It has the format version of another release.
    #[error("unsupported version {0}, expected {VERSION}")]
    Version(u32),
}

/// Data type of an object.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize, Deserialize)]
pub enum ObjectDataKind {
    /// `data` of a ConfigMap.
    ConfigMap,
    /// `data` and `binaryData` of a ConfigMap.
    ConfigMapFiles,
    /// `data` of a Secret.
    Secret,
    /// Image pull credentials of a Secret.
    PullSecret,
}

impl ObjectDataKind {
    fn is_secret(self) -> bool {
        matches!(self, Self::Secret | Self::PullSecret)
    }
}

/// Key of an object's data.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize, Deserialize)]
pub struct ObjectDataKey {
    /// Data type.
    pub kind: ObjectDataKind,
    /// Namespace of the object.
    pub namespace: String,
    /// Name of the object.
    pub name: String,
}

/// Values by key.
pub type Data = BTreeMap<String, Vec<u8>>;

/// Observation that updates the checkpoint.
#[derive(Clone, Debug)]
pub enum CheckpointUpdate {
    /// Complete set of pods.
    Pods(Vec<Arc<Pod>>),
    /// Data of an object.
    Object(ObjectDataKey, Arc<Data>),
    /// Services visible to the pods of a namespace.
    Services(String, Vec<Arc<api::Service>>),
    /// Runtime class and its handler.
    Handler(String, String),
}

/// Last-known pods and the objects they reference.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Checkpoint {
    /// Pods, without mirror pods and without volatile fields.
    pub pods: Vec<Arc<api::Pod>>,
    /// Data of objects by key.
    pub objects: BTreeMap<ObjectDataKey, Arc<Data>>,
    /// Services by namespace.
    pub services: BTreeMap<String, Vec<Arc<api::Service>>>,
    /// Handlers by runtime class.
    pub handlers: BTreeMap<String, String>,
}

#[derive(Serialize, Deserialize)]
struct CheckpointDocument {
    version: u32,
    pods: Vec<Arc<api::Pod>>,
    /// A list, because JSON keys are strings.
    objects: Vec<(ObjectDataKey, Arc<Data>)>,
    services: BTreeMap<String, Vec<Arc<api::Service>>>,
    handlers: BTreeMap<String, String>,
}

impl Checkpoint {
    /// Applies an observation; returns whether the checkpoint may have changed.
    pub fn apply(&mut self, learned: CheckpointUpdate) -> bool {
        match learned {
            CheckpointUpdate::Pods(pods) => {
                let pods: Vec<Arc<api::Pod>> = pods.iter().filter(|pod| !pod.is_mirror()).map(trimmed).collect();
                let is_new = self.pods != pods;
                self.pods = pods;
                self.forget();
                is_new
            }
            CheckpointUpdate::Object(key, data) => replaced(&mut self.objects, key, data),
            CheckpointUpdate::Services(namespace, services) => replaced(&mut self.services, namespace, services),
            CheckpointUpdate::Handler(class, handler) => replaced(&mut self.handlers, class, handler),
        }
    }

    /// Drops objects that no pod references.
    fn forget(&mut self) {
        let (mut used, mut namespaces, mut classes) = (BTreeSet::new(), BTreeSet::new(), BTreeSet::new());
        for pod in self.pods.iter().filter_map(|pod| Pod::new((**pod).clone()).ok()) {
            let names = referenced_objects(&pod);
            let namespace = pod.metadata.namespace.clone().unwrap_or_default();
            used.extend(names.config_maps.into_iter().map(|name| (false, namespace.clone(), name)));
            used.extend(names.secrets.into_iter().map(|name| (true, namespace.clone(), name)));
            classes.extend(pod.spec().runtime_class_name.clone());
            namespaces.insert(namespace);
        }
        self.objects.retain(|key, _| used.contains(&(key.kind.is_secret(), key.namespace.clone(), key.name.clone())));
        self.services.retain(|namespace, _| namespaces.contains(namespace));
        self.handlers.retain(|class, _| classes.contains(class));
    }

    /// Serializes the checkpoint.
    ///
    /// # Errors
    /// A value cannot be serialized as JSON.
    pub fn encode(&self) -> Result<Vec<u8>, KnownError> {
        let document = CheckpointDocument {
            version: VERSION,
            pods: self.pods.clone(),
            objects: self.objects.iter().map(|(key, data)| (key.clone(), data.clone())).collect(),
            services: self.services.clone(),
            handlers: self.handlers.clone(),
        };
        Ok(serde_json::to_vec(&document)?)
    }

    /// Deserializes a checkpoint.
    ///
    /// # Errors
    /// It is malformed or has another format version.
    pub fn decode(bytes: &[u8]) -> Result<Self, KnownError> {
        #[derive(Deserialize)]
        struct VersionHeader {
            version: u32,
        }
        let VersionHeader { version } = serde_json::from_slice(bytes)?;
        if version != VERSION {
            return Err(KnownError::Version(version));
        }
        let CheckpointDocument { pods, objects, services, handlers, .. } = serde_json::from_slice(bytes)?;
        Ok(Self { pods, objects: objects.into_iter().collect(), services, handlers })
    }
}

fn replaced<K: Ord, V: PartialEq>(map: &mut BTreeMap<K, V>, key: K, value: V) -> bool {
    if map.get(&key) == Some(&value) {
        return false;
    }
    map.insert(key, value);
    true
}

/// Strips volatile fields that no pod start needs. The phase stays, so that a terminal pod is not restarted.
fn trimmed(pod: &Arc<Pod>) -> Arc<api::Pod> {
    let mut pod = pod.to_object();
    pod.metadata.managed_fields = None;
    pod.metadata.resource_version = None;
    pod.status = pod.status.map(|status| api::PodStatus {
        phase: status.phase,
        reason: status.reason,
        start_time: status.start_time,
        qos_class: status.qos_class,
        ..api::PodStatus::default()
    });
    Arc::new(pod)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn pod(name: &str, more: &serde_json::Value) -> Arc<Pod> {
        let mut object = json!({
            "metadata": {"name": name, "namespace": "ns", "uid": name, "resourceVersion": "7"},
            "spec": {"containers": [{"name": "c", "image": "i", "envFrom": [{"configMapRef": {"name": "cm"}}]}],
                "imagePullSecrets": [{"name": "pull"}], "runtimeClassName": "fast"},
            "status": {"phase": "Running", "conditions": [{"type": "Ready", "status": "True"}]},
        });
        for (key, value) in more.as_object().into_iter().flatten() {
            object[key.as_str()] = value.clone();
        }
        Arc::new(serde_json::from_value(object).expect("a pod"))
    }

    fn key(kind: ObjectDataKind, name: &str) -> ObjectDataKey {
        ObjectDataKey { kind, namespace: "ns".to_owned(), name: name.to_owned() }
    }

    fn data(text: &str) -> Arc<Data> {
        Arc::new([("k".to_owned(), text.as_bytes().to_vec())].into())
    }

    #[test]
    fn what_no_pod_names_is_forgotten() {
        let mut known = Checkpoint::default();
        assert!(known.apply(CheckpointUpdate::Pods(vec![pod("a", &json!({}))])));
        for (kind, name) in [
            (ObjectDataKind::ConfigMap, "cm"),
            (ObjectDataKind::PullSecret, "pull"),
            (ObjectDataKind::Secret, "cm"),
            (ObjectDataKind::PullSecret, "x"),
        ] {
            assert!(known.apply(CheckpointUpdate::Object(key(kind, name), data("v"))));
        }
        assert!(known.apply(CheckpointUpdate::Handler("fast".to_owned(), "h".to_owned())));
        assert!(known.apply(CheckpointUpdate::Services("ns".to_owned(), Vec::new())));
        assert!(known.apply(CheckpointUpdate::Services("other".to_owned(), Vec::new())));
        assert!(!known.apply(CheckpointUpdate::Object(key(ObjectDataKind::ConfigMap, "cm"), data("v"))), "no news");
        assert!(known.apply(CheckpointUpdate::Object(key(ObjectDataKind::ConfigMap, "cm"), data("w"))));
        known.apply(CheckpointUpdate::Pods(vec![pod("a", &json!({}))]));
        let kept: Vec<&ObjectDataKey> = known.objects.keys().collect();
        assert_eq!(kept, [&key(ObjectDataKind::ConfigMap, "cm"), &key(ObjectDataKind::PullSecret, "pull")]);
        assert_eq!((known.services.len(), known.handlers.len()), (1, 1));
        known.apply(CheckpointUpdate::Pods(Vec::new()));
        assert_eq!(known, Checkpoint::default());
    }

    #[test]
    fn only_what_starts_pods_is_news() {
        let mut known = Checkpoint::default();
        known.apply(CheckpointUpdate::Pods(vec![pod("a", &json!({}))]));
        let conditions = json!({"status": {"phase": "Running", "podIP": "10.0.0.1"}});
        assert!(!known.apply(CheckpointUpdate::Pods(vec![pod("a", &conditions)])));
        assert!(known.apply(CheckpointUpdate::Pods(vec![pod("a", &json!({"status": {"phase": "Succeeded"}}))])));
        let mirror = json!({"metadata": {"name": "m", "namespace": "ns", "uid": "m", "annotations": {"kubernetes.io/config.mirror": "h"}}});
        assert!(!known.apply(CheckpointUpdate::Pods(vec![
            pod("a", &json!({"status": {"phase": "Succeeded"}})),
            pod("m", &mirror)
        ])));
    }

    #[test]
    fn what_is_written_down_is_read_again() {
        let mut known = Checkpoint::default();
        known.apply(CheckpointUpdate::Pods(vec![pod("a", &json!({})), pod("b", &json!({}))]));
        known.apply(CheckpointUpdate::Object(
            key(ObjectDataKind::ConfigMapFiles, "cm"),
            Arc::new([("b".to_owned(), vec![0, 255])].into()),
        ));
        known.apply(CheckpointUpdate::Services("ns".to_owned(), vec![Arc::default()]));
        assert_eq!(Checkpoint::decode(&known.encode().expect("written")).expect("read"), known);
        for (bytes, expected) in [
            (&b"{\"version\": 2}"[..], "unsupported version 2, expected 1"),
            (b"{}", "invalid format: missing field `version`"),
            (b"{\"version\": 1}", "invalid format: missing field `pods`"),
        ] {
            let message = Checkpoint::decode(bytes).expect_err(expected).to_string();
            assert!(message.starts_with(expected), "{message}");
        }
    }
}
