//! What the API server holds under a pod's name: as the watch shows it, or as its answer to our own
//! write does while the watch has not caught up. Pure. Spec 10 §4.3, §11.

use serde::Deserialize;

use crate::versions::is_older;
use berth_types::{
    api,
    spec::{ANNOTATION_MIRROR, PodHead},
};

/// The server's pod, as far as a status is concerned.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct ServerPod<'a> {
    /// `metadata.uid`.
    pub uid: &'a str,
    /// `metadata.resourceVersion`.
    pub version: &'a str,
    /// Whether deletion was requested.
    pub deleting: bool,
    /// The hash of the static pod that this is the mirror of.
    pub mirror_of: Option<&'a str>,
    /// Its status; `None` where it has none.
    pub status: Option<&'a api::PodStatus>,
}

impl<'a> ServerPod<'a> {
    /// As the watch shows it.
    pub fn watched(pod: &'a PodHead) -> Self {
        let meta = &pod.metadata;
        Self {
            uid: meta.uid.as_deref().unwrap_or_default(),
            version: meta.resource_version.as_deref().unwrap_or_default(),
            deleting: meta.deletion_timestamp.is_some(),
            mirror_of: meta.annotations.as_ref().and_then(|all| all.get(ANNOTATION_MIRROR)).map(String::as_str),
            status: pod.status.as_deref(),
        }
    }

    /// Whether its phase is an end.
    pub fn is_terminal(&self) -> bool {
        let phase = self.status.and_then(|status| status.phase.as_deref());
        matches!(phase, Some("Succeeded" | "Failed"))
    }
}

/// The server's answer to a write; only what matters here is parsed.
#[derive(Clone, PartialEq, Debug, Deserialize)]
pub struct Answered {
    metadata: AnsweredMeta,
    #[serde(default)]
    status: api::PodStatus,
}

#[derive(Clone, PartialEq, Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
struct AnsweredMeta {
    uid: String,
    resource_version: String,
    #[serde(default)]
    deletion_timestamp: Option<String>,
    #[serde(default)]
    annotations: Option<std::collections::BTreeMap<String, String>>,
}

impl Answered {
    /// As the server's pod.
    pub fn pod(&self) -> ServerPod<'_> {
        let meta = &self.metadata;
        ServerPod {
            uid: &meta.uid,
            version: &meta.resource_version,
            deleting: meta.deletion_timestamp.is_some(),
            mirror_of: meta.annotations.as_ref().and_then(|all| all.get(ANNOTATION_MIRROR)).map(String::as_str),
            status: Some(&self.status),
        }
    }
}

/// The newer one of what the watch shows and what the server answered: what it holds now, as far
/// as we know. An answer about another pod than the watched one is of the past.
pub fn newest<'a>(watched: ServerPod<'a>, answered: Option<&'a Answered>) -> ServerPod<'a> {
    match answered.map(Answered::pod) {
        Some(answer) if answer.uid == watched.uid && is_older(watched.version, answer.version) => answer,
        _ => watched,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn an_answer_counts_until_the_watch_has_caught_up() {
        let watched = |uid: &str, version: &str| -> PodHead {
            let read = json!({"metadata": {"uid": uid, "resourceVersion": version}});
            let read: api::Pod = serde_json::from_value(read).expect("a pod");
            PodHead::new(read.metadata, read.status)
        };
        let answer: Answered = serde_json::from_value(json!({
            "metadata": {"uid": "u", "resourceVersion": "10", "managedFields": [{"manager": "kubelet"}]},
            "spec": {"containers": []}, "status": {"phase": "Failed"}}))
        .expect("an answer");
        for (uid, version, newer) in [("u", "9", "10"), ("u", "10", "10"), ("u", "11", "11"), ("other", "9", "9")] {
            let pod = watched(uid, version);
            let now = newest(ServerPod::watched(&pod), Some(&answer));
            assert_eq!((now.uid, now.version), (uid, newer), "{uid} {version}");
        }
        assert!(answer.pod().is_terminal());
    }
}
