//! Strategic merge patch from the API server's pod status to ours. Pure.
//!
//! Implements spec 02b §8.4, 10 §5.
//!
//! Conditions are merged by `type` and addresses by `ip`; all other lists are replaced as a whole. Keys are sorted, as
//! kubelet sends them. Both sides are normalized first, so that another spelling by the server is no change
//! (spec 10 §5.2, §8.4).

use serde_json::{Map, Value, json};

use super::{
    diff::{spell_alike, without_blanks},
    lookup::find,
    normalization::lists_mut,
};
use berth_types::{ContainerKind, api};

/// Body of the patch request; `None` where nothing changed and no request is needed.
///
/// The UID is included as a precondition: the API server rejects a patch for another pod.
pub fn patch(uid: &str, old: &api::PodStatus, new: &api::PodStatus) -> Option<Vec<u8>> {
    let (mut old, mut new) = (without_blanks(old), without_blanks(new));
    spell_alike(&mut old, &mut new);
    drop_empty_resources_missing_in(&mut old, &new);
    let status = diff_objects(&to_map(&old), &to_map(&new));
    if status.is_empty() {
        return None;
    }
    let mut body = json!({"metadata": {"uid": uid}, "status": status});
    body.sort_all_objects();
    Some(body.to_string().into_bytes())
}

/// Removes empty resources from `old` where `new` has none: that is no change.
fn drop_empty_resources_missing_in(old: &mut api::PodStatus, new: &api::PodStatus) {
    let is_blank =
        |resources: &Option<api::ResourceRequirements>| *resources == Some(api::ResourceRequirements::default());
    if new.resources.is_none() && is_blank(&old.resources) {
        old.resources = None;
    }
    for (kind, list) in lists_mut(old) {
        for container in list.iter_mut().filter(|container| is_blank(&container.resources)) {
            let list = match kind {
                ContainerKind::Regular => &new.container_statuses,
                ContainerKind::Init => &new.init_container_statuses,
                ContainerKind::Ephemeral => &new.ephemeral_container_statuses,
            };
            let other = find(list.as_deref().unwrap_or_default(), &container.name);
            if other.is_none_or(|other| other.resources.is_none()) {
                container.resources = None;
            }
        }
    }
}

fn to_map(status: &api::PodStatus) -> Map<String, Value> {
    match serde_json::to_value(status) {
        Ok(Value::Object(map)) => map,
        // Unreachable: a struct serializes to an object.
        _ => Map::new(),
    }
}

/// Merge key of a list; `None` for lists that are replaced.
fn merge_key(list: &str) -> Option<&'static str> {
    match list {
        "conditions" => Some("type"),
        "podIPs" | "hostIPs" => Some("ip"),
        _ => None,
    }
}

fn diff_objects(old: &Map<String, Value>, new: &Map<String, Value>) -> Map<String, Value> {
    let mut patch = Map::new();
    for key in old.keys().filter(|key| !new.contains_key(*key)) {
        patch.insert(key.clone(), Value::Null);
    }
    for (key, value) in new {
        match (old.get(key), value) {
            (Some(before), value) if before == value => {}
            (Some(Value::Object(before)), Value::Object(value)) => {
                let inner = diff_objects(before, value);
                if !inner.is_empty() {
                    patch.insert(key.clone(), Value::Object(inner));
                }
            }
            (Some(Value::Array(before)), Value::Array(value)) if merge_key(key).is_some() => {
                diff_lists(&mut patch, key, before, value);
            }
            _ => {
                patch.insert(key.clone(), value.clone());
            }
        }
    }
    patch
}

/// Patches a list: changed entries in the new order, then deletions, and the order of all entries.
fn diff_lists(patch: &mut Map<String, Value>, list: &str, old: &[Value], new: &[Value]) {
    let Some(key) = merge_key(list) else { return };
    let by_key = |entries: &'_ [Value], wanted: &Value| entries.iter().position(|e| e.get(key) == Some(wanted));
    let mut changed = Vec::new();
    for entry in new {
        let Some(id) = entry.get(key) else { continue };
        let before = by_key(old, id).and_then(|i| old.get(i));
        match (before.and_then(Value::as_object), entry.as_object()) {
            (Some(before), Some(after)) => {
                let mut inner = diff_objects(before, after);
                if !inner.is_empty() {
                    inner.insert(key.to_owned(), id.clone());
                    changed.push(Value::Object(inner));
                }
            }
            _ => changed.push(entry.clone()),
        }
    }
    for id in old.iter().filter_map(|e| e.get(key)).filter(|id| by_key(new, id).is_none()) {
        changed.push(json!({"$patch": "delete", key: id}));
    }
    let order: Vec<Value> = new.iter().filter_map(|e| Some(json!({key: e.get(key)?}))).collect();
    patch.insert(format!("$setElementOrder/{list}"), Value::Array(order));
    if !changed.is_empty() {
        patch.insert(list.to_owned(), Value::Array(changed));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn body(old: Value, new: Value) -> Option<String> {
        let status = |v: Value| serde_json::from_value::<api::PodStatus>(v).expect("a status");
        patch("u", &status(old), &status(new)).map(|b| String::from_utf8(b).expect("JSON"))
    }

    fn check(old: Value, new: Value, expected: &str) {
        assert_eq!(body(old, new).as_deref(), Some(expected));
    }

    #[test]
    fn nothing_changed_is_nothing_to_send() {
        let same = || json!({"phase": "Running", "conditions": [{"type": "Ready", "status": "True"}]});
        assert_eq!(body(same(), same()), None);
    }

    #[test]
    fn what_is_only_spelled_otherwise_is_no_change() {
        // AC-10-19
        let server = json!({"phase": "Running", "message": "", "hostIPs": [], "podIPs": null,
            "conditions": [{"type": "Ready", "status": "True", "reason": "", "lastProbeTime": null,
                "lastTransitionTime": null}],
            "allocatedResources": {"cpu": "1000m", "memory": "1Gi"}, "resources": {},
            "containerStatuses": [{"name": "c", "image": "i", "imageID": "", "ready": true, "restartCount": 0,
                "lastState": {}, "resources": {}, "state": {"terminated": {"exitCode": 0, "startedAt": null,
                "finishedAt": null, "reason": ""}}}]});
        let ours = json!({"phase": "Running", "conditions": [{"type": "Ready", "status": "True"}],
            "allocatedResources": {"cpu": "1", "memory": "1073741824"},
            "containerStatuses": [{"name": "c", "image": "i", "imageID": "", "ready": true, "restartCount": 0,
                "state": {"terminated": {"exitCode": 0}}}]});
        assert_eq!(body(server, ours), None);
    }

    /// Clients and the resize code of the API server require the key.
    #[test]
    fn empty_resources_are_sent_where_the_server_has_none() {
        let with = |resources: &Value| {
            let mut status = json!({"phase": "Running", "containerStatuses":
                [{"name": "c", "image": "i", "imageID": "", "ready": true, "restartCount": 0}]});
            if !resources.is_null() {
                status["resources"] = resources.clone();
                status["containerStatuses"][0]["resources"] = resources.clone();
            }
            status
        };
        let (none, empty) = (Value::Null, json!({}));
        check(
            with(&none),
            with(&empty),
            r#"{"metadata":{"uid":"u"},"status":{"containerStatuses":[{"image":"i","imageID":"","name":"c","ready":true,"resources":{},"restartCount":0}],"resources":{}}}"#,
        );
        for same in [(&empty, &empty), (&empty, &json!({"limits": {}})), (&none, &none), (&empty, &none)] {
            assert_eq!(body(with(same.0), with(same.1)), None, "{same:?}");
        }
    }

    #[test]
    fn only_what_changed_is_sent() {
        // AC-10-17
        let conditions = |ready: &str| {
            json!({"phase": "Running", "conditions": [
                {"type": "Ready", "status": ready}, {"type": "PodScheduled", "status": "True"}]})
        };
        check(
            conditions("True"),
            conditions("False"),
            r#"{"metadata":{"uid":"u"},"status":{"$setElementOrder/conditions":[{"type":"Ready"},{"type":"PodScheduled"}],"conditions":[{"status":"False","type":"Ready"}]}}"#,
        );
        check(json!({}), json!({"message": "m"}), r#"{"metadata":{"uid":"u"},"status":{"message":"m"}}"#);
        check(
            json!({"reason": "r", "message": "m"}),
            json!({}),
            r#"{"metadata":{"uid":"u"},"status":{"message":null,"reason":null}}"#,
        );
        check(
            json!({"conditions": []}),
            json!({"conditions": [{"type": "Ready", "status": "True"}]}),
            r#"{"metadata":{"uid":"u"},"status":{"conditions":[{"status":"True","type":"Ready"}]}}"#,
        );
    }

    #[test]
    fn an_address_that_is_gone_is_deleted() {
        // AC-10-18
        let ip = |ip: &str| json!({"podIP": ip, "podIPs": [{"ip": ip}]});
        check(
            ip("10.0.0.1"),
            ip("10.0.0.2"),
            r#"{"metadata":{"uid":"u"},"status":{"$setElementOrder/podIPs":[{"ip":"10.0.0.2"}],"podIP":"10.0.0.2","podIPs":[{"ip":"10.0.0.2"},{"$patch":"delete","ip":"10.0.0.1"}]}}"#,
        );
    }

    #[test]
    fn removed_things_are_named() {
        check(
            json!({"nominatedNodeName": "n", "resize": "Deferred", "conditions": [
                {"type": "Ready", "status": "True", "reason": "r"}, {"type": "PodResizePending", "status": "True"}]}),
            json!({"conditions": [{"type": "Ready", "status": "True"}]}),
            r#"{"metadata":{"uid":"u"},"status":{"$setElementOrder/conditions":[{"type":"Ready"}],"conditions":[{"reason":null,"type":"Ready"},{"$patch":"delete","type":"PodResizePending"}],"nominatedNodeName":null,"resize":null}}"#,
        );
    }

    #[test]
    fn addresses_merge_and_container_lists_are_replaced() {
        let container =
            |ready: bool| json!({"name": "c", "image": "i", "imageID": "", "ready": ready, "restartCount": 0});
        check(
            json!({"podIPs": [{"ip": "10.0.0.1"}], "containerStatuses": [container(false)]}),
            json!({"podIPs": [{"ip": "fd::1"}, {"ip": "10.0.0.1"}], "containerStatuses": [container(true)],
                "hostIPs": [{"ip": "1.1.1.1"}], "hostIP": "1.1.1.1"}),
            r#"{"metadata":{"uid":"u"},"status":{"$setElementOrder/podIPs":[{"ip":"fd::1"},{"ip":"10.0.0.1"}],"containerStatuses":[{"image":"i","imageID":"","name":"c","ready":true,"restartCount":0}],"hostIP":"1.1.1.1","hostIPs":[{"ip":"1.1.1.1"}],"podIPs":[{"ip":"fd::1"}]}}"#,
        );
    }

    #[test]
    fn a_new_order_alone_is_a_change() {
        check(
            json!({"podIPs": [{"ip": "a"}, {"ip": "b"}]}),
            json!({"podIPs": [{"ip": "b"}, {"ip": "a"}]}),
            r#"{"metadata":{"uid":"u"},"status":{"$setElementOrder/podIPs":[{"ip":"b"},{"ip":"a"}]}}"#,
        );
    }

    #[test]
    fn amounts_are_merged_by_name() {
        check(
            json!({"allocatedResources": {"cpu": "1", "memory": "1Gi"}}),
            json!({"allocatedResources": {"cpu": "2"}}),
            r#"{"metadata":{"uid":"u"},"status":{"allocatedResources":{"cpu":"2","memory":null}}}"#,
        );
    }
}
