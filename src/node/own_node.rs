//! Values that are read from this node's own Node object as it changes.

use std::time::Duration;

use k8s_openapi::api::core::v1::NodeAddress;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use berth_api::ReflectorStore;
use berth_ports::AttachedVolumes;
use berth_types::api;

/// Annotation with the TTL of cached objects, in seconds.
const OBJECT_TTL: &str = "node.alpha.kubernetes.io/ttl";
/// Default TTL of cached objects.
const DEFAULT_TTL: Duration = Duration::from_secs(60);

/// Addresses of the node's status.
pub fn addresses(node: Option<&api::Node>) -> Vec<NodeAddress> {
    node.and_then(|node| node.status.as_ref()?.addresses.clone()).unwrap_or_default()
}

/// Attached volumes of the node's status, with their device paths; `None` before the node was read (spec 07 §4.1).
pub fn attached(node: Option<&api::Node>) -> AttachedVolumes {
    let volumes = node?.status.as_ref().and_then(|status| status.volumes_attached.as_deref()).unwrap_or_default();
    let known = volumes.iter().map(|volume| (volume.name.clone(), volume.device_path.clone()));
    Some(std::sync::Arc::new(known.collect()))
}

/// TTL of an object that a pod refers to, for strategy `Cache` (spec 02b §11): the node's annotation, or 60 s.
pub fn object_ttl(node: Option<&api::Node>) -> Duration {
    let annotation = node.and_then(|node| node.metadata.annotations.as_ref()?.get(OBJECT_TTL));
    let seconds = annotation.and_then(|text| text.parse::<i64>().ok());
    seconds.map_or(DEFAULT_TTL, |seconds| Duration::from_secs(u64::try_from(seconds).unwrap_or_default()))
}

/// UID of the Node object; empty before it was read.
pub fn uid(node: Option<&api::Node>) -> String {
    node.and_then(|node| node.metadata.uid.clone()).unwrap_or_default()
}

/// Publishes a value that `read` extracts from the own Node object whenever it changes, until stopped.
pub fn of_node<T: PartialEq + Send + Sync + 'static>(
    nodes: ReflectorStore<api::Node>,
    name: String,
    read: fn(Option<&api::Node>) -> T,
    stop: CancellationToken,
) -> (watch::Receiver<T>, impl Future<Output = ()> + Send + 'static) {
    let (published, known) = watch::channel(read(None));
    (known, follow(nodes, name, published, read, stop))
}

async fn follow<T: PartialEq>(
    mut nodes: ReflectorStore<api::Node>,
    name: String,
    sender: watch::Sender<T>,
    read: fn(Option<&api::Node>) -> T,
    stop: CancellationToken,
) {
    loop {
        let read = read(nodes.get("", &name).as_deref());
        sender.send_if_modified(|known| {
            let moved = *known != read;
            *known = read;
            moved
        });
        tokio::select! {
            () = stop.cancelled() => return,
            () = nodes.changed() => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn attached_volumes_are_read_from_the_node() {
        let status = json!({"status": {"volumesAttached": [{"name": "a", "devicePath": "/dev/a"}, {"name": "b", "devicePath": ""}]}});
        let node: api::Node = serde_json::from_value(status).expect("a node");
        let found = attached(Some(&node)).expect("read");
        assert_eq!(
            (found.get("a").map(String::as_str), found.get("b").map(String::as_str)),
            (Some("/dev/a"), Some(""))
        );
        assert_eq!(attached(Some(&api::Node::default())).map(|all| all.len()), Some(0));
        assert!(attached(None).is_none());
    }

    #[test]
    fn the_object_ttl_is_read_from_the_node() {
        for (annotations, expected) in [
            (json!({}), 60),
            (json!({OBJECT_TTL: "15"}), 15),
            (json!({OBJECT_TTL: "0"}), 0),
            (json!({OBJECT_TTL: "-1"}), 0),
            (json!({OBJECT_TTL: "soon"}), 60),
        ] {
            let node = json!({"metadata": {"annotations": annotations}});
            let node: api::Node = serde_json::from_value(node).expect("a node");
            assert_eq!(object_ttl(Some(&node)), Duration::from_secs(expected), "{annotations}");
        }
        assert_eq!(object_ttl(None), DEFAULT_TTL);
    }
}
