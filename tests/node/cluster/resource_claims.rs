//! Resource claims on a cluster node: preparation by a DRA driver, sharing, release, restart, health (spec 06c §3).

use std::{fs, sync::Arc};

use serde_json::{Value, json};
use tokio_util::sync::CancellationToken;
use tonic::Status;

use crate::cluster::{ClusterFixture, NAMESPACE, pod, pod_of};
use berth_proto::{dra_v1::Claim, v1alpha1::HealthStatus};
use berth_testkit::{
    csi::Plugin,
    dra_driver::{DriverCall, DriverMethod, HEALTH, POOL, SampleDriver, V1, claim_object, device_health},
    plugin_server::PluginFault,
    process::{Agent, NODE, container, skips},
    scripted_cri::Fault,
};

const DRIVER: &str = "gpu.example.com";
const CLAIMS: &str = "resourceclaims.resource.k8s.io";
const PREPARE: DriverMethod = DriverMethod::NodePrepareResources;
const UNPREPARE: DriverMethod = DriverMethod::NodeUnprepareResources;

/// A cluster whose node has a DRA driver.
struct DraNode {
    world: ClusterFixture,
    driver: SampleDriver,
    _registration: Plugin,
}

impl DraNode {
    /// Creates a cluster whose node is Ready and whose driver is registered.
    async fn joined(services: &[&str]) -> (Self, Agent) {
        let world = ClusterFixture::new().await;
        let root = world.home.root();
        let driver = SampleDriver::start(&root, DRIVER, services);
        let registration = driver.serve_registration(&root.join("plugins_registry"));
        let agent = world.start().await;
        registration.registered().await;
        (Self { world, driver, _registration: registration }, agent)
    }

    /// Creates a ResourceClaim without an allocation.
    fn create_claim(&self, claim: &str) {
        self.world.api.create(claim_object(NAMESPACE, claim, "", DRIVER, None, &["gpu"]));
    }

    /// Allocates a device to a claim and reserves the claim for pods, as a scheduler does.
    fn allocate(&self, claim: &str, pods: &[&Value]) {
        let mut status = claim_object(NAMESPACE, claim, "", DRIVER, None, &["gpu"])["status"].clone();
        let consumer = |pod: &&Value| {
            let metadata = &pod["metadata"];
            json!({"resource": "pods", "name": metadata["name"], "uid": metadata["uid"]})
        };
        status["reservedFor"] = pods.iter().map(consumer).collect();
        let outcome = self.world.api.admin().patch_sub(CLAIMS, NAMESPACE, claim, "status", json!({"status": status}));
        outcome.unwrap_or_else(|refusal| panic!("refused: {refusal:?}"));
    }

    /// Creates a pod whose container `main` uses these claims, and does not bind it to the node.
    fn create_pod(&self, name: &str, claims: &[&str]) -> Arc<Value> {
        let entry = |claim: &&str| json!({"name": claim, "resourceClaimName": claim});
        let entries: Vec<Value> = claims.iter().map(entry).collect();
        let used: Vec<Value> = claims.iter().map(|claim| json!({"name": claim})).collect();
        let main = json!({"name": "main", "resources": {"claims": used}});
        self.world.api.create(pod_of(name, json!({"resourceClaims": entries, "containers": [main]})))
    }

    fn bind(&self, name: &str) {
        self.world.api.bind(NAMESPACE, name, NODE);
    }

    /// Runs a pod with new claims that are reserved for it.
    fn run(&self, name: &str, claims: &[&str]) -> Arc<Value> {
        let pod = self.create_pod(name, claims);
        for claim in claims {
            self.create_claim(claim);
            self.allocate(claim, &[&pod]);
        }
        self.bind(name);
        pod
    }

    /// Changes a label of a pod: the agent syncs the pod at once and does not wait for the end of a back-off.
    fn resync(&self, name: &str) {
        self.world.api.patch("pods", NAMESPACE, name, json!({"metadata": {"labels": {"resync": "now"}}}));
    }

    fn uid_of_claim(&self, claim: &str) -> String {
        let object = self.world.api.get(CLAIMS, NAMESPACE, claim).expect("a claim");
        object["metadata"]["uid"].as_str().expect("a UID").to_owned()
    }

    /// The claim as requests to the driver contain it.
    fn requested(&self, claim: &str) -> Claim {
        Claim { namespace: NAMESPACE.to_owned(), uid: self.uid_of_claim(claim), name: claim.to_owned() }
    }

    /// CDI ID of the device that the driver prepares for a claim.
    fn cdi_id(&self, claim: &str) -> String {
        format!("{}={}", self.driver.cdi_kind(), self.uid_of_claim(claim))
    }

    /// Calls of a method of the driver.
    fn calls(&self, method: DriverMethod) -> Vec<DriverCall> {
        self.driver.calls().into_iter().filter(|call| call.method == method).collect()
    }

    /// Checks the CDI devices in the create request of the running container `main` of a pod.
    fn assert_uses(&self, pod: &str, claims: &[&str]) {
        let expected: Vec<String> = claims.iter().map(|claim| self.cdi_id(claim)).collect();
        assert_eq!(self.world.runtime.cri.cdi_devices(pod, "main"), expected, "{pod}");
    }

    /// Claims in the checkpoint of the DRA manager.
    fn checkpoint(&self) -> Vec<Value> {
        let text = fs::read_to_string(self.world.home.root().join("dra_manager_state")).expect("a checkpoint");
        let file: Value = serde_json::from_str(&text).expect("JSON");
        let data: Value = serde_json::from_str(file["Data"].as_str().expect("a text")).expect("JSON");
        data["ClaimInfoStateList"].as_array().cloned().unwrap_or_default()
    }

    /// Waits for the event that preparation has failed with that error.
    async fn until_failed(&self, agent: &Agent, error: &str) {
        let text = format!("Failed to prepare dynamic resources: prepare dynamic resources: {error}");
        self.world.until_event(agent, "FailedPrepareDynamicResources", &text).await;
    }

    /// Deletes a pod with a grace period of one second and waits until it is gone.
    async fn delete(&self, agent: &Agent, name: &str) {
        self.world.api.delete("pods", NAMESPACE, name, Some(1));
        self.world.until_gone(agent, name).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_claim_is_prepared_before_its_container_and_released_after_it() {
    // Spec 06c §3.3-3.5
    if skips("a_claim_is_prepared_before_its_container_and_released_after_it") {
        return;
    }
    let (node, agent) = DraNode::joined(&[V1]).await;
    node.run("web", &["one", "two"]);
    node.world.until_ready(&agent, "web").await;
    node.assert_uses("web", &["one", "two"]);
    let claims = vec![node.requested("one"), node.requested("two")];
    let prepared = DriverCall { method: PREPARE, service: V1, claims: claims.clone() };
    assert_eq!(node.driver.calls(), [prepared], "one call with all claims");
    assert_eq!(node.checkpoint().len(), 2);

    node.delete(&agent, "web").await;
    let released = DriverCall { method: UNPREPARE, service: V1, claims };
    assert_eq!(node.calls(UNPREPARE), [released]);
    assert_eq!(node.calls(PREPARE).len(), 1);
    assert_eq!(node.checkpoint(), [] as [Value; 0]);
    drop(agent);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_claim_that_is_reserved_for_another_pod_is_refused() {
    // AC-06c-19
    if skips("a_claim_that_is_reserved_for_another_pod_is_refused") {
        return;
    }
    let (node, agent) = DraNode::joined(&[V1]).await;
    let (owner, web) = (node.create_pod("owner", &["one"]), node.create_pod("web", &["one"]));
    node.create_claim("one");
    node.allocate("one", &[&owner]);
    node.bind("web");
    let (pod_uid, claim_uid) = (web["metadata"]["uid"].as_str().expect("a UID"), node.uid_of_claim("one"));
    let text = format!("pod web ({pod_uid}) is not allowed to use ResourceClaim one ({claim_uid})");
    node.until_failed(&agent, &text).await;
    assert!(node.driver.calls().is_empty(), "{:?}", node.driver.calls());
    assert_eq!(node.world.runtime.cri.count("run_podsandbox"), 0);

    // The sync is retried.
    node.allocate("one", &[&owner, &web]);
    node.resync("web");
    node.world.until_ready(&agent, "web").await;
    node.assert_uses("web", &["one"]);
    drop(agent);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn pods_share_a_claim_until_the_last_one_ends() {
    // AC-06c-20
    if skips("pods_share_a_claim_until_the_last_one_ends") {
        return;
    }
    let (node, agent) = DraNode::joined(&[V1]).await;
    let (first, second) = (node.create_pod("first", &["one"]), node.create_pod("second", &["one"]));
    node.create_claim("one");
    node.allocate("one", &[&first, &second]);
    for name in ["first", "second"] {
        node.bind(name);
    }
    for name in ["first", "second"] {
        node.world.until_ready(&agent, name).await;
        node.assert_uses(name, &["one"]);
    }
    assert_eq!(node.calls(PREPARE).len(), 1);
    node.delete(&agent, "first").await;
    assert!(node.calls(UNPREPARE).is_empty(), "the second pod uses the claim");
    let pods: Vec<String> = node.checkpoint()[0]["PodUIDs"].as_object().expect("an object").keys().cloned().collect();
    assert_eq!(pods, [second["metadata"]["uid"].as_str().expect("a UID")]);
    node.delete(&agent, "second").await;
    assert_eq!(node.calls(UNPREPARE).len(), 1);
    assert_eq!(node.calls(PREPARE).len(), 1);
    drop(agent);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_claim_that_the_driver_skips_is_reported() {
    // AC-06c-21
    if skips("a_claim_that_the_driver_skips_is_reported") {
        return;
    }
    let (node, agent) = DraNode::joined(&[V1]).await;
    node.driver.change_behavior(|behavior| behavior.answered_claims = Some(1));
    node.run("web", &["one", "two"]);
    node.until_failed(&agent, "NodePrepareResources skipped 1 ResourceClaims").await;
    assert_eq!(node.world.runtime.cri.count("run_podsandbox"), 0);
    node.driver.heal();
    node.resync("web");
    node.world.until_ready(&agent, "web").await;
    node.assert_uses("web", &["one", "two"]);
    drop(agent);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_deleted_pod_stays_until_its_claims_are_released() {
    // Spec 06c §3.5
    if skips("a_deleted_pod_stays_until_its_claims_are_released") {
        return;
    }
    let (node, agent) = DraNode::joined(&[V1]).await;
    node.run("web", &["one"]);
    node.world.until_ready(&agent, "web").await;
    node.driver.fail(UNPREPARE, PluginFault::Fail(Status::internal("broken")));
    node.world.api.delete("pods", NAMESPACE, "web", Some(1));
    // The second call is the retry after the first one has failed.
    node.driver.wait_for_calls(UNPREPARE, 2).await;
    let pod = node.world.pod("web").expect("its claim is not released");
    assert!(pod["metadata"]["deletionTimestamp"].is_string(), "{pod:#}");
    assert!(node.world.runtime.cri.running("web", "main").is_empty(), "containers are stopped first");
    assert_eq!(node.checkpoint().len(), 1);
    node.driver.heal();
    node.world.until_gone(&agent, "web").await;
    assert_eq!(node.checkpoint(), [] as [Value; 0]);
    drop(agent);
}

/// The scheduler has created a claim for an extended resource of the pod; no device plugin serves it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_extended_resource_of_a_pod_comes_from_its_claim() {
    // Spec 06c §3.7
    if skips("an_extended_resource_of_a_pod_comes_from_its_claim") {
        return;
    }
    let (node, agent) = DraNode::joined(&[V1]).await;
    node.driver.set_requests(&["gpu"]);
    let amounts = json!({"example.com/gpu": "1"});
    let main = json!({"name": "main", "resources": {"requests": amounts, "limits": amounts}});
    let spec = json!({"containers": [main, {"name": "other"}]});
    let pod = node.world.api.create(pod_of("web", spec));
    node.create_claim("extended");
    node.allocate("extended", &[&pod]);
    let mapping = json!({"containerName": "main", "resourceName": "example.com/gpu", "requestName": "gpu"});
    let claim = json!({"resourceClaimName": "extended", "requestMappings": [mapping]});
    let status = json!({"status": {"extendedResourceClaimStatus": claim}});
    let outcome = node.world.api.admin().patch_sub("pods", NAMESPACE, "web", "status", status);
    outcome.unwrap_or_else(|refusal| panic!("refused: {refusal:?}"));
    node.bind("web");
    node.world.until_ready(&agent, "web").await;
    node.assert_uses("web", &["extended"]);
    assert_eq!(node.world.runtime.cri.cdi_devices("web", "other"), [] as [String; 0]);
    let pod = node.world.pod("web").expect("it is there");
    assert_eq!(pod["status"]["extendedResourceClaimStatus"], claim, "the agent keeps what the scheduler has written");

    // The pod-resources API lists what the container has.
    let containers = node.world.pod_resources("web").await;
    let listed: Vec<(&str, &str, &str)> = containers
        .iter()
        .flat_map(|container| container.dynamic_resources.iter().map(|found| (container.name.as_str(), found)))
        .flat_map(|(name, found)| found.claim_resources.iter().map(move |device| (name, found, device)))
        .map(|(name, found, device)| (name, found.claim_name.as_str(), device.cdi_devices[0].name.as_str()))
        .collect();
    assert_eq!(listed, [("main", "extended", node.cdi_id("extended").as_str())]);

    node.delete(&agent, "web").await;
    assert_eq!((node.calls(PREPARE).len(), node.calls(UNPREPARE).len()), (1, 1));
    drop(agent);
}

/// What has to be released is in the checkpoint: the object is not needed.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_claim_that_is_deleted_under_its_pod_is_released_from_the_checkpoint() {
    // Spec 06c §3.3, §3.5
    if skips("a_claim_that_is_deleted_under_its_pod_is_released_from_the_checkpoint") {
        return;
    }
    let (node, agent) = DraNode::joined(&[V1]).await;
    node.run("web", &["one"]);
    node.world.until_ready(&agent, "web").await;
    let (claim, device) = (node.requested("one"), node.cdi_id("one"));
    let started = node.world.runtime.cri.count("start_container");
    // The API server's controllers hold the object back as long as it is reserved; an administrator can force it.
    node.world.api.delete(CLAIMS, NAMESPACE, "one", None);
    assert!(node.world.api.get(CLAIMS, NAMESPACE, "one").is_none());
    // The pod is synced by the same agent, and by the next one, which knows the claim from the checkpoint only.
    node.resync("web");
    node.world.until_ready(&agent, "web").await;
    agent.kill().await;
    let agent = node.world.home.start().await;
    node.world.run(pod("later"));
    node.world.until_ready(&agent, "later").await;
    let web = node.world.until_ready(&agent, "web").await;
    assert_eq!(container(&web, "main")["restartCount"], 0);
    assert_eq!(node.world.runtime.cri.count("start_container"), started + 1, "only the later pod is started");
    assert_eq!(node.world.runtime.cri.cdi_devices("web", "main"), [device]);
    assert_eq!((node.calls(PREPARE).len(), node.calls(UNPREPARE).len()), (1, 0));
    assert_eq!(node.checkpoint().len(), 1);

    node.delete(&agent, "web").await;
    let released = DriverCall { method: UNPREPARE, service: V1, claims: vec![claim] };
    assert_eq!(node.calls(UNPREPARE), [released]);
    assert_eq!(node.checkpoint(), [] as [Value; 0]);
    drop(agent);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_agent_restart_before_the_start_of_a_pod_repeats_the_preparation() {
    // AC-06c-22
    if skips("an_agent_restart_before_the_start_of_a_pod_repeats_the_preparation") {
        return;
    }
    let (node, agent) = DraNode::joined(&[V1]).await;
    let never = CancellationToken::new();
    node.world.runtime.cri.fault("run_podsandbox", "web", Fault::Blocked(never), None);
    node.run("web", &["one"]);
    node.world.runtime.until("the sandbox is requested", &agent, |cri| cri.count("run_podsandbox") > 0).await;
    assert_eq!(node.calls(PREPARE).len(), 1);
    agent.kill().await;
    node.world.runtime.cri.heal();

    let agent = node.world.home.start().await;
    node.world.until_ready(&agent, "web").await;
    node.assert_uses("web", &["one"]);
    assert_eq!(node.calls(PREPARE).len(), 2, "preparation is repeated after a restart");
    let claims = node.checkpoint();
    let devices = claims[0]["DriverState"][DRIVER]["Devices"].as_array().expect("a list");
    let names: Vec<&str> = devices.iter().filter_map(|device| device["DeviceName"].as_str()).collect();
    assert_eq!((claims.len(), names), (1, vec!["dev-one"]), "devices are not doubled");
    drop(agent);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_health_of_claimed_devices_is_in_the_pod_status() {
    // AC-06c-25
    if skips("the_health_of_claimed_devices_is_in_the_pod_status") {
        return;
    }
    let (node, agent) = DraNode::joined(&[V1, HEALTH]).await;
    let report = |health: HealthStatus, message: &str| {
        node.driver.set_health(vec![device_health(POOL, "dev-one", health, message, 3_600)]);
    };
    report(HealthStatus::Healthy, "");
    node.run("web", &["one"]);
    node.world.until_ready(&agent, "web").await;
    let is_listed = |pod: &Value, resource: &Value| {
        container(pod, "main")["allocatedResourcesStatus"] == json!([{"name": "claim:one", "resources": [resource]}])
    };
    let healthy = json!({"resourceID": node.cdi_id("one"), "health": "Healthy"});
    node.world.until_pod(&agent, "web", "has a healthy device", |pod| is_listed(pod, &healthy)).await;
    report(HealthStatus::Unhealthy, "xid 79");
    let unhealthy = json!({"resourceID": node.cdi_id("one"), "health": "Unhealthy", "message": "xid 79"});
    let pod = node.world.until_pod(&agent, "web", "has an unhealthy device", |pod| is_listed(pod, &unhealthy)).await;
    assert_eq!(container(&pod, "main")["restartCount"], 0);
    assert_eq!(node.calls(PREPARE).len(), 1);
    drop(agent);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_pod_whose_claim_does_not_exist_is_not_begun() {
    if skips("a_pod_whose_claim_does_not_exist_is_not_begun") {
        return;
    }
    let (world, agent) = ClusterFixture::joined().await;
    let claims = json!([{"name": "gpu", "resourceClaimName": "one"}]);
    world.run(pod_of("claims", json!({"resourceClaims": claims, "containers": [{"name": "main"}]})));
    let text = "Failed to prepare dynamic resources: prepare dynamic resources: fetch ResourceClaim one: ";
    let is_it = |event: &Arc<Value>| {
        let message = event["message"].as_str().unwrap_or_default();
        event["reason"] == "FailedPrepareDynamicResources" && message.starts_with(text)
    };
    world.until(&agent, "the event names the claim", |seen| seen.all("events").iter().any(is_it)).await;
    assert_eq!(world.runtime.cri.count("run_podsandbox"), 0);
    world.api.delete("pods", NAMESPACE, "claims", Some(0));
    world.until_gone(&agent, "claims").await;
}
