//! Pod termination on a real runtime: hooks, grace periods, changed manifests, and killed processes.

use std::{
    fs,
    path::PathBuf,
    time::{Duration, Instant},
};

use serde_json::{Value, json};

use crate::node::{Node, kill_process, lasting, shell, uid_of};
use berth_testkit::process::{container, is_ready, manifest_of};

/// A host directory that outlives the pods that write into it, and a volume for it.
fn diary(node: &Node, name: &str) -> (PathBuf, Value) {
    let path = node.home.path().join(format!("diary-{name}"));
    fs::create_dir_all(&path).expect("a folder");
    let volume = json!({"name": "diary", "hostPath": {"path": path}});
    (path.join("entries"), volume)
}

fn with_diary(mut container: Value) -> Value {
    container["volumeMounts"] = json!([{"name": "diary", "mountPath": "/diary"}]);
    container
}

fn read(path: &PathBuf) -> String {
    fs::read_to_string(path).unwrap_or_default()
}

/// Hooks really run, in their order, and the signal follows the preStop hook.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn hooks_run_before_and_after() {
    let Some(node) = Node::shared("hooks_run_before_and_after").await else { return };
    let (entries, volume) = diary(&node, "hooks");
    // The postStart hook waits until the trap is set.
    let script =
        "trap 'echo signal >> /diary/entries; exit 0' TERM; touch /ready; while true; do sleep 1 & wait $!; done";
    let mut main = with_diary(shell("main", script));
    let exec = |word: &str| json!({"exec": {"command": ["sh", "-c", format!("echo {word} >> /diary/entries")]}});
    let started = "until [ -e /ready ]; do sleep 0.1; done; echo started >> /diary/entries";
    let started = json!({"exec": {"command": ["sh", "-c", started]}});
    main["lifecycle"] = json!({"postStart": started, "preStop": exec("stopping")});
    let spec = json!({"terminationGracePeriodSeconds": 20, "containers": [main], "volumes": [volume]});
    let pod = node.run(&manifest_of("hooked", spec)).await;
    assert_eq!(read(&entries), "started\n", "the container is not running before its hook has ended");
    node.remove(&pod).await;
    assert_eq!(read(&entries), "started\nstopping\nsignal\n");
}

/// A container has its whole grace period to exit, and no more.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_grace_period_is_kept() {
    let Some(node) = Node::shared("the_grace_period_is_kept").await else { return };
    let (entries, volume) = diary(&node, "grace");
    let slow = "trap 'sleep 2; echo finished >> /diary/entries; exit 0' TERM; echo begun >> /diary/entries; \
                while true; do sleep 1 & wait $!; done";
    let spec = json!({"terminationGracePeriodSeconds": 30, "containers": [with_diary(shell("main", slow))], "volumes": [volume]});
    let pod = node.run(&manifest_of("slow", spec)).await;
    node.agent.until("it listens to signals", async || read(&entries) == "begun\n").await;
    let begun = Instant::now();
    node.remove(&pod).await;
    assert_eq!(read(&entries), "begun\nfinished\n");
    let took = begun.elapsed();
    assert!(
        took < Duration::from_secs(20),
        "it was not waited for longer than it took: {took:?}\n{}",
        node.agent.log_end()
    );

    let deaf = "trap '' TERM; while true; do sleep 1; done";
    let spec = json!({"terminationGracePeriodSeconds": 3, "containers": [shell("main", deaf)]});
    let pod = node.run(&manifest_of("deaf", spec)).await;
    let begun = Instant::now();
    node.remove(&pod).await;
    let took = begun.elapsed();
    assert!(took >= Duration::from_secs(3) && took < Duration::from_secs(20), "{took:?}\n{}", node.agent.log_end());
}

/// A changed manifest replaces its pod: the old one is gone before the new one runs.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_changed_manifest_replaces_the_pod() {
    let Some(node) = Node::shared("a_changed_manifest_replaces_the_pod").await else { return };
    // AC-02a-16
    let (entries, volume) = diary(&node, "change");
    let with = |word: &str| {
        let script = format!(
            "trap 'echo {word} ends >> /diary/entries; exit 0' TERM; echo {word} begins >> /diary/entries; \
             while true; do sleep 1 & wait $!; done"
        );
        let spec = json!({"containers": [with_diary(shell("main", &script))], "volumes": [volume], "terminationGracePeriodSeconds": 20});
        manifest_of("changing", spec)
    };
    let old = node.run(&with("old")).await;
    node.agent.until("the first one writes", async || read(&entries) == "old begins\n").await;
    node.home.put_pod(&with("new"));
    node.agent.until_pod("changing", "replaced", |pod| uid_of(pod) != uid_of(&old)).await;
    let new = node.agent.until_ready("changing").await;
    node.agent.until("the second one writes", async || read(&entries).ends_with("new begins\n")).await;
    assert_eq!(read(&entries), "old begins\nold ends\nnew begins\n");
    assert_ne!(uid_of(&old), uid_of(&new));
    node.until_nothing_is_left(&old).await;
    node.remove(&new).await;
}

/// A container killed from outside the agent.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_is_killed_from_outside_comes_back() {
    let Some(node) = Node::shared("what_is_killed_from_outside_comes_back").await else { return };
    let pod = node.run(&lasting("killed")).await;
    kill_process(node.pid(&pod, "main"));
    let again = |pod: &Value| {
        let main = container(pod, "main");
        main["restartCount"] == 1 && main["ready"] == true
    };
    let after = node.agent.until_pod("killed", "running again", again).await;
    let last = &container(&after, "main")["lastState"]["terminated"];
    assert_eq!(last["exitCode"], 137, "{last:#}");
    assert_eq!(after["status"]["podIP"], pod["status"]["podIP"], "the sandbox stays");
    node.remove(&after).await;
}

/// Killing a sandbox kills its containers; the pod gets another one.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_dead_sandbox_is_replaced() {
    let Some(node) = Node::shared("a_dead_sandbox_is_replaced").await else { return };
    // AC-03a-2
    let pod = node.run(&lasting("homeless")).await;
    let (old, main) = (node.ids(&pod, "sandbox"), node.pid(&pod, "main"));
    kill_process(node.sandbox_pid(&pod));
    let again = |pod: &Value| container(pod, "main")["restartCount"] == 1 && is_ready(pod);
    let after = node.agent.until_pod("homeless", "in another sandbox", again).await;
    assert_eq!(uid_of(&after), uid_of(&pod));
    // The process that inherited it may not have reaped it yet.
    let stat = fs::read_to_string(format!("/proc/{main}/stat")).unwrap_or_default();
    assert!(stat.is_empty() || stat.contains(") Z "), "the old container went with its sandbox: {stat}");
    let new = node.tasks(&pod, "sandbox");
    assert!(new.len() == 1 && new != old, "{new:?}");
    node.remove(&after).await;
}
