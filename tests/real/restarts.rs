//! Restarts of the agent or containerd under running pods.

use std::time::Duration;

use nix::sys::signal::Signal;
use serde_json::{Value, json};

use crate::node::{Node, UNTIL_STOPPED, kill_process, lasting, shell, uid_of};
use berth_testkit::{
    process::{container, manifest_of},
    real,
};

/// Whether a pod's container was restarted once.
fn is_back(pod: &Value) -> bool {
    let main = container(pod, "main");
    main["restartCount"] == 1 && main["ready"] == true
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_agent_goes_and_pods_stay() {
    let Some(mut node) = Node::own("the_agent_goes_and_pods_stay").await else { return };
    // AC-01-30
    let counter = "i=0; trap 'exit 0' TERM; while true; do i=$((i+1)); echo $i; sleep 0.05; done";
    let spec = json!({"terminationGracePeriodSeconds": 5, "containers": [shell("main", counter)]});
    let before = node.run(&manifest_of("steady", spec)).await;
    let prepared = json!({
        "terminationGracePeriodSeconds": 5,
        "initContainers": [shell("prepare", "true")],
        "containers": [shell("main", UNTIL_STOPPED), shell("side", UNTIL_STOPPED)],
    });
    let other = node.run(&manifest_of("prepared", prepared)).await;
    let pid = node.pid(&before, "main");
    for signal in [Signal::SIGKILL, Signal::SIGTERM, Signal::SIGKILL] {
        node.restart(signal).await;
        for (name, pod) in [("steady", &before), ("prepared", &other)] {
            let now = node.agent.until_ready(name).await;
            assert_eq!(now["status"]["containerStatuses"], pod["status"]["containerStatuses"], "{name} after {signal}");
            assert_eq!(now["status"]["podIP"], pod["status"]["podIP"], "{name} after {signal}");
            assert_eq!(container(&now, "main")["restartCount"], 0);
            assert_eq!(uid_of(&now), uid_of(pod));
        }
        assert_eq!(node.pid(&before, "main"), pid);
    }
    node.remove(&before).await;
    node.remove(&other).await;
}

/// A manifest removed while no agent ran: its pod is removed completely at the next start; and a container that crashed
/// meanwhile is restarted.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_was_missed_is_made_up_for() {
    let Some(mut node) = Node::own("what_was_missed_is_made_up_for").await else { return };
    // AC-02a-17
    let goes = node.run(&lasting("goes")).await;
    let dies = node.run(&lasting("dies")).await;
    let pid = node.pid(&dies, "main");
    node.agent.end_with(Signal::SIGKILL).await;
    node.home.remove("goes.json");
    kill_process(pid);
    node.agent = node.home.start().await;
    node.until_nothing_is_left(&goes).await;
    let dies = node.agent.until_pod("dies", "running again", is_back).await;
    assert_eq!(container(&dies, "main")["lastState"]["terminated"]["exitCode"], 137);
    node.remove(&dies).await;
}

/// Milliseconds after a change of the manifest at which the agent is killed.
const MOMENTS: [u64; 8] = [0, 10, 40, 80, 150, 250, 400, 700];

/// Whenever the agent is killed, running pods continue unchanged, and the next agent completes pending starts and
/// stops, once.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_agent_may_be_killed_at_any_moment() {
    let Some(mut node) = Node::own("the_agent_may_be_killed_at_any_moment").await else { return };
    // AC-01-30, for an unexpected exit
    let steady = node.run(&lasting("steady")).await;
    let (pid, sandbox) = (node.pid(&steady, "main"), node.ids(&steady, "sandbox"));
    for moment in MOMENTS {
        let name = format!("comes{moment}");
        node.home.put_pod(&lasting(&name));
        tokio::time::sleep(Duration::from_millis(moment)).await;
        node.restart(Signal::SIGKILL).await;
        let comes = node.agent.until_ready(&name).await;
        assert_eq!(node.tasks(&comes, "container").len(), 1, "{name}: {:#}", comes["status"]);
        assert_eq!(node.tasks(&comes, "sandbox").len(), 1, "{name}: {:#}", comes["status"]);

        node.home.remove(&format!("{name}.json"));
        tokio::time::sleep(Duration::from_millis(moment)).await;
        node.restart(Signal::SIGKILL).await;
        node.until_nothing_is_left(&comes).await;

        let now = node.agent.until_ready("steady").await;
        assert_eq!(now["status"]["containerStatuses"], steady["status"]["containerStatuses"], "after {moment} ms");
        assert_eq!(now["status"]["podIP"], steady["status"]["podIP"], "after {moment} ms");
    }
    assert_eq!((node.pid(&steady, "main"), node.ids(&steady, "sandbox")), (pid, sandbox));
    node.remove(&steady).await;
}

/// containerd crashes and returns: pods are unaffected, and keep their status meanwhile; missed changes are synced
/// afterwards. An agent that starts without it waits for it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn containerd_goes_and_pods_stay() {
    if real::is_about_containerd("containerd_goes_and_pods_stay") {
        return;
    }
    let Some(mut node) = Node::own("containerd_goes_and_pods_stay").await else { return };
    let before = node.run(&lasting("stays")).await;
    let dies = node.run(&lasting("dies")).await;
    let goes = node.run(&lasting("goes")).await;
    let (pid, dying) = (node.pid(&before, "main"), node.pid(&dies, "main"));

    node.runtime.containerd().crash();
    node.home.put_pod(&lasting("comes"));
    node.home.remove("goes.json");
    kill_process(dying);
    node.agent.until_pod("comes", "there", |pod| pod["status"]["phase"] == "Pending").await;
    node.agent.until_log("connect: no such file or directory").await;
    let shown = node.agent.until_ready("stays").await;
    assert_eq!(shown["status"]["containerStatuses"], before["status"]["containerStatuses"]);
    assert_eq!(node.agent.healthz("/healthz").await.map(|answer| answer.status), Some(200));

    node.runtime.containerd().restart();
    let comes = node.agent.until_ready("comes").await;
    let dies = node.agent.until_pod("dies", "running again", is_back).await;
    node.until_nothing_is_left(&goes).await;

    node.runtime.containerd().crash();
    node.agent.end_with(Signal::SIGKILL).await;
    node.agent = node.home.spawn();
    node.agent.until_log("Waiting for the container runtime's socket").await;
    node.runtime.containerd().restart();
    node.agent.healthy().await;
    for (name, pod, restarts) in [("stays", &before, 0), ("comes", &comes, 0), ("dies", &dies, 1)] {
        let now = node.agent.until_ready(name).await;
        assert_eq!(now["status"]["containerStatuses"], pod["status"]["containerStatuses"], "{name}");
        assert_eq!(now["status"]["podIP"], pod["status"]["podIP"], "{name}");
        assert_eq!(container(&now, "main")["restartCount"], restarts);
    }
    assert_eq!(node.pid(&before, "main"), pid);
    for pod in [&before, &comes, &dies] {
        node.remove(pod).await;
    }
}
