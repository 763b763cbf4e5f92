//! In-place pod resize on a cluster node (spec 10a §18).

use std::sync::Arc;

use serde_json::{Value, json};
use tokio_util::sync::CancellationToken;

use crate::cluster::{ClusterFixture, NAMESPACE, a_moment, condition, pod_of};
use berth_testkit::{
    process::{Agent, NODE, container, skips},
    scripted_cri::Fault,
};

const IN_PROGRESS: &str = "PodResizeInProgress";
const PENDING: &str = "PodResizePending";

/// A pod of one container with that CPU request and limit.
fn sized(name: &str, cpu: &str) -> Value {
    pod_of(name, json!({"containers": [{"name": "main", "resources": cpu_of(cpu)}]}))
}

fn cpu_of(cpu: &str) -> Value {
    json!({"requests": {"cpu": cpu, "memory": "32Mi"}, "limits": {"cpu": cpu, "memory": "32Mi"}})
}

impl ClusterFixture {
    /// Changes the resources of the container `main`, as a user does.
    fn resize(&self, name: &str, resources: &Value) {
        let patch = json!({"spec": {"containers": [{"name": "main", "resources": resources}]}});
        let outcome = self.api.admin().patch_sub("pods", NAMESPACE, name, "resize", patch);
        outcome.unwrap_or_else(|refusal| panic!("refused: {refusal:?}"));
    }

    /// Blocks UpdateContainerResources calls until the token is canceled.
    fn hold_updates(&self) -> CancellationToken {
        let go = CancellationToken::new();
        self.runtime.cri.fault("update_container", "", Fault::Blocked(go.clone()), None);
        go
    }

    /// Waits until a pod has that CPU and no resize condition.
    async fn until_resized(&self, agent: &Agent, name: &str, cpu: &str) -> Arc<Value> {
        let is_done = |pod: &Value| {
            let resources = &container(pod, "main")["resources"];
            [IN_PROGRESS, PENDING].iter().all(|kind| condition(pod, kind).is_empty())
                && resources["limits"]["cpu"] == cpu
                && resources["requests"]["cpu"] == cpu
                && pod["status"]["observedGeneration"] == pod["metadata"]["generation"]
        };
        let pod = self.until_pod(agent, name, &format!("has {cpu}"), is_done).await;
        assert_eq!(pod["status"]["resources"]["requests"]["cpu"], cpu, "{pod:#}");
        assert_eq!(pod["status"]["allocatedResources"]["cpu"], cpu, "{pod:#}");
        pod
    }

    /// Waits until a resize condition has that observed generation.
    async fn until_resize_condition(&self, agent: &Agent, name: &str, kind: &str, generation: i64) -> Value {
        let is_observed = |pod: &Value| resize_condition(pod, kind)["observedGeneration"] == generation;
        let pod = self.until_pod(agent, name, &format!("tells {kind} {generation}"), is_observed).await;
        resize_condition(&pod, kind).clone()
    }

    /// Allocatable CPU of the node, in millicores.
    fn milli_cpu(&self) -> i64 {
        let node = self.api.get("nodes", "", NODE).expect("it is there");
        let text = node["status"]["allocatable"]["cpu"].as_str().expect("a quantity").to_owned();
        match text.strip_suffix('m') {
            Some(milli) => milli.parse().expect("a number"),
            None => text.parse::<i64>().expect("a number") * 1000,
        }
    }
}

/// Millicores as a quantity of the API.
fn quantity(milli: i64) -> String {
    if milli % 1000 == 0 { (milli / 1000).to_string() } else { format!("{milli}m") }
}

fn resize_condition<'a>(pod: &'a Value, kind: &str) -> &'a Value {
    let mut all = pod["status"]["conditions"].as_array().into_iter().flatten();
    all.rfind(|condition| condition["type"] == kind).unwrap_or(&Value::Null)
}

fn summary(resources: &Value, generation: i64) -> String {
    let resources = json!({"limits": resources["limits"], "requests": resources["requests"]});
    format!(r#"{{"containers":[{{"name":"main","resources":{resources}}}],"generation":{generation}}}"#)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_resize_is_reported_before_and_after_it_is_applied() {
    // AC-10a-35
    if skips("a_resize_is_reported_before_and_after_it_is_applied") {
        return;
    }
    let (world, agent) = ClusterFixture::joined().await;
    world.run(sized("web", "100m"));
    world.until_ready(&agent, "web").await;
    a_moment().await;
    let (before, started) = (world.api.last(), world.runtime.cri.count("start_container"));
    let go = world.hold_updates();
    world.resize("web", &cpu_of("200m"));
    let condition = world.until_resize_condition(&agent, "web", IN_PROGRESS, 2).await;
    assert_eq!((&condition["status"], &condition["reason"]), (&json!("True"), &Value::Null), "{condition}");
    let pod = world.pod("web").expect("it is there");
    assert_eq!(pod["status"]["allocatedResources"]["cpu"], "200m", "{pod:#}");
    assert_eq!(container(&pod, "main")["allocatedResources"]["cpu"], "200m", "{pod:#}");
    assert_eq!(container(&pod, "main")["resources"]["limits"]["cpu"], "100m", "{pod:#}");
    assert_eq!(pod["status"]["resources"]["limits"]["cpu"], "100m", "{pod:#}");
    let state = std::fs::read_to_string(world.home.root().join("allocated_pods_state")).expect("a file");
    assert!(state.contains("200m"), "it is on disk before it is published: {state}");
    world.until_event(&agent, "ResizeStarted", &format!("Pod resize started: {}", summary(&cpu_of("200m"), 2))).await;

    go.cancel();
    world.until_resized(&agent, "web", "200m").await;
    let text = format!("Pod resize completed: {}", summary(&cpu_of("200m"), 2));
    world.until_event(&agent, "ResizeCompleted", &text).await;
    a_moment().await;
    let patches = world.agent_requests().since(before).at("pods", NAMESPACE, "web").sub("status").verb("patch");
    assert!(patches.len() <= 3, "{patches}");
    let deleted = json!({"$patch": "delete", "type": IN_PROGRESS});
    let conditions = |index: usize| patches[index].body["status"]["conditions"].as_array().cloned().unwrap_or_default();
    assert!(conditions(patches.len() - 1).contains(&deleted), "{patches}");
    let calls = world.runtime.cri.calls();
    let updates: Vec<&str> =
        calls.iter().filter(|call| call.op == "update_container").map(|call| call.detail.as_str()).collect();
    assert!(matches!(updates.as_slice(), [one] if one.contains("cpu_quota: 20000")), "{updates:?}");
    assert_eq!(world.runtime.cri.count("start_container"), started, "it is not restarted");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_does_not_fit_waits_until_another_goes() {
    // AC-02a-19, AC-02a-20
    if skips("what_does_not_fit_waits_until_another_goes") {
        return;
    }
    let (world, agent) = ClusterFixture::joined().await;
    let all = world.milli_cpu();
    let (half, most) = (quantity(all / 2), quantity(all * 3 / 4));
    world.run(sized("other", &half));
    world.run(sized("web", "100m"));
    for name in ["other", "web"] {
        world.until_ready(&agent, name).await;
    }
    world.resize("web", &cpu_of(&most));
    let condition = world.until_resize_condition(&agent, "web", PENDING, 2).await;
    let message = format!(
        "Node didn't have enough resource: cpu, requested: {}, used: {}, capacity: {all}",
        all * 3 / 4,
        all / 2
    );
    assert_eq!((&condition["reason"], &condition["message"]), (&json!("Deferred"), &json!(message)));
    world.until_event(&agent, "ResizeDeferred", &format!("Pod resize OutOfcpu: {}", summary(&cpu_of(&most), 2))).await;
    let pod = world.pod("web").expect("it is there");
    assert_eq!(pod["status"]["allocatedResources"]["cpu"], "100m", "{pod:#}");
    assert_eq!(world.runtime.cri.count("update_container"), 0);

    // A request above the node's capacity is deferred, too.
    world.resize("web", &cpu_of(&quantity(all * 2)));
    let condition = world.until_resize_condition(&agent, "web", PENDING, 3).await;
    assert_eq!(condition["reason"], "Deferred", "{condition}");

    // Reverting the resize ends the wait.
    world.resize("web", &cpu_of("100m"));
    world.until_resized(&agent, "web", "100m").await;
    assert_eq!(world.runtime.cri.count("update_container"), 0);

    world.resize("web", &cpu_of(&most));
    world.until_resize_condition(&agent, "web", PENDING, 5).await;
    world.api.delete("pods", NAMESPACE, "other", Some(0));
    world.until_resized(&agent, "web", &most).await;
    let series = "kubelet_pod_deferred_accepted_resizes_total{retry_trigger=\"pods_removed\"}";
    assert_eq!(agent.metric(series).await, Some(1.0));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_never_fits_here_is_infeasible() {
    if skips("what_never_fits_here_is_infeasible") {
        return;
    }
    let mut world = ClusterFixture::new().await;
    world.home = world.home.with(json!({"featureGates": {"InPlacePodLevelResourcesVerticalScaling": false}}));
    let agent = world.start().await;
    let level = |cpu: &str| json!({"requests": {"cpu": cpu}, "limits": {"cpu": cpu}});
    world.run(pod_of("web", json!({"resources": level("100m"), "containers": [{"name": "main"}]})));
    world.until_ready(&agent, "web").await;
    let patch = json!({"spec": {"resources": level("200m")}});
    world.api.admin().patch_sub("pods", NAMESPACE, "web", "resize", patch).expect("accepted");
    let condition = world.until_resize_condition(&agent, "web", PENDING, 2).await;
    let message = "InPlacePodLevelResourcesVerticalScaling is disabled";
    assert_eq!((&condition["reason"], &condition["message"]), (&json!("Infeasible"), &json!(message)));
    let text = r#"Pod resize Infeasible: {"containers":[{"name":"main","resources":{}}],"generation":2}"#;
    world.until_event(&agent, "ResizeInfeasible", text).await;
    let series = "kubelet_pod_infeasible_resizes_total{reason_detail=\"plr_feature_gate_off\"}";
    assert_eq!(agent.metric(series).await, Some(1.0));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_resize_that_is_taken_back_is_carried_back() {
    if skips("a_resize_that_is_taken_back_is_carried_back") {
        return;
    }
    let (world, agent) = ClusterFixture::joined().await;
    world.run(sized("web", "100m"));
    world.until_ready(&agent, "web").await;
    let go = world.hold_updates();
    world.resize("web", &cpu_of("200m"));
    world.until_resize_condition(&agent, "web", IN_PROGRESS, 2).await;
    world.resize("web", &cpu_of("100m"));
    world.until_event(&agent, "ResizeStarted", &format!("Pod resize started: {}", summary(&cpu_of("100m"), 3))).await;
    go.cancel();
    let pod = world.until_resized(&agent, "web", "100m").await;
    assert_eq!(pod["metadata"]["generation"], 3);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_resize_outlives_the_agent() {
    if skips("a_resize_outlives_the_agent") {
        return;
    }
    let (world, agent) = ClusterFixture::joined().await;
    world.run(sized("web", "100m"));
    world.until_ready(&agent, "web").await;
    let started = world.runtime.cri.count("start_container");
    let _never = world.hold_updates();
    world.resize("web", &cpu_of("200m"));
    world.until_resize_condition(&agent, "web", IN_PROGRESS, 2).await;
    agent.kill().await;
    world.runtime.cri.heal();
    let agent = world.home.start().await;
    world.until_resized(&agent, "web", "200m").await;
    assert_eq!(world.runtime.cri.count("start_container"), started, "it is not restarted");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_container_may_want_to_be_restarted() {
    if skips("a_container_may_want_to_be_restarted") {
        return;
    }
    let (world, agent) = ClusterFixture::joined().await;
    let memory =
        |size: &str| json!({"requests": {"cpu": "100m", "memory": size}, "limits": {"cpu": "100m", "memory": size}});
    let policy = json!([{"resourceName": "memory", "restartPolicy": "RestartContainer"}]);
    let main = json!({"name": "main", "resources": memory("32Mi"), "resizePolicy": policy});
    world.run(pod_of("web", json!({"containers": [main]})));
    world.until_ready(&agent, "web").await;
    world.resize("web", &memory("64Mi"));
    let is_restarted = |pod: &Value| container(pod, "main")["restartCount"] == 1;
    world.until_pod(&agent, "web", "is restarted", is_restarted).await;
    let pod = world.until_resized(&agent, "web", "100m").await;
    assert_eq!(container(&pod, "main")["resources"]["limits"]["memory"], "64Mi", "{pod:#}");
    assert_eq!(pod["status"]["resources"]["limits"]["memory"], "64Mi", "{pod:#}");
    assert_eq!(world.runtime.cri.count("update_container"), 0);
    let killed = |event: &Arc<Value>| {
        event["reason"] == "Killing" && event["message"] == "Container main resize requires restart"
    };
    world.until(&agent, "why it was killed", |seen| seen.all("events").iter().any(killed)).await;
}
