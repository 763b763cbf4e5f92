//! Duplicate node names, and deleted node objects (spec 05 §4.2, §4.8; 10 §4.1, §4.2).

use std::sync::Arc;

use serde_json::{Value, json};

use crate::cluster::{ClusterFixture, a_moment, condition, pod};
use berth_testkit::{
    api_server::ApiServer,
    process::{NODE, skips},
};

const LEASES: &str = "leases.coordination.k8s.io";
const REASON: &str = "NodeNameTaken";

fn conflict_events(world: &ClusterFixture) -> Vec<Arc<Value>> {
    let events = world.api.all("events");
    events.into_iter().filter(|event| event["reason"] == REASON).collect()
}

fn texts(world: &ClusterFixture) -> Vec<String> {
    conflict_events(world).iter().map(|event| event["message"].to_string()).collect()
}

/// Renews the lease as an agent does.
fn renew(api: &ApiServer) {
    let now = api.now().strftime("%Y-%m-%dT%H:%M:%S.%6fZ").to_string();
    api.patch(LEASES, "kube-node-lease", NODE, json!({"spec": {"renewTime": now}}));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_name_of_a_live_node_is_taken_over_and_reported() {
    // AC-10-2 with a live node: the reference adopts the object silently.
    if skips("the_name_of_a_live_node_is_taken_over_and_reported") {
        return;
    }
    let mut world = ClusterFixture::new().await;
    world.home = world.home.with(json!({"providerID": "cloud://ours"}));
    let info = json!({"systemUUID": "another-machine", "machineID": "m", "bootID": "b", "architecture": "amd64",
        "operatingSystem": "linux", "osImage": "x", "kernelVersion": "x", "containerRuntimeVersion": "x://1",
        "kubeletVersion": "v1.36.0", "kubeProxyVersion": ""});
    world.api.create(json!({"apiVersion": "v1", "kind": "Node", "metadata": {"name": NODE},
        "spec": {"providerID": "cloud://other"},
        "status": {"nodeInfo": info, "conditions": [{"type": "Ready", "status": "True"}]}}));
    let now = world.api.now().strftime("%Y-%m-%dT%H:%M:%S.%6fZ").to_string();
    world.api.create(json!({"apiVersion": "coordination.k8s.io/v1", "kind": "Lease",
        "metadata": {"name": NODE, "namespace": "kube-node-lease"},
        "spec": {"holderIdentity": "another-agent", "leaseDurationSeconds": 40, "renewTime": now}}));
    let uid = world.api.get("nodes", "", NODE).expect("there")["metadata"]["uid"].clone();
    let agent = world.home.start().await;
    world
        .until(&agent, "the object is ours", |seen| {
            let node = seen.object("nodes", "", NODE).expect("there");
            node["status"]["nodeInfo"]["systemUUID"] != "another-machine" && condition(&node, "Ready") == "True"
        })
        .await;
    world
        .until(&agent, "the lease is renewed", |seen| {
            let lease = seen.object(LEASES, "kube-node-lease", NODE).expect("there");
            lease["spec"]["renewTime"] != json!(now)
        })
        .await;
    // The other holder must renew: otherwise it could be our own lease from before a restart.
    renew(&world.api);
    agent.until("it is told", async || conflict_events(&world).len() >= 2).await;
    let texts = texts(&world);
    assert!(
        texts.iter().any(|text| text.contains("provider ID cloud://other differs from cloud://ours of this machine")),
        "{texts:?}"
    );
    assert!(texts.iter().any(|text| text.contains("another-agent")), "{texts:?}");
    // The other agent continues: ours does not compete with it.
    let before = world.api.last();
    for _ in 0..10 {
        renew(&world.api);
        let status = json!({"status": {"nodeInfo": {"systemUUID": "another-machine", "machineID": "m"}}});
        world.api.admin().patch_sub("nodes", "", NODE, "status", status).expect("taken");
        a_moment().await;
    }
    let asked = world.agent_requests().since(before);
    let writes = asked.of("nodes").filter(|logged| logged.verb == "patch");
    assert!(writes.len() <= 4, "{writes}");
    let node = world.api.get("nodes", "", NODE).expect("there");
    assert_eq!((&node["metadata"]["uid"], &node["spec"]["providerID"]), (&uid, &json!("cloud://other")), "{node:#}");
    let lease = world.api.get(LEASES, "kube-node-lease", NODE).expect("there");
    assert_eq!(lease["spec"]["holderIdentity"], "another-agent", "{lease:#}");
    assert!(conflict_events(&world).len() <= 4, "{:?}", conflict_events(&world));
    world.run(pod("a"));
    world.until_ready(&agent, "a").await;
    drop(agent);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_own_lease_is_no_conflict_after_a_restart() {
    if skips("an_own_lease_is_no_conflict_after_a_restart") {
        return;
    }
    let world = ClusterFixture::new().await;
    let now = world.api.now().strftime("%Y-%m-%dT%H:%M:%S.%6fZ").to_string();
    world.api.create(json!({"apiVersion": "coordination.k8s.io/v1", "kind": "Lease",
        "metadata": {"name": NODE, "namespace": "kube-node-lease"},
        "spec": {"holderIdentity": "gone", "leaseDurationSeconds": 40, "renewTime": now}}));
    for _ in 0..2 {
        let before = world.api.last();
        let agent = world.start().await;
        world
            .until(&agent, "the lease is renewed", |seen| {
                seen.log().since(before).of(LEASES).verb("update").codes().contains(&200)
            })
            .await;
        a_moment().await;
        assert_eq!(agent.stop().await, Some(0));
    }
    let lease = world.api.get(LEASES, "kube-node-lease", NODE).expect("there");
    assert_eq!(lease["spec"]["holderIdentity"], "gone", "as the reference has it: {lease:#}");
    assert!(conflict_events(&world).is_empty(), "{:?}", texts(&world));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_node_that_is_deleted_comes_back_where_that_is_wanted() {
    // Spec 05 §4.8: `reregisterDeletedNode`.
    if skips("a_node_that_is_deleted_comes_back_where_that_is_wanted") {
        return;
    }
    let mut world = ClusterFixture::new().await;
    world.home = world.home.settings(json!({"node": {"reregisterDeletedNode": true}}));
    let agent = world.start().await;
    world.run(pod("a"));
    world.until_ready(&agent, "a").await;
    let old = world.api.get("nodes", "", NODE).expect("there")["metadata"]["uid"].clone();
    world.api.delete("nodes", "", NODE, None);
    let is_new = |node: &Value| node["metadata"]["uid"] != old && condition(node, "Ready") == "True";
    world
        .until(&agent, "the node is there again", |seen| {
            seen.object("nodes", "", NODE).is_some_and(|node| is_new(&node))
        })
        .await;
    let new = world.api.get("nodes", "", NODE).expect("there")["metadata"]["uid"].clone();
    for (resource, namespace) in [(LEASES, "kube-node-lease"), ("csinodes.storage.k8s.io", "")] {
        world
            .until(&agent, &format!("{resource} is the new node's"), |seen| {
                let found = seen.object(resource, namespace, NODE);
                found.is_some_and(|found| found["metadata"]["ownerReferences"][0]["uid"] == new)
            })
            .await;
    }
    assert_eq!(world.runtime.cri.count("stop_podsandbox"), 0, "pods go on");
    drop(agent);
}
