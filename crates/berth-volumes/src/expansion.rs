//! Node-side volume expansion: runs the resize and updates the claim's status.
//!
//! Implements spec 07 §4.5.

use std::path::PathBuf;

use serde_json::{Map, Value, json};

use super::{
    attachable::{AttachableVolumePlugin, Class, ErrorCause, Expansion, OpError, Usage},
    spec::VolumeSpec,
};
use berth_ports::{EventKind, EventRecord, EventSink, StorageObjects};
use berth_types::api;

const PENDING: &str = "NodeResizePending";
const IN_PROGRESS: &str = "NodeResizeInProgress";
const INFEASIBLE: &str = "NodeResizeInfeasible";
/// Conditions that are removed when the expansion completes.
const CONDITIONS: [&str; 4] = ["Resizing", "FileSystemResizePending", "NodeResizeError", "ControllerResizeError"];
/// Annotation of volumes for which the expansion on one node is sufficient for all nodes.
const NOT_REQUIRED: &str = "volume.kubernetes.io/node-expansion-not-required";

/// How to run and report an expansion.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum ExpansionMode {
    /// The claim has no allocated resources (before recovery from resize failure).
    Legacy,
    /// The claim's resize status is updated at each step.
    Tracked,
    /// The expansion is complete elsewhere; this node may still need its own.
    NodeOnly,
    /// No expansion is due on the node.
    Nothing,
}

fn expansion_mode(spec: &VolumeSpec, to: u64) -> ExpansionMode {
    let Some(persistent) = spec.as_persistent() else { return ExpansionMode::Nothing };
    let status = persistent.claim.status.clone().unwrap_or_default();
    let state = status.allocated_resource_statuses.as_ref().and_then(|all| all.get("storage")).map(String::as_str);
    let is_allocated = status.allocated_resources.as_ref().is_some_and(|all| all.contains_key("storage"));
    let has = status.capacity.as_ref().and_then(|all| all.get("storage")).and_then(|size| bytes(&size.0));
    match state {
        None if !is_allocated => ExpansionMode::Legacy,
        Some(PENDING | IN_PROGRESS) => ExpansionMode::Tracked,
        None if has.is_some_and(|has| has >= to) => {
            let is_shared = spec.access_modes().iter().any(|mode| mode == "ReadWriteMany");
            let annotations = persistent.volume.metadata.annotations.as_ref();
            let is_needless = annotations.is_some_and(|all| all.contains_key(NOT_REQUIRED));
            if is_shared && !is_needless { ExpansionMode::NodeOnly } else { ExpansionMode::Nothing }
        }
        _ => ExpansionMode::Nothing,
    }
}

/// Whether an expansion to that size is due on the node, according to the claim.
pub fn is_due(spec: &VolumeSpec, to: u64) -> bool {
    expansion_mode(spec, to) != ExpansionMode::Nothing
}

fn bytes(text: &str) -> Option<u64> {
    u64::try_from(berth_types::quantity::Amount::parse(text).ok()?.value()).ok()
}

/// Returns the requested size as spelled in the API object.
fn target(spec: &VolumeSpec, way: ExpansionMode) -> Option<String> {
    let persistent = spec.as_persistent()?;
    let status = persistent.claim.status.as_ref();
    let allocated = status.and_then(|status| status.allocated_resources.as_ref()?.get("storage"));
    let capacity = persistent.volume.spec.as_ref()?.capacity.as_ref()?.get("storage");
    if way == ExpansionMode::Tracked { allocated.or(capacity) } else { capacity }.map(|size| size.0.clone())
}

/// Returns the status patch for a completed expansion.
fn finished(claim: &api::PersistentVolumeClaim, size: &str, way: ExpansionMode) -> Value {
    let present = claim.status.as_ref().and_then(|status| status.conditions.as_deref()).unwrap_or_default();
    let over: Vec<Value> = present
        .iter()
        .filter(|condition| CONDITIONS.contains(&condition.type_.as_str()))
        .map(|condition| json!({"$patch": "delete", "type": condition.type_}))
        .collect();
    let mut status = Map::new();
    status.insert("capacity".to_owned(), json!({"storage": size}));
    if !over.is_empty() {
        status.insert("conditions".to_owned(), Value::Array(over));
    }
    if way == ExpansionMode::Tracked {
        status.insert("allocatedResourceStatuses".to_owned(), json!({"storage": null}));
    }
    json!({"metadata": versioned(claim, way), "status": status})
}

/// Returns the patch metadata: the resource version detects concurrent writes, unless an earlier patch changed it.
fn versioned(claim: &api::PersistentVolumeClaim, way: ExpansionMode) -> Value {
    match (&claim.metadata.resource_version, way) {
        (Some(version), ExpansionMode::Legacy | ExpansionMode::NodeOnly | ExpansionMode::Nothing) => {
            json!({"resourceVersion": version})
        }
        // The first of the two patches changes the version.
        _ => json!({}),
    }
}

/// Returns the status patch for a started expansion.
fn started_patch(claim: &api::PersistentVolumeClaim) -> Value {
    let version = claim.metadata.resource_version.clone().unwrap_or_default();
    json!({"metadata": {"resourceVersion": version}, "status": {"allocatedResourceStatuses": {"storage": IN_PROGRESS}}})
}

/// Returns the status patch for a permanently failed expansion.
fn failed(error: &OpError, now: jiff::Timestamp) -> Value {
    let condition = json!({"type": "NodeResizeError", "status": "True", "lastTransitionTime": now.strftime("%Y-%m-%dT%H:%M:%SZ").to_string(),
        "message": format!("failed to expand pvc with {error}")});
    let mut status = Map::new();
    status.insert("conditions".to_owned(), json!([condition]));
    if error.trouble == ErrorCause::Infeasible {
        status.insert("allocatedResourceStatuses".to_owned(), json!({"storage": INFEASIBLE}));
    }
    json!({"status": status})
}

/// Expansion that is due.
pub struct NodeExpansion<'a> {
    /// Plugin of the volume.
    pub plugin: &'a dyn AttachableVolumePlugin,
    /// API server access for the claim.
    pub storage: &'a dyn StorageObjects,
    /// Sink for events about the result.
    pub events: &'a dyn EventSink,
    /// Name of the node.
    pub node: String,
    /// Pod and volume to expand.
    pub usage: Usage,
    /// Current and requested size in bytes.
    pub growth: Option<(u64, u64)>,
    /// Path at which the volume was published.
    pub path: PathBuf,
}

impl NodeExpansion<'_> {
    /// Runs the expansion and updates the claim.
    ///
    /// # Errors
    /// If the plugin fails or the API server rejects a patch.
    pub async fn run(self) -> Result<(), OpError> {
        let Some((from, to)) = self.growth else { return Ok(()) };
        let spec = self.usage.spec.clone();
        if spec.read_only() {
            let text = format!(
                "MountVolume.NodeExpandVolume failed for volume {:?} requested read-only file system",
                spec.name
            );
            self.record(EventKind::Warning, "FileSystemResizeFailed", &text);
            return Ok(());
        }
        let way = expansion_mode(&spec, to);
        let (Some(persistent), Some(size)) = (spec.as_persistent(), target(&spec, way)) else { return Ok(()) };
        if way == ExpansionMode::Nothing {
            return Ok(());
        }
        let to = bytes(&size).unwrap_or(to);
        if way == ExpansionMode::Tracked {
            self.patch_claim(&spec, started_patch(&persistent.claim)).await?;
        }
        let expansion = Expansion { usage: self.usage.clone(), path: self.path.clone(), from, to };
        match self.plugin.expand(&expansion).await {
            Ok(_) => {}
            Err(e) if e.trouble == ErrorCause::Unsupported && way != ExpansionMode::Tracked => return Ok(()),
            Err(e) => {
                if way == ExpansionMode::Tracked && e.class == Class::Final && e.trouble != ErrorCause::InUse {
                    self.patch_claim(&spec, failed(&e, jiff::Timestamp::now())).await?;
                }
                return Err(e);
            }
        }
        if way != ExpansionMode::NodeOnly {
            self.patch_claim(&spec, finished(&persistent.claim, &size, way)).await?;
        }
        let text = format!("MountVolume.NodeExpandVolume succeeded for volume {:?} {}", spec.name, self.node);
        self.record(EventKind::Normal, "FileSystemResizeSuccessful", &text);
        Ok(())
    }

    /// Records an event on the pod and on its claim.
    fn record(&self, kind: EventKind, reason: &'static str, text: &str) {
        let pod = self.usage.pod.id();
        self.events.record(match kind {
            EventKind::Normal => EventRecord::normal(pod, reason, text),
            EventKind::Warning => EventRecord::warning(pod, reason, text),
        });
        if let Some(persistent) = self.usage.spec.as_persistent() {
            self.events.record(EventRecord::on_claim(&persistent.claim, kind, reason, text));
        }
    }

    async fn patch_claim(&self, spec: &VolumeSpec, patch: Value) -> Result<(), OpError> {
        let (namespace, name) = spec.claim().unwrap_or_default();
        let result = self.storage.patch_claim(namespace, name, patch.to_string()).await;
        result.map_err(|e| OpError::transient(e.to_string()))
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;

    fn spec(status: Value, modes: Value, annotations: Value) -> VolumeSpec {
        let volume = json!({"metadata": {"name": "pv", "annotations": annotations},
            "spec": {"capacity": {"storage": "2Gi"}, "accessModes": modes}});
        let claim = json!({"metadata": {"name": "c", "namespace": "n", "resourceVersion": "7"}, "status": status});
        let parsed = (serde_json::from_value(volume), serde_json::from_value(claim));
        VolumeSpec::persistent(Arc::new(parsed.0.expect("a volume")), Arc::new(parsed.1.expect("a claim")), false)
    }

    #[test]
    fn the_claim_status_decides_the_expansion_mode() {
        let shared = || json!(["ReadWriteMany"]);
        let allocated = |state: Value| {
            json!({"capacity": {"storage": "1Gi"}, "allocatedResources": {"storage": "3Gi"},
            "allocatedResourceStatuses": state})
        };
        let done = || json!({"capacity": {"storage": "2Gi"}, "allocatedResources": {"storage": "2Gi"}});
        for (status, modes, annotations, expected) in [
            (json!({"capacity": {"storage": "1Gi"}}), shared(), json!({}), ExpansionMode::Legacy),
            (allocated(json!({"storage": PENDING})), shared(), json!({}), ExpansionMode::Tracked),
            (allocated(json!({"storage": IN_PROGRESS})), shared(), json!({}), ExpansionMode::Tracked),
            (allocated(json!({"storage": INFEASIBLE})), shared(), json!({}), ExpansionMode::Nothing),
            (allocated(json!({})), shared(), json!({}), ExpansionMode::Nothing),
            (done(), shared(), json!({}), ExpansionMode::NodeOnly),
            (done(), shared(), json!({NOT_REQUIRED: ""}), ExpansionMode::Nothing),
            (done(), json!(["ReadWriteOnce"]), json!({}), ExpansionMode::Nothing),
        ] {
            let spec = spec(status.clone(), modes, annotations);
            assert_eq!(expansion_mode(&spec, 2 << 30), expected, "{status}");
        }
        let followed = spec(allocated(json!({"storage": PENDING})), shared(), json!({}));
        assert_eq!(target(&followed, ExpansionMode::Tracked).as_deref(), Some("3Gi"));
        assert_eq!(target(&followed, ExpansionMode::Legacy).as_deref(), Some("2Gi"));
    }

    #[test]
    fn a_finished_expansion_patches_the_claim_status() {
        let spec = spec(
            json!({"conditions": [{"type": "Resizing", "status": "True"}, {"type": "Mine", "status": "True"}]}),
            json!([]),
            json!({}),
        );
        let claim = &spec.as_persistent().expect("a claim").claim;
        let over = json!([{"$patch": "delete", "type": "Resizing"}]);
        assert_eq!(
            finished(claim, "2Gi", ExpansionMode::Legacy),
            json!({"metadata": {"resourceVersion": "7"}, "status": {"capacity": {"storage": "2Gi"}, "conditions": over}})
        );
        assert_eq!(
            finished(claim, "2Gi", ExpansionMode::Tracked),
            json!({"metadata": {}, "status": {"capacity": {"storage": "2Gi"}, "conditions": over,
                "allocatedResourceStatuses": {"storage": null}}})
        );
        let error = OpError::failed("no").with_cause(ErrorCause::Infeasible);
        assert_eq!(
            failed(&error, jiff::Timestamp::UNIX_EPOCH),
            json!({"status": {"conditions": [{"type": "NodeResizeError", "status": "True",
                "lastTransitionTime": "1970-01-01T00:00:00Z", "message": "failed to expand pvc with no"}],
                "allocatedResourceStatuses": {"storage": INFEASIBLE}}})
        );
    }
}
