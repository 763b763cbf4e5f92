//! A pod in memory: the API object, parsed once and shared. Pure.

use std::{collections::BTreeMap, ops::Deref, sync::Arc};

use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use serde::{Deserialize, Deserializer, de};

use super::{PodFullName, PodRef, PodSpec, PodUid, api};

/// Source of a pod's definition (`kubernetes.io/config.source`).
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub enum PodSource {
    /// A static pod file or directory (`staticPodPath`).
    File,
    /// A static pod URL (`staticPodURL`).
    Http,
    /// The API server.
    Api,
}

impl PodSource {
    /// Value of the source annotation, and name of the source in messages.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::File => "file",
            Self::Http => "http",
            Self::Api => "api",
        }
    }

    /// Returns the source of that name; `None` if it is unknown.
    pub fn parse(text: &str) -> Option<Self> {
        [Self::File, Self::Http, Self::Api].into_iter().find(|s| s.as_str() == text)
    }
}

/// `spec.restartPolicy`; unknown or missing values are `Always` (the API's default).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum RestartPolicy {
    /// Restarts after any exit code.
    Always,
    /// Restarts after a non-zero exit code.
    OnFailure,
    /// Never restarts.
    Never,
}

impl RestartPolicy {
    /// Parses the API's value.
    pub fn parse(text: Option<&str>) -> Self {
        match text {
            Some("Never") => Self::Never,
            Some("OnFailure") => Self::OnFailure,
            _ => Self::Always,
        }
    }
}

/// List of the pod spec that contains a container.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub enum ContainerKind {
    /// `spec.initContainers`, sidecars included.
    Init,
    /// `spec.containers`.
    Regular,
    /// `spec.ephemeralContainers`.
    Ephemeral,
}

impl ContainerKind {
    /// Value of the metrics label `container_type`.
    pub fn metric_label(self) -> &'static str {
        match self {
            Self::Init => "init_container",
            Self::Regular => "container",
            Self::Ephemeral => "ephemeral_container",
        }
    }

    /// Returns the `fieldPath` of an event's involved object, e.g. `spec.containers{web}` (spec 03a §7).
    pub fn field_path(self, container: &str) -> String {
        let list = match self {
            Self::Init => "initContainers",
            Self::Regular => "containers",
            Self::Ephemeral => "ephemeralContainers",
        };
        format!("spec.{list}{{{container}}}")
    }
}

/// Annotation with the source of a pod.
pub const ANNOTATION_SOURCE: &str = "kubernetes.io/config.source";
/// Annotation with the time at which the pod config mux first saw a pod.
pub const ANNOTATION_SEEN: &str = "kubernetes.io/config.seen";
/// Annotation with the hash of a static pod, which equals its UID.
pub const ANNOTATION_HASH: &str = "kubernetes.io/config.hash";
/// Annotation of a mirror pod (any value, even empty).
pub const ANNOTATION_MIRROR: &str = "kubernetes.io/config.mirror";
/// Lowest priority of a critical pod.
pub const CRITICAL_PRIORITY: i32 = 2_000_000_000;

/// The API object lacks a mandatory field.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("pod {name:?}: {field} is required")]
pub struct MalformedPod {
    /// `metadata.name`; empty if that is the missing field.
    pub name: String,
    /// The missing field.
    pub field: &'static str,
}

/// A pod: identity, metadata, status, and spec. Immutable; share it as `Arc<Pod>`.
///
/// Dereferences to the parts of the API object other than the spec. The spec is shared between versions of a pod: it
/// takes most of the memory, and most updates do not change it.
#[derive(Clone, Debug, PartialEq)]
pub struct Pod {
    id: PodRef,
    head: PodHead,
    spec: Arc<PodSpec>,
}

/// Metadata and status of a pod. Versions of a pod share each part that is the same in them.
#[derive(Clone, Debug, PartialEq)]
pub struct PodHead {
    /// `metadata` of the API object.
    pub metadata: Arc<ObjectMeta>,
    /// `status` of the API object.
    pub status: Option<Arc<api::PodStatus>>,
}

impl PodHead {
    /// Creates the head from both parts.
    pub fn new(metadata: ObjectMeta, status: Option<api::PodStatus>) -> Self {
        Self { metadata: Arc::new(compact(&metadata)), status: status.map(|status| Arc::new(compact(&status))) }
    }
}

/// Copies the value without spare capacity: deserialized lists have capacity for up to twice their length, and one
/// container status alone takes 750 bytes.
fn compact<T: Clone>(read: &T) -> T {
    read.clone()
}

impl Pod {
    /// Creates a pod from an API object that has UID, name, namespace, and a spec.
    ///
    /// The spec is moved out of the object: [`Pod::spec`] returns it, [`Pod::to_object`] restores the whole object.
    ///
    /// # Errors
    /// The first missing field.
    pub fn new(object: api::Pod) -> Result<Self, MalformedPod> {
        let head = PodHead::new(object.metadata, object.status);
        Self::of(head, object.spec.map(|spec| Arc::new(compact(&PodSpec::from(spec)))))
    }

    /// Creates a pod from its parts.
    ///
    /// # Errors
    /// The first missing field.
    pub fn of(head: PodHead, spec: Option<Arc<PodSpec>>) -> Result<Self, MalformedPod> {
        let meta = &head.metadata;
        let name = meta.name.clone().unwrap_or_default();
        let missing = |field| MalformedPod { name: name.clone(), field };
        let filled = |value: &Option<String>| value.clone().filter(|text| !text.is_empty());
        let id = PodRef {
            name: filled(&meta.name).ok_or_else(|| missing("metadata.name"))?.into(),
            uid: filled(&meta.uid).ok_or_else(|| missing("metadata.uid"))?.into(),
            namespace: filled(&meta.namespace).ok_or_else(|| missing("metadata.namespace"))?.into(),
        };
        let spec = spec.ok_or_else(|| missing("spec"))?;
        Ok(Self { id, head, spec })
    }

    /// UID, name, and namespace.
    pub fn id(&self) -> &PodRef {
        &self.id
    }

    /// `metadata.uid`.
    pub fn uid(&self) -> &PodUid {
        &self.id.uid
    }

    /// `metadata.name`.
    pub fn name(&self) -> &str {
        &self.id.name
    }

    /// `metadata.namespace`.
    pub fn namespace(&self) -> &str {
        &self.id.namespace
    }

    /// Name and namespace.
    pub fn full_name(&self) -> PodFullName {
        self.id.full_name()
    }

    /// Returns `<namespace>/<name>`, the object name in logs and events.
    pub fn object_name(&self) -> String {
        self.id.object_name()
    }

    /// The pod spec.
    pub fn spec(&self) -> &PodSpec {
        &self.spec
    }

    /// The shared pod spec.
    pub fn shared_spec(&self) -> &Arc<PodSpec> {
        &self.spec
    }

    /// Shares the spec and status of `other` where they are equal to its own.
    pub fn share(&mut self, other: &Self) {
        if self.spec == other.spec {
            self.spec = other.spec.clone();
        }
        if self.head.status == other.head.status {
            self.head.status.clone_from(&other.head.status);
        }
    }

    /// Returns the whole API object, spec included (a deep copy).
    pub fn to_object(&self) -> api::Pod {
        let PodHead { metadata, status } = self.head.clone();
        let (metadata, status) = (Arc::unwrap_or_clone(metadata), status.map(Arc::unwrap_or_clone));
        api::Pod { metadata, spec: Some(self.spec.to_object()), status }
    }

    /// Returns a copy with another spec, such as the one with allocated resources.
    #[must_use]
    pub fn with_spec(&self, spec: PodSpec) -> Self {
        Self { id: self.id.clone(), head: self.head.clone(), spec: Arc::new(spec) }
    }

    /// Returns a copy with other metadata and status of the same pod.
    #[must_use]
    pub fn with_head(&self, head: PodHead) -> Self {
        Self { id: self.id.clone(), head, spec: self.spec.clone() }
    }

    /// Returns a copy with another status.
    #[must_use]
    pub fn with_status(&self, status: api::PodStatus) -> Self {
        let head = PodHead { metadata: self.head.metadata.clone(), status: Some(Arc::new(status)) };
        Self { id: self.id.clone(), head, spec: self.spec.clone() }
    }

    /// Value of an annotation.
    pub fn annotation(&self, key: &str) -> Option<&str> {
        self.head.metadata.annotations.as_ref()?.get(key).map(String::as_str)
    }

    /// All labels; empty where the object has none.
    pub fn labels(&self) -> &BTreeMap<String, String> {
        static NONE: BTreeMap<String, String> = BTreeMap::new();
        self.head.metadata.labels.as_ref().unwrap_or(&NONE)
    }

    /// All annotations; empty where the object has none.
    pub fn annotations(&self) -> &BTreeMap<String, String> {
        static NONE: BTreeMap<String, String> = BTreeMap::new();
        self.head.metadata.annotations.as_ref().unwrap_or(&NONE)
    }

    /// Source of the pod; `None` if the annotation is missing or unknown.
    pub fn source(&self) -> Option<PodSource> {
        PodSource::parse(self.annotation(ANNOTATION_SOURCE)?)
    }

    /// Whether the source annotation exists and is not `api` (spec 02 §2).
    pub fn is_static(&self) -> bool {
        self.annotation(ANNOTATION_SOURCE).is_some_and(|source| source != "api")
    }

    /// Whether the pod is a mirror pod: the API copy of a static pod.
    pub fn is_mirror(&self) -> bool {
        self.annotation(ANNOTATION_MIRROR).is_some()
    }

    /// Whether the pod is static, a mirror pod, or of critical priority (spec 02 §2).
    pub fn is_critical(&self) -> bool {
        self.is_static() || self.is_mirror() || self.spec.priority.is_some_and(|p| p >= CRITICAL_PRIORITY)
    }

    /// Whether the pod is critical and of class `system-node-critical`.
    pub fn is_node_critical(&self) -> bool {
        self.is_critical() && self.spec.priority_class_name.as_deref() == Some("system-node-critical")
    }

    /// Whether the pod uses the host network.
    pub fn is_host_network(&self) -> bool {
        self.spec.host_network == Some(true)
    }

    /// `spec.restartPolicy`.
    pub fn restart_policy(&self) -> RestartPolicy {
        RestartPolicy::parse(self.spec.restart_policy.as_deref())
    }

    /// Whether deletion was requested through the API.
    pub fn is_deleting(&self) -> bool {
        self.head.metadata.deletion_timestamp.is_some()
    }

    /// `metadata.generation`; 0 where unset.
    pub fn generation(&self) -> i64 {
        self.head.metadata.generation.unwrap_or(0)
    }

    /// `status.phase` of the API object; empty where unset.
    pub fn api_phase(&self) -> &str {
        self.head.status.as_ref().and_then(|s| s.phase.as_deref()).unwrap_or("")
    }

    /// Whether the API object's phase is `Succeeded` or `Failed`.
    pub fn is_api_terminal(&self) -> bool {
        matches!(self.api_phase(), "Succeeded" | "Failed")
    }

    /// Whether the API status reports the pod as evicted.
    pub fn is_evicted(&self) -> bool {
        self.api_phase() == "Failed" && self.status.as_ref().is_some_and(|s| s.reason.as_deref() == Some("Evicted"))
    }

    /// Init containers, in order.
    pub fn init_containers(&self) -> &[api::Container] {
        self.spec.init_containers.as_deref().unwrap_or_default()
    }

    /// Regular containers, in order.
    pub fn containers(&self) -> &[api::Container] {
        &self.spec.containers
    }

    /// Ephemeral containers, in order.
    pub fn ephemeral_containers(&self) -> &[api::EphemeralContainer] {
        self.spec.ephemeral_containers.as_deref().unwrap_or_default()
    }
}

impl Pod {
    /// Whether an init container is restartable (a sidecar).
    pub fn is_sidecar(container: &api::Container) -> bool {
        container.restart_policy.as_deref() == Some("Always")
    }

    /// Whether any init container is a sidecar.
    pub fn has_sidecars(&self) -> bool {
        self.init_containers().iter().any(Self::is_sidecar)
    }

    /// Kind and definition of a container by name; ephemeral containers are not searched.
    pub fn container(&self, name: &str) -> Option<(ContainerKind, &api::Container)> {
        let find = |list: &'_ [api::Container]| list.iter().position(|c| c.name == name);
        if let Some(i) = find(self.init_containers()) {
            return Some((ContainerKind::Init, &self.init_containers()[i]));
        }
        find(self.containers()).map(|i| (ContainerKind::Regular, &self.containers()[i]))
    }
}

/// Converts an ephemeral container into a container, for code that treats both alike.
pub fn ephemeral_as_container(ephemeral: &api::EphemeralContainer) -> api::Container {
    let e = ephemeral.clone();
    api::Container {
        args: e.args,
        command: e.command,
        env: e.env,
        env_from: e.env_from,
        image: e.image,
        image_pull_policy: e.image_pull_policy,
        lifecycle: e.lifecycle,
        liveness_probe: e.liveness_probe,
        name: e.name,
        ports: e.ports,
        readiness_probe: e.readiness_probe,
        resize_policy: e.resize_policy,
        resources: e.resources,
        restart_policy: e.restart_policy,
        restart_policy_rules: e.restart_policy_rules,
        security_context: e.security_context,
        startup_probe: e.startup_probe,
        stdin: e.stdin,
        stdin_once: e.stdin_once,
        termination_message_path: e.termination_message_path,
        termination_message_policy: e.termination_message_policy,
        tty: e.tty,
        volume_devices: e.volume_devices,
        volume_mounts: e.volume_mounts,
        working_dir: e.working_dir,
    }
}

impl Deref for Pod {
    type Target = PodHead;

    fn deref(&self) -> &PodHead {
        &self.head
    }
}

/// Deserializes the API object; rejects what [`Pod::new`] rejects.
impl<'de> Deserialize<'de> for Pod {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        Self::new(api::Pod::deserialize(deserializer)?).map_err(de::Error::custom)
    }
}

impl From<&Arc<Pod>> for PodRef {
    fn from(pod: &Arc<Pod>) -> Self {
        pod.id.clone()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn object() -> api::Pod {
        serde_json::from_value(serde_json::json!({
            "metadata": {"name": "web", "namespace": "default", "uid": "u1"},
            "spec": {"containers": [{"name": "c"}]},
        }))
        .expect("a pod")
    }

    #[test]
    fn a_pod_names_its_first_missing_field() {
        let mut without = object();
        without.metadata.uid = None;
        assert_eq!(Pod::new(without).unwrap_err().field, "metadata.uid");
        let mut without = object();
        without.spec = None;
        assert_eq!(Pod::new(without).unwrap_err().to_string(), "pod \"web\": spec is required");
    }

    #[test]
    fn the_object_survives_the_round_trip() {
        assert_eq!(Pod::new(object()).expect("complete").to_object(), object());
    }

    #[test]
    fn static_and_critical_follow_the_annotations() {
        let mut with_source = object();
        with_source.metadata.annotations = Some([(ANNOTATION_SOURCE.to_owned(), "file".to_owned())].into());
        let pod = Pod::new(with_source).expect("complete");
        assert!(pod.is_static() && pod.is_critical() && !pod.is_node_critical());
        assert_eq!(pod.source(), Some(PodSource::File));
        assert!(!Pod::new(object()).expect("complete").is_critical());
    }
}
