//! Table of pods: readiness, status, and restarts aggregated over their containers. Pure.

use jiff::Timestamp;
use serde_json::{Value, json};

use super::{
    super::rules::fields::{is_true, list, number, text},
    Column, Printer, ages,
    cells::{age, name, text_or},
};

pub const PRINTER: Printer = Printer {
    columns: &[
        Column::NAME,
        Column::new("Ready"),
        Column::new("Status"),
        Column::new("Restarts"),
        Column::AGE,
        Column::wide("IP"),
        Column::wide("Node"),
        Column::wide("Nominated Node"),
        Column::wide("Readiness Gates"),
    ],
    cells,
};

/// Aggregate over the containers of a pod.
#[derive(Default)]
struct Sum {
    ready: usize,
    restarts: Restarts,
    /// Status text of the containers; the last one set takes precedence.
    reason: Option<String>,
}

/// Number of restarts, and the time of the last one.
#[derive(Clone, Default)]
struct Restarts {
    count: i64,
    last: String,
}

impl Restarts {
    fn add(&mut self, status: &Value) {
        self.count += number(status, "/restartCount").unwrap_or_default();
        let ended = text(status, "/lastState/terminated/finishedAt");
        if ended > self.last.as_str() {
            ended.clone_into(&mut self.last);
        }
    }

    fn text(&self, now: Timestamp) -> String {
        if self.count == 0 || self.last.is_empty() {
            return self.count.to_string();
        }
        format!("{} ({} ago)", self.count, ages::since(&json!({"at": self.last}), "/at", now))
    }
}

fn cells(pod: &Value, now: Timestamp) -> Vec<Value> {
    let sidecars = list(pod, "/spec/initContainers").iter().filter(|c| text(c, "/restartPolicy") == "Always").count();
    let total = list(pod, "/spec/containers").len() + sidecars;
    let sum = summed(pod);
    let address = match text(pod, "/status/podIPs/0/ip") {
        "" => text_or(pod, "/status/podIP", "<none>"),
        address => json!(address),
    };
    vec![
        name(pod),
        json!(format!("{}/{total}", sum.ready)),
        json!(status(pod, sum.reason)),
        json!(sum.restarts.text(now)),
        age(pod, now),
        address,
        text_or(pod, "/spec/nodeName", "<none>"),
        text_or(pod, "/status/nominatedNodeName", "<none>"),
        json!(gates(pod)),
    ]
}

fn has_condition(pod: &Value, kind: &str) -> bool {
    let is_it = |condition: &Value| condition["type"] == kind && condition["status"] == "True";
    list(pod, "/status/conditions").iter().any(is_it)
}

fn summed(pod: &Value) -> Sum {
    let mut sum = Sum::default();
    let (waits, sidecars) = initialising(pod, &mut sum);
    if waits && !has_condition(pod, "Initialized") {
        return sum;
    }
    sum.restarts = sidecars;
    let mut runs = false;
    for status in list(pod, "/status/containerStatuses").iter().rev() {
        sum.restarts.add(status);
        let (waiting, ended) = (text(status, "/state/waiting/reason"), status.pointer("/state/terminated"));
        if !waiting.is_empty() {
            sum.reason = Some(waiting.to_owned());
        } else if let Some(ended) = ended {
            sum.reason = Some(end_of(ended));
        } else if is_true(status, "/ready") && status.pointer("/state/running").is_some() {
            runs = true;
            sum.ready += 1;
        }
    }
    if runs && sum.reason.as_deref() == Some("Completed") {
        let word = if has_condition(pod, "Ready") { "Running" } else { "NotReady" };
        sum.reason = Some(word.to_owned());
    }
    sum
}

/// Returns whether an init container is not done, and the restarts of the sidecars.
fn initialising(pod: &Value, sum: &mut Sum) -> (bool, Restarts) {
    let mut sidecars = Restarts::default();
    let all = list(pod, "/spec/initContainers");
    for (index, status) in list(pod, "/status/initContainerStatuses").iter().enumerate() {
        sum.restarts.add(status);
        let named = |container: &&Value| container["name"] == status["name"];
        let is_sidecar = all.iter().find(named).is_some_and(|container| text(container, "/restartPolicy") == "Always");
        if is_sidecar {
            sidecars.add(status);
        }
        let ended = status.pointer("/state/terminated");
        if ended.is_some_and(|ended| number(ended, "/exitCode") == Some(0)) {
            continue;
        }
        if is_sidecar && is_true(status, "/started") {
            sum.ready += usize::from(is_true(status, "/ready"));
            continue;
        }
        let waiting = text(status, "/state/waiting/reason");
        sum.reason = Some(match ended {
            Some(ended) => format!("Init:{}", end_of(ended)),
            None if !["", "PodInitializing"].contains(&waiting) => format!("Init:{waiting}"),
            None => format!("Init:{index}/{}", all.len()),
        });
        return (true, sidecars);
    }
    (false, sidecars)
}

fn end_of(ended: &Value) -> String {
    match (text(ended, "/reason"), number(ended, "/signal").unwrap_or_default()) {
        ("", 0) => format!("ExitCode:{}", number(ended, "/exitCode").unwrap_or_default()),
        ("", signal) => format!("Signal:{signal}"),
        (reason, _) => reason.to_owned(),
    }
}

fn status(pod: &Value, reason: Option<String>) -> String {
    let (phase, own) = (text(pod, "/status/phase"), text(pod, "/status/reason"));
    if !text(pod, "/metadata/deletionTimestamp").is_empty() {
        if own == "NodeLost" {
            return "Unknown".to_owned();
        }
        if !["Succeeded", "Failed"].contains(&phase) {
            return "Terminating".to_owned();
        }
    }
    if let Some(reason) = reason {
        return reason;
    }
    let gated = |c: &Value| c["type"] == "PodScheduled" && c["reason"] == "SchedulingGated";
    if list(pod, "/status/conditions").iter().any(gated) {
        return "SchedulingGated".to_owned();
    }
    if own.is_empty() { phase.to_owned() } else { own.to_owned() }
}

fn gates(pod: &Value) -> String {
    let all = list(pod, "/spec/readinessGates");
    if all.is_empty() {
        return "<none>".to_owned();
    }
    let open = all.iter().filter(|gate| has_condition(pod, text(gate, "/conditionType"))).count();
    format!("{open}/{}", all.len())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shown(spec: Value, status: Value) -> (String, String, String) {
        let now = "2026-01-01T01:00:00Z".parse().expect("a time");
        let all = cells(&json!({"metadata": {"name": "p"}, "spec": spec, "status": status}), now);
        let text = |index: usize| all[index].as_str().expect("a text").to_owned();
        (text(1), text(2), text(3))
    }

    fn check(spec: Value, status: Value, expected: [&str; 3]) {
        let (ready, status, restarts) = shown(spec, status);
        assert_eq!([ready.as_str(), status.as_str(), restarts.as_str()], expected);
    }

    #[test]
    fn the_last_word_of_containers_is_the_status() {
        let one = || json!({"containers": [{"name": "c"}]});
        let with = |state: Value, restarts: i64| {
            json!({"phase": "Running", "containerStatuses": [{"name": "c", "ready": state.get("running").is_some(),
                "restartCount": restarts, "state": state, "lastState": {"terminated": {"finishedAt": "2026-01-01T00:59:00Z"}}}]})
        };
        check(one(), json!({"phase": "Pending"}), ["0/1", "Pending", "0"]);
        check(one(), with(json!({"running": {}}), 0), ["1/1", "Running", "0"]);
        check(one(), with(json!({"running": {}}), 2), ["1/1", "Running", "2 (60s ago)"]);
        let waiting = json!({"waiting": {"reason": "CrashLoopBackOff"}});
        check(one(), with(waiting, 3), ["0/1", "CrashLoopBackOff", "3 (60s ago)"]);
        check(one(), with(json!({"terminated": {"exitCode": 3}}), 0), ["0/1", "ExitCode:3", "0"]);
        check(one(), with(json!({"terminated": {"exitCode": 1, "reason": "Error"}}), 0), ["0/1", "Error", "0"]);
        check(one(), json!({"phase": "Failed", "reason": "Evicted"}), ["0/1", "Evicted", "0"]);
    }

    #[test]
    fn init_containers_come_first_and_sidecars_count() {
        let spec = json!({"containers": [{"name": "c"}], "initContainers": [{"name": "i"}, {"name": "s", "restartPolicy": "Always"}]});
        let begins = json!({"phase": "Pending", "initContainerStatuses": [{"name": "i", "restartCount": 0, "state": {"running": {}}}]});
        check(spec.clone(), begins, ["0/2", "Init:0/2", "0"]);
        let fails = json!({"phase": "Pending", "initContainerStatuses": [{"name": "i", "restartCount": 1,
            "state": {"waiting": {"reason": "CrashLoopBackOff"}}}]});
        check(spec.clone(), fails, ["0/2", "Init:CrashLoopBackOff", "1"]);
        let runs = json!({"phase": "Running", "conditions": [{"type": "Initialized", "status": "True"}],
            "initContainerStatuses": [{"name": "i", "restartCount": 4, "state": {"terminated": {"exitCode": 0}}},
                {"name": "s", "restartCount": 1, "ready": true, "started": true, "state": {"running": {}}}],
            "containerStatuses": [{"name": "c", "restartCount": 0, "ready": true, "state": {"running": {}}}]});
        check(spec, runs, ["2/2", "Running", "1"]);
    }

    #[test]
    fn who_is_deleted_terminates() {
        let mut pod =
            json!({"metadata": {"deletionTimestamp": "2026-01-01T00:00:00Z"}, "status": {"phase": "Running"}});
        assert_eq!(status(&pod, Some("Completed".to_owned())), "Terminating");
        pod["status"]["phase"] = json!("Succeeded");
        assert_eq!(status(&pod, Some("Completed".to_owned())), "Completed");
    }
}
