//! What the own node object says of how we work, and what our settings say of it.

use std::time::Duration;

use serde::Deserialize;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use super::super::build::{Base, BuildError};
use crate::{embedded, kube::Store, pod::api};

/// Says how long objects serve, in seconds.
const OBJECT_TTL: &str = "node.alpha.kubernetes.io/ttl";
/// How long they do where nothing is said.
const DEFAULT_TTL: Duration = Duration::from_secs(60);

/// Section `node` of the agent's own settings (`/etc/berth/config.yaml`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub(super) struct NodeSettings {
    /// A node object that somebody deletes is made again; off, as in the reference.
    pub(super) reregister_deleted_node: bool,
}

impl NodeSettings {
    /// As the file has them.
    ///
    /// # Errors
    /// Names the file or the field.
    pub(super) fn read() -> Result<Self, BuildError> {
        let Some(section) = embedded::settings::section("node").map_err(BuildError)? else {
            return Ok(Self::default());
        };
        Self::of(section).map_err(BuildError)
    }

    fn of(section: serde_json::Value) -> Result<Self, String> {
        serde_json::from_value(section).map_err(|error| format!("node: {error}"))
    }
}

/// How long an object that a pod refers to serves without being asked for again, by strategy `Cache`,
/// as the node of that name says from time to time (spec 02b §11).
pub(super) fn object_ttl(base: &Base, nodes: Store<api::Node>, name: &str) -> watch::Receiver<Duration> {
    let (told, known) = watch::channel(DEFAULT_TTL);
    base.tasks.spawn(follow(nodes, name.to_owned(), told, base.stop.child_token()));
    known
}

async fn follow(mut nodes: Store<api::Node>, name: String, told: watch::Sender<Duration>, stop: CancellationToken) {
    loop {
        let ttl = ttl(nodes.get("", &name).as_deref());
        told.send_if_modified(|known| std::mem::replace(known, ttl) != ttl);
        tokio::select! {
            () = stop.cancelled() => return,
            () = nodes.changed() => {}
        }
    }
}

/// What the annotation of the node says, else a minute.
fn ttl(node: Option<&api::Node>) -> Duration {
    let annotation = node.and_then(|node| node.metadata.annotations.as_ref()?.get(OBJECT_TTL));
    let seconds = annotation.and_then(|text| text.parse::<i64>().ok());
    seconds.map_or(DEFAULT_TTL, |seconds| Duration::from_secs(u64::try_from(seconds).unwrap_or_default()))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn the_node_says_how_long_objects_serve() {
        for (annotations, expected) in [
            (json!({}), 60),
            (json!({OBJECT_TTL: "15"}), 15),
            (json!({OBJECT_TTL: "0"}), 0),
            (json!({OBJECT_TTL: "-1"}), 0),
            (json!({OBJECT_TTL: "soon"}), 60),
        ] {
            let node = json!({"metadata": {"annotations": annotations}});
            let node: api::Node = serde_json::from_value(node).expect("a node");
            assert_eq!(ttl(Some(&node)), Duration::from_secs(expected), "{annotations}");
        }
        assert_eq!(ttl(None), DEFAULT_TTL);
    }

    #[test]
    fn settings_of_the_node_are_few() {
        for (section, expected) in [
            (json!({}), Ok(NodeSettings::default())),
            (json!({"reregisterDeletedNode": true}), Ok(NodeSettings { reregister_deleted_node: true })),
        ] {
            assert_eq!(NodeSettings::of(section), expected);
        }
        let told = NodeSettings::of(json!({"reregister": true})).expect_err("unknown");
        assert!(told.starts_with("node: unknown field `reregister`"), "{told}");
    }
}
