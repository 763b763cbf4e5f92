//! Mirror pods of static pods in the API server (spec 10a §16).

use serde_json::json;

use crate::cluster::{ClusterFixture, NAMESPACE, a_moment};
use berth_testkit::process::{NODE, manifest, manifest_of, skips};

const NAME: &str = "web-test-node";

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_static_pod_has_a_mirror_that_can_be_deleted_in_vain() {
    // AC-10a-33, AC-10-28
    if skips("a_static_pod_has_a_mirror_that_can_be_deleted_in_vain") {
        return;
    }
    let world = ClusterFixture::new().await;
    world.home.put_pod(&manifest("web"));
    let agent = world.start().await;
    let mirror = world.until_ready(&agent, NAME).await;
    let metadata = &mirror["metadata"];
    assert_eq!(
        metadata["annotations"]["kubernetes.io/config.mirror"],
        metadata["annotations"]["kubernetes.io/config.hash"]
    );
    let node = world.api.get("nodes", "", NODE).expect("there");
    assert_eq!(metadata["ownerReferences"][0]["uid"], node["metadata"]["uid"]);
    let ran = world.runtime.cri.count("start_container");

    for grace in [30, 0] {
        let old = world.pod(NAME).expect("a mirror")["metadata"]["uid"].clone();
        let before = world.api.last();
        world.api.delete("pods", NAMESPACE, NAME, Some(grace));
        let is_new =
            |pod: &serde_json::Value| pod["metadata"]["uid"] != old && pod["metadata"]["deletionTimestamp"].is_null();
        world.until_pod(&agent, NAME, "is there again", is_new).await;
        world.until_ready(&agent, NAME).await;
        let deletes = world.agent_requests().at("pods", NAMESPACE, NAME).verb("delete");
        if grace > 0 {
            let body = &deletes.last().expect("what the user asked for is done").body;
            assert_eq!((&body["gracePeriodSeconds"], &body["preconditions"]["uid"]), (&json!(0), &old), "{deletes}");
        } else {
            // The server reports the deletion before the object is removed: a second DELETE of the same UID may follow.
            let others = deletes.since(before).filter(|logged| logged.body["preconditions"]["uid"] != old);
            assert!(others.is_empty(), "there is nothing else to delete\n{deletes}");
        }
    }
    let uid = world.pod(NAME).expect("a mirror")["metadata"]["uid"].clone();
    let updates = world.agent_requests().at("pods", NAMESPACE, NAME).sub("status");
    assert!(
        updates
            .iter()
            .all(|logged| logged.body["metadata"]["uid"] != metadata["annotations"]["kubernetes.io/config.hash"])
    );
    assert_eq!(updates.last().expect("received").body["metadata"]["uid"], uid, "the mirror's own\n{updates}");
    assert_eq!(world.runtime.cri.count("start_container"), ran, "the container is never restarted");

    world.home.put_pod(&manifest_of("web", json!({"containers": [{"name": "main", "command": ["/other"]}]})));
    let old = world.pod(NAME).expect("a mirror")["metadata"]["annotations"]["kubernetes.io/config.hash"].clone();
    world
        .until_pod(&agent, NAME, "is the new one", |pod| {
            pod["metadata"]["annotations"]["kubernetes.io/config.hash"] != old
        })
        .await;
    world.until_ready(&agent, NAME).await;

    world.home.remove("web.json");
    world.until_gone(&agent, NAME).await;
    a_moment().await;
    assert!(world.pod(NAME).is_none(), "it does not come back");
    drop(agent);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_mirror_goes_with_its_node_and_comes_with_the_next() {
    // 10a §16 step 10
    if skips("a_mirror_goes_with_its_node_and_comes_with_the_next") {
        return;
    }
    let world = ClusterFixture::new().await;
    world.home.put_pod(&manifest("web"));
    let agent = world.start().await;
    world.until_ready(&agent, NAME).await;
    let mut node = (*world.api.get("nodes", "", NODE).expect("there")).clone();
    let metadata = node["metadata"].as_object_mut().expect("an object");
    for own in ["uid", "resourceVersion", "creationTimestamp", "managedFields"] {
        metadata.remove(own);
    }
    let ran = world.runtime.cri.count("start_container");
    world.api.delete("nodes", "", NODE, None);
    let uid = world.api.create(node)["metadata"]["uid"].clone();
    world
        .until_pod(&agent, NAME, "belongs to the new node", |pod| pod["metadata"]["ownerReferences"][0]["uid"] == uid)
        .await;
    world.until_ready(&agent, NAME).await;
    assert_eq!(world.runtime.cri.count("start_container"), ran, "the container is never restarted");
    drop(agent);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_static_pod_that_may_have_no_mirror_runs_all_the_same() {
    // AC-10-27
    if skips("a_static_pod_that_may_have_no_mirror_runs_all_the_same") {
        return;
    }
    let mut world = ClusterFixture::new().await;
    world.home = world.home.with(json!({"featureGates": {"PreventStaticPodAPIReferences": false}}));
    world.home.put_pod(&manifest_of("web", json!({"serviceAccountName": "x", "containers": [{"name": "main"}]})));
    let agent = world.start().await;
    agent.until_ready("web").await;
    world.until(&agent, "the mirror is refused", |seen| !seen.log().of("pods").verb("create").is_empty()).await;
    a_moment().await;
    let posts = world.agent_requests().of("pods").verb("create");
    assert_eq!(posts.codes(), [403], "{posts}");
    drop(agent);
}
