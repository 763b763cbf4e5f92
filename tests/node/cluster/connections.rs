//! Number of connections of a node to the API server (spec 10 §8.2, §8.6).

use std::collections::BTreeSet;

use serde_json::json;

use crate::cluster::{ClusterFixture, NAMESPACE, pod_of};
use berth_testkit::{
    api_server::Requests,
    process::{NODE, skips},
};

const LEASES: &str = "leases.coordination.k8s.io";
/// Maximum number of connections; the limit for 500 pods applies to fifty.
const MOST: usize = 8;

fn used(requests: &Requests) -> BTreeSet<u64> {
    requests.iter().map(|logged| logged.connection).collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn fifty_pods_need_few_connections() {
    if skips("fifty_pods_need_few_connections") {
        return;
    }
    let (world, agent) = ClusterFixture::joined().await;
    let names: Vec<String> = (0..50).map(|i| format!("pod-{i}")).collect();
    for name in &names {
        let metadata = json!({"name": name, "namespace": NAMESPACE});
        world.api.create(json!({"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": {"a": "b"}}));
        world.api.create(json!({"apiVersion": "v1", "kind": "Secret", "metadata": metadata, "data": {"c": "ZA=="}}));
        let all = json!([{"configMapRef": {"name": name}}, {"secretRef": {"name": name}}]);
        world.run(pod_of(name, json!({"containers": [{"name": "main", "envFrom": all}]})));
    }
    for name in &names {
        world.until_ready(&agent, name).await;
    }
    let before = world.api.last();
    world
        .until(&agent, "the lease is renewed with all of them there", |seen| {
            seen.log().since(before).at(LEASES, "kube-node-lease", NODE).codes().contains(&200)
        })
        .await;
    let asked = world.agent_requests();
    let watched = asked.verb("watch").filter(|logged| ["configmaps", "secrets"].contains(&logged.resource.as_str()));
    assert!(watched.len() >= 2 * names.len(), "each is followed: {}", watched.len());
    // A server limits each connection to a hundred streams: one would not be sufficient.
    let (watches, leases, all) = (used(&asked.verb("watch")), used(&asked.of(LEASES)), used(&asked));
    assert!(watches.len() >= 2, "{watches:?}");
    assert!(leases.is_disjoint(&watches), "{leases:?} {watches:?}");
    assert!(all.len() <= MOST, "there never were more: {all:?}");
    let open = world.api.connections().iter().filter(|connection| !connection.is_ended()).count();
    assert!(open <= MOST, "{open}");
    drop(agent);
}
