//! Node registration and TLS bootstrap (spec 10a §12, spec 10 §4.1, §4.2).

use std::{path::PathBuf, time::Duration};

use serde_json::{Value, json};

use crate::cluster::{ClusterFixture, a_moment, condition};
use berth_testkit::{
    api_server::{Effect, Fault},
    process::{NODE, manifest, skips},
};

const CSRS: &str = "certificatesigningrequests.certificates.k8s.io";

/// Log id of the first request of that kind.
fn first(world: &ClusterFixture, verb: &str, resource: &str) -> u64 {
    let found = world.agent_requests().of(resource).verb(verb);
    found
        .first()
        .map(|logged| logged.id)
        .unwrap_or_else(|| panic!("no {verb} {resource} in\n{}", world.agent_requests()))
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_node_joins_in_order() {
    // AC-10-1
    if skips("a_node_joins_in_order") {
        return;
    }
    let (world, agent) = ClusterFixture::joined().await;
    world
        .until(&agent, "a lease", |seen| seen.object("leases.coordination.k8s.io", "kube-node-lease", NODE).is_some())
        .await;
    world.until(&agent, "pods are watched", |seen| !seen.log().of("pods").verb("watch").is_empty()).await;
    let node = world.api.get("nodes", "", NODE).expect("registered");
    let lease = world.api.get("leases.coordination.k8s.io", "kube-node-lease", NODE).expect("made");
    assert_eq!(lease["metadata"]["ownerReferences"][0]["uid"], node["metadata"]["uid"]);
    assert!(first(&world, "watch", "nodes") < first(&world, "create", "nodes"), "{}", world.agent_requests());
    assert!(
        first(&world, "create", "nodes") < first(&world, "create", "leases.coordination.k8s.io"),
        "{}",
        world.agent_requests()
    );
    assert!(first(&world, "watch", "nodes") < first(&world, "watch", "pods"), "{}", world.agent_requests());
    assert!(
        world.agent_requests().iter().all(|logged| logged.agent().starts_with("kubelet/v1.36")),
        "{}",
        world.agent_requests()
    );
    let refused = world.agent_requests().filter(|logged| logged.code == Some(403));
    assert!(refused.is_empty(), "{refused}");
    for (kind, status) in
        [("MemoryPressure", "False"), ("DiskPressure", "False"), ("PIDPressure", "False"), ("Ready", "True")]
    {
        assert_eq!(condition(&node, kind), status, "{kind}");
    }
    let status = &node["status"];
    assert_eq!(status["nodeInfo"]["kubeletVersion"].as_str().map(|v| v.starts_with("v1.36")), Some(true), "{status:#}");
    assert!(status["capacity"]["cpu"].is_string() && status["allocatable"]["memory"].is_string(), "{status:#}");
    let addresses = status["addresses"].as_array().expect("addresses");
    assert!(addresses.iter().any(|address| address["type"] == "Hostname" && address["address"] == NODE), "{status:#}");
    assert_eq!(node["metadata"]["labels"]["kubernetes.io/hostname"], NODE);
    drop(agent);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_node_that_exists_is_taken_over() {
    // AC-10-2
    if skips("a_node_that_exists_is_taken_over") {
        return;
    }
    let world = ClusterFixture::new().await;
    world.api.create(json!({"apiVersion": "v1", "kind": "Node", "metadata": {"name": NODE,
        "labels": {"custom": "kept"}}, "spec": {"podCIDR": "10.1.0.0/24"}}));
    let forbidden = Effect::status(403, "Forbidden", "nodes is forbidden");
    world.api.fault(Fault::new(forbidden).on("create", "nodes"));
    let agent = world.start().await;
    let node = world.api.get("nodes", "", NODE).expect("there");
    let labels = &node["metadata"]["labels"];
    assert_eq!((&labels["custom"], &labels["kubernetes.io/os"]), (&json!("kept"), &json!("linux")), "{node:#}");
    assert_eq!(world.agent_requests().of("nodes").verb("create").len(), 1, "{}", world.agent_requests());
    drop(agent);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_server_that_fails_is_asked_again_and_again() {
    // AC-10-3
    if skips("a_server_that_fails_is_asked_again_and_again") {
        return;
    }
    let world = ClusterFixture::new().await;
    world.api.fault(
        Fault::new(Effect::status(500, "InternalError", "etcdserver: leader changed")).on("create", "nodes").times(3),
    );
    let agent = world.start().await;
    let posts = world.agent_requests().of("nodes").verb("create");
    assert_eq!(posts.codes(), [500, 500, 500, 201], "{posts}");
    let pauses: Vec<Duration> = posts.windows(2).map(|pair| pair[1].begun - pair[0].begun).collect();
    for (pause, least) in pauses.iter().zip([200, 400, 800]) {
        assert!(*pause >= Duration::from_millis(least), "{pauses:?}");
    }
    drop(agent);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_token_becomes_a_certificate() {
    // AC-10a-30
    if skips("a_token_becomes_a_certificate") {
        return;
    }
    let BootstrappingNode { world, kubeconfig, pki } =
        BootstrappingNode::new(json!({"rotateCertificates": true})).await;
    let agent = world.start().await;
    let log = world.api.log();
    let requests = log.of("certificatesigningrequests.certificates.k8s.io").verb("create");
    assert!(requests.iter().any(|logged| logged.user.starts_with("system:bootstrap:")), "{log}");
    let patches = log.of("nodes").sub("status").verb("patch");
    assert!(patches.iter().all(|logged| logged.user == format!("system:node:{NODE}")), "{patches}");
    let text = std::fs::read_to_string(&kubeconfig).expect("written");
    assert!(text.contains("kubelet-client-current.pem"), "{text}");
    assert!(pki.join("kubelet-client-current.pem").exists());
    drop(agent);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn pods_of_manifests_do_not_wait_for_a_first_certificate() {
    if skips("pods_of_manifests_do_not_wait_for_a_first_certificate") {
        return;
    }
    let BootstrappingNode { world, kubeconfig, pki } =
        BootstrappingNode::new(json!({"rotateCertificates": false})).await;
    world.api.rules(|rules| rules.approver = None);
    world.home.put_pod(&manifest("web"));
    let agent = world.home.start().await;
    agent.until_ready("web").await;
    world.until(&agent, "it asks for a certificate", |seen| !seen.all(CSRS).is_empty()).await;
    a_moment().await;
    let name = world.api.all(CSRS)[0]["metadata"]["name"].as_str().expect("a name").to_owned();
    assert!(name.starts_with("node-csr-"), "{name}");
    let others = world.api.log().filter(|logged| !logged.user.starts_with("system:bootstrap:"));
    assert!(others.is_empty(), "no request without a certificate\n{others}");
    assert!(!kubeconfig.exists(), "it names a certificate, so it comes after it");
    world.api.deny(&name);
    agent.until_log("Failed to obtain the initial client certificate, retrying").await;
    world.api.delete(CSRS, "", &name, None);
    world.api.rules(|rules| rules.approver = Some(Duration::ZERO));
    world
        .until(&agent, "the node is Ready", |seen| {
            seen.object("nodes", "", NODE).is_some_and(|node| condition(&node, "Ready") == "True")
        })
        .await;
    assert!(kubeconfig.exists() && pki.join("kubelet-client-current.pem").exists());
    world.until_ready(&agent, &format!("web-{NODE}")).await;
    assert_eq!(world.runtime.cri.count("start_container"), 1, "{}", agent.log_end());
    drop(agent);
}

/// A node with a bootstrap token and no certificate.
struct BootstrappingNode {
    world: ClusterFixture,
    kubeconfig: PathBuf,
    pki: PathBuf,
}

impl BootstrappingNode {
    async fn new(config: Value) -> Self {
        let mut world = ClusterFixture::new().await;
        world.api.create(bootstrap_secret());
        let bootstrap = world.api.bootstrap_kubeconfig("abcdef.0123456789abcdef");
        let kubeconfig = world.home.path().join("kubelet.conf");
        let pki = world.home.path().join("pki");
        world.home = world
            .home
            .with(config)
            .flag(format!("--cert-dir={}", pki.display()))
            .flag(format!("--bootstrap-kubeconfig={}", bootstrap.display()))
            .flag(format!("--kubeconfig={}", kubeconfig.display()));
        Self { world, kubeconfig, pki }
    }
}

fn bootstrap_secret() -> Value {
    use base64::Engine;
    let encode = |text: &str| base64::engine::general_purpose::STANDARD.encode(text);
    json!({"apiVersion": "v1", "kind": "Secret", "type": "bootstrap.kubernetes.io/token",
        "metadata": {"name": "bootstrap-token-abcdef", "namespace": "kube-system"},
        "data": {"token-id": encode("abcdef"), "token-secret": encode("0123456789abcdef"),
                 "usage-bootstrap-authentication": encode("true"),
                 "auth-extra-groups": encode("system:bootstrappers:kubeadm:default-node-token")}})
}
