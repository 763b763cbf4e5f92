//! Unusual, oversized, or deleted API objects: pods that do not use them are unaffected.
//!
//! The bad input of issue "A node in a cluster".

use serde_json::{Value, json};

use crate::cluster::{ClusterFixture, NAMESPACE, a_moment, pod, pod_of};
use berth_testkit::{
    api_server::view::Write,
    process::{NODE, skips},
};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn pods_of_a_newer_cluster() {
    if skips("pods_of_a_newer_cluster") {
        return;
    }
    let (world, agent) = ClusterFixture::joined().await;
    world.run(pod("a"));
    world.until_ready(&agent, "a").await;
    world.api.rules(|rules| rules.is_newer = true);
    let mut newer = pod_of(
        "newer",
        json!({"containers": [{"name": "main", "future": {"of": ["containers"]}}], "future": true,
               "tolerations": [{"key": "x", "operator": "Roughly", "effect": "NoSchedule"}]}),
    );
    newer["metadata"]["future"] = json!(1);
    newer["status"] = json!({"future": 1, "conditions": [{"type": "Future", "status": "Perhaps"}]});
    world.run(newer);
    world.until_ready(&agent, "newer").await;
    let put = |name: &str, change: &dyn Fn(&mut Value)| {
        let mut object = pod(name);
        object["metadata"]["uid"] = json!(format!("11111111-1111-4111-8111-1111111111{:02}", name.len()));
        object["spec"]["nodeName"] = json!(NODE);
        object["status"] = json!({"phase": "Pending", "qosClass": "BestEffort"});
        change(&mut object);
        world.api.with(|core| core.apply(vec![Write::Put { resource: "pods".to_owned(), object }]));
    };
    put("policies", &|pod| {
        pod["spec"]["dnsPolicy"] = json!("Quantum");
        pod["spec"]["containers"][0]["imagePullPolicy"] = json!("Sometimes");
    });
    put("restart", &|pod| pod["spec"]["restartPolicy"] = json!("Perhaps"));
    put("lists", &|pod| pod["spec"]["containers"] = json!("many"));
    put("ports-of-words", &|pod| pod["spec"]["containers"][0]["ports"] = json!([{"containerPort": "http"}]));
    put("volumes-of-future", &|pod| pod["spec"]["volumes"] = json!([{"name": "v", "future": {"x": 1}}]));
    a_moment().await;
    world.run(pod("b"));
    world.until_ready(&agent, "b").await;
    assert_eq!(world.runtime.cri.count("stop_podsandbox"), 0, "nobody is stopped\n{}", agent.log_end());
    world.api.delete("pods", NAMESPACE, "b", Some(1));
    world.until_gone(&agent, "b").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_config_map_that_is_too_big() {
    if skips("a_config_map_that_is_too_big") {
        return;
    }
    let (world, agent) = ClusterFixture::joined().await;
    world.run(pod("a"));
    world.until_ready(&agent, "a").await;
    let text = "x".repeat(1_400_000);
    let metadata = json!({"name": "big", "namespace": NAMESPACE, "uid": "22222222-2222-4222-8222-222222222222"});
    let object = json!({"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": {"text": text}});
    world.api.with(|core| core.apply(vec![Write::Put { resource: "configmaps".to_owned(), object }]));
    let spec = json!({
        "containers": [{"name": "main", "volumeMounts": [{"name": "files", "mountPath": "/big"}]}],
        "volumes": [{"name": "files", "configMap": {"name": "big"}}]});
    let created = world.run(pod_of("reader", spec));
    world.until_ready(&agent, "reader").await;
    let uid = created["metadata"]["uid"].as_str().expect("a uid");
    let file = world.home.root().join("pods").join(uid).join("volumes/kubernetes.io~configmap/files/text");
    assert_eq!(std::fs::metadata(&file).expect("there").len(), 1_400_000);
    world.run(pod("b"));
    world.until_ready(&agent, "b").await;
    assert_eq!(world.runtime.cri.count("stop_podsandbox"), 0, "{}", agent.log_end());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_secret_that_is_deleted_under_its_pod() {
    if skips("a_secret_that_is_deleted_under_its_pod") {
        return;
    }
    let (world, agent) = ClusterFixture::joined().await;
    let secret = || {
        json!({"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "word", "namespace": NAMESPACE},
               "data": {"word": "aGVsbG8="}})
    };
    world.api.create(secret());
    let spec = json!({
        "containers": [{"name": "main", "envFrom": [{"secretRef": {"name": "word"}}],
                        "volumeMounts": [{"name": "files", "mountPath": "/word"}]}],
        "volumes": [{"name": "files", "secret": {"secretName": "word"}}]});
    let created = world.run(pod_of("user", spec));
    world.run(pod("a"));
    world.until_ready(&agent, "user").await;
    world.until_ready(&agent, "a").await;
    let uid = created["metadata"]["uid"].as_str().expect("a uid");
    let file = world.home.root().join("pods").join(uid).join("volumes/kubernetes.io~secret/files/word");
    let started = world.runtime.cri.count("start_container");
    world.api.delete("secrets", NAMESPACE, "word", None);
    a_moment().await;
    assert_eq!(std::fs::read_to_string(&file).expect("it stays"), "hello");
    assert_eq!(world.runtime.cri.count("start_container"), started, "it runs on");
    world.end(&created, 1);
    world
        .until_pod(&agent, "user", "says what it waits for", |pod| {
            pod["status"]["containerStatuses"][0]["state"]["waiting"]["reason"] == "CreateContainerConfigError"
        })
        .await;
    world.api.create(secret());
    world.until_ready(&agent, "user").await;
    assert_eq!(world.runtime.cri.count("stop_podsandbox"), 0, "{}", agent.log_end());
    drop(agent);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_pod_without_containers_is_not_begun() {
    if skips("a_pod_without_containers_is_not_begun") {
        return;
    }
    let (world, agent) = ClusterFixture::joined().await;
    world.run(pod("a"));
    world.until_ready(&agent, "a").await;
    let made = world.runtime.cri.count("run_podsandbox");
    for (name, uid, init) in [("bare", "a", json!([])), ("init", "b", json!([{"name": "i", "image": "i"}]))] {
        let mut object = pod_of(name, json!({"containers": [], "initContainers": init}));
        object["metadata"]["uid"] = json!(format!("33333333-3333-4333-8333-33333333333{uid}"));
        object["spec"]["nodeName"] = json!(NODE);
        object["status"] = json!({"phase": "Pending", "qosClass": "BestEffort"});
        // A real API server rejects such a pod.
        world.api.with(|core| core.apply(vec![Write::Put { resource: "pods".to_owned(), object }]));
        let failed = |pod: &Value| pod["status"]["phase"] == "Failed";
        let pod = world.until_pod(&agent, name, "is told to be nothing", failed).await;
        assert_eq!(pod["status"]["message"], "The pod has no containers", "{:#}", pod["status"]);
    }
    let mut bare = pod("bare");
    bare["spec"]["containers"] = json!([]);
    world.home.put_pod(&bare);
    agent.until_log("spec.containers: Required value").await;
    a_moment().await;
    assert_eq!(world.runtime.cri.count("run_podsandbox"), made, "{}", agent.log_end());
    drop(agent);
}
