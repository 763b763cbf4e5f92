//! Agent restart on a cluster node: no pod and no status changes (spec 10a §22).

use std::time::Duration;

use serde_json::{Value, json};

use crate::cluster::{ClusterFixture, NAMESPACE, a_moment, pod};
use berth_testkit::{
    misbehaving_server::{Answer, Server},
    process::{NODE, PATIENCE, manifest, manifest_of, skips},
};

/// Mirror pod of the static pod.
const MIRROR: &str = "fixed-test-node";

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_restart_changes_nothing() {
    // AC-10-42, AC-10a-38
    if skips("a_restart_changes_nothing") {
        return;
    }
    let world = ClusterFixture::new().await;
    world.home.put_pod(&manifest("fixed"));
    let agent = world.start().await;
    let names: Vec<String> = (0..20).map(|i| format!("pod-{i}")).collect();
    names.iter().for_each(|name| drop(world.run(pod(name))));
    for name in &names {
        world.until_ready(&agent, name).await;
    }
    world.until_ready(&agent, MIRROR).await;
    a_moment().await;
    agent.kill().await;
    // Times have a resolution of one second: a restarted probe or container would show another one.
    let ended = world.api.now().as_second();
    while world.api.now().as_second() == ended {
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    world.api.delete("pods", NAMESPACE, "pod-0", Some(0));
    world.api.delete("pods", NAMESPACE, "pod-1", Some(30));
    let (started, before) = (world.runtime.cri.count("start_container"), world.api.last());
    let same: Vec<&str> = names.iter().skip(2).map(String::as_str).chain([MIRROR]).collect();
    let versions: Vec<Value> = same.iter().map(|name| version(&world, name)).collect();
    let agent = world.home.start().await;
    world.until_gone(&agent, "pod-1").await;
    world.runtime.until("who was deleted meanwhile is stopped", &agent, |cri| cri.count("stop_podsandbox") >= 2).await;
    a_moment().await;
    let asked = world.agent_requests().since(before);
    let others = asked.of("pods").filter(|logged| !["pod-0", "pod-1"].contains(&logged.name.as_str()));
    assert!(others.verb("patch").is_empty() && others.verb("get").is_empty(), "{others}");
    assert_eq!(same.iter().map(|name| version(&world, name)).collect::<Vec<_>>(), versions);
    let tokens = asked.of("serviceaccounts");
    assert!(tokens.is_empty(), "those on disk are not due\n{tokens}");
    assert_eq!(world.runtime.cri.count("start_container"), started, "nothing is restarted");
    let node = asked.of("nodes").verb("create");
    assert_eq!(node.codes(), [409], "{asked}");
    let unready = asked.at("nodes", "", NODE).sub("status").filter(|logged| {
        let conditions = logged.body["status"]["conditions"].as_array();
        conditions.is_some_and(|all| all.iter().any(|c| c["type"] == "Ready" && c["status"] == "False"))
    });
    assert!(unready.is_empty(), "{unready}");
    drop(agent);
}

fn version(world: &ClusterFixture, name: &str) -> Value {
    world.pod(name).expect("there")["metadata"]["resourceVersion"].clone()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn static_pods_that_are_probed_stay_ready() {
    // AC-10a-38, 10a §22 step 7: as for static control plane pods
    if skips("static_pods_that_are_probed_stay_ready") {
        return;
    }
    let world = ClusterFixture::new().await;
    let mut web = Server::start([Answer::Plain(200, "ok".to_owned())]).await;
    let port = web.port();
    let asked =
        |period: u32| json!({"httpGet": {"host": "127.0.0.1", "port": port, "path": "/"}, "periodSeconds": period});
    let container =
        json!({"name": "main", "startupProbe": asked(1), "livenessProbe": asked(1), "readinessProbe": asked(2)});
    world.home.put_pod(&manifest_of("fixed", json!({"hostNetwork": true, "containers": [container]})));
    let agent = world.start().await;
    world.until_ready(&agent, MIRROR).await;
    let saved = world.home.root().join("probe_results_state");
    agent
        .until("its results are on disk", async || {
            std::fs::read_to_string(&saved).is_ok_and(|text| text.contains(r#""ready":true"#))
        })
        .await;
    a_moment().await;
    let (before, mirror_version, started) =
        (world.api.last(), version(&world, MIRROR), world.runtime.cri.count("start_container"));
    agent.kill().await;
    while web.heads.try_recv().is_ok() {}
    let agent = world.home.start().await;
    // Both probes continue, and more than once.
    for _ in 0..5 {
        tokio::time::timeout(PATIENCE, web.heads.recv()).await.expect("it is probed again").expect("it is served");
    }
    world.until(&agent, "the node is looked after", |seen| seen.log().since(before).of("nodes").len() > 1).await;
    a_moment().await;
    let writes = world.agent_requests().since(before).of("pods");
    assert!(writes.verb("patch").is_empty() && writes.verb("get").is_empty(), "{writes}");
    assert!(writes.verb("create").is_empty() && writes.verb("delete").is_empty(), "{writes}");
    assert_eq!(version(&world, MIRROR), mirror_version);
    assert_eq!(world.runtime.cri.count("start_container"), started, "nothing is restarted");
    drop(agent);
}
