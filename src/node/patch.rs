//! Strategic merge patch of a node's status. Pure. Implements spec 10 §5.2, §5.4.

use serde_json::{Map, Value, json};

use berth_types::api;

/// Builds the patch from `old` to `new`, without the spec; `None` if nothing differs.
///
/// It contains the UID of `old`, so that it never applies to a node recreated under the same name.
pub fn node_patch(old: &api::Node, new: &api::Node) -> Option<Value> {
    let (mut before, mut after) = (tree(old), tree(new));
    let addresses = [&mut before, &mut after].map(|node| node.get_mut("status").and_then(take_addresses));
    let replaced = match addresses {
        [Some(old), Some(new)] if old == new => None,
        [Some(_), new] => Some(new.unwrap_or_else(|| json!([]))),
        // `old` has no addresses: the list is set as it is.
        [None, new] => {
            if let (Some(new), Some(status)) = (new, member(&mut after, "status")) {
                status.insert("addresses".to_owned(), new);
            }
            None
        }
    };
    let mut patch = object(&before, &after, "");
    if let Some(Value::Array(mut list)) = replaced {
        list.push(json!({"$patch": "replace"}));
        let status = patch.entry("status").or_insert_with(|| json!({}));
        if let Value::Object(status) = status {
            status.insert("addresses".to_owned(), Value::Array(list));
        }
    }
    if patch.is_empty() {
        return None;
    }
    let mut patch = Value::Object(patch);
    if let (Some(uid), Some(metadata)) = (&old.metadata.uid, member(&mut patch, "metadata")) {
        metadata.insert("uid".to_owned(), json!(uid));
    }
    patch.sort_all_objects();
    Some(patch)
}

/// Node as JSON, without its spec and empty values.
fn tree(node: &api::Node) -> Value {
    let mut value = serde_json::to_value(node).unwrap_or_default();
    if let Value::Object(node) = &mut value {
        node.remove("spec");
    }
    prune(&mut value);
    for part in ["metadata", "status"] {
        member(&mut value, part);
    }
    value
}

/// Drops nulls, empty lists, and empty maps, on both sides of a comparison.
fn prune(value: &mut Value) {
    match value {
        Value::Object(members) => members.retain(|_, member| {
            prune(member);
            !matches!(member, Value::Null)
                && !member.as_array().is_some_and(Vec::is_empty)
                && !member.as_object().is_some_and(Map::is_empty)
        }),
        Value::Array(items) => items.iter_mut().for_each(prune),
        _ => {}
    }
}

fn take_addresses(status: &mut Value) -> Option<Value> {
    status.as_object_mut()?.remove("addresses")
}

fn member<'a>(value: &'a mut Value, name: &str) -> Option<&'a mut Map<String, Value>> {
    value.as_object_mut()?.entry(name).or_insert_with(|| json!({})).as_object_mut()
}

/// Merge key of a list; `None` for lists that are replaced as a whole.
fn merge_key(path: &str) -> Option<&'static str> {
    match path {
        "/status/conditions" => Some("type"),
        "/metadata/ownerReferences" => Some("uid"),
        _ => None,
    }
}

fn object(old: &Value, new: &Value, path: &str) -> Map<String, Value> {
    let nothing = Map::new();
    let (old, new) = (old.as_object().unwrap_or(&nothing), new.as_object().unwrap_or(&nothing));
    let mut patch = Map::new();
    for (name, after) in new {
        let at = format!("{path}/{name}");
        match (old.get(name), after) {
            (Some(before), after) if before == after => {}
            (Some(before @ Value::Object(_)), Value::Object(_)) => {
                let inner = object(before, after, &at);
                if !inner.is_empty() {
                    patch.insert(name.clone(), Value::Object(inner));
                }
            }
            (Some(Value::Array(before)), Value::Array(after)) if merge_key(&at).is_some() => {
                let key = merge_key(&at).unwrap_or_default();
                list(&mut patch, name, (before, after), (key, &at));
            }
            _ => drop(patch.insert(name.clone(), after.clone())),
        }
    }
    for name in old.keys().filter(|name| !new.contains_key(*name)) {
        patch.insert(name.clone(), Value::Null);
    }
    patch
}

/// Patches a list with a merge key: added, changed, and deleted elements, and the element order.
fn list(patch: &mut Map<String, Value>, name: &str, (old, new): (&[Value], &[Value]), (key, path): (&str, &str)) {
    let id = |item: &Value| item.get(key).cloned().unwrap_or_default();
    let mut items: Vec<Value> = Vec::new();
    for after in new {
        match old.iter().find(|before| id(before) == id(after)) {
            None => items.push(after.clone()),
            Some(before) => {
                let mut inner = object(before, after, path);
                if !inner.is_empty() {
                    inner.insert(key.to_owned(), id(after));
                    items.push(Value::Object(inner));
                }
            }
        }
    }
    let gone = old.iter().map(id).filter(|key| !new.iter().any(|after| id(after) == *key));
    items.extend(gone.map(|id| json!({"$patch": "delete", key: id})));
    let order = |list: &[Value]| list.iter().map(id).collect::<Vec<_>>();
    if !items.is_empty() || order(old) != order(new) {
        let whole = new.iter().map(|item| json!({key: id(item)})).collect();
        patch.insert(format!("$setElementOrder/{name}"), Value::Array(whole));
    }
    if !items.is_empty() {
        patch.insert(name.to_owned(), Value::Array(items));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn patch(old: Value, new: Value) -> Option<String> {
        let read = |value| serde_json::from_value::<api::Node>(value).expect("a node");
        node_patch(&read(old), &read(new)).map(|patch| patch.to_string())
    }

    fn status(status: Value) -> Value {
        json!({"metadata": {"uid": "u"}, "status": status})
    }

    fn check(old: Value, new: Value, expected: &str) {
        let expected = format!(r#"{{"metadata":{{"uid":"u"}},"status":{expected}}}"#);
        assert_eq!(patch(status(old), status(new)), Some(expected));
    }

    #[test]
    fn nothing_changed_is_no_patch() {
        // AC-10-19: nulls written by the server and empty lists are no difference.
        let old = json!({"images": [], "conditions": [{"type": "A", "status": "True", "lastHeartbeatTime": null}]});
        let new = json!({"conditions": [{"type": "A", "status": "True"}], "capacity": {}});
        assert_eq!(patch(status(old), status(new)), None);
    }

    #[test]
    fn addresses_are_replaced() {
        // AC-10-23
        let address = |kind: &str, text: &str| json!({"type": kind, "address": text});
        let [a, b, c] = [address("InternalIP", "1"), address("InternalIP", "2"), address("Hostname", "n")];
        check(
            json!({"addresses": [a, b, c]}),
            json!({"addresses": [b, c]}),
            r#"{"addresses":[{"address":"2","type":"InternalIP"},{"address":"n","type":"Hostname"},{"$patch":"replace"}]}"#,
        );
        check(json!({}), json!({"addresses": [c]}), r#"{"addresses":[{"address":"n","type":"Hostname"}]}"#);
        check(json!({"addresses": [c]}), json!({}), r#"{"addresses":[{"$patch":"replace"}]}"#);
        assert_eq!(patch(status(json!({"addresses": [a, c]})), status(json!({"addresses": [a, c]}))), None);
    }

    #[test]
    fn conditions_merge_by_type_with_their_order() {
        let condition = |kind: &str, status: &str| json!({"type": kind, "status": status, "message": "m"});
        let order = r#""$setElementOrder/conditions":[{"type":"A"},{"type":"B"}]"#;
        check(
            json!({"conditions": [condition("A", "True"), condition("B", "True")]}),
            json!({"conditions": [condition("A", "True"), condition("B", "False")]}),
            &format!(r#"{{{order},"conditions":[{{"status":"False","type":"B"}}]}}"#),
        );
        check(
            json!({"conditions": [condition("C", "True"), condition("A", "True")]}),
            json!({"conditions": [condition("A", "True"), {"type": "B", "status": "True"}]}),
            &format!(r#"{{{order},"conditions":[{{"status":"True","type":"B"}},{{"$patch":"delete","type":"C"}}]}}"#),
        );
        check(
            json!({"conditions": [condition("B", "True"), condition("A", "True")]}),
            json!({"conditions": [condition("A", "True"), condition("B", "True")]}),
            &format!("{{{order}}}"),
        );
    }

    #[test]
    fn maps_merge_lists_are_replaced_and_the_spec_is_left_out() {
        check(
            json!({"capacity": {"cpu": "4", "old": "1"}, "volumesInUse": ["a", "b"]}),
            json!({"capacity": {"cpu": "8", "new": "1"}, "volumesInUse": ["b"]}),
            r#"{"capacity":{"cpu":"8","new":"1","old":null},"volumesInUse":["b"]}"#,
        );
        let old = json!({"metadata": {"labels": {"a": "1"}}, "spec": {"podCIDR": "x"}, "status": {}});
        let new = json!({"metadata": {"labels": {"a": "2"}}, "spec": {"podCIDR": "y"}, "status": {}});
        assert_eq!(patch(old, new).as_deref(), Some(r#"{"metadata":{"labels":{"a":"2"}}}"#));
    }
}
