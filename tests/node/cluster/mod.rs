//! The binary itself as a node of a cluster: the test API server on one side, a scripted runtime on the
//! other, and the flows of spec 10a between them. Needs root, because an agent does; otherwise each test is
//! skipped by name.

mod certificates;
mod claims;
mod connections;
mod csi;
mod deletion;
mod eviction;
mod identity;
mod join;
mod kubectl;
mod mirrors;
mod names;
mod odd_objects;
mod odd_server;
mod offline;
mod outage;
mod probes;
mod quiet;
mod resize;
mod restart;
mod shutdown;
mod start;
mod tokens;
mod volumes;

use std::{sync::Arc, time::Duration};

use berth_testkit::{
    api_server::{ApiServer, Requests, Seen},
    ground::Ground,
    process::{Agent, Home, NODE, PATIENCE, manifest_of},
};
use serde_json::{Value, json};

/// The namespace of the pods here.
const NAMESPACE: &str = "default";

/// A cluster of one node.
pub struct World {
    /// The control plane, which knows the node's credentials.
    pub api: ApiServer,
    /// The runtime.
    pub ground: Ground,
    /// The node's agent: its files.
    pub home: Home,
}

impl World {
    /// Nothing runs yet.
    pub async fn new() -> Self {
        let (api, ground) = (ApiServer::start().await, Ground::new().await);
        let kubeconfig = api.node_kubeconfig(NODE);
        let home = ground
            .home()
            .with(json!({"configMapAndSecretChangeDetectionStrategy": "Watch"}))
            .flag(format!("--kubeconfig={}", kubeconfig.display()));
        Self { api, ground, home }
    }

    /// A node that is Ready.
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

    /// Creates a pod, bound to the node as a scheduler does it.
    pub fn run(&self, manifest: Value) -> Arc<Value> {
        let name = manifest["metadata"]["name"].as_str().expect("a name").to_owned();
        self.api.create(manifest);
        self.api.bind(NAMESPACE, &name, NODE);
        self.pod(&name).expect("it is there")
    }

    /// A pod as the server has it.
    pub fn pod(&self, name: &str) -> Option<Arc<Value>> {
        self.api.get("pods", NAMESPACE, name)
    }

    /// Waits until something holds of the server; tells what the agent logged where it does not.
    pub async fn until(&self, agent: &Agent, what: &str, holds: impl Fn(&Seen<'_>) -> bool) {
        let _told = Told(agent);
        self.api.wait_until(what, PATIENCE, holds).await;
    }

    /// Waits until something holds of a pod there, and returns it.
    pub async fn until_pod(&self, agent: &Agent, name: &str, what: &str, holds: impl Fn(&Value) -> bool) -> Arc<Value> {
        let what = format!("{name} {what}");
        self.until(agent, &what, |seen| seen.object("pods", NAMESPACE, name).is_some_and(|pod| holds(&pod))).await;
        self.pod(name).expect("it was there just now")
    }

    /// Waits until a pod is Running and Ready there.
    pub async fn until_ready(&self, agent: &Agent, name: &str) -> Arc<Value> {
        let is_ready = |pod: &Value| pod["status"]["phase"] == "Running" && condition(pod, "Ready") == "True";
        self.until_pod(agent, name, "is Running and Ready", is_ready).await
    }

    /// Waits until a pod is not there any more.
    pub async fn until_gone(&self, agent: &Agent, name: &str) {
        self.until(agent, &format!("{name} is gone"), |seen| seen.object("pods", NAMESPACE, name).is_none()).await;
    }

    /// Waits until that event was sent.
    pub async fn until_event(&self, agent: &Agent, reason: &str, message: &str) {
        let is_it = |event: &Arc<Value>| event["reason"] == reason && event["message"] == message;
        let what = format!("the event {reason}: {message}");
        self.until(agent, &what, |seen| seen.all("events").iter().any(is_it)).await;
    }

    /// The container `main` of a pod ends.
    pub fn end(&self, pod: &Value, code: i32) {
        let name = pod["metadata"]["name"].as_str().expect("a name");
        for id in self.ground.cri.running(name, "main") {
            self.ground.cri.kill(&id, code, if code == 0 { "Completed" } else { "Error" });
        }
    }

    /// What the agent asked.
    pub fn asked(&self) -> Requests {
        self.api.log().by(&format!("system:node:{NODE}"))
    }
}

/// Prints the end of the agent's log when a test fails while it waits.
struct Told<'a>(&'a Agent);

impl Drop for Told<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("the agent's log ends:\n{}", self.0.log_end());
        }
    }
}

/// The status of a condition; empty where there is none.
pub fn condition<'a>(object: &'a Value, kind: &str) -> &'a str {
    let conditions = object["status"]["conditions"].as_array();
    let found = conditions.and_then(|all| all.iter().find(|condition| condition["type"] == kind));
    found.and_then(|condition| condition["status"].as_str()).unwrap_or_default()
}

/// A pod of one container, as a user applies it.
pub fn pod(name: &str) -> Value {
    pod_of(name, json!({"containers": [{"name": "main"}]}))
}

/// A pod; containers get an image that the runtime has.
pub fn pod_of(name: &str, spec: Value) -> Value {
    let mut pod = manifest_of(name, spec);
    pod["metadata"]["namespace"] = json!(NAMESPACE);
    pod
}

/// A short while in which nothing may happen: as long as what may not happen would take.
pub async fn a_moment() {
    tokio::time::sleep(Duration::from_millis(500)).await;
}
