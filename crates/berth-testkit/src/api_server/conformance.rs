//! Conformance checks of node clients: forbidden request patterns, pod and lease transitions.
//!
//! Implements spec 10a §10.

use std::collections::{BTreeMap, BTreeSet};

use jiff::Timestamp;
use serde_json::{Value, json};

use super::{
    ApiServer,
    recorder::{RecordedRequest, Requests},
    view::Change,
};

/// Resources that a node may list and watch only with a field selector.
const SELECTED: &[&str] = &[
    "pods",
    "nodes",
    "secrets",
    "configmaps",
    "certificatesigningrequests.certificates.k8s.io",
    "resourceslices.resource.k8s.io",
];

/// Checks every commit for forbidden state transitions.
#[derive(Debug, Default)]
pub struct TransitionChecker(Vec<String>);

impl TransitionChecker {
    /// Checks one committed change and records its violations.
    pub fn check(&mut self, change: &Change) {
        let (Some(before), Some(after)) = (&change.before, &change.after) else { return };
        let name = || {
            let metadata = &after["metadata"];
            format!("{} {}/{}", change.resource, word(&metadata["namespace"]), word(&metadata["name"]))
        };
        match change.resource.as_str() {
            "pods" => {
                let is_over = ["Succeeded", "Failed"].contains(&word(&after["status"]["phase"]));
                if is_over && is_ready(after) {
                    self.0.push(format!("{}: condition Ready is True in phase {}", name(), after["status"]["phase"]));
                }
                let was_over = ["Succeeded", "Failed"].contains(&word(&before["status"]["phase"]));
                if was_over && before["status"]["phase"] != after["status"]["phase"] {
                    let (from, to) = (&before["status"]["phase"], &after["status"]["phase"]);
                    self.0.push(format!("{}: phase changed to {to} after {from}", name()));
                }
                for (container, from, to) in uncounted_restarts(before, after) {
                    self.0.push(format!(
                        "{}: container {container} restarted without increasing restartCount: {from} to {to}",
                        name()
                    ));
                }
            }
            "leases.coordination.k8s.io" => {
                let renewed = |lease: &Value| word(&lease["spec"]["renewTime"]).parse::<Timestamp>().ok();
                if renewed(after) < renewed(before) {
                    self.0.push(format!("{}: renewTime went backwards", name()));
                }
            }
            _ => {}
        }
    }
}

fn word(value: &Value) -> &str {
    value.as_str().unwrap_or_default()
}

fn is_ready(pod: &Value) -> bool {
    let conditions = pod["status"]["conditions"].as_array().into_iter().flatten();
    conditions.into_iter().any(|condition| condition["type"] == "Ready" && condition["status"] == "True")
}

/// Containers that went from terminated to running without an increased restart count.
fn uncounted_restarts(before: &Value, after: &Value) -> Vec<(String, Value, Value)> {
    let containers = |pod: &Value| {
        let lists = ["initContainerStatuses", "containerStatuses"].map(|list| pod["status"][list].clone());
        lists.into_iter().flat_map(|list| list.as_array().cloned().unwrap_or_default()).collect::<Vec<_>>()
    };
    let mut found = Vec::new();
    for old in containers(before) {
        let Some(new) = containers(after).into_iter().find(|new| new["name"] == old["name"]) else { continue };
        let is_over = !old["state"]["terminated"].is_null();
        let is_running = !new["state"]["running"].is_null();
        if is_over && is_running && new["restartCount"].as_u64() <= old["restartCount"].as_u64() {
            found.push((word(&old["name"]).to_owned(), old["state"].clone(), new["state"].clone()));
        }
    }
    found
}

impl ApiServer {
    /// Violations by node clients, as text; `is_announced` exempts expected 403 responses.
    pub fn violations(&self, is_announced: impl Fn(&RecordedRequest) -> bool) -> Vec<String> {
        let log = self.log().filter(|logged| logged.user.starts_with("system:node:"));
        let mut found: Vec<String> = log.iter().flat_map(|logged| of_one(logged, &is_announced)).collect();
        found.extend(idle_patches(&log));
        found.extend(repeated_deletes(&log));
        found.extend(stale_puts(&log));
        found.extend(self.shared.core().witness.0.iter().cloned());
        found
    }

    /// Asserts that node clients behaved as kubelets do.
    ///
    /// # Panics
    /// There are violations.
    pub fn assert_conformance(&self) {
        self.assert_conformance_except(|_| false);
    }

    /// Asserts that node clients behaved as kubelets do, except for expected 403 responses.
    ///
    /// # Panics
    /// There are violations.
    pub fn assert_conformance_except(&self, is_announced: impl Fn(&RecordedRequest) -> bool) {
        let offences = self.violations(is_announced);
        assert!(offences.is_empty(), "{}", offences.join("\n"));
    }
}

fn of_one(logged: &RecordedRequest, is_announced: &impl Fn(&RecordedRequest) -> bool) -> Vec<String> {
    let is_write = ["create", "update", "patch", "delete", "deletecollection"].contains(&logged.verb);
    let is_read_of_many = ["list", "watch"].contains(&logged.verb);
    let resource = logged.resource.as_str();
    let offences = [
        (logged.code == Some(403) && !is_announced(logged), "unexpected 403 Forbidden"),
        (logged.code == Some(422), "422 Unprocessable Entity"),
        (logged.verb == "update" && ["pods", "nodes"].contains(&resource), "PUT of a pod or node"),
        (
            is_read_of_many && SELECTED.contains(&resource) && logged.query("fieldSelector").is_none(),
            "list or watch without fieldSelector",
        ),
        (is_write && !logged.agent().starts_with("kubelet/"), "write with a User-Agent other than kubelet's"),
        (
            logged.verb == "patch" && logged.header("content-type") != "application/strategic-merge-patch+json",
            "patch is not a strategic merge patch",
        ),
    ];
    offences.into_iter().filter(|(is, _)| *is).map(|(_, what)| format!("{what}: {logged}")).collect()
}

/// Objects that received more than one empty patch.
fn idle_patches(log: &Requests) -> Vec<String> {
    let mut counts: BTreeMap<(&str, &str, &str), usize> = BTreeMap::new();
    for logged in log.iter().filter(|logged| logged.verb == "patch" && is_idle(&logged.body)) {
        *counts.entry((&logged.resource, &logged.namespace, &logged.name)).or_default() += 1;
    }
    let many = counts.into_iter().filter(|(_, count)| *count > 1);
    many.map(|((what, place, name), count)| format!("{count} empty patches of {what} {place}/{name}")).collect()
}

fn is_idle(patch: &Value) -> bool {
    let mut bare = patch.clone();
    if let Some(metadata) = bare["metadata"].as_object_mut() {
        metadata.shift_remove("uid");
    }
    bare == json!({}) || bare == json!({"metadata": {}})
}

/// Pods that were deleted by two effective DELETEs.
fn repeated_deletes(log: &Requests) -> Vec<String> {
    let mut seen = BTreeSet::new();
    let deletes = log.of("pods").verb("delete").filter(|logged| logged.code == Some(200) && logged.rv.is_some());
    let again = deletes.iter().filter(|logged| {
        let uid = logged.body["preconditions"]["uid"].as_str().unwrap_or(&logged.name).to_owned();
        !seen.insert((logged.namespace.clone(), uid))
    });
    again.map(|logged| format!("pod deleted twice: {logged}")).collect()
}

/// PUTs with a resource version older than the same client's last write of the object.
fn stale_puts(log: &Requests) -> Vec<String> {
    let mut written: BTreeMap<(String, String, String, String), u64> = BTreeMap::new();
    let mut found = Vec::new();
    for logged in log.iter().filter(|logged| ["create", "update", "patch"].contains(&logged.verb)) {
        let place = [&logged.user, &logged.resource, &logged.namespace, &logged.name].map(Clone::clone);
        let last = written.entry(place.into()).or_default();
        let version = logged.body["metadata"]["resourceVersion"].as_str().and_then(|rv| rv.parse().ok());
        if logged.verb == "update" && version.is_some_and(|rv: u64| rv < *last) {
            found.push(format!("PUT with a resourceVersion older than the client's last write {last}: {logged}"));
        }
        *last = logged.rv.unwrap_or(*last).max(*last);
    }
    found
}
