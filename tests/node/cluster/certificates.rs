//! Pod certificates in projected volumes, from a fake signer. Spec 07 §9.4, §7.5; spec 02b.

use std::{
    fs,
    path::{Path, PathBuf},
    sync::Arc,
};

use serde_json::{Value, json};

use crate::cluster::{ClusterFixture, NAMESPACE, pod_of};
use berth_testkit::process::{Agent, NODE, skips};

const REQUESTS: &str = "podcertificaterequests.certificates.k8s.io";
const SIGNER: &str = "example.com/identity";
const ACCOUNT: &str = "robot";

/// A node with the feature gate, in a cluster with an account for pods.
async fn world() -> (ClusterFixture, Agent) {
    let mut world = ClusterFixture::new().await;
    world.home = world.home.with(json!({"featureGates": {"PodCertificateRequest": true}}));
    let metadata = json!({"name": ACCOUNT, "namespace": NAMESPACE});
    world.api.create(json!({"apiVersion": "v1", "kind": "ServiceAccount", "metadata": metadata}));
    let agent = world.start().await;
    (world, agent)
}

fn run(world: &ClusterFixture, name: &str) -> Arc<Value> {
    let source = json!({"podCertificate": {"signerName": SIGNER, "keyType": "ED25519", "maxExpirationSeconds": 3600,
        "credentialBundlePath": "bundle.pem", "keyPath": "key.pem", "certificateChainPath": "chain.pem"}});
    world.run(pod_of(
        name,
        json!({"serviceAccountName": ACCOUNT, "securityContext": {"runAsUser": 1000},
            "containers": [{"name": "main", "volumeMounts": [{"name": "identity", "mountPath": "/identity"}]}],
            "volumes": [{"name": "identity", "projected": {"sources": [source]}}]}),
    ))
}

/// Waits for that many requests in all, and returns the pod's newest.
async fn asked(world: &ClusterFixture, agent: &Agent, pod: &Value, count: usize) -> Arc<Value> {
    let own = |all: Vec<Arc<Value>>| -> Vec<Arc<Value>> {
        all.into_iter().filter(|one| one["spec"]["podUID"] == pod["metadata"]["uid"]).collect()
    };
    let what = format!("request {count} for a certificate");
    world.until(agent, &what, |seen| own(seen.all(REQUESTS)).len() >= count).await;
    let decided = |one: &Arc<Value>| one["status"]["conditions"].is_array();
    own(world.api.all(REQUESTS)).into_iter().find(|one| !decided(one)).expect("one that waits")
}

/// Sets a condition as a signer does.
fn decide(world: &ClusterFixture, request: &Value, kind: &str, rest: Value) {
    let name = request["metadata"]["name"].as_str().expect("a name");
    let mut status = rest;
    status["conditions"] = json!([{"type": kind, "status": "True", "reason": "Because", "message": "of that",
        "lastTransitionTime": "2026-01-01T00:00:00Z"}]);
    let outcome = world.api.admin().patch_sub(REQUESTS, NAMESPACE, name, "status", json!({"status": status}));
    outcome.unwrap_or_else(|refusal| panic!("refused: {refusal:?}"));
}

fn issue(world: &ClusterFixture, request: &Value, chain: &str, refresh: &str) {
    let status = json!({"certificateChain": format!("a comment\n{chain}"), "beginRefreshAt": refresh,
        "notBefore": "2026-01-01T00:00:00Z", "notAfter": "2199-01-01T00:00:00Z"});
    decide(world, request, "Issued", status);
}

fn chain(content: &str) -> String {
    format!("-----BEGIN CERTIFICATE-----\n{content}\n-----END CERTIFICATE-----\n")
}

fn read(folder: &Path, file: &str) -> String {
    fs::read_to_string(folder.join("..data").join(file)).expect("always there")
}

fn volume(world: &ClusterFixture, pod: &Value) -> PathBuf {
    let uid = pod["metadata"]["uid"].as_str().expect("a UID");
    world.home.root().join("pods").join(uid).join("volumes/kubernetes.io~projected/identity")
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_pod_has_a_certificate_and_another_when_that_is_due() {
    if skips("a_pod_has_a_certificate_and_another_when_that_is_due") {
        return;
    }
    let (world, agent) = world().await;
    let pod = run(&world, "holder");
    let request = asked(&world, &agent, &pod, 1).await;
    let (spec, account) = (&request["spec"], world.api.get("serviceaccounts", NAMESPACE, ACCOUNT).expect("there"));
    let node = world.api.get("nodes", "", NODE).expect("there");
    for (field, expected) in [
        ("signerName", &json!(SIGNER)),
        ("podName", &json!("holder")),
        ("serviceAccountName", &json!(ACCOUNT)),
        ("serviceAccountUID", &account["metadata"]["uid"]),
        ("nodeName", &json!(NODE)),
        ("nodeUID", &node["metadata"]["uid"]),
        ("maxExpirationSeconds", &json!(3600)),
    ] {
        assert_eq!(&spec[field], expected, "{field}");
    }
    let owner = &request["metadata"]["ownerReferences"][0];
    assert_eq!((&owner["kind"], &owner["uid"]), (&json!("Pod"), &pod["metadata"]["uid"]));
    assert!(request["metadata"]["name"].as_str().is_some_and(|name| name.starts_with("req-")));

    // It is due for renewal from the beginning.
    issue(&world, &request, &chain("AQ=="), "2026-01-01T00:00:00Z");
    world.until_ready(&agent, "holder").await;
    let folder = volume(&world, &pod);
    let second = asked(&world, &agent, &pod, 2).await;
    let (key, bundle) = (read(&folder, "key.pem"), read(&folder, "bundle.pem"));
    assert!(key.starts_with("-----BEGIN PRIVATE KEY-----\n"));
    assert_eq!((read(&folder, "chain.pem"), bundle), (chain("AQ=="), format!("{key}{}", chain("AQ=="))));
    let metadata = fs::metadata(folder.join("key.pem")).expect("there");
    let shape =
        (std::os::unix::fs::MetadataExt::mode(&metadata) & 0o777, std::os::unix::fs::MetadataExt::uid(&metadata));
    assert_eq!(shape, (0o600, 1000));
    assert_ne!(second["spec"]["stubPKCS10Request"], spec["stubPKCS10Request"], "another key");

    issue(&world, &second, &chain("Ag=="), "2198-01-01T00:00:00Z");
    agent.until("the files are the new ones", async || read(&folder, "chain.pem") == chain("Ag==")).await;
    let renewed = read(&folder, "bundle.pem");
    assert!(!renewed.contains(&key) && renewed.ends_with(&chain("Ag==")), "the new key with the new certificate");
    let series = format!("kubelet_podcertificate_states{{signer_name=\"{SIGNER}\",state=\"fresh\"}} 1");
    agent.until("the metric is exposed", async || agent.metrics().await.contains(&series)).await;

    world.api.delete("pods", NAMESPACE, "holder", Some(1));
    world.until_gone(&agent, "holder").await;
    agent.until("the key goes with the pod", async || !folder.exists()).await;
    agent.until("and is not told of", async || !agent.metrics().await.contains("kubelet_podcertificate_states{")).await;
    assert_eq!(world.api.all(REQUESTS).iter().filter(|one| one["spec"]["podUID"] == pod["metadata"]["uid"]).count(), 2);
    drop(agent);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_refused_certificate_is_reported_with_its_reason() {
    if skips("a_refused_certificate_is_reported_with_its_reason") {
        return;
    }
    let (world, agent) = world().await;
    for (kind, verdict, words) in [("Denied", "was denied", "denied"), ("Failed", "failed", "failed")] {
        let name = words;
        let pod = run(&world, name);
        let request = asked(&world, &agent, &pod, 1).await;
        decide(&world, &request, kind, json!({}));
        let object = request["metadata"]["name"].as_str().expect("a name");
        let message =
            format!("PodCertificateRequest {NAMESPACE}/{object} {verdict}, reason=\"Because\", message=\"of that\"");
        world.until_event(&agent, kind, &message).await;
        let text = format!("PodCertificateRequest was permanently {words}: reason=\"Because\" message=\"of that\"");
        let is_it = |event: &Arc<Value>| {
            event["reason"] == "FailedMount" && event["message"].as_str().is_some_and(|message| message.contains(&text))
        };
        world.until(&agent, "the pod waits", |seen| seen.all("events").iter().any(is_it)).await;
        assert_eq!(world.runtime.cri.count("run_pod_sandbox"), 0, "nothing of it was begun");
    }
    drop(agent);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_certificate_outlives_the_agent_and_its_server() {
    if skips("a_certificate_outlives_the_agent_and_its_server") {
        return;
    }
    let (world, agent) = world().await;
    let pod = run(&world, "holder");
    let request = asked(&world, &agent, &pod, 1).await;
    issue(&world, &request, &chain("AQ=="), "2198-01-01T00:00:00Z");
    world.until_ready(&agent, "holder").await;
    let folder = volume(&world, &pod);
    let bundle = read(&folder, "bundle.pem");
    let started = world.runtime.cri.count("start_container");
    // Keys are in memory: another agent requests a new certificate, and the files stay until it is issued.
    agent.kill().await;
    let agent = world.home.start().await;
    let again = asked(&world, &agent, &pod, 2).await;
    assert_eq!(read(&folder, "bundle.pem"), bundle);
    issue(&world, &again, &chain("Ag=="), "2198-01-01T00:00:00Z");
    agent.until("the files are the new ones", async || read(&folder, "chain.pem") == chain("Ag==")).await;
    assert_eq!(world.runtime.cri.count("start_container"), started, "nothing is restarted");
    drop(agent);
}
