//! Node pressure eviction, and evictions by users (spec 10a §17, 05 §3).

use std::fs;

use nix::mount::{MsFlags, mount};
use serde_json::{Value, json};

use crate::cluster::{ClusterFixture, NAMESPACE, a_moment, condition, pod, pod_of};
use berth_testkit::{
    api_server::RecordedRequest,
    process::{Agent, NODE, skips},
};

const MI: usize = 1 << 20;

/// A pod with a small memory request: it is admitted under memory pressure.
fn burstable(name: &str) -> Value {
    let requests = json!({"requests": {"memory": "1Mi"}});
    pod_of(name, json!({"containers": [{"name": "main", "resources": requests}]}))
}

async fn until_node(world: &ClusterFixture, agent: &Agent, kind: &str, status: &str) {
    let what = format!("{kind} is {status}");
    let holds = |node: &Value| condition(node, kind) == status;
    world.until(agent, &what, |seen| seen.object("nodes", "", NODE).is_some_and(|node| holds(&node))).await;
}

async fn until_counted(agent: &Agent, signal: &str, count: f64) {
    let series = format!("kubelet_evictions{{eviction_signal=\"{signal}\"}}");
    agent.until(&format!("{series} is {count}"), async || agent.metric(&series).await == Some(count)).await;
}

fn reasons(world: &ClusterFixture, of: &str) -> Vec<String> {
    let events = world.api.all("events");
    let of = events.iter().filter(|event| event["involvedObject"]["name"] == of);
    of.filter_map(|event| event["reason"].as_str().map(str::to_owned)).collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_node_short_of_memory_lets_a_pod_go() {
    // AC-10a-34, AC-05-14, AC-05-21, AC-02a-13
    if skips("a_node_short_of_memory_lets_a_pod_go") {
        return;
    }
    let (mut world, agent) = ClusterFixture::joined().await;
    let created = world.run(burstable("web"));
    world.until_ready(&agent, "web").await;
    agent.kill().await;
    // More than 1 % of any machine's memory is in use.
    world.home = world.home.with(json!({"evictionHard": {"memory.available": "99%"}}));
    let before = world.api.last();
    let agent = world.home.start().await;
    until_node(&world, &agent, "MemoryPressure", "True").await;
    let over = world.until_pod(&agent, "web", "is evicted", |pod| pod["status"]["phase"] == "Failed").await;
    let status = &over["status"];
    let message = status["message"].as_str().expect("a message");
    assert!(message.starts_with("The node was low on resource: memory. Threshold quantity: "), "{message}");
    assert!(message.ends_with(' ') && status["reason"] == "Evicted", "{status:#}");
    assert!(status["containerStatuses"][0]["state"]["terminated"].is_object(), "{status:#}");
    let conditions = status["conditions"].as_array().expect("conditions");
    let target = conditions.iter().find(|c| c["type"] == "DisruptionTarget").expect("the condition is published");
    assert_eq!((&target["status"], &target["reason"]), (&json!("True"), &json!("TerminationByKubelet")), "{target:#}");
    assert_eq!((&target["message"], &target["observedGeneration"]), (&json!(message), &json!(1)), "{target:#}");
    world.runtime.until("nothing of it runs", &agent, |cri| cri.running("web", "main").is_empty()).await;
    a_moment().await;
    let asked = world.agent_requests().since(before).at("pods", NAMESPACE, "web");
    let updates = asked.sub("status").filter(|logged| logged.body["status"]["phase"] == "Failed");
    assert_eq!(updates.codes(), [200], "{asked}");
    assert!(asked.verb("delete").is_empty(), "{asked}");
    world
        .until(&agent, "events tell of it", |_| {
            reasons(&world, "web").contains(&"Evicted".to_owned())
                && ["EvictionThresholdMet", "NodeHasInsufficientMemory"]
                    .iter()
                    .all(|reason| reasons(&world, NODE).contains(&(*reason).to_owned()))
        })
        .await;
    let events = world.api.all("events");
    let evicted = events.iter().find(|event| event["reason"] == "Evicted").expect("an event");
    assert_eq!(evicted["metadata"]["annotations"]["starved_resource"], "memory", "{evicted:#}");
    assert_eq!((&evicted["message"], &evicted["type"]), (&json!(message), &json!("Warning")));

    world.run(pod("best-effort"));
    let refused = |pod: &Value| pod["status"]["phase"] == "Failed";
    let over = world.until_pod(&agent, "best-effort", "is refused", refused).await;
    let status = &over["status"];
    assert_eq!(status["reason"], "Evicted", "{status:#}");
    assert_eq!(status["message"], "Pod was rejected: The node had condition: [MemoryPressure]. ", "{status:#}");
    world.run(burstable("admitted"));
    let over = world.until_pod(&agent, "admitted", "has to go in its turn", refused).await;
    let message = over["status"]["message"].as_str().unwrap_or_default();
    assert!(message.starts_with("The node was low on resource"), "{message}");
    until_counted(&agent, "memory.available", 2.0).await;

    assert_eq!(world.pod("web").expect("it stays")["metadata"]["uid"], created["metadata"]["uid"]);
    world.api.delete("pods", NAMESPACE, "web", Some(30));
    assert!(world.pod("web").is_none(), "what is over goes at once");
    drop(agent);
}

/// Mounts a tmpfs of that size with that much free space on the agent's root directory.
fn small_disk(world: &ClusterFixture, size: usize, left: usize) {
    let root = world.home.root();
    let options = format!("size={size},mode=750");
    mount(Some("tmpfs"), &root, Some("tmpfs"), MsFlags::empty(), Some(options.as_str())).expect("mounted");
    fs::write(root.join("filler"), vec![1_u8; size - left]).expect("there is room");
}

/// Writes a file of that size into a pod's volume.
fn write_into(world: &ClusterFixture, pod: &Value, volume: &str, size: usize) {
    let uid = pod["metadata"]["uid"].as_str().expect("a uid");
    let place = world.home.root().join("pods").join(uid).join("volumes/kubernetes.io~empty-dir").join(volume);
    fs::write(place.join("data"), vec![1_u8; size]).expect("the volume is there");
}

fn with_volume(name: &str, volume: Value) -> Value {
    let mount = json!([{"name": "data", "mountPath": "/data"}]);
    pod_of(
        name,
        json!({"containers": [{"name": "main", "volumeMounts": mount}], "volumes": [{"name": "data", "emptyDir": volume}]}),
    )
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn of_a_full_disk_one_pod_goes_where_one_suffices() {
    if skips("of_a_full_disk_one_pod_goes_where_one_suffices") {
        return;
    }
    let mut world = ClusterFixture::new().await;
    world.home = world.home.with(json!({
        "evictionHard": {"nodefs.available": "20Mi"}, "evictionPressureTransitionPeriod": "2s",
        "volumeStatsAggPeriod": "1s"}));
    small_disk(&world, 64 * MI, 40 * MI);
    let agent = world.start().await;
    let large = world.run(with_volume("large", json!({})));
    for name in ["small", "other"] {
        world.run(pod(name));
    }
    for name in ["large", "small", "other"] {
        world.until_ready(&agent, name).await;
    }
    write_into(&world, &large, "data", 22 * MI);
    let over = world.until_pod(&agent, "large", "is evicted", |pod| pod["status"]["phase"] == "Failed").await;
    let message = over["status"]["message"].as_str().unwrap_or_default();
    let start = "The node was low on resource: ephemeral-storage. Threshold quantity: 20Mi, available: ";
    assert!(message.starts_with(start), "{message}");
    // The condition may be cleared by now: the log of requests proves that it was reported.
    let reports_pressure = |logged: &RecordedRequest| {
        let conditions = logged.body["status"]["conditions"].as_array();
        conditions.is_some_and(|all| all.iter().any(|c| c["type"] == "DiskPressure" && c["status"] == "True"))
    };
    world
        .until(&agent, "the pressure was told", |seen| {
            seen.log().at("nodes", "", NODE).sub("status").iter().any(|logged| reports_pressure(logged))
        })
        .await;
    until_node(&world, &agent, "DiskPressure", "False").await;
    for name in ["small", "other"] {
        assert_eq!(world.pod(name).expect("there")["status"]["phase"], "Running", "{name}");
    }
    until_counted(&agent, "nodefs.available", 1.0).await;
    drop(agent);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_volume_that_is_too_large_ends_its_pod() {
    // AC-05-19
    if skips("a_volume_that_is_too_large_ends_its_pod") {
        return;
    }
    let mut world = ClusterFixture::new().await;
    world.home = world.home.with(json!({"volumeStatsAggPeriod": "1s"}));
    let agent = world.start().await;
    let greedy = world.run(with_volume("greedy", json!({"sizeLimit": "1Mi"})));
    let modest = world.run(with_volume("modest", json!({"sizeLimit": "3Mi"})));
    for (name, pod) in [("greedy", &greedy), ("modest", &modest)] {
        world.until_ready(&agent, name).await;
        write_into(&world, pod, "data", 2 * MI);
    }
    let over = world.until_pod(&agent, "greedy", "is evicted", |pod| pod["status"]["phase"] == "Failed").await;
    let status = &over["status"];
    assert_eq!(status["message"], "Usage of EmptyDir volume \"data\" exceeds the limit \"1Mi\". ", "{status:#}");
    assert_eq!(status["reason"], "Evicted", "{status:#}");
    assert_eq!(condition(&over, "DisruptionTarget"), "", "{status:#}");
    until_counted(&agent, "emptydirfs.limit", 1.0).await;
    assert_eq!(world.pod("modest").expect("there")["status"]["phase"], "Running");
    drop(agent);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_pod_that_a_user_evicts_keeps_its_reason() {
    // AC-10a-34
    if skips("a_pod_that_a_user_evicts_keeps_its_reason") {
        return;
    }
    let (world, agent) = ClusterFixture::joined().await;
    let mut protected = pod("web");
    protected["metadata"]["finalizers"] = json!(["example.com/held"]);
    let created = world.run(protected);
    world.until_ready(&agent, "web").await;
    let before = world.api.last();
    let eviction = json!({"apiVersion": "policy/v1", "kind": "Eviction",
        "metadata": {"name": "web", "namespace": NAMESPACE}, "deleteOptions": {"gracePeriodSeconds": 30}});
    let answer = world.api.admin().post_sub("pods", NAMESPACE, "web", "eviction", eviction);
    assert!(answer.is_ok(), "{answer:?}");
    let is_let_go = |pod: &Value| pod["metadata"]["deletionGracePeriodSeconds"] == 0;
    let over = world.until_pod(&agent, "web", "is ours no more", is_let_go).await;
    a_moment().await;
    let asked = world.agent_requests().since(before).at("pods", NAMESPACE, "web");
    let deletes = asked.verb("delete");
    assert_eq!(deletes.len(), 1, "{asked}");
    assert_eq!(deletes[0].body["preconditions"]["uid"], created["metadata"]["uid"], "{asked}");
    let conditions = over["status"]["conditions"].as_array().expect("conditions");
    let target = conditions.iter().find(|c| c["type"] == "DisruptionTarget").expect("its reason stays");
    assert_eq!((&target["status"], &target["reason"]), (&json!("True"), &json!("EvictionByEvictionAPI")), "{over:#}");
    assert!(over["status"]["containerStatuses"][0]["state"]["terminated"].is_object(), "{over:#}");
    drop(agent);
}
