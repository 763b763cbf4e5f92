//! Server-side strategic merge patch and JSON merge patch. Pure.
//!
//! Written from spec 10 §5.5 only, independent of how the agent builds its patches.

use serde_json::{Map, Value};

use super::merge_keys::{ListStrategy, strategy};

const DIRECTIVE: &str = "$patch";
const RETAIN_KEYS: &str = "$retainKeys";
const DELETE_PREFIX: &str = "$deleteFromPrimitiveList";
const ORDER_PREFIX: &str = "$setElementOrder";

const BAD_ORDER_LIST: &str = "invalid patch format of setElementOrder list";
const BAD_DELETE_LIST: &str = "invalid patch format of primitive list";
const BAD_RETAIN_KEYS: &str = "invalid patch format of retainKeys";

/// Error of a strategic merge patch.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PatchError {
    /// 400: a directive is malformed.
    Malformed(String),
    /// 422: lists of lists cannot be merged.
    Unfit(String),
    /// 500, as a plain error: the server does not distinguish these from internal errors.
    Plain(String),
}

type PatchResult<T> = Result<T, PatchError>;
type Object = Map<String, Value>;

/// Applies a strategic merge patch to an object of that kind.
///
/// # Errors
/// The patch is invalid for the object.
pub fn strategic(kind: &str, original: &Value, patch: &Value) -> PatchResult<Value> {
    let (Some(original), Some(patch)) = (original.as_object(), patch.as_object()) else {
        return Err(PatchError::Malformed("invalid JSON document".to_owned()));
    };
    merge_objects(original.clone(), patch.clone(), &FieldPath { kind, path: String::new() }).map(Value::Object)
}

/// Applies a JSON merge patch (RFC 7386).
pub fn json_merge(original: &Value, patch: &Value) -> Value {
    let Value::Object(patch) = patch else { return patch.clone() };
    let mut merged = original.as_object().cloned().unwrap_or_default();
    for (key, value) in patch {
        if value.is_null() {
            merged.shift_remove(key);
        } else {
            let old = merged.get(key).cloned().unwrap_or(Value::Null);
            merged.insert(key.clone(), json_merge(&old, value));
        }
    }
    Value::Object(merged)
}

/// Position in the object: kind and field path.
struct FieldPath<'a> {
    kind: &'a str,
    path: String,
}

impl FieldPath<'_> {
    fn below(&self, field: &str) -> Self {
        let path = if self.path.is_empty() { field.to_owned() } else { format!("{}.{field}", self.path) };
        Self { kind: self.kind, path }
    }

    fn list(&self) -> ListStrategy {
        strategy(self.kind, &self.path)
    }
}

fn merge_objects(mut original: Object, mut patch: Object, place: &FieldPath<'_>) -> PatchResult<Object> {
    match patch.get(DIRECTIVE) {
        None => {}
        Some(Value::String(directive)) if directive == "replace" => {
            patch.shift_remove(DIRECTIVE);
            return Ok(patch);
        }
        Some(Value::String(directive)) if directive == "delete" => return Ok(Object::new()),
        Some(other) => return Err(unknown_directive(other, &patch)),
    }
    retain_keys(&mut original, &mut patch)?;
    merge_ordered_lists(&mut original, &mut patch, place)?;
    for (key, value) in patch {
        merge_field(&mut original, &key, value, place)?;
    }
    Ok(original)
}

fn merge_field(original: &mut Object, key: &str, value: Value, place: &FieldPath<'_>) -> PatchResult<()> {
    let removed_scalars = key.starts_with(DELETE_PREFIX);
    let key = if removed_scalars { name_behind(key, BAD_DELETE_LIST)? } else { key };
    if value.is_null() {
        original.shift_remove(key);
        return Ok(());
    }
    let merged = match (original.get(key), value) {
        (Some(Value::Array(old)), Value::Array(gone)) if removed_scalars => {
            Value::Array(old.iter().filter(|item| !gone.contains(item)).cloned().collect())
        }
        (_, _) if removed_scalars => return Ok(()),
        (Some(Value::Object(old)), Value::Object(new)) => {
            Value::Object(merge_objects(old.clone(), new, &place.below(key))?)
        }
        (Some(Value::Array(old)), Value::Array(new)) => Value::Array(merge_lists(old.clone(), new, &place.below(key))?),
        (_, new) => plain(new),
    };
    original.insert(key.to_owned(), merged);
    Ok(())
}

/// Value without nulls and directives: the result of a patch where there was no value.
fn plain(value: Value) -> Value {
    match value {
        Value::Object(fields) => {
            let kept = fields.into_iter().filter(|(key, value)| !key.starts_with('$') && !value.is_null());
            Value::Object(kept.map(|(key, value)| (key, plain(value))).collect())
        }
        Value::Array(items) => {
            let kept = items.into_iter().filter(|item| item.get(DIRECTIVE).is_none());
            Value::Array(kept.map(plain).collect())
        }
        scalar => scalar,
    }
}

fn retain_keys(original: &mut Object, patch: &mut Object) -> PatchResult<()> {
    let Some(list) = patch.shift_remove(RETAIN_KEYS) else { return Ok(()) };
    let malformed = || PatchError::Malformed(BAD_RETAIN_KEYS.to_owned());
    let keys: Vec<String> =
        list.as_array().ok_or_else(malformed)?.iter().filter_map(|key| key.as_str().map(str::to_owned)).collect();
    let directive = |key: &str| key.starts_with(DELETE_PREFIX) || key.starts_with(ORDER_PREFIX);
    let stray = |(key, value): (&String, &Value)| !value.is_null() && !directive(key) && !keys.contains(key);
    if patch.iter().any(stray) {
        return Err(malformed());
    }
    original.retain(|key, _| keys.contains(key));
    Ok(())
}

/// Merges the lists whose order the patch specifies; removes them and their order lists from the patch.
fn merge_ordered_lists(original: &mut Object, patch: &mut Object, place: &FieldPath<'_>) -> PatchResult<()> {
    let orders: Vec<String> = patch.keys().filter(|key| key.starts_with(ORDER_PREFIX)).cloned().collect();
    for order_key in orders {
        let order = list_or_error(patch.shift_remove(&order_key).unwrap_or_default())?;
        let field = name_behind(&order_key, BAD_ORDER_LIST)?;
        let below = place.below(field);
        let key = match below.list() {
            ListStrategy::MergeBy(key) => Some(key),
            ListStrategy::Atomic | ListStrategy::Set => None,
        };
        let old = original.get(field).cloned().map(list_or_error).transpose()?;
        let new = patch.shift_remove(field).map(list_or_error).transpose()?;
        check_order(new.as_deref().unwrap_or_default(), &order, key)?;
        let merged = match (&old, new) {
            (None, None) => continue,
            (Some(old), None) => old.clone(),
            (None, Some(new)) => new.into_iter().filter(|item| item.get(DIRECTIVE).is_none()).map(plain).collect(),
            (Some(old), Some(new)) => merge_lists(old.clone(), new, &below)?,
        };
        let sorted = in_order(merged, &order, old.as_deref().unwrap_or_default(), key)?;
        original.insert(field.to_owned(), Value::Array(sorted));
    }
    Ok(())
}

/// Checks that each element of the patch is in the order list, in the same sequence.
fn check_order(patch: &[Value], order: &[Value], key: Option<&str>) -> PatchResult<()> {
    if patch.is_empty() || order.is_empty() {
        return Ok(());
    }
    let mut rest = order.iter();
    for item in patch.iter().filter(|item| item.get(DIRECTIVE).is_none()) {
        let wanted = identity(item, key)?;
        loop {
            let Some(next) = rest.next() else {
                let (patch, order) = (go_list(patch), go_list(order));
                return Err(PatchError::Plain(format!(
                    "The order in patch list:\n{patch}\n doesn't match {ORDER_PREFIX} list:\n{order}\n"
                )));
            };
            if identity(next, key)? == wanted {
                break;
            }
        }
    }
    Ok(())
}

fn merge_lists(original: Vec<Value>, patch: Vec<Value>, place: &FieldPath<'_>) -> PatchResult<Vec<Value>> {
    if original.iter().chain(&patch).any(Value::is_array) && place.list() != ListStrategy::Atomic {
        return Err(PatchError::Unfit("lists of lists are not supported".to_owned()));
    }
    match place.list() {
        ListStrategy::Atomic => Ok(patch.into_iter().map(plain).collect()),
        ListStrategy::Set => {
            let mut merged = original.clone();
            merged.extend(patch.iter().filter(|item| !original.contains(item)).cloned());
            in_order(merged, &patch, &original, None)
        }
        ListStrategy::MergeBy(key) => merge_by(original, patch, key, place),
    }
}

fn merge_by(mut original: Vec<Value>, patch: Vec<Value>, key: &str, place: &FieldPath<'_>) -> PatchResult<Vec<Value>> {
    let mut elements = Vec::with_capacity(patch.len());
    let mut replace = false;
    for item in patch {
        match item.get(DIRECTIVE).map(|directive| directive.as_str().unwrap_or_default()) {
            None => elements.push(item),
            Some("replace") => replace = true,
            Some("delete") => {
                let gone = identity(&item, Some(key))?;
                original.retain(|old| old.get(key) != Some(&gone));
            }
            Some("merge") => {
                return Err(PatchError::Plain("merging lists cannot yet be specified in the patch".to_owned()));
            }
            Some(_) => {
                let fields = item.as_object().cloned().unwrap_or_default();
                return Err(unknown_directive(&item[DIRECTIVE], &fields));
            }
        }
    }
    if replace {
        return Ok(elements.into_iter().map(plain).collect());
    }
    let mut merged = original.clone();
    for item in &elements {
        let wanted = identity(item, Some(key))?;
        let found = merged.iter_mut().find(|old| old.get(key) == Some(&wanted)); // the first of duplicates
        match (found, item) {
            (Some(Value::Object(old)), Value::Object(new)) => {
                *old = merge_objects(std::mem::take(old), new.clone(), place)?;
            }
            _ => merged.push(plain(item.clone())),
        }
    }
    in_order(merged, &elements, &original, Some(key))
}

/// Sorts elements that `order` names into its order. Others keep their order, and precede a named one only if they
/// preceded it in `old`.
fn in_order(merged: Vec<Value>, order: &[Value], old: &[Value], key: Option<&str>) -> PatchResult<Vec<Value>> {
    let mut names = Vec::with_capacity(order.len());
    for item in order {
        names.push(identity(item, key)?);
    }
    let olds: Vec<Value> = old.iter().map(|item| identity(item, key)).collect::<PatchResult<_>>()?;
    let at = |list: &[Value], name: &Value| list.iter().position(|other| other == name);
    let (mut named, mut others) = (Vec::new(), std::collections::VecDeque::new());
    for item in merged {
        let name = identity(&item, key)?;
        let stood = at(&olds, &name);
        match at(&names, &name) {
            Some(place) => named.push((place, stood, item)),
            None => others.push_back((stood, item)),
        }
    }
    named.sort_by_key(|(place, _, _)| *place);
    let mut sorted = Vec::with_capacity(named.len() + others.len());
    for (_, stood, item) in named {
        while let Some((Some(other), _)) = others.front() {
            if stood.is_none_or(|stood| *other > stood) {
                break;
            }
            sorted.extend(others.pop_front().map(|(_, item)| item));
        }
        sorted.push(item);
    }
    sorted.extend(others.into_iter().map(|(_, item)| item));
    Ok(sorted)
}

/// Identity of a list element: the value of its merge key, or the scalar itself.
fn identity(item: &Value, key: Option<&str>) -> PatchResult<Value> {
    let Some(key) = key else { return Ok(item.clone()) };
    item.get(key)
        .cloned()
        .ok_or_else(|| PatchError::Plain(format!("map: {} does not contain declared merge key: {key}", go_value(item))))
}

fn name_behind<'a>(key: &'a str, otherwise: &str) -> PatchResult<&'a str> {
    key.split_once('/').map(|(_, name)| name).ok_or_else(|| PatchError::Malformed(otherwise.to_owned()))
}

fn list_or_error(value: Value) -> PatchResult<Vec<Value>> {
    match value {
        Value::Array(items) => Ok(items),
        Value::Null => Ok(Vec::new()),
        _ => Err(PatchError::Plain("expected a []interface {}, but received something else".to_owned())),
    }
}

fn unknown_directive(directive: &Value, fields: &Object) -> PatchError {
    let fields = go_value(&Value::Object(fields.clone()));
    PatchError::Plain(format!("unknown patch type: {} in map: {fields}", go_value(directive)))
}

fn go_list(items: &[Value]) -> String {
    format!("[{}]", items.iter().map(go_value).collect::<Vec<_>>().join(" "))
}

/// A value as Go prints it with `%v`.
fn go_value(value: &Value) -> String {
    match value {
        Value::Null => "<nil>".to_owned(),
        Value::String(text) => text.clone(),
        Value::Array(items) => go_list(items),
        Value::Object(fields) => {
            let mut fields: Vec<String> =
                fields.iter().map(|(key, value)| format!("{key}:{}", go_value(value))).collect();
            fields.sort();
            format!("map[{}]", fields.join(" "))
        }
        other => other.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn check(kind: &str, original: Value, patch: Value, expected: Value) {
        assert_eq!(strategic(kind, &original, &patch), Ok(expected.clone()), "{patch} on {original}");
        // Object fields have no order, lists do: compares the lists as well.
        let merged = strategic(kind, &original, &patch).expect("just seen");
        assert_eq!(merged.pointer("/status/conditions"), expected.pointer("/status/conditions"));
    }

    #[test]
    fn objects_merge_and_null_deletes() {
        check(
            "Pod",
            json!({"a": 1, "b": {"c": 2, "d": 3}}),
            json!({"b": {"c": null, "e": 4}}),
            json!({"a": 1, "b": {"d": 3, "e": 4}}),
        );
        check("Pod", json!({"a": {"b": 1}}), json!({"a": {"$patch": "replace", "c": 2}}), json!({"a": {"c": 2}}));
        check("Pod", json!({"a": {"b": 1}}), json!({"a": {"$patch": "delete"}}), json!({"a": {}}));
        check("Pod", json!({}), json!({"a": {"b": null, "c": 1}, "gone": null}), json!({"a": {"c": 1}}));
    }

    /// Spec 10 §5.3 row 2 (AC-10-17), and a condition that was dropped.
    #[test]
    fn conditions_merge_by_type_and_are_ordered() {
        let stored = json!({"status": {"conditions": [{"type": "PodScheduled", "status": "True"}, {"type": "Ready", "status": "True"}]}});
        check(
            "Pod",
            stored.clone(),
            json!({"status": {"$setElementOrder/conditions": [{"type": "Ready"}, {"type": "PodScheduled"}], "conditions": [{"type": "Ready", "status": "False"}]}}),
            json!({"status": {"conditions": [{"type": "Ready", "status": "False"}, {"type": "PodScheduled", "status": "True"}]}}),
        );
        check(
            "Pod",
            stored,
            json!({"status": {"$setElementOrder/conditions": [{"type": "PodScheduled"}], "conditions": [{"$patch": "delete", "type": "Ready"}]}}),
            json!({"status": {"conditions": [{"type": "PodScheduled", "status": "True"}]}}),
        );
    }

    /// Elements that the order list does not name keep their position before what they preceded.
    #[test]
    fn elements_missing_from_the_order_list_keep_their_position() {
        let list = |types: &[&str]| types.iter().map(|t| json!({"type": t})).collect::<Vec<_>>();
        for (old, order, added, expected) in [
            (vec!["x", "a", "b"], vec!["b", "a"], vec![], vec!["x", "b", "a"]),
            (vec!["a", "x", "b"], vec!["b", "a"], vec![], vec!["x", "b", "a"]),
            (vec!["a", "x", "b"], vec!["a", "b"], vec![], vec!["a", "x", "b"]),
            (vec!["a", "b", "x"], vec!["b", "a"], vec![], vec!["b", "a", "x"]),
            (vec!["x"], vec!["a", "b"], vec!["a", "b"], vec!["a", "b", "x"]),
            (vec!["a", "x"], vec!["n", "a"], vec!["n"], vec!["n", "a", "x"]),
        ] {
            let patch = json!({"status": {"$setElementOrder/conditions": list(&order), "conditions": list(&added)}});
            check(
                "Pod",
                json!({"status": {"conditions": list(&old)}}),
                patch,
                json!({"status": {"conditions": list(&expected)}}),
            );
        }
    }

    /// AC-10a-17: without the delete element the old address stays.
    #[test]
    fn pod_ips_merge_by_ip() {
        let stored = json!({"status": {"podIPs": [{"ip": "10.0.0.1"}]}});
        let order = json!([{"ip": "10.0.0.2"}]);
        check(
            "Pod",
            stored.clone(),
            json!({"status": {"$setElementOrder/podIPs": order, "podIPs": [{"ip": "10.0.0.2"}]}}),
            json!({"status": {"podIPs": [{"ip": "10.0.0.2"}, {"ip": "10.0.0.1"}]}}),
        );
        check(
            "Pod",
            stored,
            json!({"status": {"$setElementOrder/podIPs": order, "podIPs": [{"ip": "10.0.0.2"}, {"$patch": "delete", "ip": "10.0.0.1"}]}}),
            json!({"status": {"podIPs": [{"ip": "10.0.0.2"}]}}),
        );
    }

    /// AC-10a-19 and AC-10-23: the list is exactly the sent one, duplicates of the key included.
    #[test]
    fn a_list_is_replaced_on_demand() {
        let address = |kind: &str, address: &str| json!({"type": kind, "address": address});
        let stored = json!({"status": {"addresses": [address("InternalIP", "1.1.1.1"), address("Hostname", "n")]}});
        let wanted = [address("InternalIP", "1.1.1.2"), address("InternalIP", "::2"), address("Hostname", "n")];
        let mut sent = wanted.to_vec();
        sent.push(json!({"$patch": "replace"}));
        check("Node", stored, json!({"status": {"addresses": sent}}), json!({"status": {"addresses": wanted}}));
    }

    #[test]
    fn of_duplicates_in_the_store_the_first_is_merged() {
        let stored = json!({"status": {"addresses": [{"type": "A", "address": "1"}, {"type": "A", "address": "2"}]}});
        check(
            "Node",
            stored,
            json!({"status": {"addresses": [{"type": "A", "address": "3"}]}}),
            json!({"status": {"addresses": [{"type": "A", "address": "3"}, {"type": "A", "address": "2"}]}}),
        );
    }

    /// As with `kubectl patch`: an added container comes first.
    #[test]
    fn without_an_order_new_elements_stand_first() {
        let stored = json!({"spec": {"containers": [{"name": "a"}, {"name": "b"}]}});
        let patched = strategic("Pod", &stored, &json!({"spec": {"containers": [{"name": "c"}]}})).expect("applies");
        assert_eq!(patched, json!({"spec": {"containers": [{"name": "c"}, {"name": "a"}, {"name": "b"}]}}));
    }

    #[test]
    fn sets_of_scalars_grow_shrink_and_are_ordered() {
        let stored = json!({"metadata": {"finalizers": ["a", "b"]}});
        check(
            "Pod",
            stored.clone(),
            json!({"metadata": {"finalizers": ["c"]}}),
            json!({"metadata": {"finalizers": ["c", "a", "b"]}}),
        );
        check(
            "Pod",
            stored,
            json!({"metadata": {"$deleteFromPrimitiveList/finalizers": ["a"], "$setElementOrder/finalizers": ["c", "b"], "finalizers": ["c"]}}),
            json!({"metadata": {"finalizers": ["c", "b"]}}),
        );
    }

    #[test]
    fn volumes_keep_only_the_keys_that_are_retained() {
        let stored = json!({"spec": {"volumes": [{"name": "v", "emptyDir": {}}]}});
        let volume = json!({"name": "v", "hostPath": {"path": "/x"}});
        let mut sent = volume.clone();
        sent["$retainKeys"] = json!(["hostPath", "name"]);
        check("Pod", stored.clone(), json!({"spec": {"volumes": [sent]}}), json!({"spec": {"volumes": [volume]}}));
        let stray = json!({"spec": {"volumes": [{"name": "v", "hostPath": {}, "$retainKeys": ["name"]}]}});
        assert_eq!(strategic("Pod", &stored, &stray), Err(PatchError::Malformed(BAD_RETAIN_KEYS.to_owned())));
    }

    /// AC-10a-18 and the other refusals of spec 10 §5.5.
    #[test]
    fn what_does_not_fit_is_refused() {
        let stored = json!({"status": {"conditions": [{"type": "Ready"}], "podIPs": [{"ip": "1"}]}});
        let plain = |text: &str| PatchError::Plain(text.to_owned());
        for (patch, expected) in [
            (
                json!({"status": {"$setElementOrder/conditions": [{"type": "Ready"}], "conditions": [{"type": "Other", "status": "True"}]}}),
                plain(
                    "The order in patch list:\n[map[status:True type:Other]]\n doesn't match $setElementOrder list:\n[map[type:Ready]]\n",
                ),
            ),
            (
                json!({"status": {"$setElementOrder/conditions": [{"type": "A"}, {"type": "B"}], "conditions": [{"type": "B"}, {"type": "A"}]}}),
                plain(
                    "The order in patch list:\n[map[type:B] map[type:A]]\n doesn't match $setElementOrder list:\n[map[type:A] map[type:B]]\n",
                ),
            ),
            (
                json!({"status": {"conditions": [{"status": "True"}]}}),
                plain("map: map[status:True] does not contain declared merge key: type"),
            ),
            (
                json!({"status": {"conditions": [{"type": "Ready", "$patch": "what"}]}}),
                plain("unknown patch type: what in map: map[$patch:what type:Ready]"),
            ),
            (json!({"status": {"$setElementOrder": []}}), PatchError::Malformed(BAD_ORDER_LIST.to_owned())),
            (json!({"status": {"$deleteFromPrimitiveList": []}}), PatchError::Malformed(BAD_DELETE_LIST.to_owned())),
            (json!([1]), PatchError::Malformed("invalid JSON document".to_owned())),
        ] {
            assert_eq!(strategic("Pod", &stored, &patch), Err(expected), "{patch}");
        }
    }

    #[test]
    fn a_json_merge_patch_replaces_lists() {
        let stored = json!({"a": {"b": [1, 2], "c": 1}, "d": 1});
        let merged = json_merge(&stored, &json!({"a": {"b": [3], "c": null}}));
        assert_eq!(merged, json!({"a": {"b": [3]}, "d": 1}));
    }
}
