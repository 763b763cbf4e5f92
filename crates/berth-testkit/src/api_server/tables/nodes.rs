//! Table of nodes. Pure.

use jiff::Timestamp;
use serde_json::{Value, json};

use super::{
    super::rules::fields::{fields, is_true, list, text},
    Column, Printer,
    cells::{age, joined, name, text_or},
};

pub const PRINTER: Printer = Printer {
    columns: &[
        Column::NAME,
        Column::new("Status"),
        Column::new("Roles"),
        Column::AGE,
        Column::new("Version"),
        Column::wide("Internal-IP"),
        Column::wide("External-IP"),
        Column::wide("OS-Image"),
        Column::wide("Kernel-Version"),
        Column::wide("Container-Runtime"),
    ],
    cells,
};

const ROLE: &str = "node-role.kubernetes.io/";

fn cells(node: &Value, now: Timestamp) -> Vec<Value> {
    let info = |field: &str| text_or(node, &format!("/status/nodeInfo/{field}"), "<unknown>");
    let address = |kind: &str| {
        let found = list(node, "/status/addresses").iter().find(|address| address["type"] == kind);
        found.map_or_else(|| json!("<none>"), |address| address["address"].clone())
    };
    vec![
        name(node),
        json!(status(node)),
        roles(node),
        age(node, now),
        json!(text(node, "/status/nodeInfo/kubeletVersion")),
        address("InternalIP"),
        address("ExternalIP"),
        info("osImage"),
        info("kernelVersion"),
        info("containerRuntimeVersion"),
    ]
}

fn status(node: &Value) -> String {
    let ready = list(node, "/status/conditions").iter().find(|condition| condition["type"] == "Ready");
    let word = match ready.map(|condition| text(condition, "/status")) {
        None => "Unknown",
        Some("True") => "Ready",
        Some(_) => "NotReady",
    };
    let more = if is_true(node, "/spec/unschedulable") { ",SchedulingDisabled" } else { "" };
    format!("{word}{more}")
}

fn roles(node: &Value) -> Value {
    let mut roles: Vec<String> = fields(node, "/metadata/labels")
        .filter_map(|(key, value)| match key.strip_prefix(ROLE) {
            Some(role) => Some(role.to_owned()),
            None => value.as_str().filter(|_| key == "kubernetes.io/role").map(str::to_owned),
        })
        .filter(|role| !role.is_empty())
        .collect();
    roles.sort();
    roles.dedup();
    joined(&roles)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_node_shows_what_it_is() {
        let node = json!({"metadata": {"name": "n", "labels": {"node-role.kubernetes.io/b": "", "kubernetes.io/role": "a"}},
            "spec": {"unschedulable": true},
            "status": {"conditions": [{"type": "Ready", "status": "True"}], "nodeInfo": {"kubeletVersion": "v1"},
                "addresses": [{"type": "InternalIP", "address": "10.0.0.1"}]}});
        let expected = json!([
            "n",
            "Ready,SchedulingDisabled",
            "a,b",
            "<unknown>",
            "v1",
            "10.0.0.1",
            "<none>",
            "<unknown>",
            "<unknown>",
            "<unknown>"
        ]);
        assert_eq!(json!(cells(&node, Timestamp::UNIX_EPOCH)), expected);
        let other = json!({"status": {"conditions": [{"type": "Ready", "status": "Unknown"}]}});
        assert_eq!((status(&other), roles(&other)), ("NotReady".to_owned(), json!("<none>")));
        assert_eq!(status(&json!({})), "Unknown");
    }
}
