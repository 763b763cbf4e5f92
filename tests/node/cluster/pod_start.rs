//! Pod start on a cluster node: running, waiting, or refused; and an agent whose own start fails (spec 10a §13, §19).

use std::time::Duration;

use serde_json::{Value, json};

use crate::cluster::{ClusterFixture, NAMESPACE, a_moment, condition, pod, pod_of};
use berth_testkit::{
    process::{NODE, skips},
    scripted_cri::Fault,
};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_bound_pod_runs() {
    // AC-10-16, AC-10a-31
    if skips("a_bound_pod_runs") {
        return;
    }
    let (world, agent) = ClusterFixture::joined().await;
    world.until(&agent, "pods are watched", |seen| !seen.log().of("pods").verb("watch").is_empty()).await;
    let before = world.api.last();
    world.run(pod("web"));
    let running = world.until_ready(&agent, "web").await;
    let status = &running["status"];
    let node = world.api.get("nodes", "", NODE).expect("there");
    assert!(
        status["hostIP"].is_string(),
        "{}\n{:#}",
        world.agent_requests().at("pods", NAMESPACE, "web"),
        node["status"]["addresses"]
    );
    assert!(status["podIP"].is_string() && status["startTime"].is_string(), "{status:#}");
    // e2e F1: a container without resources must not look like one on a node without resize support.
    let resources = [&status["resources"], &status["containerStatuses"][0]["resources"]];
    assert_eq!(resources, [&json!({}); 2], "{status:#}");
    for kind in ["PodReadyToStartContainers", "Initialized", "Ready", "ContainersReady", "PodScheduled"] {
        assert_eq!(condition(&running, kind), "True", "{kind} in {status:#}");
    }
    a_moment().await;
    let asked = world.agent_requests().since(before);
    let patches = asked.at("pods", NAMESPACE, "web").sub("status");
    assert!((1..=4).contains(&patches.len()), "{patches}");
    assert!(patches.iter().all(|logged| logged.verb == "patch" && logged.code == Some(200)), "{patches}");
    assert!(asked.verb("list").is_empty(), "{asked}");
    assert!(asked.of("pods").verb("get").is_empty(), "{asked}");
    let tokens = asked.of("serviceaccounts").sub("token").filter(|logged| logged.code == Some(201));
    assert_eq!(tokens.len(), 1, "{asked}");
    let events = world.api.all("events");
    let reasons: Vec<&str> = events.iter().filter_map(|e| e["reason"].as_str()).collect();
    for reason in ["Created", "Started"] {
        assert!(reasons.contains(&reason), "{reasons:?}");
    }
    drop(agent);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_pod_is_reported_as_starting_before_it_runs() {
    // 10a §13 steps 3, 5, 8
    if skips("a_pod_is_reported_as_starting_before_it_runs") {
        return;
    }
    let (world, agent) = ClusterFixture::joined().await;
    world.runtime.cri.fault("run_podsandbox", "web", Fault::Delay(Duration::from_secs(5)), Some(1));
    world.run(pod("web"));
    let begun = world
        .until_pod(&agent, "web", "tells that it begins", |pod| {
            pod["status"]["containerStatuses"][0]["state"]["waiting"]["reason"] == "ContainerCreating"
        })
        .await;
    let status = &begun["status"];
    assert_eq!((&status["phase"], &status["observedGeneration"]), (&json!("Pending"), &json!(1)), "{status:#}");
    assert!(status["startTime"].is_string() && status["hostIPs"].is_array(), "{status:#}");
    assert!(status["podIP"].is_null(), "{status:#}");
    assert_eq!(condition(&begun, "PodReadyToStartContainers"), "False", "{status:#}");
    let running = world.until_ready(&agent, "web").await;
    assert_eq!(running["status"]["startTime"], status["startTime"], "it began once");
    assert_eq!(running["status"]["observedGeneration"], 1);
    world.run(pod("neighbour"));
    world.until_ready(&agent, "neighbour").await;
    let shared = world
        .agent_requests()
        .at("configmaps", NAMESPACE, "kube-root-ca.crt")
        .filter(|logged| logged.code == Some(200));
    assert_eq!(shared.verbs(), ["watch"], "one stream for both\n{shared}");
    drop(agent);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_a_pod_refers_to_comes_into_its_environment_and_files() {
    // AC-10a-36
    if skips("what_a_pod_refers_to_comes_into_its_environment_and_files") {
        return;
    }
    let (world, agent) = ClusterFixture::joined().await;
    world.api.create(
        json!({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "settings", "namespace": NAMESPACE},
                        "data": {"colour": "blue"}}),
    );
    let spec = json!({
        "containers": [{"name": "main", "envFrom": [{"configMapRef": {"name": "settings"}}],
                        "volumeMounts": [{"name": "files", "mountPath": "/etc/settings"}]}],
        "volumes": [{"name": "files", "configMap": {"name": "settings"}}]});
    let created = world.run(pod_of("reader", spec));
    world.until_ready(&agent, "reader").await;
    let uid = created["metadata"]["uid"].as_str().expect("a uid");
    let volumes = world.home.root().join("pods").join(uid).join("volumes");
    let file = volumes.join("kubernetes.io~configmap/files/colour");
    assert_eq!(std::fs::read_to_string(&file).expect("there"), "blue");
    let token = walk(&volumes.join("kubernetes.io~projected"), "token");
    assert_eq!(std::fs::read_to_string(token).expect("a token").split('.').count(), 3, "a JWT");
    let before = world.api.last();
    world.api.patch("configmaps", NAMESPACE, "settings", json!({"data": {"colour": "green"}}));
    agent.until("the file follows", async || std::fs::read_to_string(&file).is_ok_and(|text| text == "green")).await;
    let asked = world.agent_requests().since(before).filter(|logged| logged.resource == "configmaps");
    assert!(asked.is_empty(), "{asked}");
    drop(agent);
}

/// Finds a file below a directory with one unknown level in between.
pub fn walk(folder: &std::path::Path, name: &str) -> std::path::PathBuf {
    let entries = std::fs::read_dir(folder).unwrap_or_else(|error| panic!("{}: {error}", folder.display()));
    let found = entries.flatten().map(|entry| entry.path().join(name)).find(|path| path.exists());
    found.unwrap_or_else(|| panic!("no {name} below {}", folder.display()))
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_is_missing_is_waited_for() {
    // AC-10-29
    if skips("what_is_missing_is_waited_for") {
        return;
    }
    let (world, agent) = ClusterFixture::joined().await;
    let spec = json!({"containers": [{"name": "main", "env": [
        {"name": "WORD", "valueFrom": {"secretKeyRef": {"name": "word", "key": "word"}}}]}]});
    world.run(pod_of("waits", spec));
    world.run(pod("free"));
    world.until_ready(&agent, "free").await;
    let pod = world
        .until_pod(&agent, "waits", "says what it waits for", |pod| {
            let waiting = &pod["status"]["containerStatuses"][0]["state"]["waiting"];
            waiting["reason"] == "CreateContainerConfigError"
        })
        .await;
    let waiting = &pod["status"]["containerStatuses"][0]["state"]["waiting"];
    assert_eq!(waiting["message"], "secret \"word\" not found", "{waiting:#}");
    world
        .api
        .create(json!({"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "word", "namespace": NAMESPACE},
                                    "data": {"word": "aGVsbG8="}}));
    world.until_ready(&agent, "waits").await;
    assert_eq!(world.pod("waits").expect("there")["spec"]["nodeName"], NODE);
    drop(agent);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_refused_pod_keeps_its_one_status() {
    if skips("a_refused_pod_keeps_its_one_status") {
        return;
    }
    let (world, agent) = ClusterFixture::joined().await;
    let forbidden = json!([{"name": "net.core.somaxconn", "value": "1024"}]);
    world.run(pod_of("refused", json!({"securityContext": {"sysctls": forbidden}, "containers": [{"name": "main"}]})));
    let is_refused = |pod: &Value| pod["status"]["reason"] == "SysctlForbidden" && pod["status"]["phase"] == "Failed";
    world.until_pod(&agent, "refused", "is refused", is_refused).await;
    let assert_rejected_once = |world: &ClusterFixture| {
        let patches = world.agent_requests().at("pods", NAMESPACE, "refused").verb("patch");
        assert_eq!(patches.len(), 1, "{patches}");
        let status = &world.pod("refused").expect("there")["status"];
        assert!(status["containerStatuses"].is_null() && status["reason"] == "SysctlForbidden", "{status}");
    };
    // Every reaction to the echo of that status is done before the next pod runs.
    world.run(pod("after"));
    world.until_ready(&agent, "after").await;
    assert_rejected_once(&world);
    agent.kill().await;
    let agent = world.start().await;
    world.run(pod("later"));
    world.until_ready(&agent, "later").await;
    assert_rejected_once(&world);
    world.api.delete("pods", NAMESPACE, "refused", None);
    world.until_gone(&agent, "refused").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_start_that_fails_is_reported_as_an_event() {
    // Spec 01 §20, 05 §13
    if skips("a_start_that_fails_is_reported_as_an_event") {
        return;
    }
    let world = ClusterFixture::new().await;
    // A directory where a file is expected.
    std::fs::create_dir_all(world.home.root().join("allocated_pods_state")).expect("a directory");
    let mut agent = world.home.spawn();
    assert_eq!(agent.end().await.code(), Some(1), "{}", agent.log_end());
    let events = world.api.all("events");
    let failure = events.iter().find(|event| event["reason"] == "KubeletSetupFailed");
    let failure = failure.unwrap_or_else(|| panic!("{events:#?}\n{}", agent.log_end()));
    assert_eq!((&failure["type"], &failure["involvedObject"]["kind"]), (&json!("Warning"), &json!("Node")));
    let message = failure["message"].as_str().unwrap_or_default();
    assert!(message.contains("allocated_pods_state"), "{message}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_label_that_comes_after_its_pod_is_waited_for() {
    // Spec 02a §6.2
    if skips("a_label_that_comes_after_its_pod_is_waited_for") {
        return;
    }
    let (world, agent) = ClusterFixture::joined().await;
    let wants = json!({"nodeSelector": {"zone": "a"}, "containers": [{"name": "main"}]});
    world.run(pod_of("early", wants));
    world.api.patch("nodes", "", NODE, json!({"metadata": {"labels": {"zone": "a"}}}));
    world.until_ready(&agent, "early").await;
    // The node never has this label: the order in which the two watches deliver does not matter.
    world.run(pod_of("never", json!({"nodeSelector": {"zone": "b"}, "containers": [{"name": "main"}]})));
    world.until_pod(&agent, "never", "is refused", |pod| pod["status"]["reason"] == "NodeAffinity").await;
}
