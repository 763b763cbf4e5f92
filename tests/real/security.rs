//! Security contexts in real containers: users, groups, capabilities, and read-only roots.

use serde_json::{Value, json};

use crate::node::{Node, UNTIL_STOPPED, shell};
use berth_testkit::process::{container, manifest_of};

async fn output_of(node: &Node, name: &str, context: Value, pod_context: Value, script: &str) -> String {
    let mut main = shell("main", &format!("{script}; echo done; {UNTIL_STOPPED}"));
    main["securityContext"] = context;
    let spec = json!({"containers": [main], "securityContext": pod_context, "terminationGracePeriodSeconds": 5});
    let pod = node.run(&manifest_of(name, spec)).await;
    let out = node.until_output(&pod, "main", "done\n").await;
    node.remove(&pod).await;
    out
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_container_runs_as_the_configured_user() {
    let Some(node) = Node::shared("a_container_runs_as_the_configured_user").await else { return };
    let context = json!({"runAsUser": 1000, "runAsGroup": 1234, "runAsNonRoot": true});
    let groups = json!({"supplementalGroups": [4321], "fsGroup": 5678});
    let out = output_of(&node, "asuser", context, groups, "id -u; id -g; id -G").await;
    let lines: Vec<&str> = out.lines().collect();
    assert_eq!(lines.get(..2), Some(["1000", "1234"].as_slice()), "{out}");
    let all: Vec<&str> = lines.get(2).map(|line| line.split(' ').collect()).unwrap_or_default();
    assert!(all.contains(&"4321") && all.contains(&"5678"), "{out}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_container_may_do_what_it_is_allowed() {
    let Some(node) = Node::shared("a_container_may_do_what_it_is_allowed").await else { return };
    let script = "grep -E 'CapEff|NoNewPrivs|Seccomp:' /proc/self/status; touch /file && echo touched || echo refused";
    let context = json!({
        "readOnlyRootFilesystem": true,
        "allowPrivilegeEscalation": false,
        "capabilities": {"drop": ["ALL"], "add": ["NET_BIND_SERVICE"]},
    });
    let out = output_of(&node, "confined", context, json!({}), script).await;
    assert!(out.contains("CapEff:\t0000000000000400\n") && out.contains("NoNewPrivs:\t1\n"), "{out}");
    assert!(out.contains("refused\n") && !out.contains("touched"), "{out}");
    let out = output_of(&node, "ordinary", json!({}), json!({}), script).await;
    assert!(out.contains("NoNewPrivs:\t0\n") && out.contains("touched\n"), "{out}");
}

/// A container with runAsNonRoot whose image runs as root does not start; the status has the reason.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn root_is_refused_where_it_must_not_be() {
    let Some(node) = Node::shared("root_is_refused_where_it_must_not_be").await else { return };
    let mut main = shell("main", UNTIL_STOPPED);
    main["securityContext"] = json!({"runAsNonRoot": true});
    node.home.put_pod(&manifest_of("notroot", json!({"containers": [main]})));
    let waits = |pod: &Value| container(pod, "main")["state"]["waiting"]["reason"] == "CreateContainerConfigError";
    let pod = node.agent.until_pod("notroot", "refused", waits).await;
    let message = container(&pod, "main")["state"]["waiting"]["message"].as_str().unwrap_or_default();
    assert!(message.contains("container has runAsNonRoot and image will run as root"), "{message}");
    node.remove(&pod).await;
}
