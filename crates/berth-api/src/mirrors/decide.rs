//! What is to be done next for the mirror of one name. Pure. Spec 02a §5, 10 §4.4, §7.

use std::time::Duration;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::OwnerReference;

use crate::{api::ApiError, versions::is_older};
use berth_types::{
    Pod, api,
    spec::{ANNOTATION_HASH, ANNOTATION_MIRROR, PodHead},
};

/// What is wanted of the mirror.
#[derive(Clone, Copy, Debug)]
pub enum Wish<'a> {
    /// It mirrors that pod.
    Mirror(&'a Pod),
    /// It stays as it is.
    Leave,
    /// It goes.
    Remove,
}

/// The pod that the watch shows under the name.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Shown<'a> {
    /// `metadata.uid`.
    pub uid: &'a str,
    /// The hash of the static pod that this is the mirror of; `None` for what is no mirror.
    pub hash: Option<&'a str>,
    /// Whether deletion was requested.
    pub deleting: bool,
}

impl<'a> Shown<'a> {
    /// As the watch shows it.
    pub fn of(pod: &'a PodHead) -> Self {
        let meta = &pod.metadata;
        Self {
            uid: meta.uid.as_deref().unwrap_or_default(),
            hash: meta.annotations.as_ref().and_then(|all| all.get(ANNOTATION_MIRROR)).map(String::as_str),
            deleting: meta.deletion_timestamp.is_some(),
        }
    }
}

/// This node, as it owns mirror pods.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Owner {
    /// Its name.
    pub name: String,
    /// `metadata.uid` of its object.
    pub uid: String,
}

/// What earlier steps came to.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Memory {
    /// The pod of that UID was deleted.
    pub deleted: Option<String>,
    /// A mirror was made, of that resource version.
    pub created: Option<String>,
    /// The server does not take the mirror of that hash, owned by that node.
    pub refused: Option<(String, Option<String>)>,
}

/// What is to be done.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Step {
    /// Nothing now.
    Rest,
    /// Nothing until the watch shows what became of the mirror that was made.
    Await,
    /// Delete the pod of that UID.
    Delete(String),
    /// Make the mirror.
    Create,
}

/// The next step. `version` is the newest one that the watch has shown of anything: deletions and
/// creations follow each other by what it shows, so that nothing is made twice.
pub fn next(wish: Wish<'_>, shown: Option<Shown<'_>>, version: &str, owner: Option<&Owner>, memory: &Memory) -> Step {
    let shown_mirror = shown.filter(|shown| shown.hash.is_some());
    let pod = match wish {
        Wish::Leave => return Step::Rest,
        Wish::Remove => return shown_mirror.map_or(Step::Rest, |mirror| delete(mirror, memory)),
        Wish::Mirror(pod) => pod,
    };
    match (shown, shown_mirror) {
        (_, Some(mirror)) if mirror.hash == Some(hash_of(pod)) && !mirror.deleting => Step::Rest,
        (_, Some(mirror)) => delete(mirror, memory),
        (Some(_), None) => Step::Rest, // a pod of its own right has the name
        (None, None) => {
            let awaited = memory.created.as_deref().is_some_and(|created| is_older(version, created));
            if awaited {
                return Step::Await;
            }
            let Some(owner) = owner else { return Step::Rest };
            let refused = memory.refused.as_ref().is_some_and(|(hash, node)| {
                hash == hash_of(pod) && node.as_ref().is_none_or(|node| *node == owner.uid)
            });
            if refused { Step::Rest } else { Step::Create }
        }
    }
}

fn delete(mirror: Shown<'_>, memory: &Memory) -> Step {
    if memory.deleted.as_deref() == Some(mirror.uid) { Step::Rest } else { Step::Delete(mirror.uid.to_owned()) }
}

/// What a mirror is told by.
pub fn hash_of(pod: &Pod) -> &str {
    pod.annotation(ANNOTATION_HASH).unwrap_or(pod.uid().as_str())
}

/// The mirror of a static pod.
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

/// What a failed POST means.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Refusal {
    /// Not again until the manifest or the node's UID changes.
    OfNode,
    /// Not again until the manifest changes.
    OfManifest,
    /// The name is taken, or the namespace is not there: not soon.
    Later,
    /// Again after that time, or soon.
    Retry(Option<Duration>),
}

/// After a POST that failed. What became of a request that was lost shows in the watch.
pub fn after_create(error: &ApiError) -> Refusal {
    match error.code() {
        403 => Refusal::OfNode,
        400 | 413 | 422 => Refusal::OfManifest,
        404 | 409 => Refusal::Later,
        _ => Refusal::Retry(error.retry_after()),
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

    fn mirror(hash: &'static str, deleting: bool) -> Option<Shown<'static>> {
        Some(Shown { uid: "m", hash: Some(hash), deleting })
    }

    #[test]
    fn a_mirror_says_what_the_static_pod_says() {
        let (pod, fresh) = (pod("u"), Memory::default());
        let deleted = Memory { deleted: Some("m".to_owned()), ..Memory::default() };
        let created = Memory { created: Some("10".to_owned()), ..Memory::default() };
        let refused = |hash: &str, node: Option<&str>| Memory {
            refused: Some((hash.to_owned(), node.map(str::to_owned))),
            ..Memory::default()
        };
        let own = Shown { uid: "m", hash: None, deleting: false };
        let delete = || Step::Delete("m".to_owned());
        for (case, shown, memory, step) in [
            ("none", None, fresh.clone(), Step::Create),
            ("equal", mirror("u", false), fresh.clone(), Step::Rest), // AC-10-28
            ("another manifest", mirror("old", false), fresh.clone(), delete()),
            ("being deleted", mirror("u", true), fresh.clone(), delete()), // AC-10a-33
            ("deleted, still shown", mirror("u", true), deleted.clone(), Step::Rest),
            ("deleted, no longer shown", None, deleted, Step::Create),
            ("a pod of its own right", Some(own), fresh.clone(), Step::Rest),
            ("made, not shown yet", None, created, Step::Await),
            ("made and gone again", None, Memory { created: Some("8".to_owned()), ..fresh.clone() }, Step::Create),
            ("refused", None, refused("u", Some("n1")), Step::Rest), // AC-10-27
            ("refused of another node", None, refused("u", Some("n0")), Step::Create),
            ("refused of any node", None, refused("u", None), Step::Rest),
            ("refused of another manifest", None, refused("old", None), Step::Create),
        ] {
            assert_eq!(next(Wish::Mirror(&pod), shown, "9", Some(&owner()), &memory), step, "{case}");
        }
        assert_eq!(next(Wish::Mirror(&pod), None, "9", None, &fresh), Step::Rest, "no node object yet");
    }

    #[test]
    fn what_nobody_wants_goes() {
        let fresh = Memory::default();
        let step = |wish, shown| next(wish, shown, "9", None, &fresh);
        assert_eq!(step(Wish::Remove, mirror("u", false)), Step::Delete("m".to_owned()));
        assert_eq!(step(Wish::Remove, None), Step::Rest);
        assert_eq!(step(Wish::Remove, Some(Shown { uid: "p", hash: None, deleting: false })), Step::Rest);
        assert_eq!(step(Wish::Leave, mirror("u", true)), Step::Rest);
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
            (refused(403, "Forbidden", ""), Refusal::OfNode),
            (refused(422, "Invalid", ""), Refusal::OfManifest),
            (refused(404, "NotFound", ""), Refusal::Later),
            (refused(409, "AlreadyExists", ""), Refusal::Later), // AC-10-28
            (refused(401, "Unauthorized", ""), Refusal::Retry(None)),
            (refused(503, "ServiceUnavailable", ""), Refusal::Retry(None)),
            (ApiError::Lost("reset".into()), Refusal::Retry(None)),
        ] {
            assert_eq!(after_create(&error), refusal, "{error:?}");
        }
    }
}
