//! Graceful shutdown of a cluster node: endpoints first, critical pods last (spec 05 §7).
//!
//! A pod leaves its endpoints before its containers are stopped, and critical pods run until the final status of the
//! others is reported.

use std::time::Duration;

use nix::sys::signal::Signal;
use serde_json::{Value, json};
use tokio::time::{Instant, sleep, timeout};

use crate::cluster::{ClusterFixture, condition, pod, pod_of};
use berth_testkit::{
    api_server::{Effect, Fault, RecordedRequest},
    process::{Home, NODE, PATIENCE, skips},
    scripted_cri::Behaviour,
};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn pods_leave_service_before_they_end() {
    // AC-05-29, spec 05 §7.7
    if skips("pods_leave_service_before_they_end") {
        return;
    }
    let mut world = ClusterFixture::new().await;
    let settings = json!({"shutdown": {"onTermination": true}});
    let periods = json!({"shutdownGracePeriod": "600s", "shutdownGracePeriodCriticalPods": "300s"});
    world.home = world.home.settings(settings).with(periods);
    // A pod that takes its time to stop.
    let slow = Behaviour { stops_after: Some(Duration::from_secs(3600)), ..Behaviour::default() };
    world.runtime.cri.behave("web/main", [slow]);
    let mut agent = world.start().await;
    // The server delays each status update, and no container is stopped before it has responded.
    world.api.fault(
        Fault::new(Effect::Delay(Duration::from_millis(100))).on("patch", "pods").subresource("status").always(),
    );
    let spec = |fields: Value| {
        let mut spec = json!({"terminationGracePeriodSeconds": 300, "containers": [{"name": "main"}]});
        for (key, value) in fields.as_object().expect("an object") {
            spec[key] = value.clone();
        }
        spec
    };
    world.run(pod_of("web", spec(json!({}))));
    world.run(pod_of("critical", spec(json!({"priorityClassName": "system-cluster-critical"}))));
    let web = world.until_ready(&agent, "web").await;
    world.until_ready(&agent, "critical").await;
    let before = world.api.last();
    agent.signal(Signal::SIGTERM);
    let is_out = |pod: &Value| condition(pod, "Ready") == "False" && pod["status"]["phase"] == "Running";
    let left = world.until_pod(&agent, "web", "is out of service while it runs", is_out).await;
    assert_eq!(condition(&left, "ContainersReady"), "False");
    assert!(!world.runtime.cri.running("web", "main").is_empty(), "it still runs");
    let stops = async {
        while world.runtime.cri.count("stop_container") == 0 {
            sleep(Duration::from_millis(5)).await;
        }
    };
    timeout(Duration::from_secs(60), stops).await.expect("it is stopped");
    let reports_unready = |logged: &RecordedRequest| {
        let mut conditions = logged.body["status"]["conditions"].as_array().into_iter().flatten();
        logged.name == "web" && conditions.any(|c| c["type"] == "Ready" && c["status"] == "False")
    };
    let updates = world.agent_requests().since(before).of("pods").sub("status").filter(reports_unready);
    let calls = world.runtime.cri.calls();
    let stopped = calls.iter().find(|call| call.op == "stop_container" && call.target == "web/main").expect("received");
    let reported_at = updates.first().and_then(|logged| logged.ended).expect("answered");
    assert!(reported_at <= stopped.at, "containers end before others see them unready\n{updates}");
    let critical = world.pod("critical").expect("there");
    assert_eq!(condition(&critical, "Ready"), "True", "it is not its turn");
    world.end(&web, 0);
    let is_over = |pod: &Value| pod["status"]["reason"] == "Terminated" && condition(pod, "DisruptionTarget") == "True";
    for name in ["web", "critical"] {
        world.until_pod(&agent, name, "has gone with its node", is_over).await;
    }
    // A pod that exited successfully has not failed; its status keeps the reason even once its containers are removed.
    let is_done = |pod: &Value| pod["status"]["phase"] == "Succeeded";
    let web = world.until_pod(&agent, "web", "has succeeded", is_done).await;
    let text = "Pod was terminated in response to imminent node shutdown.";
    assert_eq!((&web["status"]["reason"], &web["status"]["message"]), (&json!("Terminated"), &json!(text)));
    assert_eq!(agent.end().await.code(), Some(0), "{}", agent.log_end());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_end_of_killed_pods_is_reported_before_critical_ones_are_stopped() {
    // AC-05-29, spec 05 §7.4, §7.7
    if skips("the_end_of_killed_pods_is_reported_before_critical_ones_are_stopped") {
        return;
    }
    let mut world = ClusterFixture::new().await;
    // The middle priority class has no pods: its time is available for the final status updates, however slow this
    // machine is.
    let bands = [(0, 8), (1_000_000_000, 60), (2_000_000_000, 120)]
        .map(|(priority, seconds)| json!({"priority": priority, "shutdownGracePeriodSeconds": seconds}));
    world.home = world
        .home
        .settings(json!({"shutdown": {"onTermination": true}}))
        .with(json!({"shutdownGracePeriodByPodPriority": bands}));
    world.runtime.cri.behave("main", [Behaviour::stubborn()]);
    world.runtime.cri.behave("critical/main", [Behaviour::default()]);
    let mut agent = world.start().await;
    let spec = json!({"terminationGracePeriodSeconds": 600, "containers": [{"name": "main"}]});
    let plain = ["one", "two", "three"];
    for name in plain {
        world.run(pod_of(name, spec.clone()));
    }
    let mut important = spec;
    important["priorityClassName"] = json!("system-cluster-critical");
    world.run(pod_of("critical", important));
    for name in plain.into_iter().chain(["critical"]) {
        world.until_ready(&agent, name).await;
    }
    let before = world.api.last();
    agent.signal(Signal::SIGTERM);
    assert_eq!(agent.end().await.code(), Some(0), "{}", agent.log_end());
    let calls = world.runtime.cri.calls();
    let stop = |target: &str| calls.iter().find(|call| call.op == "stop_container" && call.target == target);
    let touched = stop("critical/main").expect("it was stopped").at;
    for name in plain {
        let given: u64 = stop(&format!("{name}/main")).expect("it was stopped").detail.parse().expect("seconds");
        assert!((2..8).contains(&given), "{name} has {given} s: its end is to be published within the 8 s");
        let pod = world.pod(name).expect("there");
        assert_eq!((&pod["status"]["phase"], &pod["status"]["reason"]), (&json!("Failed"), &json!("Terminated")));
        assert_eq!(condition(&pod, "DisruptionTarget"), "True");
        let writes = world
            .agent_requests()
            .since(before)
            .of("pods")
            .sub("status")
            .filter(|logged: &RecordedRequest| logged.name == name);
        let last: Option<Instant> = writes.iter().filter_map(|logged| logged.ended).max();
        assert!(last.expect("its end was published") <= touched, "{name}: a critical pod went first\n{writes}");
    }
}

/// Runs `berth drain`, or cancels it, as root does.
async fn drain(home: &Home, more: &[&str]) {
    let mut command = tokio::process::Command::new(env!("CARGO_BIN_EXE_berth"));
    command.args(["drain", "--root-dir"]).arg(home.root()).args(more);
    let output = timeout(PATIENCE, command.output()).await.expect("it ends").expect("it begins");
    assert!(output.status.success(), "{output:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_node_that_stays_after_all_is_ready_again() {
    // AC-05-30
    if skips("a_node_that_stays_after_all_is_ready_again") {
        return;
    }
    let mut world = ClusterFixture::new().await;
    let periods = json!({"shutdownGracePeriod": "30s", "shutdownGracePeriodCriticalPods": "10s"});
    world.home = world.home.environment("DBUS_SYSTEM_BUS_ADDRESS", "unix:path=/no/such/bus").with(periods);
    let agent = world.start().await;
    world.run(pod("web"));
    world.until_ready(&agent, "web").await;
    let message = |node: &Value| {
        let conditions = node["status"]["conditions"].as_array();
        let ready = conditions.and_then(|all| all.iter().find(|condition| condition["type"] == "Ready"));
        ready.and_then(|ready| ready["message"].as_str()).unwrap_or_default().to_owned()
    };
    drain(&world.home, &[]).await;
    world
        .until(&agent, "the node says that it goes", |seen| {
            let node = seen.object("nodes", "", NODE);
            node.is_some_and(|node| condition(&node, "Ready") == "False" && message(&node) == "node is shutting down")
        })
        .await;
    world.run(pod("late"));
    world.until_pod(&agent, "late", "is refused", |pod| pod["status"]["reason"] == "NodeShutdown").await;

    drain(&world.home, &["--cancel"]).await;
    world
        .until(&agent, "the node is Ready again", |seen| {
            seen.object("nodes", "", NODE).is_some_and(|node| condition(&node, "Ready") == "True")
        })
        .await;
    world.run(pod("next"));
    world.until_ready(&agent, "next").await;
}
