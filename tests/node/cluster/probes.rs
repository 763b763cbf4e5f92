//! Probes of a cluster node: result latency in the API server, and agent restarts (spec 05 §1).
//!
//! Results reach the API server at once, and a restart of the agent changes nothing.

use std::time::Duration;

use serde_json::{Value, json};

use crate::cluster::{ClusterFixture, NAMESPACE, a_moment, condition, pod, pod_of};
use berth_testkit::{
    process::{Agent, skips},
    scripted_cri::{Behaviour, Fault},
};

/// An exec probe with that command.
fn exec(command: &str, mut probe: Value) -> Value {
    probe["exec"] = json!({"command": [command]});
    probe
}

fn often() -> Value {
    json!({"periodSeconds": 1, "failureThreshold": 1})
}

/// A pod of one container with these probes.
fn probed(name: &str, mut container: Value) -> Value {
    container["name"] = json!("main");
    pod_of(name, json!({"terminationGracePeriodSeconds": 500, "containers": [container]}))
}

impl ClusterFixture {
    /// Sets whether a probe's command passes from now on.
    fn let_exec(&self, command: &str, passes: bool) {
        let (code, output) = if passes { (0, "") } else { (1, "no") };
        self.runtime.cri.on_exec(command, code, output, "", Duration::ZERO);
    }

    fn count_exec(&self, command: &str) -> usize {
        self.runtime.cri.calls().iter().filter(|call| call.op == "exec_sync" && call.detail == command).count()
    }

    async fn until_unready(&self, agent: &Agent, name: &str) {
        let is_unready = |pod: &Value| condition(pod, "Ready") == "False" && main(pod)["ready"] == false;
        self.until_pod(agent, name, "is not Ready", is_unready).await;
    }
}

fn main(pod: &Value) -> &Value {
    &pod["status"]["containerStatuses"][0]
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn readiness_is_reported_as_it_changes() {
    if skips("readiness_is_reported_as_it_changes") {
        return;
    }
    let (world, agent) = ClusterFixture::joined().await;
    world.let_exec("ready", false);
    world.run(probed("web", json!({"readinessProbe": exec("ready", often())})));
    world.until_event(&agent, "Unhealthy", "Readiness probe failed: no").await;
    world.until_unready(&agent, "web").await;
    for _ in 0..2 {
        world.let_exec("ready", true);
        world.until_ready(&agent, "web").await;
        world.let_exec("ready", false);
        world.until_unready(&agent, "web").await;
    }
    assert_eq!(main(&world.pod("web").expect("there"))["restartCount"], 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn startup_comes_first_and_restarts_what_does_not_start() {
    // AC-05-7, AC-05-8
    if skips("startup_comes_first_and_restarts_what_does_not_start") {
        return;
    }
    let (world, agent) = ClusterFixture::joined().await;
    world.let_exec("up", false);
    world.let_exec("alive", false);
    let startup = exec("up", json!({"periodSeconds": 1, "failureThreshold": 2}));
    world.run(probed("slow", json!({"startupProbe": startup, "livenessProbe": exec("alive", often())})));
    let killing = "Container main failed startup probe, will be restarted";
    world.until_event(&agent, "Killing", killing).await;
    world.until_pod(&agent, "slow", "is restarted", |pod| main(pod)["restartCount"] == 1).await;
    assert_eq!((world.count_exec("alive"), &main(&world.pod("slow").expect("there"))["started"]), (0, &json!(false)));
    world.let_exec("alive", true);
    world.let_exec("up", true);
    world.until_pod(&agent, "slow", "has started", |pod| main(pod)["started"] == true).await;
    agent.until("it is asked whether it is alive", async || world.count_exec("alive") > 0).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_container_that_is_not_alive_has_its_probes_own_grace() {
    // AC-05-9
    if skips("a_container_that_is_not_alive_has_its_probes_own_grace") {
        return;
    }
    let (world, agent) = ClusterFixture::joined().await;
    let liveness = json!({"periodSeconds": 1, "failureThreshold": 1, "terminationGracePeriodSeconds": 5});
    world.run(probed("ill", json!({"livenessProbe": exec("alive", liveness)})));
    world.until_ready(&agent, "ill").await;
    world.let_exec("alive", false);
    world.until_event(&agent, "Killing", "Container main failed liveness probe, will be restarted").await;
    world.let_exec("alive", true);
    world.until_pod(&agent, "ill", "is restarted", |pod| main(pod)["restartCount"] == 1).await;
    let calls = world.runtime.cri.calls();
    let stop = calls.iter().find(|call| call.op == "stop_container").expect("it was stopped");
    assert_eq!(stop.detail, "5");
    world.until_ready(&agent, "ill").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_probe_that_hangs_delays_no_other() {
    if skips("a_probe_that_hangs_delays_no_other") {
        return;
    }
    let (world, agent) = ClusterFixture::joined().await;
    world.runtime.cri.fault("exec_sync", "stuck", Fault::Hang, None);
    let both = || json!({"readinessProbe": exec("ready", often()), "livenessProbe": exec("alive", often())});
    world.run(probed("stuck", both()));
    world.run(probed("well", both()));
    world.until_ready(&agent, "well").await;
    world.let_exec("ready", false);
    world.until_unready(&agent, "well").await;
    let asked = |pod: &str| {
        let calls = world.runtime.cri.calls();
        calls.iter().filter(|call| call.op == "exec_sync" && call.target.contains(pod)).count()
    };
    assert!(asked("stuck") <= 2, "never two of one probe: {}", asked("stuck"));
    world.api.delete("pods", NAMESPACE, "stuck", Some(0));
    world.until_gone(&agent, "stuck").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_restart_of_the_agent_keeps_what_is_ready() {
    // AC-05-11
    if skips("a_restart_of_the_agent_keeps_what_is_ready") {
        return;
    }
    let (world, agent) = ClusterFixture::joined().await;
    let seldom = || json!({"periodSeconds": 30, "failureThreshold": 1});
    world.run(probed("web", json!({"startupProbe": exec("up", often()), "readinessProbe": exec("ready", seldom())})));
    world.run(probed("other", json!({"readinessProbe": exec("other", seldom())})));
    world.run(pod("plain"));
    for name in ["web", "other", "plain"] {
        world.until_ready(&agent, name).await;
    }
    let saved = world.home.root().join("probe_results_state");
    let are_saved = || std::fs::read_to_string(&saved).is_ok_and(|text| text.matches(r#""ready":true"#).count() == 2);
    agent.until("the results are on disk", async || are_saved()).await;
    a_moment().await;
    agent.kill().await;
    let before = world.api.last();
    let agent = world.home.start().await;
    world
        .until(&agent, "the node is looked after again", |seen| !seen.log().since(before).of("nodes").is_empty())
        .await;
    a_moment().await;
    let writes = world.agent_requests().since(before).of("pods").verb("patch");
    assert!(writes.is_empty(), "{writes}");
    // The probe still runs.
    world.let_exec("other", false);
    world.until_unready(&agent, "other").await;
    world.until_ready(&agent, "web").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_pod_that_terminates_is_reported_unready() {
    // AC-05-12
    if skips("a_pod_that_terminates_is_reported_unready") {
        return;
    }
    let (world, agent) = ClusterFixture::joined().await;
    world.runtime.cri.behave("web/main", [Behaviour::stubborn()]);
    world
        .run(probed("web", json!({"readinessProbe": exec("ready", often()), "livenessProbe": exec("alive", often())})));
    world.until_ready(&agent, "web").await;
    world.api.delete("pods", NAMESPACE, "web", Some(30));
    world.runtime.until("it is stopped", &agent, |cri| cri.count("stop_container") == 1).await;
    world.let_exec("ready", false);
    world.let_exec("alive", false);
    world.until_unready(&agent, "web").await;
    assert_eq!(world.pod("web").expect("it still runs")["status"]["phase"], "Running");
    let asked = world.count_exec("ready");
    agent.until("it is asked again", async || world.count_exec("ready") > asked + 1).await;
    let events = world.api.all("events");
    let about_liveness = |event: &Value| event["message"].as_str().is_some_and(|text| text.contains("Liveness"));
    assert!(!events.iter().any(|event| about_liveness(event)), "{events:#?}");
    world.api.delete("pods", NAMESPACE, "web", Some(0));
    world.until_gone(&agent, "web").await;
}
