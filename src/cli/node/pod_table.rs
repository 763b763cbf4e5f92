//! Pod list as a text table: one row per pod. Pure.

use jiff::Timestamp;
use k8s_openapi::api::core::v1::{ContainerStatus, Pod, PodStatus};

use super::pod_lookup::{name, namespace};
use crate::cli::table::{Cell, Color, age, painted};

/// Renders the table.
pub(super) fn table(pods: &[Pod], wide: bool, now: Timestamp, in_colour: bool) -> String {
    let mut head = vec!["NAMESPACE", "NAME", "READY", "STATUS", "RESTARTS", "AGE"];
    if wide {
        head.extend(["IP", "QOS", "SOURCE"]);
    }
    let mut rows: Vec<Vec<Cell>> = vec![head.into_iter().map(Cell::from).collect()];
    rows.extend(pods.iter().map(|pod| row(pod, wide, now)));
    painted(&rows, in_colour)
}

fn row(pod: &Pod, wide: bool, now: Timestamp) -> Vec<Cell> {
    let nothing = PodStatus::default();
    let status = pod.status.as_ref().unwrap_or(&nothing);
    let init = pod.spec.iter().flat_map(|spec| spec.init_containers.iter().flatten());
    let sidecars: Vec<&str> =
        init.filter(|c| c.restart_policy.as_deref() == Some("Always")).map(|c| c.name.as_str()).collect();
    let total = pod.spec.as_ref().map_or(0, |spec| spec.containers.len()) + sidecars.len();
    let is_up = |c: &&ContainerStatus| sidecars.contains(&c.name.as_str()) && c.started == Some(true) && c.ready;
    let ready = status.container_statuses.iter().flatten().filter(|container| container.ready).count()
        + status.init_container_statuses.iter().flatten().filter(is_up).count();
    let (label, colour) = status_text(pod, status, ready == total);
    let begun = pod.metadata.creation_timestamp.as_ref().or(status.start_time.as_ref());
    let mut row: Vec<Cell> = vec![
        namespace(pod).into(),
        name(pod).into(),
        format!("{ready}/{total}").into(),
        Cell::painted(label, Some(colour)),
        restarts(status, now).into(),
        begun.map_or_else(|| "<unknown>".to_owned(), |time| age(time.0, now)).into(),
    ];
    if wide {
        let source = pod.metadata.annotations.as_ref().and_then(|all| all.get("kubernetes.io/config.source"));
        let text = |text: Option<&String>| text.cloned().unwrap_or_else(|| "<none>".to_owned());
        row.push(text(status.pod_ip.as_ref()).into());
        row.push(text(status.qos_class.as_ref()).into());
        row.push(text(source).into());
    }
    row
}

fn restarts(status: &PodStatus, now: Timestamp) -> String {
    let all = || status.init_container_statuses.iter().chain(&status.container_statuses).flatten();
    let count: i64 = all().map(|container| i64::from(container.restart_count)).sum();
    let last = all().filter_map(|c| c.last_state.as_ref()?.terminated.as_ref()?.finished_at.as_ref()).max();
    match last {
        Some(last) if count > 0 => format!("{count} ({} ago)", age(last.0, now)),
        _ => count.to_string(),
    }
}

/// Status column, as kubectl computes it, and its color.
fn status_text(pod: &Pod, status: &PodStatus, is_ready: bool) -> (String, Color) {
    let phase = status.phase.as_deref().unwrap_or("Unknown");
    let mut word = status.reason.clone().unwrap_or_else(|| phase.to_owned());
    let init = status.init_container_statuses.as_deref().unwrap_or_default();
    // A started sidecar does not block initialization.
    let unfinished = |c: &&ContainerStatus| !(exit_code(c) == Some(0) || c.started == Some(true));
    if let Some(waits) = init.iter().find(unfinished).filter(|_| phase == "Pending" || phase == "Failed") {
        let done = init.iter().position(|c| c.name == waits.name).unwrap_or_default();
        word = reason(waits)
            .filter(|reason| reason != "PodInitializing")
            .map_or_else(|| format!("Init:{done}/{}", init.len()), |reason| format!("Init:{reason}"));
    } else {
        let all = status.container_statuses.as_deref().unwrap_or_default();
        let is_over = phase == "Succeeded" && status.reason.is_none();
        if let Some(reason) = all.iter().find_map(reason).filter(|_| status.reason.is_none()) {
            let some_run = all.iter().any(|c| c.ready && c.state.as_ref().is_some_and(|s| s.running.is_some()));
            let is_ready = status.conditions.iter().flatten().any(|c| c.type_ == "Ready" && c.status == "True");
            word = match reason.as_str() {
                "Completed" if some_run && is_ready => "Running".to_owned(),
                "Completed" if some_run => "NotReady".to_owned(),
                _ => reason,
            };
        } else if is_over {
            word = "Completed".to_owned();
        }
    }
    if pod.metadata.deletion_timestamp.is_some() {
        word = "Terminating".to_owned();
    }
    let colour = match word.as_str() {
        "Running" if is_ready => Color::Green,
        "Completed" | "Succeeded" => Color::Dim,
        "Running" | "NotReady" | "Pending" | "ContainerCreating" | "PodInitializing" | "Terminating" => Color::Yellow,
        word if word.starts_with("Init:") && word.contains('/') => Color::Yellow,
        _ => Color::Red,
    };
    (word, colour)
}

fn exit_code(status: &ContainerStatus) -> Option<i32> {
    Some(status.state.as_ref()?.terminated.as_ref()?.exit_code)
}

/// Why a container does not run; `None` if it runs.
fn reason(status: &ContainerStatus) -> Option<String> {
    let state = status.state.as_ref()?;
    if let Some(waiting) = &state.waiting {
        return waiting.reason.clone().filter(|reason| !reason.is_empty());
    }
    let exit = state.terminated.as_ref()?;
    let exit_reason = exit.reason.clone().filter(|reason| !reason.is_empty());
    Some(exit_reason.unwrap_or_else(|| match exit.signal {
        Some(signal) if signal != 0 => format!("Signal:{signal}"),
        _ => format!("ExitCode:{}", exit.exit_code),
    }))
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn pod(name: &str, status: Value) -> Pod {
        serde_json::from_value(json!({
            "metadata": {"name": name, "namespace": "n", "creationTimestamp": "2026-01-01T00:00:00Z",
                         "annotations": {"kubernetes.io/config.source": "file"}},
            "spec": {"containers": [{"name": "a"}, {"name": "b"}]},
            "status": status,
        }))
        .expect("a pod")
    }

    #[test]
    fn a_line_for_each_pod() {
        let running = json!({"running": {}});
        let of = |name: &str, ready: bool, state: &Value| json!({"name": name, "image": "", "imageID": "", "ready": ready, "restartCount": 0, "state": state});
        let mut crashed = of("b", false, &json!({"waiting": {"reason": "CrashLoopBackOff"}}));
        crashed["restartCount"] = json!(3);
        crashed["lastState"] = json!({"terminated": {"exitCode": 1, "finishedAt": "2026-01-01T00:59:00Z"}});
        let completed = json!({"terminated": {"exitCode": 0, "reason": "Completed"}});
        let pods = [
            pod(
                "good",
                json!({"phase": "Running", "podIP": "10.0.0.1", "qosClass": "Burstable",
                "containerStatuses": [of("a", true, &running), of("b", true, &running)]}),
            ),
            pod("bad", json!({"phase": "Running", "containerStatuses": [of("a", true, &running), crashed]})),
            pod("new", json!({"phase": "Pending", "initContainerStatuses": [of("i", false, &running)]})),
            pod("evicted", json!({"phase": "Failed", "reason": "Evicted"})),
            pod("done", json!({"phase": "Succeeded", "containerStatuses": [of("a", false, &completed)]})),
            pod(
                "killed",
                json!({"phase": "Failed",
                "containerStatuses": [of("a", false, &json!({"terminated": {"exitCode": 137, "signal": 9}}))]}),
            ),
            pod("odd", json!({"phase": "\u{1b}[2J"})),
            pod("none", json!({})),
        ];
        let now = "2026-01-01T01:00:00Z".parse().expect("a time");
        let text = table(&pods, false, now, false);
        let expected = "\
NAMESPACE   NAME      READY   STATUS             RESTARTS      AGE
n           good      2/2     Running            0             60m
n           bad       1/2     CrashLoopBackOff   3 (60s ago)   60m
n           new       0/2     Init:0/1           0             60m
n           evicted   0/2     Evicted            0             60m
n           done      0/2     Completed          0             60m
n           killed    0/2     Signal:9           0             60m
n           odd       0/2     \u{fffd}[2J               0             60m
n           none      0/2     Unknown            0             60m
";
        assert_eq!(text, expected);
        let sidecar = |started: bool| {
            let mut init_status = of("i", true, &running);
            init_status["started"] = json!(started);
            let all = [of("a", true, &running), of("b", true, &running)];
            let mut pod = pod(
                "side",
                json!({"phase": "Running", "initContainerStatuses": [init_status], "containerStatuses": all}),
            );
            let init = json!([{"name": "i", "restartPolicy": "Always"}]);
            pod.spec.as_mut().expect("a spec").init_containers = serde_json::from_value(init).expect("containers");
            pod
        };
        let waits = |name: &str, reason: &str| of(name, false, &json!({"waiting": {"reason": reason}}));
        let halves = |ready: &str| {
            json!({"phase": "Running", "conditions": [{"type": "Ready", "status": ready}],
                   "containerStatuses": [of("a", false, &completed), of("b", true, &running)]})
        };
        let both = [waits("a", "ErrImagePull"), waits("b", "CrashLoopBackOff")];
        for (pod, ready, word) in [
            (sidecar(true), "3/3", "Running"),
            (sidecar(false), "2/3", "Running"),
            (pod("both", json!({"phase": "Running", "containerStatuses": both})), "0/2", "ErrImagePull"),
            (pod("half", halves("True")), "1/2", "Running"),
            (pod("half", halves("False")), "1/2", "NotReady"),
        ] {
            let text = table(&[pod], false, now, false);
            let words: Vec<&str> = text.lines().nth(1).expect("a line").split_whitespace().collect();
            assert_eq!(words.get(2..4), Some([ready, word].as_slice()), "{text}");
        }
        let wide = table(&pods[..1], true, now, true);
        assert!(
            wide.contains("\u{1b}[32mRunning\u{1b}[0m   0          60m   10.0.0.1   Burstable   file\n"),
            "{wide:?}"
        );
    }
}
