//! The agent binary as a cluster node between the test API server and the scripted runtime.
//!
//! Covers the flows of spec 10a. Needs root, because an agent does; otherwise each test reports its name and is
//! skipped.

mod agent_restart;
mod certificates;
mod claims;
mod connections;
mod csi;
mod deletion;
mod devices;
mod duplicate_names;
mod eviction;
mod faulty_server;
mod identity;
mod kubectl;
mod log_warnings;
mod malformed_objects;
mod mirrors;
mod node_registration;
mod offline;
mod outage;
mod pod_start;
mod probes;
mod resize;
mod resource_claims;
mod shutdown;
mod tokens;
mod traces;
mod volumes;

use std::{sync::Arc, time::Duration};

use berth_proto::pod_resources::{
    ContainerResources, ListPodResourcesRequest, pod_resources_lister_client::PodResourcesListerClient,
};
use berth_testkit::{
    api_server::{ApiServer, ConditionContext, Requests},
    process::{Agent, Home, NODE, PATIENCE, manifest_of},
    scripted_server::ScriptedServer,
};
use hyper_util::rt::TokioIo;
use serde_json::{Value, json};
use tokio::net::UnixStream;
use tonic::transport::Endpoint;

/// Namespace of the pods.
const NAMESPACE: &str = "default";

/// A cluster of one node.
pub struct ClusterFixture {
    /// Control plane; it knows the node's credentials.
    pub api: ApiServer,
    /// Scripted runtime.
    pub runtime: ScriptedServer,
    /// Files and configuration of the node's agent.
    pub home: Home,
}

impl ClusterFixture {
    /// Creates a cluster without a running agent.
    pub async fn new() -> Self {
        let (api, runtime) = (ApiServer::start().await, ScriptedServer::new().await);
        let kubeconfig = api.node_kubeconfig(NODE);
        let home = runtime
            .home()
            .with(json!({"configMapAndSecretChangeDetectionStrategy": "Watch"}))
            .flag(format!("--kubeconfig={}", kubeconfig.display()));
        Self { api, runtime, home }
    }

    /// Creates a cluster whose node is Ready.
    pub async fn joined() -> (Self, Agent) {
        let world = Self::new().await;
        let agent = world.start().await;
        (world, agent)
    }

    /// Starts the agent and waits until its node is Ready.
    pub async fn start(&self) -> Agent {
        let agent = self.home.start().await;
        self.until(&agent, "the node is Ready", |seen| {
            seen.object("nodes", "", NODE).is_some_and(|node| condition(&node, "Ready") == "True")
        })
        .await;
        agent
    }

    /// Creates a pod and binds it to the node, as a scheduler does.
    pub fn run(&self, manifest: Value) -> Arc<Value> {
        let name = manifest["metadata"]["name"].as_str().expect("a name").to_owned();
        self.api.create(manifest);
        self.api.bind(NAMESPACE, &name, NODE);
        self.pod(&name).expect("it is there")
    }

    /// The server's copy of a pod.
    pub fn pod(&self, name: &str) -> Option<Arc<Value>> {
        self.api.get("pods", NAMESPACE, name)
    }

    /// Waits until the server meets a condition; prints the end of the agent's log if it does not.
    pub async fn until(&self, agent: &Agent, what: &str, holds: impl Fn(&ConditionContext<'_>) -> bool) {
        let _print_on_panic = PrintLogOnPanic(agent);
        self.api.wait_until(what, PATIENCE, holds).await;
    }

    /// Waits until the server's copy of a pod meets a condition, and returns it.
    pub async fn until_pod(&self, agent: &Agent, name: &str, what: &str, holds: impl Fn(&Value) -> bool) -> Arc<Value> {
        let what = format!("{name} {what}");
        self.until(agent, &what, |seen| seen.object("pods", NAMESPACE, name).is_some_and(|pod| holds(&pod))).await;
        self.pod(name).expect("it was there just now")
    }

    /// Waits until a pod is Running and Ready on the server.
    pub async fn until_ready(&self, agent: &Agent, name: &str) -> Arc<Value> {
        let is_ready = |pod: &Value| pod["status"]["phase"] == "Running" && condition(pod, "Ready") == "True";
        self.until_pod(agent, name, "is Running and Ready", is_ready).await
    }

    /// Waits until a pod is deleted from the server.
    pub async fn until_gone(&self, agent: &Agent, name: &str) {
        self.until(agent, &format!("{name} is gone"), |seen| seen.object("pods", NAMESPACE, name).is_none()).await;
    }

    /// Waits until the server has that event.
    pub async fn until_event(&self, agent: &Agent, reason: &str, message: &str) {
        let is_it = |event: &Arc<Value>| event["reason"] == reason && event["message"] == message;
        let what = format!("the event {reason}: {message}");
        self.until(agent, &what, |seen| seen.all("events").iter().any(is_it)).await;
    }

    /// Ends the container `main` of a pod with that exit code.
    pub fn end(&self, pod: &Value, code: i32) {
        let name = pod["metadata"]["name"].as_str().expect("a name");
        for id in self.runtime.cri.running(name, "main") {
            self.runtime.cri.kill(&id, code, if code == 0 { "Completed" } else { "Error" });
        }
    }

    /// Containers of a pod as the pod-resources API lists them; empty for a pod that is not active.
    pub async fn pod_resources(&self, pod: &str) -> Vec<ContainerResources> {
        let socket = self.home.root().join("pod-resources/kubelet.sock");
        let connector = tower::service_fn(move |_: http::Uri| {
            let socket = socket.clone();
            async move { UnixStream::connect(socket).await.map(TokioIo::new) }
        });
        let channel = Endpoint::from_static("http://localhost").connect_with_connector(connector).await;
        let mut lister = PodResourcesListerClient::new(channel.expect("the socket is open"));
        let listed = lister.list(ListPodResourcesRequest {}).await.expect("answered").into_inner().pod_resources;
        listed.into_iter().find(|found| found.name == pod).map(|found| found.containers).unwrap_or_default()
    }

    /// Requests of the agent.
    pub fn agent_requests(&self) -> Requests {
        self.api.log().by(&format!("system:node:{NODE}"))
    }
}

/// Prints the end of the agent's log when a test fails during a wait.
struct PrintLogOnPanic<'a>(&'a Agent);

impl Drop for PrintLogOnPanic<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("the agent's log ends:\n{}", self.0.log_end());
        }
    }
}

/// Status of a condition; empty if there is none.
pub fn condition<'a>(object: &'a Value, kind: &str) -> &'a str {
    let conditions = object["status"]["conditions"].as_array();
    let found = conditions.and_then(|all| all.iter().find(|condition| condition["type"] == kind));
    found.and_then(|condition| condition["status"].as_str()).unwrap_or_default()
}

/// A pod with one container, as a user applies it.
pub fn pod(name: &str) -> Value {
    pod_of(name, json!({"containers": [{"name": "main"}]}))
}

/// A pod; its containers get an image that the runtime has.
pub fn pod_of(name: &str, spec: Value) -> Value {
    let mut pod = manifest_of(name, spec);
    pod["metadata"]["namespace"] = json!(NAMESPACE);
    pod
}

/// Pause in which nothing may happen; as long as the unwanted action would take.
pub async fn a_moment() {
    tokio::time::sleep(Duration::from_millis(500)).await;
}
