//! Latest known pod object on the server: from the watch, or from the response to our last write. Pure.
//!
//! The response counts while the watch lags behind it. Implements spec 10 §4.3, §11.

use serde::Deserialize;

use crate::versions::is_older;
use berth_types::{
    api,
    spec::{ANNOTATION_MIRROR, PodHead},
};

/// Fields of the server's pod that matter for its status.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct ServerPod<'a> {
    /// `metadata.uid`.
    pub uid: &'a str,
    /// `metadata.resourceVersion`.
    pub version: &'a str,
    /// Whether `metadata.deletionTimestamp` is set.
    pub deleting: bool,
    /// Hash of the static pod that it mirrors; `None` if it is no mirror pod.
    pub mirror_of: Option<&'a str>,
    /// Status; `None` if unset.
    pub status: Option<&'a api::PodStatus>,
}

impl<'a> ServerPod<'a> {
    /// Extracts the fields from a watched pod.
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

    /// Whether the phase is terminal.
    pub fn is_terminal(&self) -> bool {
        let phase = self.status.and_then(|status| status.phase.as_deref());
        matches!(phase, Some("Succeeded" | "Failed"))
    }
}

/// Response to a write; only the relevant fields are parsed.
#[derive(Clone, PartialEq, Debug, Deserialize)]
pub struct WriteResponse {
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

impl WriteResponse {
    /// Converts the response.
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

/// Returns the newer one of the watched pod and the response. A response about a pod with another UID is outdated.
pub fn newest<'a>(watched: ServerPod<'a>, answered: Option<&'a WriteResponse>) -> ServerPod<'a> {
    match answered.map(WriteResponse::pod) {
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
        let answer: WriteResponse = serde_json::from_value(json!({
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
