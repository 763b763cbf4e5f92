//! Converts a decoded manifest to a static pod of this node. Pure. Implements spec 02a §1.2 steps 4-14.
//!
//! The order of the steps is visible in the UID, in error texts, and in the pod, and must not change.
//! The UID is the 128-bit FNV-1a hash of the defaulted pod as canonical JSON (keys sorted, compact) and
//! of its origin. It determines whether a running pod is replaced when the agent is upgraded: its input
//! must not change between releases without a migration, which the golden values of the tests guard.

use std::sync::Arc;

use serde_json::Value;

use super::{
    defaults,
    references::{self, ReferenceError, ReferenceRule},
    validation::{self, FieldErrors},
};
use berth_types::{
    Pod, PodSource, api,
    hash::fnv1a_128,
    spec::{ANNOTATION_HASH, MalformedPod},
};

/// Annotation of `kubectl apply`: a copy of the whole pod that is not used on a node.
const ANNOTATION_LAST_APPLIED: &str = "kubectl.kubernetes.io/last-applied-configuration";

/// Origin of a manifest, and the node it is for.
#[derive(Clone, Copy, Debug)]
pub struct ManifestOrigin<'a> {
    /// `file` or `http`.
    pub source: PodSource,
    /// Absolute path of the file, or the URL.
    pub location: &'a str,
    /// Node name: `spec.nodeName`, and in lower case the suffix of the pod's name.
    pub node_name: &'a str,
    /// Rule for references to API objects.
    pub references: ReferenceRule,
}

/// Why a manifest is not a valid static pod.
#[derive(Clone, PartialEq, Debug, thiserror::Error)]
pub enum InvalidPod {
    /// The name is missing.
    #[error("invalid pod: name is needed for the pod")]
    NoName,
    /// Fields are invalid.
    #[error("invalid pod: {0}")]
    Fields(FieldErrors),
    /// The pod refers to API objects.
    #[error(transparent)]
    Refers(#[from] ReferenceError),
    /// The pod lacks required metadata.
    #[error("invalid pod: {0}")]
    Malformed(#[from] MalformedPod),
}

/// Like [`static_pod`], converted for the engine.
///
/// # Errors
/// As [`static_pod`].
pub fn prepared(pod: api::Pod, origin: ManifestOrigin<'_>) -> Result<Arc<Pod>, InvalidPod> {
    Ok(Arc::new(Pod::new(static_pod(pod, origin)?)?))
}

/// Converts a decoded manifest to a static pod.
///
/// # Errors
/// The pod has no name, invalid fields, or references to API objects.
pub fn static_pod(mut pod: api::Pod, origin: ManifestOrigin<'_>) -> Result<api::Pod, InvalidPod> {
    pod.metadata.managed_fields = None;
    defaults::apply(&mut pod);
    let name = pod.metadata.name.clone().unwrap_or_default();
    if name.is_empty() {
        return Err(InvalidPod::NoName);
    }
    if pod.metadata.uid.as_deref().unwrap_or_default().is_empty() {
        pod.metadata.uid = Some(uid(&pod, origin));
    }
    let uid = pod.metadata.uid.clone().unwrap_or_default();
    // After the UID, which is a hash of the manifest: Go always serializes `resources`, as `{}` if
    // empty.
    let spec = pod.spec.get_or_insert_default();
    for container in spec.containers.iter_mut().chain(spec.init_containers.iter_mut().flatten()) {
        container.resources.get_or_insert_default();
    }
    // As the API server does on creation: a negative grace period becomes 1.
    spec.termination_grace_period_seconds =
        spec.termination_grace_period_seconds.map(|grace| if grace < 0 { 1 } else { grace });
    let meta = &mut pod.metadata;
    meta.name = Some(format!("{name}-{}", origin.node_name.to_lowercase()));
    if meta.namespace.as_deref().unwrap_or_default().is_empty() {
        meta.namespace = Some("default".to_owned());
    }
    meta.annotations.get_or_insert_default().insert(ANNOTATION_HASH.to_owned(), uid);
    let spec = pod.spec.get_or_insert_default();
    spec.node_name = Some(origin.node_name.to_owned());
    if origin.source == PodSource::File {
        tolerate_no_execute(spec);
    }
    pod.status.get_or_insert_default().phase = Some("Pending".to_owned());
    let errors = validation::new_pod(&pod);
    if !errors.is_empty() {
        return Err(InvalidPod::Fields(errors));
    }
    let spec = pod.spec.get_or_insert_default();
    references::check(spec, origin.references)?;
    Ok(pod)
}

/// UID of a manifest without one. The annotation of `kubectl apply` is excluded.
fn uid(pod: &api::Pod, origin: ManifestOrigin<'_>) -> String {
    let mut pod = pod.clone();
    if let Some(annotations) = pod.metadata.annotations.as_mut() {
        annotations.remove(ANNOTATION_LAST_APPLIED);
        if annotations.is_empty() {
            pod.metadata.annotations = None;
        }
    }
    let canonical = canonical_json(&pod);
    let (host, kind) = match origin.source {
        PodSource::File => (format!("host:{}", origin.node_name), "file:"),
        PodSource::Http | PodSource::Api => (String::new(), "url:"),
    };
    let parts: [&[u8]; 4] = [canonical.as_bytes(), host.as_bytes(), kind.as_bytes(), origin.location.as_bytes()];
    format!("{:032x}", fnv1a_128(&parts))
}

/// Compact JSON with sorted keys.
fn canonical_json(pod: &api::Pod) -> String {
    let mut value = serde_json::to_value(pod).unwrap_or(Value::Null);
    value.sort_all_objects();
    value.to_string()
}

/// Static pods from files are not evicted by `NoExecute` taints.
fn tolerate_no_execute(spec: &mut api::PodSpec) {
    let wanted = api::Toleration {
        operator: Some("Exists".to_owned()),
        effect: Some("NoExecute".to_owned()),
        ..Default::default()
    };
    let plain = |text: &Option<String>| text.clone().unwrap_or_default();
    let same = |one: &api::Toleration| {
        plain(&one.key).is_empty()
            && plain(&one.value).is_empty()
            && one.effect == wanted.effect
            && one.operator == wanted.operator
    };
    let tolerations = spec.tolerations.get_or_insert_default();
    match tolerations.iter_mut().find(|one| same(one)) {
        Some(one) => one.toleration_seconds = None,
        None => tolerations.push(wanted),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn origin(source: PodSource) -> ManifestOrigin<'static> {
        let location = match source {
            PodSource::File => "/etc/kubernetes/manifests/web.yaml",
            _ => "http://10.0.0.1/pods",
        };
        ManifestOrigin { source, location, node_name: "Node-A", references: ReferenceRule::RefuseAll }
    }

    fn made(json: Value, source: PodSource) -> Result<api::Pod, String> {
        let pod = serde_json::from_value(json).expect("a pod");
        static_pod(pod, origin(source)).map_err(|e| e.to_string())
    }

    fn web() -> Value {
        json!({"metadata": {"name": "web"}, "spec": {"containers": [{"name": "c", "image": "busybox"}]}})
    }

    #[test]
    fn a_pod_of_a_file_is_named_and_hashed_for_this_node() {
        // AC-02a-1 (the mux adds source and seen)
        let pod = made(web(), PodSource::File).expect("valid");
        let meta = &pod.metadata;
        let uid = meta.uid.as_deref().expect("a uid");
        assert_eq!((meta.name.as_deref(), meta.namespace.as_deref()), (Some("web-node-a"), Some("default")));
        assert_eq!((uid.len(), uid.to_lowercase().as_str()), (32, uid));
        assert_eq!(meta.annotations.as_ref().map(|a| a[ANNOTATION_HASH].as_str()), Some(uid));
        let spec = pod.spec.as_ref().expect("a spec");
        assert_eq!(spec.node_name.as_deref(), Some("Node-A"));
        assert_eq!(
            serde_json::to_value(&spec.tolerations).expect("JSON"),
            json!([{"operator": "Exists", "effect": "NoExecute"}])
        );
        assert_eq!(pod.status.as_ref().and_then(|s| s.phase.as_deref()), Some("Pending"));
        // AC-02a-2
        let of_http = made(web(), PodSource::Http).expect("valid");
        assert_ne!(of_http.metadata.uid, pod.metadata.uid);
        assert_eq!(of_http.spec.and_then(|s| s.tolerations), None);
    }

    #[test]
    fn uids_never_change_between_releases() {
        for (source, uid) in [
            (PodSource::File, "31ae1e28e08b9aadc9b6411b377abd6b"),
            (PodSource::Http, "afab612776e3074b56ec5b19d1addd7a"),
        ] {
            assert_eq!(made(web(), source).expect("valid").metadata.uid.as_deref(), Some(uid));
        }
    }

    #[test]
    fn pods_are_shown_as_the_reference_shows_them() {
        let mut manifest = web();
        manifest["spec"]["terminationGracePeriodSeconds"] = json!(-5);
        manifest["metadata"]["annotations"] = json!({ANNOTATION_LAST_APPLIED: "x"});
        let pod = made(manifest, PodSource::File).expect("valid");
        let spec = pod.spec.expect("a specification");
        assert_eq!(spec.termination_grace_period_seconds, Some(1));
        assert_eq!(spec.containers[0].resources, Some(api::ResourceRequirements::default()));
        assert_eq!(pod.metadata.annotations.expect("some")[ANNOTATION_LAST_APPLIED], "x");
    }

    #[test]
    fn the_uid_follows_what_counts_and_nothing_else() {
        let uid = |json| made(json, PodSource::File).expect("valid").metadata.uid;
        let with = |path: &str, value: Value| {
            let mut pod = web();
            match path.rsplit_once('/') {
                Some((at, key)) => pod.pointer_mut(at).expect("a path")[key] = value,
                None => pod[path] = value,
            }
            pod
        };
        let plain = uid(web());
        assert_eq!(uid(with("/spec/restartPolicy", json!("Always"))), plain, "a default written out");
        assert_eq!(uid(with("/metadata/annotations", json!({ANNOTATION_LAST_APPLIED: "x"}))), plain);
        assert_eq!(uid(with("/metadata/managedFields", json!([{"manager": "m"}]))), plain);
        assert_ne!(uid(with("/spec/restartPolicy", json!("Never"))), plain);
        assert_ne!(uid(with("/metadata/labels", json!({"a": "b"}))), plain);
        assert_eq!(uid(with("/metadata/uid", json!("fixed"))).as_deref(), Some("fixed"));
        let fixed = made(with("/metadata/uid", json!("fixed")), PodSource::File).expect("valid");
        assert_eq!(fixed.metadata.annotations.map(|a| a[ANNOTATION_HASH].clone()).as_deref(), Some("fixed"));
    }

    #[test]
    fn an_equal_toleration_is_kept_and_one_with_seconds_replaced() {
        let with = |seconds: Value| {
            let mut pod = web();
            pod["spec"]["tolerations"] = json!([
                {"key": "a", "operator": "Exists"},
                {"operator": "Exists", "effect": "NoExecute", "tolerationSeconds": seconds}]);
            made(pod, PodSource::File).expect("valid").spec.and_then(|s| s.tolerations).expect("tolerations")
        };
        for seconds in [Value::Null, json!(30)] {
            let tolerations = with(seconds);
            assert_eq!(tolerations.len(), 2);
            assert_eq!(tolerations[1].toleration_seconds, None);
        }
    }

    #[test]
    fn bad_pods_are_refused_in_the_words_of_the_reference() {
        let mut nameless = web();
        nameless["metadata"]["name"] = Value::Null;
        assert_eq!(made(nameless, PodSource::File).unwrap_err(), "invalid pod: name is needed for the pod");
        let mut no_image = web();
        no_image["spec"]["containers"][0]["image"] = Value::Null;
        assert_eq!(
            made(no_image, PodSource::File).unwrap_err(),
            "invalid pod: [spec.containers[0].image: Required value]"
        );
        let mut refers = web();
        refers["spec"]["containers"][0]["envFrom"] = json!([{"secretRef": {"name": "s"}}]);
        // AC-02a-3
        assert_eq!(made(refers, PodSource::File).unwrap_err(), "static pods may not reference secrets");
    }

    #[test]
    fn the_status_of_the_manifest_is_kept_but_for_the_phase() {
        let mut pod = web();
        pod["status"] = json!({"phase": "Running", "reason": "kept"});
        let status = made(pod, PodSource::File).expect("valid").status.expect("a status");
        assert_eq!((status.phase.as_deref(), status.reason.as_deref()), (Some("Pending"), Some("kept")));
    }
}
