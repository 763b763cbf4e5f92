//! Graceful shutdown of the machine: logind waits for the agent, the agent for its pods.
//!
//! Behavior: spec 05 §7.

use std::fs;

use serde_json::{Value, json};

use crate::node::{
    inside::{ClusterFixture, NODE, only, shell, systemctl, until},
    service::locks,
};
use berth_testkit::process::condition;

/// Directory of the pods' notes with their order of events.
const NOTES: &str = "/t/ends";
/// First release of systemd with soft-reboot.
const SOFT_REBOOT: u32 = 254;

/// A pod that writes a note on SIGTERM, and when it has finished.
fn noting(name: &str, takes: u32, class: &str) -> Value {
    let note = |what: &str| format!("echo {name} {what} >> /ends/notes");
    let (on_signal, gone) = (note("told"), note("gone"));
    let mut main =
        shell(&format!("trap '{on_signal}; sleep {takes}; {gone}; exit 0' TERM; while :; do sleep 0.2; done"));
    main["volumeMounts"] = json!([{"name": "ends", "mountPath": "/ends"}]);
    let mut spec = only(main);
    spec["volumes"] = json!([{"name": "ends", "hostPath": {"path": NOTES, "type": "DirectoryOrCreate"}}]);
    spec["terminationGracePeriodSeconds"] = json!(100);
    if !class.is_empty() {
        spec["priorityClassName"] = json!(class);
    }
    spec
}

fn notes() -> Vec<String> {
    let text = fs::read_to_string(format!("{NOTES}/notes")).unwrap_or_default();
    text.lines().map(str::to_owned).collect()
}

/// Whether systemd has started to power off the machine.
fn goes_down() -> bool {
    systemctl(&["list-jobs", "--no-legend", "--plain"]).contains("poweroff.target")
}

pub async fn a_soft_reboot_ends_pods(_: &ClusterFixture) {
    let text = systemctl(&["--version"]);
    let release = text.split_whitespace().nth(1).and_then(|release| release.parse().ok());
    let release: u32 = release.unwrap_or_else(|| panic!("{text}"));
    // A soft reboot would end the other checks, too; it needs a machine of its own.
    let why = if release < SOFT_REBOOT { "systemd has none before 254" } else { "the machine is needed" };
    println!("skipped a_soft_reboot_ends_pods: {why}");
}

pub async fn the_machine_waits_for_its_pods(world: &ClusterFixture) {
    // AC-05-29
    world.run("ordinary", noting("ordinary", 3, ""));
    // Long enough to inspect the machine meanwhile.
    world.run("critical", noting("critical", 15, "system-node-critical"));
    let mut deaf = only(shell("trap '' TERM; while :; do sleep 1; done"));
    deaf["terminationGracePeriodSeconds"] = json!(3);
    world.run("deaf", deaf);
    world.until_ready(["ordinary", "critical", "deaf"]).await;
    assert_eq!(locks(), ["kubelet delay shutdown"]);
    systemctl(&["poweroff"]);
    until("the first pod is stopped", async || (!notes().is_empty()).then_some(())).await;
    world.until_node("Ready", "False").await;
    world.run("late", only(shell("exec sleep 100000")));
    until("the critical pod is told to end", async || notes().contains(&"critical told".to_owned()).then_some(()))
        .await;
    // The other pods have terminated, and their final status is published; only the agent delays the shutdown.
    assert_eq!((locks(), goes_down()), (vec!["kubelet delay shutdown".to_owned()], false));
    assert_eq!(notes()[..3], ["ordinary told", "ordinary gone", "critical told"]);
    // A pod that exited successfully in time has not failed.
    for (name, phase) in [("ordinary", "Succeeded"), ("deaf", "Failed"), ("critical", "Succeeded")] {
        let is_over = |pod: &Value| ["Failed", "Succeeded"].map(Value::from).contains(&pod["status"]["phase"]);
        let pod = world.until_pod(name, "is over", is_over).await;
        let status = &pod["status"];
        let reported = [&status["phase"], &status["reason"], &status["message"]];
        let text = "Pod was terminated in response to imminent node shutdown.";
        assert_eq!(reported, [phase, "Terminated", text], "{name}: {status:#}");
        assert_eq!(condition(&pod, "DisruptionTarget"), Some("True"), "{status:#}");
    }
    let late = world.until_pod("late", "is refused", |pod| pod["status"]["phase"] == "Failed").await;
    assert_eq!(late["status"]["reason"], "NodeShutdown", "{:#}", late["status"]);
    assert_eq!(notes(), ["ordinary told", "ordinary gone", "critical told", "critical gone"]);
    // The rest is observed from outside: the machine powers off.
    until("the agent lets the machine go", async || locks().is_empty().then_some(())).await;
    let log = fs::read_to_string("/t/kubelet.log").expect("a log");
    log.lines().filter(|line| line.contains("Shutdown manager")).for_each(|line| println!("{line}"));
    assert!(log.contains("Shutdown manager completed processing shutdown event, node will shutdown shortly"));
    let node = world.api.get("nodes", "", NODE).expect("it joined");
    let ready = node["status"]["conditions"].as_array().and_then(|all| all.iter().find(|c| c["type"] == "Ready"));
    let message = ready.and_then(|c| c["message"].as_str()).unwrap_or_default();
    assert!(message.contains("node is shutting down"), "{message}");
}
