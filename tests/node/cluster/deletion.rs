//! Pod deletion: grace periods, status, force, and finalizers (spec 10a §14, §15).

use std::time::Duration;

use serde_json::json;

use crate::cluster::{ClusterFixture, NAMESPACE, a_moment, condition, pod, pod_of};
use berth_testkit::{api_server::RecordedRequest, process::skips, scripted_cri::Behaviour};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_deleted_pod_ends_and_goes() {
    // AC-10-24, AC-10a-32
    if skips("a_deleted_pod_ends_and_goes") {
        return;
    }
    let (world, agent) = ClusterFixture::joined().await;
    let created = world.run(pod("web"));
    world.until_ready(&agent, "web").await;
    let before = world.api.last();
    world.api.delete("pods", NAMESPACE, "web", Some(30));
    world.until_gone(&agent, "web").await;
    a_moment().await;
    let asked = world.agent_requests().since(before).at("pods", NAMESPACE, "web");
    let deletes = asked.verb("delete");
    assert_eq!(deletes.len(), 1, "{asked}");
    let body = &deletes[0].body;
    assert_eq!(body["gracePeriodSeconds"], 0, "{body}");
    assert_eq!(body["preconditions"]["uid"], created["metadata"]["uid"], "{body}");
    let last = asked.sub("status").last().cloned().expect("the final status is published");
    assert!(
        last.id < deletes[0].id
            && ["Succeeded", "Failed"].contains(&last.body["status"]["phase"].as_str().unwrap_or_default()),
        "{asked}"
    );
    let ended = last.ended.expect("answered");
    // Triggered by an event, not by the sync period; the benchmark measures the latency.
    assert!(deletes[0].begun - ended < Duration::from_secs(5), "{:?}", deletes[0].begun - ended);
    drop(agent);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_pod_that_ends_slowly_reports_its_end_when_it_is_over() {
    // 10a §14 steps 3, 4, 7
    if skips("a_pod_that_ends_slowly_reports_its_end_when_it_is_over") {
        return;
    }
    let (world, agent) = ClusterFixture::joined().await;
    let settings = json!({"apiVersion": "v1", "kind": "ConfigMap",
        "metadata": {"name": "settings", "namespace": NAMESPACE}, "data": {"colour": "blue"}});
    world.api.create(settings);
    world.runtime.cri.behave("main", [Behaviour { stops_after: Some(Duration::from_secs(5)), ..Behaviour::default() }]);
    let spec = json!({"containers": [{"name": "main", "envFrom": [{"configMapRef": {"name": "settings"}}]}]});
    world.run(pod_of("slow", spec));
    world.until_ready(&agent, "slow").await;
    let before = world.api.last();
    world.api.delete("pods", NAMESPACE, "slow", Some(30));
    let ending = world
        .until_pod(&agent, "slow", "knows that it is being deleted", |pod| pod["status"]["observedGeneration"] == 2)
        .await;
    let status = &ending["status"];
    assert_eq!((&status["phase"], condition(&ending, "Ready")), (&json!("Running"), "True"), "{status:#}");
    world.until_gone(&agent, "slow").await;
    let updates = world.agent_requests().since(before).at("pods", NAMESPACE, "slow").sub("status");
    let is_over =
        |logged: &RecordedRequest| ["Succeeded", "Failed"].iter().any(|end| logged.body["status"]["phase"] == *end);
    let ends = updates.filter(is_over);
    assert_eq!(ends.len(), 1, "{updates}");
    let container = &ends[0].body["status"]["containerStatuses"][0];
    assert_eq!(container["state"]["terminated"]["exitCode"], 143, "with the end of its container\n{updates}");
    world
        .until(&agent, "nobody follows what nobody refers to", |seen| {
            let streams = seen.log().at("configmaps", NAMESPACE, "settings").verb("watch");
            !streams.is_empty() && streams.iter().all(|stream| stream.ended.is_some())
        })
        .await;
    drop(agent);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_shorter_grace_cuts_a_longer_one_short() {
    // 10a §14: a second DELETE
    if skips("a_shorter_grace_cuts_a_longer_one_short") {
        return;
    }
    let (world, agent) = ClusterFixture::joined().await;
    world.runtime.cri.behave("main", [Behaviour::stubborn()]);
    world.run(pod("stubborn"));
    world.until_ready(&agent, "stubborn").await;
    world.api.delete("pods", NAMESPACE, "stubborn", Some(3600));
    world.runtime.until("it is asked to stop", &agent, |cri| cri.count("stop_container") == 1).await;
    world.api.delete("pods", NAMESPACE, "stubborn", Some(2));
    world.until_gone(&agent, "stubborn").await;
    let calls = world.runtime.cri.calls();
    let graces: Vec<u64> = calls
        .iter()
        .filter(|call| call.op == "stop_container")
        .map(|call| call.detail.parse().expect("seconds"))
        .collect();
    assert!(graces.is_sorted_by(|before, after| before >= after) && graces.last() <= Some(&2), "{graces:?}");
    drop(agent);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_pod_deleted_by_force_is_stopped_and_its_name_is_free() {
    // AC-10-20, AC-10-21
    if skips("a_pod_deleted_by_force_is_stopped_and_its_name_is_free") {
        return;
    }
    let (world, agent) = ClusterFixture::joined().await;
    let old = world.run(pod("web"));
    world.until_ready(&agent, "web").await;
    world.api.delete("pods", NAMESPACE, "web", Some(0));
    let new = world.run(pod("web"));
    assert_ne!(old["metadata"]["uid"], new["metadata"]["uid"]);
    let before = world.api.last();
    let running = world.until_ready(&agent, "web").await;
    assert_eq!(running["metadata"]["uid"], new["metadata"]["uid"]);
    a_moment().await;
    let writes = world.agent_requests().since(before).at("pods", NAMESPACE, "web").verb("patch");
    let taken = writes.filter(|logged| logged.code == Some(200));
    assert!(taken.iter().all(|logged| logged.body["metadata"]["uid"] == new["metadata"]["uid"]), "{writes}");
    assert!(writes.len() - taken.len() <= 1, "a write for the old one is not repeated\n{writes}");
    let reads = world.agent_requests().at("pods", NAMESPACE, "web").verb("get");
    assert!(reads.is_empty(), "a node must not read a deleted pod\n{reads}");
    drop(agent);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_job_that_is_done_stays_until_it_is_deleted() {
    if skips("a_job_that_is_done_stays_until_it_is_deleted") {
        return;
    }
    let (world, agent) = ClusterFixture::joined().await;
    let created = world.run(pod_of("job", json!({"restartPolicy": "Never", "containers": [{"name": "main"}]})));
    world.until_ready(&agent, "job").await;
    world.end(&created, 0);
    let done = world.until_pod(&agent, "job", "has Succeeded", |pod| pod["status"]["phase"] == "Succeeded").await;
    assert_eq!(done["status"]["containerStatuses"][0]["state"]["terminated"]["exitCode"], 0);
    a_moment().await;
    assert!(world.agent_requests().at("pods", NAMESPACE, "job").verb("delete").is_empty());
    world.api.delete("pods", NAMESPACE, "job", None);
    assert!(world.pod("job").is_none(), "what is over goes at once");
    drop(agent);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_finalizer_holds_the_object_and_not_us() {
    // AC-10-25
    if skips("a_finalizer_holds_the_object_and_not_us") {
        return;
    }
    let (world, agent) = ClusterFixture::joined().await;
    let mut protected = pod("held");
    protected["metadata"]["finalizers"] = json!(["example.com/held"]);
    world.run(protected);
    world.until_ready(&agent, "held").await;
    world.api.delete("pods", NAMESPACE, "held", Some(1));
    world
        .until(&agent, "it is deleted as far as we are concerned", |seen| {
            seen.object("pods", NAMESPACE, "held").is_some_and(|pod| pod["metadata"]["deletionGracePeriodSeconds"] == 0)
        })
        .await;
    a_moment().await;
    assert_eq!(
        world.agent_requests().at("pods", NAMESPACE, "held").verb("delete").len(),
        1,
        "{}",
        world.agent_requests()
    );
    world.api.patch(
        "pods",
        NAMESPACE,
        "held",
        json!({"metadata": {"$deleteFromPrimitiveList/finalizers": ["example.com/held"]}}),
    );
    world.until_gone(&agent, "held").await;
    drop(agent);
}
