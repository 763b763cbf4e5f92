//! What kind a volume of a pod is. Pure.

use super::api;

/// The kinds a volume names, as the API spells them (`emptyDir`, `configMap`, …): one in a valid
/// pod, none or several in what a person wrote.
pub fn kinds(volume: &api::Volume) -> Vec<String> {
    // The API object has some thirty optional members; its own serialisation is their only list.
    match serde_json::to_value(volume) {
        Ok(serde_json::Value::Object(members)) => {
            members.into_iter().map(|(key, _)| key).filter(|key| key != "name").collect()
        }
        _ => Vec::new(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kinds_are_the_members_that_are_set() {
        let kinds_of = |json: serde_json::Value| kinds(&serde_json::from_value(json).expect("a volume"));
        assert_eq!(kinds_of(serde_json::json!({"name": "v"})), Vec::<String>::new());
        assert_eq!(kinds_of(serde_json::json!({"name": "v", "emptyDir": {}})), ["emptyDir"]);
        assert_eq!(
            kinds_of(serde_json::json!({"name": "v", "configMap": {}, "csi": {"driver": "d"}})),
            ["configMap", "csi"]
        );
    }
}
