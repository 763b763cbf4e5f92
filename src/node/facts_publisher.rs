//! Node facts for pods: follows the node object. Implements spec 02a §6, 02b §8, 05 §4.4.

use std::{net::IpAddr, sync::Arc};

use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use berth_api::ReflectorStore;
use berth_ports::NodeFacts;
use berth_types::api;

/// Updates the facts from the node object of that name until stopped.
pub(super) async fn follow_node(
    mut nodes: ReflectorStore<api::Node>,
    name: String,
    facts: watch::Sender<Arc<NodeFacts>>,
    stop: CancellationToken,
) {
    loop {
        if let Some(node) = nodes.get("", &name) {
            publish(&facts, &node);
        }
        tokio::select! {
            () = stop.cancelled() => return,
            () = nodes.changed() => {}
        }
    }
}

/// Publishes the facts of `node` if they changed.
pub(super) fn publish(facts: &watch::Sender<Arc<NodeFacts>>, node: &api::Node) {
    facts.send_if_modified(|known| {
        let next = with_node(known, node);
        let is_news = next != **known;
        if is_news {
            *known = Arc::new(next);
        }
        is_news
    });
}

/// Facts with the fields that the object is authoritative for: labels, taints, addresses, extended resources.
fn with_node(facts: &NodeFacts, node: &api::Node) -> NodeFacts {
    let mut next = facts.clone();
    if let Some(labels) = &node.metadata.labels {
        next.labels.clone_from(labels);
    }
    next.taints = node.spec.as_ref().and_then(|spec| spec.taints.clone()).unwrap_or_default();
    let status = node.status.clone().unwrap_or_default();
    let ips = host_ips(status.addresses.as_deref().unwrap_or_default());
    if !ips.is_empty() {
        next.host_ips = ips;
    }
    // This machine's own capacity is measured here; extended resources exist only in the object.
    for (own, reported) in [(&mut next.capacity, status.capacity), (&mut next.allocatable, status.allocatable)] {
        own.retain(|name, _| !berth_types::resources::is_extended(name));
        for (name, quantity) in reported.unwrap_or_default() {
            own.entry(name).or_insert(quantity.0);
        }
    }
    next
}

/// Addresses of a node, internal before external ones, as a [`dual_stack_pair`].
fn host_ips(addresses: &[api::NodeAddress]) -> Vec<IpAddr> {
    let of_kind = |kind: &'static str| addresses.iter().filter(move |address| address.type_ == kind);
    let all = of_kind("InternalIP").chain(of_kind("ExternalIP"));
    dual_stack_pair(all.filter_map(|address| address.address.parse().ok()))
}

/// First address, and the first of the other IP version.
pub(super) fn dual_stack_pair(ips: impl Iterator<Item = IpAddr>) -> Vec<IpAddr> {
    let ips: Vec<IpAddr> = ips.collect();
    let first = ips.first().copied();
    let other = first.and_then(|first| ips.iter().copied().find(|ip| ip.is_ipv4() != first.is_ipv4()));
    first.into_iter().chain(other).collect()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn facts_follow_the_object() {
        let text = |pairs: &[(&str, &str)]| pairs.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned())).collect();
        let facts = NodeFacts {
            capacity: text(&[("cpu", "4"), ("x.y/gone", "1")]),
            host_ips: vec!["10.0.0.9".parse().expect("an address")],
            ..NodeFacts::default()
        };
        let (sender, mut receiver) = watch::channel(Arc::new(facts));
        let node: api::Node = serde_json::from_value(json!({
            "metadata": {"labels": {"a": "b"}},
            "spec": {"taints": [{"key": "k", "effect": "NoExecute"}]},
            "status": {
                "capacity": {"cpu": "8", "x.y/gpu": "2"},
                "addresses": [
                    {"type": "ExternalIP", "address": "1.1.1.1"}, {"type": "Hostname", "address": "n"},
                    {"type": "InternalIP", "address": "10.0.0.1"}, {"type": "InternalIP", "address": "10.0.0.2"},
                    {"type": "InternalIP", "address": "fd00::1"}]},
        }))
        .expect("a node");
        publish(&sender, &node);
        assert!(receiver.has_changed().expect("open"));
        let received = receiver.borrow_and_update().clone();
        let ips: Vec<String> = received.host_ips.iter().map(IpAddr::to_string).collect();
        assert_eq!(ips, ["10.0.0.1", "fd00::1"]);
        assert_eq!((received.labels["a"].as_str(), received.taints.len()), ("b", 1));
        assert_eq!(received.capacity, text(&[("cpu", "4"), ("x.y/gpu", "2")]));
        publish(&sender, &node);
        assert!(!receiver.has_changed().expect("open"));
        publish(&sender, &api::Node::default());
        assert_eq!(receiver.borrow().host_ips.len(), 2, "an object without addresses takes none away");
    }
}
