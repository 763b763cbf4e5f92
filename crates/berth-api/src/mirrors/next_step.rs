//! Next reconciliation step of a mirror pod. Pure.
//!
//! Implements spec 02a §5, 10 §4.4, §7.

use std::time::Duration;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::OwnerReference;

use crate::{api::ApiError, versions::is_older};
use berth_types::{
    Pod, api,
    spec::{ANNOTATION_HASH, ANNOTATION_MIRROR, PodHead},
};

/// Desired state of a mirror pod.
#[derive(Clone, Copy, Debug)]
pub enum DesiredMirror<'a> {
    /// A mirror of this static pod exists.
    Mirror(&'a Pod),
    /// The mirror is left unchanged.
    Leave,
    /// The mirror is deleted.
    Remove,
}

/// Pod that the watch shows under the name.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ObservedMirror<'a> {
    /// `metadata.uid`.
    pub uid: &'a str,
    /// Hash of the static pod it mirrors; `None` if it is no mirror pod.
    pub hash: Option<&'a str>,
    /// Whether deletion was requested.
    pub deleting: bool,
}

impl<'a> ObservedMirror<'a> {
    /// Extracts the observation from a pod of the watch.
    pub fn of(pod: &'a PodHead) -> Self {
        let meta = &pod.metadata;
        Self {
            uid: meta.uid.as_deref().unwrap_or_default(),
            hash: meta.annotations.as_ref().and_then(|all| all.get(ANNOTATION_MIRROR)).map(String::as_str),
            deleting: meta.deletion_timestamp.is_some(),
        }
    }
}

/// Owner of mirror pods: this node's object.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Owner {
    /// Name of the node.
    pub name: String,
    /// `metadata.uid` of the `Node` object.
    pub uid: String,
}

/// Results of earlier steps.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct MirrorHistory {
    /// UID of the pod that was deleted.
    pub deleted: Option<String>,
    /// Resource version of the mirror that was created.
    pub created: Option<String>,
    /// Hash that the server refused, and the UID of the node if only for that owner.
    pub refused: Option<(String, Option<String>)>,
}

/// Next step.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum MirrorStep {
    /// Nothing to do.
    Rest,
    /// Wait until the watch shows the created mirror.
    Await,
    /// Delete the pod with that UID.
    Delete(String),
    /// Create the mirror.
    Create,
}

/// Computes the next step. `version` is the newest resource version that the watch has shown: deletions and creations
/// follow the watch, so that no mirror is created twice.
pub fn next(
    desired: DesiredMirror<'_>,
    shown: Option<ObservedMirror<'_>>,
    version: &str,
    owner: Option<&Owner>,
    memory: &MirrorHistory,
) -> MirrorStep {
    let shown_mirror = shown.filter(|shown| shown.hash.is_some());
    let pod = match desired {
        DesiredMirror::Leave => return MirrorStep::Rest,
        DesiredMirror::Remove => return shown_mirror.map_or(MirrorStep::Rest, |mirror| delete(mirror, memory)),
        DesiredMirror::Mirror(pod) => pod,
    };
    match (shown, shown_mirror) {
        (_, Some(mirror)) if mirror.hash == Some(hash_of(pod)) && !mirror.deleting => MirrorStep::Rest,
        (_, Some(mirror)) => delete(mirror, memory),
        (Some(_), None) => MirrorStep::Rest, // a pod that is no mirror has the name
        (None, None) => {
            let awaited = memory.created.as_deref().is_some_and(|created| is_older(version, created));
            if awaited {
                return MirrorStep::Await;
            }
            let Some(owner) = owner else { return MirrorStep::Rest };
            let refused = memory.refused.as_ref().is_some_and(|(hash, node)| {
                hash == hash_of(pod) && node.as_ref().is_none_or(|node| *node == owner.uid)
            });
            if refused { MirrorStep::Rest } else { MirrorStep::Create }
        }
    }
}

fn delete(mirror: ObservedMirror<'_>, memory: &MirrorHistory) -> MirrorStep {
    if memory.deleted.as_deref() == Some(mirror.uid) {
        MirrorStep::Rest
    } else {
        MirrorStep::Delete(mirror.uid.to_owned())
    }
}

/// Hash that identifies the static pod's configuration.
pub fn hash_of(pod: &Pod) -> &str {
    pod.annotation(ANNOTATION_HASH).unwrap_or(pod.uid().as_str())
}

/// Builds the mirror pod of a static pod.
pub fn mirror_of(pod: &Pod, owner: &Owner) -> api::Pod {
    let mut mirror = pod.to_object();
    mirror.status = None;
    let meta = &mut mirror.metadata;
    (meta.uid, meta.resource_version, meta.creation_timestamp) = (None, None, None);
    meta.annotations.get_or_insert_default().insert(ANNOTATION_MIRROR.to_owned(), hash_of(pod).to_owned());
    meta.owner_references = Some(vec![OwnerReference {
        api_version: "v1".to_owned(),
        kind: "Node".to_owned(),
        name: owner.name.clone(),
        uid: owner.uid.clone(),
        controller: Some(true),
        block_owner_deletion: None,
    }]);
    mirror
}

/// Classification of a failed creation.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum CreateFailure {
    /// No retry until the manifest or the node's UID changes.
    OfNode,
    /// No retry until the manifest changes.
    OfManifest,
    /// The name is taken or the namespace does not exist: retry with a longer back-off.
    Later,
    /// Retry after that delay, or after the usual back-off.
    Retry(Option<Duration>),
}

/// Classifies a failed creation. If the response was lost, the watch shows the outcome.
pub fn after_create(error: &ApiError) -> CreateFailure {
    match error.code() {
        403 => CreateFailure::OfNode,
        400 | 413 | 422 => CreateFailure::OfManifest,
        404 | 409 => CreateFailure::Later,
        _ => CreateFailure::Retry(error.retry_after()),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;
    use crate::testing::refused;

    fn pod(uid: &str) -> Pod {
        let annotations = json!({"kubernetes.io/config.hash": uid, "kubernetes.io/config.source": "file"});
        let object = json!({
            "metadata": {"name": "web-node", "namespace": "ns", "uid": uid, "annotations": annotations},
            "spec": {"nodeName": "node", "containers": [{"name": "c"}]}, "status": {"phase": "Pending"}});
        Pod::new(serde_json::from_value(object).expect("a pod")).expect("complete")
    }

    fn owner() -> Owner {
        Owner { name: "node".to_owned(), uid: "n1".to_owned() }
    }

    fn mirror(hash: &'static str, deleting: bool) -> Option<ObservedMirror<'static>> {
        Some(ObservedMirror { uid: "m", hash: Some(hash), deleting })
    }

    #[test]
    fn a_mirror_is_reconciled_with_its_static_pod() {
        let (pod, fresh) = (pod("u"), MirrorHistory::default());
        let deleted = MirrorHistory { deleted: Some("m".to_owned()), ..MirrorHistory::default() };
        let created = MirrorHistory { created: Some("10".to_owned()), ..MirrorHistory::default() };
        let refused = |hash: &str, node: Option<&str>| MirrorHistory {
            refused: Some((hash.to_owned(), node.map(str::to_owned))),
            ..MirrorHistory::default()
        };
        let own = ObservedMirror { uid: "m", hash: None, deleting: false };
        let delete = || MirrorStep::Delete("m".to_owned());
        for (case, shown, memory, step) in [
            ("none", None, fresh.clone(), MirrorStep::Create),
            ("equal", mirror("u", false), fresh.clone(), MirrorStep::Rest), // AC-10-28
            ("another manifest", mirror("old", false), fresh.clone(), delete()),
            ("being deleted", mirror("u", true), fresh.clone(), delete()), // AC-10a-33
            ("deleted, still shown", mirror("u", true), deleted.clone(), MirrorStep::Rest),
            ("deleted, no longer shown", None, deleted, MirrorStep::Create),
            ("a pod of its own right", Some(own), fresh.clone(), MirrorStep::Rest),
            ("made, not shown yet", None, created, MirrorStep::Await),
            (
                "made and gone again",
                None,
                MirrorHistory { created: Some("8".to_owned()), ..fresh.clone() },
                MirrorStep::Create,
            ),
            ("refused", None, refused("u", Some("n1")), MirrorStep::Rest), // AC-10-27
            ("refused of another node", None, refused("u", Some("n0")), MirrorStep::Create),
            ("refused of any node", None, refused("u", None), MirrorStep::Rest),
            ("refused of another manifest", None, refused("old", None), MirrorStep::Create),
        ] {
            assert_eq!(next(DesiredMirror::Mirror(&pod), shown, "9", Some(&owner()), &memory), step, "{case}");
        }
        assert_eq!(next(DesiredMirror::Mirror(&pod), None, "9", None, &fresh), MirrorStep::Rest, "no node object yet");
    }

    #[test]
    fn a_mirror_without_a_static_pod_is_deleted() {
        let fresh = MirrorHistory::default();
        let step = |desired, shown| next(desired, shown, "9", None, &fresh);
        assert_eq!(step(DesiredMirror::Remove, mirror("u", false)), MirrorStep::Delete("m".to_owned()));
        assert_eq!(step(DesiredMirror::Remove, None), MirrorStep::Rest);
        assert_eq!(
            step(DesiredMirror::Remove, Some(ObservedMirror { uid: "p", hash: None, deleting: false })),
            MirrorStep::Rest
        );
        assert_eq!(step(DesiredMirror::Leave, mirror("u", true)), MirrorStep::Rest);
    }

    #[test]
    fn a_mirror_is_the_pod_owned_by_the_node() {
        let made: Value = serde_json::to_value(mirror_of(&pod("u"), &owner())).expect("JSON");
        assert_eq!(
            made,
            json!({"apiVersion": "v1", "kind": "Pod", "metadata": {
                "name": "web-node", "namespace": "ns", "annotations": {"kubernetes.io/config.hash": "u",
                    "kubernetes.io/config.source": "file", "kubernetes.io/config.mirror": "u"},
                "ownerReferences": [
                    {"apiVersion": "v1", "kind": "Node", "name": "node", "uid": "n1", "controller": true}]},
                "spec": {"nodeName": "node", "containers": [{"name": "c"}]}})
        );
    }

    #[test]
    fn a_refusal_by_its_code() {
        for (error, refusal) in [
            (refused(403, "Forbidden", ""), CreateFailure::OfNode),
            (refused(422, "Invalid", ""), CreateFailure::OfManifest),
            (refused(404, "NotFound", ""), CreateFailure::Later),
            (refused(409, "AlreadyExists", ""), CreateFailure::Later), // AC-10-28
            (refused(401, "Unauthorized", ""), CreateFailure::Retry(None)),
            (refused(503, "ServiceUnavailable", ""), CreateFailure::Retry(None)),
            (ApiError::Lost("reset".into()), CreateFailure::Retry(None)),
        ] {
            assert_eq!(after_create(&error), refusal, "{error:?}");
        }
    }
}
