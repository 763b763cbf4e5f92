//! API server outages: unreachable, hanging, and black-holed connections (spec 10a §21).

use std::time::Duration;

use crate::cluster::{ClusterFixture, NAMESPACE, a_moment, pod};
use berth_testkit::{
    api_server::{Effect, Fault},
    process::{NODE, skips},
};

const LEASES: &str = "leases.coordination.k8s.io";

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn pods_keep_running_while_the_api_server_is_down() {
    // AC-10a-37, AC-10-43
    if skips("pods_keep_running_while_the_api_server_is_down") {
        return;
    }
    let (world, agent) = ClusterFixture::joined().await;
    let pods: Vec<_> = ["a", "b", "c"].map(|name| world.run(pod(name))).into();
    for name in ["a", "b", "c"] {
        world.until_ready(&agent, name).await;
    }
    let (sandboxes, started) = (world.runtime.cri.count("run_podsandbox"), world.runtime.cri.count("start_container"));
    world.api.take_offline().await;
    world.end(&pods[0], 1);
    world.runtime.until("what ended is restarted", &agent, |cri| cri.count("start_container") == started + 1).await;
    a_moment().await;
    world.api.delete("pods", NAMESPACE, "c", Some(0));
    assert_eq!(world.runtime.cri.count("stop_podsandbox"), 0, "nothing is stopped on half a knowledge");
    let before = world.api.last();
    world.api.bring_online().await;
    world
        .until(&agent, "the lease is renewed", |seen| {
            seen.log().since(before).at(LEASES, "kube-node-lease", NODE).iter().any(|logged| logged.code == Some(200))
        })
        .await;
    world
        .until_pod(&agent, "a", "tells its restart", |pod| pod["status"]["containerStatuses"][0]["restartCount"] == 1)
        .await;
    world.runtime.until("who was deleted meanwhile is stopped", &agent, |cri| cri.count("stop_podsandbox") > 0).await;
    assert_eq!(world.runtime.cri.count("run_podsandbox"), sandboxes, "no other pod is restarted");
    let asked = world.agent_requests().since(before);
    assert!(asked.at("pods", NAMESPACE, "b").verb("patch").is_empty(), "an unchanged status is not published\n{asked}");
    assert!(asked.verb("list").is_empty(), "{asked}");
    drop(agent);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn one_request_that_hangs_blocks_no_other() {
    // AC-10a-27
    if skips("one_request_that_hangs_blocks_no_other") {
        return;
    }
    let (world, agent) = ClusterFixture::joined().await;
    world.api.fault(Fault::new(Effect::Hang).on("patch", "pods").name("^stuck$").always());
    world.run(pod("stuck"));
    let names: Vec<String> = (0..20).map(|i| format!("pod-{i}")).collect();
    names.iter().for_each(|name| drop(world.run(pod(name))));
    for name in &names {
        world.until_ready(&agent, name).await;
    }
    world.api.clear_all();
    world.until_ready(&agent, "stuck").await;
    drop(agent);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_watch_that_breaks_is_resumed_where_it_was() {
    // AC-10a-28, AC-10-11, AC-10-14
    if skips("a_watch_that_breaks_is_resumed_where_it_was") {
        return;
    }
    let world = ClusterFixture::new().await;
    world.api.fault(Fault::new(Effect::Truncate(3, 20)).on("watch", "pods"));
    let agent = world.start().await;
    world.until(&agent, "pods are watched", |seen| !seen.log().of("pods").verb("watch").is_empty()).await;
    let before = world.api.last();
    for name in ["a", "b", "c", "d"] {
        world.run(pod(name));
    }
    for name in ["a", "b", "c", "d"] {
        world.until_ready(&agent, name).await;
    }
    let asked = world.agent_requests().since(before);
    assert!(!asked.of("pods").verb("watch").is_empty() && asked.verb("list").is_empty(), "{asked}");
    drop(agent);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_black_hole_costs_neither_the_lease_nor_the_watches() {
    // AC-10-5; an HTTP/2 ping would detect the dead watch only after 45 s.
    if skips("a_black_hole_costs_neither_the_lease_nor_the_watches") {
        return;
    }
    let (world, agent) = ClusterFixture::joined().await;
    world.until(&agent, "a lease", |seen| seen.object(LEASES, "kube-node-lease", NODE).is_some()).await;
    for connection in world.api.connections() {
        connection.set_black_hole(true);
    }
    let before = world.api.last();
    let begun = std::time::Instant::now();
    world
        .until(&agent, "the lease is renewed on another connection", |seen| {
            seen.log().since(before).at(LEASES, "kube-node-lease", NODE).iter().any(|logged| logged.code == Some(200))
        })
        .await;
    assert!(begun.elapsed() < Duration::from_secs(40), "{:?}", begun.elapsed());
    world.run(pod("new"));
    world
        .until(&agent, "pods are watched again", |seen| {
            !seen.log().since(before).by(&format!("system:node:{NODE}")).of("pods").verb("watch").is_empty()
        })
        .await;
    println!("pods are watched again {:?} after the black hole began", begun.elapsed());
    assert!(begun.elapsed() < Duration::from_secs(40), "{:?}", begun.elapsed());
    world.until_ready(&agent, "new").await;
    let asked = world.agent_requests().since(before);
    assert!(asked.verb("list").is_empty(), "{asked}");
    drop(agent);
}
