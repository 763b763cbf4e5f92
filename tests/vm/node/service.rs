//! The agent as a systemd service: packaged unit with kubeadm's drop-in.
//!
//! Behavior: spec 01 §8.2, 09 §5.

use std::{fs, sync::Arc};

use serde_json::{Value, json};

use crate::node::inside::{
    ClusterFixture, NODE, UNIT, directory, log, only, page, processes, property, shell, systemctl, until,
};
use berth_testkit::process::{container, get};

/// A script that counts once a second.
const COUNTS: &str = "n=0; while :; do echo count $n; n=$((n+1)); sleep 1; done";
/// Name of the pod that must survive everything that happens to the agent.
const LASTING: &str = "lasting";

pub async fn the_packaged_unit_has_started_once_it_is_ready(world: &ClusterFixture) {
    systemctl(&["start", "systemd-logind.service"]);
    systemctl(&["start", UNIT]);
    // AC-01-29: READY was sent, so no wait is needed here.
    let answer = get(10248, "/healthz").await.expect("it says that it has started");
    assert_eq!(answer.body, "ok");
    let command = fs::read(format!("/proc/{}/cmdline", main_process())).expect("it runs");
    let command = String::from_utf8_lossy(&command).replace('\0', " ");
    let expected = "/usr/bin/kubelet --bootstrap-kubeconfig=/etc/kubernetes/bootstrap-kubelet.conf \
                    --kubeconfig=/etc/kubernetes/kubelet.conf --config=/var/lib/kubelet/config.yaml \
                    --hostname-override=node --node-ip=10.77.0.1 ";
    assert_eq!(command, expected);
    assert_eq!(["WatchdogUSec", "KillMode", "NRestarts"].map(|name| property(UNIT, name)), ["40s", "process", "0"]);
    world.until_node("Ready", "True").await;
    let is_unit = ["kubepods.slice", "kubepods-burstable.slice", "kubepods-besteffort.slice"];
    assert_eq!(is_unit.map(|slice| property(slice, "ActiveState")), ["active"; 3]);
    // Spec 05 §7.2: logind's default delay for inhibitor locks is five seconds.
    until("the agent delays a shutdown", async || (locks() == ["kubelet delay shutdown"]).then_some(())).await;
    let config = fs::read_to_string("/etc/systemd/logind.conf.d/99-kubelet.conf").expect("logind was notified");
    assert_eq!(config, "# Kubelet logind override\n[Login]\nInhibitDelayMaxSec=240\n");
}

fn main_process() -> u32 {
    property(UNIT, "MainPID").parse().expect("a pid")
}

/// Inhibitor locks, from logind's state files.
pub fn locks() -> Vec<String> {
    let entries = fs::read_dir("/run/systemd/inhibit").into_iter().flatten().flatten();
    let notes = entries.map(|entry| entry.path()).filter(|path| path.extension().is_none());
    let field = |text: String, key: &str| text.lines().find_map(|line| line.strip_prefix(key).map(str::to_owned));
    let lock =
        |text: String| ["WHO=", "MODE=", "WHAT="].map(|key| field(text.clone(), key).unwrap_or_default()).join(" ");
    notes.filter_map(|path| fs::read_to_string(path).ok()).map(lock).collect()
}

/// The last number that a pod has logged.
fn count(pod: &Value) -> u32 {
    let log = log(pod);
    let last = log.lines().rev().find_map(|line| line.rsplit_once("count ")?.1.parse().ok());
    last.unwrap_or_default()
}

/// Asserts that the pod is unchanged and running under the new agent.
async fn lives_on(world: &ClusterFixture, before: &Arc<Value>, pids: &[u32], had: u32) {
    until("the new agent answers", async || page("/pods").await).await;
    world.until_node("Ready", "True").await;
    let pod = world.pod(LASTING);
    assert_eq!(processes(&pod)[0], pids[0], "its first process is another one");
    let id = |pod: &Value| container(pod, "main")["containerID"].clone();
    assert_eq!((id(&pod), &container(&pod, "main")["restartCount"]), (id(before), &json!(0)));
    until("its log goes on", async || (count(&pod) > had).then_some(())).await;
    let shown = until("the agent shows it", async || {
        let pods: Value = serde_json::from_str(&page("/pods").await?).ok()?;
        pods["items"].as_array()?.iter().find(|pod| pod["metadata"]["name"] == LASTING).cloned()
    })
    .await;
    assert_eq!(shown["status"]["phase"], "Running", "{:#}", shown["status"]);
    assert!(directory("/kubepods.slice").exists());
}

pub async fn a_restart_keeps_pods(world: &ClusterFixture) {
    // AC-01-30
    world.run(LASTING, only(shell(COUNTS)));
    let [pod] = world.until_ready([LASTING]).await;
    let (pids, had, first) = (processes(&pod), count(&pod), main_process());
    world.configure(&json!({"singleProcessOOMKill": true}));
    systemctl(&["restart", UNIT]);
    assert_ne!(main_process(), first);
    lives_on(world, &pod, &pids, had).await;
    assert_eq!(property(UNIT, "NRestarts"), "0", "nobody asked systemd's help so far");
}

/// Waits until systemd has restarted the agent that many times in all.
async fn until_started_again(times: &str) {
    until(&format!("the agent was started again {times} times"), async || {
        (property(UNIT, "NRestarts") == times && property(UNIT, "ActiveState") == "active").then_some(())
    })
    .await;
}

pub async fn a_killed_agent_comes_back_to_its_pods(world: &ClusterFixture) {
    let pod = world.pod(LASTING);
    let (pids, had) = (processes(&pod), count(&pod));
    systemctl(&["kill", "--kill-who=main", "--signal=KILL", UNIT]);
    until_started_again("1").await;
    lives_on(world, &pod, &pids, had).await;
    world
        .until(&format!("{NODE} holds its lease"), |seen| {
            seen.object("leases.coordination.k8s.io", "kube-node-lease", NODE).is_some()
        })
        .await;
}

pub async fn an_agent_that_does_not_turn_is_started_again(world: &ClusterFixture) {
    let pod = world.pod(LASTING);
    let (pids, had) = (processes(&pod), count(&pod));
    systemctl(&["kill", "--kill-who=main", "--signal=STOP", UNIT]);
    until_started_again("2").await;
    lives_on(world, &pod, &pids, had).await;
    let log = systemctl(&["show", "--property=Result", "--value", UNIT]);
    assert_eq!(log, "success", "the one that runs now");
    world.remove([LASTING]).await;
}
