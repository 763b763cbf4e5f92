//! The agent or containerd goes and comes back; pods that run do not notice.

use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use serde_json::{Value, json};

use crate::{
    kit::process::{container, manifest_of},
    node::{Node, UNTIL_STOPPED, shell, uid_of},
};

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

/// A manifest that went while no agent ran: its pod is taken down at the next start, to the last
/// directory; and what crashed meanwhile is started again.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_was_missed_is_made_up_for() {
    let Some(mut node) = Node::own("what_was_missed_is_made_up_for").await else { return };
    let spec = || json!({"terminationGracePeriodSeconds": 5, "containers": [shell("main", UNTIL_STOPPED)]});
    let goes = node.run(&manifest_of("goes", spec())).await;
    let dies = node.run(&manifest_of("dies", spec())).await;
    let pid = i32::try_from(node.pid(&dies, "main")).expect("a pid");
    node.agent.end_with(Signal::SIGKILL).await;
    node.home.remove("goes.json");
    kill(Pid::from_raw(pid), Signal::SIGKILL).expect("it runs");
    node.agent = node.home.start().await;
    node.until_nothing_is_left(&goes).await;
    let again = |pod: &Value| container(pod, "main")["restartCount"] == 1 && container(pod, "main")["ready"] == true;
    let dies = node.agent.until_pod("dies", "running again", again).await;
    assert_eq!(container(&dies, "main")["lastState"]["terminated"]["exitCode"], 137);
    node.remove(&dies).await;
}
