//! Detects another agent registered under this node's name. Pure.
//!
//! Kubelet takes over any object with its name and does not report it. Berth takes it over, too, but reports it: two
//! agents with one name overwrite each other's status, and both run the node's pods.

use jiff::Timestamp;
use serde_json::Value;

use berth_types::api;

/// Reason of the event.
pub const REASON: &str = "NodeNameTaken";
/// Consecutive rounds with a conflicting lease renewal until it is reported: a single one may be a manual edit.
pub const CONFLICTS: u32 = 3;

/// Facts that show that `node` belongs to another machine than `ours`; `None` if there are none.
pub fn conflicting_machine(node: &api::Node, ours: &api::Node) -> Option<String> {
    let info = |node: &api::Node| node.status.as_ref().and_then(|status| status.node_info.clone()).unwrap_or_default();
    let provider = |node: &api::Node| node.spec.as_ref().and_then(|spec| spec.provider_id.clone()).unwrap_or_default();
    let (theirs, own) = (info(node), info(ours));
    // A reinstalled machine has a new machine ID, so it is compared only where the firmware has no UUID.
    let machine = match theirs.system_uuid.is_empty() || own.system_uuid.is_empty() {
        true => ("machine ID", theirs.machine_id, own.machine_id),
        false => ("system UUID", theirs.system_uuid, own.system_uuid),
    };
    let is_known = |(_, theirs, own): &(&str, String, String)| !theirs.is_empty() && !own.is_empty();
    let is_same = |(_, theirs, own): &(&str, String, String)| theirs.eq_ignore_ascii_case(own);
    // This machine reported last: a different provider ID is a leftover of the creator of the object.
    if is_known(&machine) && is_same(&machine) {
        return None;
    }
    let facts = [machine, ("provider ID", provider(node), provider(ours))];
    let differing = facts.into_iter().filter(|fact| is_known(fact) && !is_same(fact));
    let differing = differing.map(|(what, theirs, own)| format!("{what} {theirs} differs from {own} of this machine"));
    let differing: Vec<String> = differing.collect();
    (!differing.is_empty()).then(|| differing.join("; "))
}

/// Whether the control plane regards the node as alive: its Ready condition is not Unknown.
pub fn is_alive(node: &api::Node) -> bool {
    let conditions = node.status.as_ref().and_then(|status| status.conditions.as_deref()).unwrap_or_default();
    conditions.iter().any(|condition| condition.type_ == "Ready" && condition.status != "Unknown")
}

/// Holder of a lease that is not `name` and has not expired.
pub fn holder(lease: &Value, name: &str, now: Timestamp) -> Option<String> {
    let spec = lease.get("spec")?;
    let holder = spec.get("holderIdentity")?.as_str().filter(|holder| !holder.is_empty() && *holder != name)?;
    let renewed: Timestamp = spec.get("renewTime")?.as_str()?.parse().ok()?;
    let lasts = spec.get("leaseDurationSeconds").and_then(Value::as_i64).unwrap_or(40);
    (now.as_second().saturating_sub(renewed.as_second()) < lasts).then(|| holder.to_owned())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn node(system: &str, provider: &str) -> api::Node {
        on(system, "", provider)
    }

    fn on(system: &str, machine: &str, provider: &str) -> api::Node {
        let info = json!({"systemUUID": system, "architecture": "", "bootID": "", "containerRuntimeVersion": "",
            "kernelVersion": "", "kubeProxyVersion": "", "kubeletVersion": "", "machineID": machine, "operatingSystem": "",
            "osImage": ""});
        serde_json::from_value(json!({"spec": {"providerID": provider}, "status": {"nodeInfo": info}})).expect("a node")
    }

    #[test]
    fn another_machine_is_known_by_what_it_cannot_change() {
        for (what, theirs, own, expected) in [
            ("the same", node("A-1", "c://1"), node("a-1", "c://1"), None),
            ("nobody has reported", api::Node::default(), node("a", "c"), None),
            ("nothing is known here", node("a", "c"), node("", ""), None),
            ("another machine", node("a", ""), node("b", ""), Some("system UUID a differs from b of this machine")),
            (
                "another instance",
                node("", "c://1"),
                node("", "c://2"),
                Some("provider ID c://1 differs from c://2 of this machine"),
            ),
            ("installed again", on("a", "1", ""), on("a", "2", ""), None),
            ("no firmware", on("", "1", ""), on("", "2", ""), Some("machine ID 1 differs from 2 of this machine")),
            ("taken over by us", node("a", "c"), node("a", "d"), None),
            (
                "both",
                node("a", "c"),
                node("b", "d"),
                Some("system UUID a differs from b of this machine; provider ID c differs from d of this machine"),
            ),
        ] {
            assert_eq!(conflicting_machine(&theirs, &own).as_deref(), expected, "{what}");
        }
    }

    #[test]
    fn a_node_is_alive_unless_its_ready_condition_is_unknown() {
        for (status, expected) in [("True", true), ("False", true), ("Unknown", false)] {
            let node = json!({"status": {"conditions": [{"type": "Ready", "status": status}]}});
            assert_eq!(is_alive(&serde_json::from_value(node).expect("a node")), expected, "{status}");
        }
        assert!(!is_alive(&api::Node::default()));
    }

    #[test]
    fn a_foreign_lease_counts_until_it_expires() {
        let now: Timestamp = "2026-01-01T00:01:00Z".parse().expect("a time");
        for (what, lease, expected) in [
            ("no lease", json!({}), None),
            ("ours", json!({"spec": {"holderIdentity": "n", "renewTime": "2026-01-01T00:00:59.0Z"}}), None),
            ("nobody's", json!({"spec": {"holderIdentity": "", "renewTime": "2026-01-01T00:00:59.0Z"}}), None),
            ("never renewed", json!({"spec": {"holderIdentity": "m"}}), None),
            ("theirs", json!({"spec": {"holderIdentity": "m", "renewTime": "2026-01-01T00:00:59.0Z"}}), Some("m")),
            ("run out", json!({"spec": {"holderIdentity": "m", "renewTime": "2026-01-01T00:00:20.0Z"}}), None),
            ("nonsense", json!({"spec": {"holderIdentity": 7, "renewTime": "soon"}}), None),
        ] {
            assert_eq!(holder(&lease, "n", now).as_deref(), expected, "{what}");
        }
    }
}
