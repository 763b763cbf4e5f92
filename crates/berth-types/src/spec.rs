//! A pod as the engine holds it: the API object, parsed once and shared. Pure.

use std::{collections::BTreeMap, ops::Deref, sync::Arc};

use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use serde::{Deserialize, Deserializer, de};

use super::{PodFullName, PodRef, PodSpec, PodUid, api};

/// Where a pod's definition came from (`kubernetes.io/config.source`).
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub enum PodSource {
    /// A directory or file (`staticPodPath`).
    File,
    /// An HTTP URL (`staticPodURL`).
    Http,
    /// The API server.
    Api,
}

impl PodSource {
    /// The annotation's value, and the source's name in texts.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::File => "file",
            Self::Http => "http",
            Self::Api => "api",
        }
    }

    /// The source of that name.
    pub fn parse(text: &str) -> Option<Self> {
        [Self::File, Self::Http, Self::Api].into_iter().find(|s| s.as_str() == text)
    }
}

/// `spec.restartPolicy`; unknown or missing values count as `Always` (the API's default).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum RestartPolicy {
    /// Restart whatever the exit code.
    Always,
    /// Restart after a non-zero exit code.
    OnFailure,
    /// Never restart.
    Never,
}

impl RestartPolicy {
    /// Reads the API's text.
    pub fn parse(text: Option<&str>) -> Self {
        match text {
            Some("Never") => Self::Never,
            Some("OnFailure") => Self::OnFailure,
            _ => Self::Always,
        }
    }
}

/// Which list of the specification a container stands in.
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
    /// The `container_type` label of metrics.
    pub fn metric_label(self) -> &'static str {
        match self {
            Self::Init => "init_container",
            Self::Regular => "container",
            Self::Ephemeral => "ephemeral_container",
        }
    }

    /// The involved object's `fieldPath` of events, e.g. `spec.containers{web}` (spec 03a §7).
    pub fn field_path(self, container: &str) -> String {
        let list = match self {
            Self::Init => "initContainers",
            Self::Regular => "containers",
            Self::Ephemeral => "ephemeralContainers",
        };
        format!("spec.{list}{{{container}}}")
    }
}

/// Annotation that tells the source of a pod.
pub const ANNOTATION_SOURCE: &str = "kubernetes.io/config.source";
/// Annotation that tells when the mux first saw a pod.
pub const ANNOTATION_SEEN: &str = "kubernetes.io/config.seen";
/// Annotation with a static pod's hash, equal to its UID.
pub const ANNOTATION_HASH: &str = "kubernetes.io/config.hash";
/// Annotation that marks a mirror pod (any value, even empty).
pub const ANNOTATION_MIRROR: &str = "kubernetes.io/config.mirror";
/// Priority from which on a pod is critical.
pub const CRITICAL_PRIORITY: i32 = 2_000_000_000;

/// The API object lacks something every pod has.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("pod {name:?} has no {field}")]
pub struct MalformedPod {
    /// `metadata.name`, empty where that is what is missing.
    pub name: String,
    /// The field that is missing.
    pub field: &'static str,
}

/// A pod with identity and specification, immutable; share it as `Arc<Pod>`.
///
/// Dereferences to what of the API object is not its specification. The specification is shared: most of what
/// a pod takes is its own, and most changes are of something else.
#[derive(Clone, Debug, PartialEq)]
pub struct Pod {
    id: PodRef,
    head: PodHead,
    spec: Arc<PodSpec>,
}

/// What of a pod is not its specification. Each part is shared by the versions of a pod in which it is the same.
#[derive(Clone, Debug, PartialEq)]
pub struct PodHead {
    /// As of the API object.
    pub metadata: Arc<ObjectMeta>,
    /// As of the API object.
    pub status: Option<Arc<api::PodStatus>>,
}

impl PodHead {
    /// Of these.
    pub fn new(metadata: ObjectMeta, status: Option<api::PodStatus>) -> Self {
        Self { metadata: Arc::new(compact(&metadata)), status: status.map(|status| Arc::new(compact(&status))) }
    }
}

/// The same without room for more: lists that were read keep place for up to twice as many, and a container's
/// status alone is 750 bytes.
fn compact<T: Clone>(read: &T) -> T {
    read.clone()
}

impl Pod {
    /// Takes an API object that has uid, name, namespace and a spec.
    ///
    /// The spec is moved out of the object: read it by [`Pod::spec`], and the whole object by
    /// [`Pod::to_object`].
    ///
    /// # Errors
    /// Names the first missing field.
    pub fn new(object: api::Pod) -> Result<Self, MalformedPod> {
        let head = PodHead::new(object.metadata, object.status);
        Self::of(head, object.spec.map(|spec| Arc::new(compact(&PodSpec::from(spec)))))
    }

    /// Of its parts.
    ///
    /// # Errors
    /// Names the first missing field.
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

    /// Identity.
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

    /// `<namespace>/<name>`: how logs and events name an object.
    pub fn object_name(&self) -> String {
        self.id.object_name()
    }

    /// The specification.
    pub fn spec(&self) -> &PodSpec {
        &self.spec
    }

    /// The specification, to share.
    pub fn shared_spec(&self) -> &Arc<PodSpec> {
        &self.spec
    }

    /// Shares with another what is the same in both: the specification, the status.
    pub fn share(&mut self, other: &Self) {
        if self.spec == other.spec {
            self.spec = other.spec.clone();
        }
        if self.head.status == other.head.status {
            self.head.status.clone_from(&other.head.status);
        }
    }

    /// The whole API object again, spec included (a deep copy).
    pub fn to_object(&self) -> api::Pod {
        let PodHead { metadata, status } = self.head.clone();
        let (metadata, status) = (Arc::unwrap_or_clone(metadata), status.map(Arc::unwrap_or_clone));
        api::Pod { metadata, spec: Some(self.spec.to_object()), status }
    }

    /// A copy with another specification (the allocated one, say).
    #[must_use]
    pub fn with_spec(&self, spec: PodSpec) -> Self {
        Self { id: self.id.clone(), head: self.head.clone(), spec: Arc::new(spec) }
    }

    /// A copy with other metadata and status, of the same pod.
    #[must_use]
    pub fn with_head(&self, head: PodHead) -> Self {
        Self { id: self.id.clone(), head, spec: self.spec.clone() }
    }

    /// A copy with another status.
    #[must_use]
    pub fn with_status(&self, status: api::PodStatus) -> Self {
        let head = PodHead { metadata: self.head.metadata.clone(), status: Some(Arc::new(status)) };
        Self { id: self.id.clone(), head, spec: self.spec.clone() }
    }

    /// The annotation of that name.
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

    /// Where the pod came from; `None` where the annotation is missing or unknown.
    pub fn source(&self) -> Option<PodSource> {
        PodSource::parse(self.annotation(ANNOTATION_SOURCE)?)
    }

    /// Whether the source annotation exists and is not `api` (spec 02 §2).
    pub fn is_static(&self) -> bool {
        self.annotation(ANNOTATION_SOURCE).is_some_and(|source| source != "api")
    }

    /// Whether this is the API copy of a static pod.
    pub fn is_mirror(&self) -> bool {
        self.annotation(ANNOTATION_MIRROR).is_some()
    }

    /// Static, mirror, or of critical priority (spec 02 §2).
    pub fn is_critical(&self) -> bool {
        self.is_static() || self.is_mirror() || self.spec.priority.is_some_and(|p| p >= CRITICAL_PRIORITY)
    }

    /// Critical and of class `system-node-critical`.
    pub fn is_node_critical(&self) -> bool {
        self.is_critical() && self.spec.priority_class_name.as_deref() == Some("system-node-critical")
    }

    /// Whether the pod uses the node's network.
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

    /// `metadata.generation`, 0 where unset.
    pub fn generation(&self) -> i64 {
        self.head.metadata.generation.unwrap_or(0)
    }

    /// `status.phase` of the API object, empty where unset.
    pub fn api_phase(&self) -> &str {
        self.head.status.as_ref().and_then(|s| s.phase.as_deref()).unwrap_or("")
    }

    /// Whether the API object's phase is `Succeeded` or `Failed`.
    pub fn is_api_terminal(&self) -> bool {
        matches!(self.api_phase(), "Succeeded" | "Failed")
    }

    /// Whether the API object says that the pod was evicted.
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

    /// Kind and definition of the container of that name; ephemeral ones are not looked at.
    pub fn container(&self, name: &str) -> Option<(ContainerKind, &api::Container)> {
        let find = |list: &'_ [api::Container]| list.iter().position(|c| c.name == name);
        if let Some(i) = find(self.init_containers()) {
            return Some((ContainerKind::Init, &self.init_containers()[i]));
        }
        find(self.containers()).map(|i| (ContainerKind::Regular, &self.containers()[i]))
    }
}

/// An ephemeral container as a container, for code that treats both alike.
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

/// As the API has it; what [`Pod::new`] refuses is refused.
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
        assert_eq!(Pod::new(without).unwrap_err().to_string(), "pod \"web\" has no spec");
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
