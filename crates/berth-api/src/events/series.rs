//! `Event` objects of the core API group. Pure.
//!
//! Implements spec 05 §13.1, 10 §4.9.

use jiff::Timestamp;
use serde_json::{Value, json};

use berth_types::PodRef;

/// Component name in the event source.
const REPORTER: &str = "kubelet";
/// Namespace of events about cluster-scoped objects.
const DEFAULT_NAMESPACE: &str = "default";

/// `involvedObject` of an event: the object that the event is about.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct InvolvedObject {
    /// `Pod`, `Node`, `PersistentVolumeClaim` or `PersistentVolume`.
    pub kind: &'static str,
    /// Namespace; empty for cluster-scoped objects.
    pub namespace: String,
    /// Object name.
    pub name: String,
    /// UID; for the node, its name.
    pub uid: String,
    /// Field of the object (`spec.containers{web}`).
    pub field_path: Option<String>,
}

impl InvolvedObject {
    /// Reference to a pod, or a field of it.
    pub fn of_pod(pod: &PodRef, field_path: Option<String>) -> Self {
        Self {
            kind: "Pod",
            namespace: pod.namespace.to_string(),
            name: pod.name.to_string(),
            uid: pod.uid.to_string(),
            field_path,
        }
    }

    /// Reference to this node.
    pub fn of_node(name: &str) -> Self {
        let name = name.to_owned();
        Self { kind: "Node", namespace: String::new(), uid: name.clone(), name, field_path: None }
    }

    /// Kind, namespace, name, and UID, without the field path.
    pub fn object(&self) -> (&'static str, &str, &str, &str) {
        (self.kind, &self.namespace, &self.name, &self.uid)
    }

    /// Namespace of events about this object; `default` for cluster-scoped objects.
    pub fn event_namespace(&self) -> &str {
        if self.namespace.is_empty() { DEFAULT_NAMESPACE } else { &self.namespace }
    }

    fn reference(&self) -> Value {
        let mut reference = json!({"kind": self.kind, "apiVersion": "v1", "name": self.name, "uid": self.uid});
        if !self.namespace.is_empty() {
            reference["namespace"] = self.namespace.as_str().into();
        }
        if let Some(path) = self.field_path.as_deref().filter(|path| !path.is_empty()) {
            reference["fieldPath"] = path.into();
        }
        reference
    }
}

/// Event with the count of its occurrences.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Series {
    /// Involved object.
    pub about: InvolvedObject,
    /// Whether its type is `Warning` rather than `Normal`.
    pub warning: bool,
    /// Machine-readable reason.
    pub reason: String,
    /// Latest message.
    pub message: String,
    /// Object name of the event.
    pub name: String,
    /// Time of the first occurrence.
    pub first: Timestamp,
    /// Time of the latest occurrence.
    pub last: Timestamp,
    /// Number of occurrences.
    pub count: i32,
    /// Annotations of the event.
    pub annotations: Vec<(&'static str, String)>,
}

impl Series {
    /// Event object to create; `node` is this node's name.
    pub fn object(&self, node: &str) -> Value {
        let mut event = json!({
            "apiVersion": "v1",
            "kind": "Event",
            "metadata": {"name": self.name, "namespace": self.about.event_namespace()},
            "involvedObject": self.about.reference(),
            "reason": self.reason,
            "message": self.message,
            "source": {"component": REPORTER, "host": node},
            "firstTimestamp": seconds(self.first),
            "lastTimestamp": seconds(self.last),
            "count": self.count,
            "type": if self.warning { "Warning" } else { "Normal" },
            "eventTime": null,
            "reportingComponent": REPORTER,
            "reportingInstance": node,
        });
        if !self.annotations.is_empty() {
            let all = self.annotations.iter().map(|(key, value)| ((*key).to_owned(), value.as_str().into()));
            event["metadata"]["annotations"] = Value::Object(all.collect());
        }
        event
    }

    /// Patch for a further occurrence.
    pub fn change(&self) -> Value {
        json!({"count": self.count, "lastTimestamp": seconds(self.last), "message": self.message})
    }
}

/// RFC 3339 time in whole seconds, as the API server writes times.
fn seconds(at: Timestamp) -> String {
    Timestamp::from_second(at.as_second()).unwrap_or(at).to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_event_is_written_as_the_api_knows_it() {
        let pod = PodRef { uid: "u".into(), name: "p".into(), namespace: "n".into() };
        let first: Timestamp = "2026-01-01T00:00:00.5Z".parse().expect("a time");
        let series = Series {
            about: InvolvedObject::of_pod(&pod, Some("spec.containers{c}".to_owned())),
            warning: true,
            reason: "BackOff".to_owned(),
            message: "m".to_owned(),
            name: "p.1".to_owned(),
            first,
            last: first,
            count: 1,
            annotations: Vec::new(),
        };
        let source = json!({"component": "kubelet", "host": "node"});
        assert_eq!(
            series.object("node"),
            json!({"apiVersion": "v1", "kind": "Event", "metadata": {"name": "p.1", "namespace": "n"},
                "involvedObject": {"kind": "Pod", "apiVersion": "v1", "namespace": "n", "name": "p", "uid": "u",
                    "fieldPath": "spec.containers{c}"},
                "reason": "BackOff", "message": "m", "source": source, "firstTimestamp": "2026-01-01T00:00:00Z",
                "lastTimestamp": "2026-01-01T00:00:00Z", "count": 1, "type": "Warning", "eventTime": null,
                "reportingComponent": "kubelet", "reportingInstance": "node"})
        );
        assert_eq!(series.change().to_string(), r#"{"count":1,"lastTimestamp":"2026-01-01T00:00:00Z","message":"m"}"#);
        let annotated = Series { annotations: vec![("starved_resource", "memory".to_owned())], ..series.clone() };
        assert_eq!(annotated.object("node")["metadata"]["annotations"], json!({"starved_resource": "memory"}));
        let node = Series { about: InvolvedObject::of_node("node"), warning: false, ..series }.object("node");
        assert_eq!((&node["metadata"]["namespace"], &node["type"]), (&json!("default"), &json!("Normal")));
        assert_eq!(node["involvedObject"], json!({"kind": "Node", "apiVersion": "v1", "name": "node", "uid": "node"}));
    }
}
