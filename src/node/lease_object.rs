//! Lease object as JSON, edited in place so that fields of newer servers survive. Pure.
//!
//! Implements spec 05 §5, 10 §4.2.

use jiff::{Timestamp, fmt::strtime};
use serde_json::{Value, json};

/// Namespace of node leases.
pub const NAMESPACE: &str = "kube-node-lease";

/// Holder and duration of the lease.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Holder {
    /// Node name, used as the lease's name and holder identity.
    pub node: String,
    /// `nodeLeaseDurationSeconds`, in seconds.
    pub seconds: i32,
}

/// Builds a new lease, owned by the node of that UID.
pub fn created(holder: &Holder, node_uid: &str, now: Timestamp) -> Value {
    let mut lease = json!({
        "apiVersion": "coordination.k8s.io/v1",
        "kind": "Lease",
        "metadata": {"name": holder.node, "namespace": NAMESPACE, "ownerReferences": [owner(holder, node_uid)]},
        "spec": {"holderIdentity": holder.node},
    });
    renew(&mut lease, holder, now);
    lease
}

/// Renews the lease; all other fields are kept.
pub fn renewed(last: &Value, holder: &Holder, now: Timestamp) -> Value {
    let mut lease = last.clone();
    renew(&mut lease, holder, now);
    lease
}

/// Whether the lease has no owner reference.
pub fn lacks_owner(lease: &Value) -> bool {
    lease.pointer("/metadata/ownerReferences").and_then(Value::as_array).is_none_or(Vec::is_empty)
}

/// Sets this node as owner of the lease.
pub fn set_owner(lease: &mut Value, holder: &Holder, node_uid: &str) {
    if let Some(metadata) = lease.get_mut("metadata").and_then(Value::as_object_mut) {
        metadata.insert("ownerReferences".to_owned(), json!([owner(holder, node_uid)]));
    }
}

/// Response to keep for the next renewal, without server-managed fields; `None` if it is not an object.
pub fn without_managed_fields(mut answer: Value) -> Option<Value> {
    let metadata = answer.get_mut("metadata")?.as_object_mut()?;
    metadata.remove("managedFields");
    Some(answer)
}

fn owner(holder: &Holder, uid: &str) -> Value {
    json!({"apiVersion": "v1", "kind": "Node", "name": holder.node, "uid": uid})
}

fn renew(lease: &mut Value, holder: &Holder, now: Timestamp) {
    let Some(lease) = lease.as_object_mut() else { return };
    let spec = lease.entry("spec").or_insert_with(|| json!({}));
    if !spec.is_object() {
        *spec = json!({});
    }
    if let Some(spec) = spec.as_object_mut() {
        spec.insert("leaseDurationSeconds".to_owned(), json!(holder.seconds));
        spec.insert("renewTime".to_owned(), json!(micro_time(now)));
    }
}

/// Formats a Kubernetes `MicroTime`: six fractional digits, UTC.
fn micro_time(time: Timestamp) -> String {
    strtime::format("%Y-%m-%dT%H:%M:%S.%6fZ", time).unwrap_or_else(|_| time.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn holder() -> Holder {
        Holder { node: "n".to_owned(), seconds: 40 }
    }

    #[test]
    fn a_new_lease_names_its_holder_and_owner() {
        let lease = created(&holder(), "u", "2026-01-01T00:00:01.5Z".parse().expect("a time"));
        assert_eq!(
            lease,
            json!({
                "apiVersion": "coordination.k8s.io/v1", "kind": "Lease",
                "metadata": {"name": "n", "namespace": "kube-node-lease", "ownerReferences": [
                    {"apiVersion": "v1", "kind": "Node", "name": "n", "uid": "u"}]},
                "spec": {"holderIdentity": "n", "leaseDurationSeconds": 40,
                    "renewTime": "2026-01-01T00:00:01.500000Z"},
            })
        );
    }

    #[test]
    fn renewing_keeps_what_it_does_not_know() {
        let last = json!({"metadata": {"resourceVersion": "7", "uid": "l", "managedFields": [1], "new": true},
            "spec": {"holderIdentity": "n", "leaseDurationSeconds": 30, "strategy": "x"}});
        let last = without_managed_fields(last).expect("an object");
        let lease = renewed(&last, &holder(), "2026-01-01T00:00:00Z".parse().expect("a time"));
        assert_eq!(
            lease,
            json!({"metadata": {"resourceVersion": "7", "uid": "l", "new": true}, "spec": {"holderIdentity": "n",
                "leaseDurationSeconds": 40, "strategy": "x", "renewTime": "2026-01-01T00:00:00.000000Z"}})
        );
        let mut lease = lease;
        assert!(lacks_owner(&lease));
        set_owner(&mut lease, &holder(), "u");
        assert!(!lacks_owner(&lease));
        assert_eq!(without_managed_fields(json!("nonsense")), None);
    }
}
