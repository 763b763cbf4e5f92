//! One-node cluster fixture: test API server, scripted runtime, and an agent between them.
//!
//! The API server logs when each request began. Users change objects on the server directly, without a request.

use std::{
    collections::BTreeMap,
    path::Path,
    sync::Arc,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};

use crate::{
    agent::{Agent, Target},
    manifest::{self, NODE},
    scripted_runtime::{PATIENCE, Runtime},
};
use berth_testkit::{
    api_server::{ApiServer, RecordedRequest, Requests},
    scripted_cri::LifecycleEvent,
};

/// Resource key of leases in the test API server.
pub const LEASES: &str = "leases.coordination.k8s.io";
const NAMESPACE: &str = "default";

/// Control plane and runtime.
pub struct Cluster {
    /// API server; logs all requests.
    pub api: ApiServer,
    /// Scripted runtime; logs all calls.
    pub runtime: Runtime,
}

impl Cluster {
    /// Starts a cluster and an agent whose node is Ready and renews its lease; the runtime runs at most `parallel`
    /// mutating calls at once.
    pub async fn joined(target: &Target, parallel: usize) -> Result<(Self, Agent)> {
        Self::joined_with(target, parallel, &json!({}), None).await
    }

    /// Like [`Self::joined`], with these fields of the kubelet configuration, and that Berth settings file.
    pub async fn joined_with(
        target: &Target,
        parallel: usize,
        fields: &Value,
        settings: Option<&Path>,
    ) -> Result<(Self, Agent)> {
        let (api, runtime) = (ApiServer::start().await, Runtime::start(parallel).await?);
        let agent = runtime.agent_in_cluster_with(target, &api.node_kubeconfig(NODE), fields, settings).await?;
        let cluster = Self { api, runtime };
        cluster.until("the node is Ready and has a lease", &agent, Self::is_joined).await?;
        // Other agents start to watch pods and services only once the node is Ready.
        cluster.quiet().await;
        Ok((cluster, agent))
    }

    fn is_joined(&self) -> bool {
        let is_ready = self.api.get("nodes", "", NODE).is_some_and(|node| has_condition(&node, "Ready"));
        is_ready && self.api.get(LEASES, "kube-node-lease", NODE).is_some()
    }

    /// Creates an unassigned pod.
    pub fn create(&self, name: &str, fields: Value) {
        let mut pod = manifest::scripted(name, 1);
        for (key, value) in fields.as_object().into_iter().flatten() {
            pod["spec"][key] = value.clone();
        }
        self.api.create(pod);
    }

    /// Binds a pod to the node. Returns the time of the binding.
    pub fn bind(&self, name: &str) -> Instant {
        let at = Instant::now();
        self.api.bind(NAMESPACE, name, NODE);
        at
    }

    /// Creates and binds `count` pods `<prefix>0`, …, each with these fields of the pod spec; returns once all are
    /// Ready.
    pub async fn run_pods(&self, agent: &Agent, prefix: &str, count: usize, fields: &Value) -> Result<Vec<String>> {
        let names: Vec<String> = (0..count).map(|i| format!("{prefix}{i}")).collect();
        for name in &names {
            self.create(name, fields.clone());
            self.bind(name);
        }
        self.until("all pods are Ready", agent, |cluster| names.iter().all(|name| cluster.is_ready(name))).await?;
        Ok(names)
    }

    /// Deletes a pod as a user does, with its default grace period.
    pub fn delete(&self, name: &str) {
        self.api.delete("pods", NAMESPACE, name, None);
    }

    /// Whether the server's copy of the pod is Running and Ready.
    pub fn is_ready(&self, name: &str) -> bool {
        self.pod(name).is_some_and(|pod| pod["status"]["phase"] == "Running" && has_condition(&pod, "Ready"))
    }

    /// The server's copy of the pod.
    pub fn pod(&self, name: &str) -> Option<Arc<Value>> {
        self.api.get("pods", NAMESPACE, name)
    }

    /// Id of the pod's only container.
    ///
    /// # Errors
    /// It does not run.
    pub fn container(&self, name: &str) -> Result<String> {
        self.runtime.cri.running(name, "c0").pop().with_context(|| format!("container of pod {name} is not running"))
    }

    /// Time at which a container exited.
    pub fn exit_of(&self, container: &str) -> Option<Instant> {
        let moments = self.runtime.cri.history().0;
        let found = moments.iter().rev().find(|m| matches!(&m.fact, LifecycleEvent::Exited(id, _) if id == container));
        found.map(|moment| moment.at.into_std())
    }

    /// Requests of the node after that request number.
    pub fn node_requests(&self, since: u64) -> Requests {
        self.api.log().since(since).by(&format!("system:node:{NODE}"))
    }

    /// Start of the first status update of a pod at or after `from`.
    pub fn first_status_update(&self, since: u64, name: &str, from: Instant) -> Option<Instant> {
        let writes = self.node_requests(since).at("pods", NAMESPACE, name).sub("status");
        begun(&writes, |logged| is_write(logged) && logged.begun.into_std() >= from)
    }

    /// Start of the first deletion of a pod by the node.
    pub fn deleted(&self, since: u64, name: &str) -> Option<Instant> {
        begun(&self.node_requests(since).at("pods", NAMESPACE, name), |logged| logged.verb == "delete")
    }

    /// End times of the successful lease renewals.
    pub fn renewals(&self, since: u64) -> Vec<Instant> {
        let asked = self.node_requests(since).at(LEASES, "kube-node-lease", NODE);
        let good = asked.filter(|logged| is_write(logged) && logged.code == Some(200));
        good.iter().filter_map(|logged| logged.ended).map(|at| at.into_std()).collect()
    }

    /// Waits until a condition is met.
    ///
    /// # Errors
    /// It is not met within [`PATIENCE`]; the error contains the end of the agent's log.
    pub async fn until(&self, what: &str, agent: &Agent, holds: impl Fn(&Self) -> bool) -> Result<Instant> {
        self.until_within(PATIENCE, what, agent, holds).await
    }

    /// Like [`Self::until`], with another timeout.
    ///
    /// # Errors
    /// It is not met in time.
    pub async fn until_within(
        &self,
        limit: Duration,
        what: &str,
        agent: &Agent,
        holds: impl Fn(&Self) -> bool,
    ) -> Result<Instant> {
        let deadline = Instant::now() + limit;
        while !holds(self) {
            ensure!(Instant::now() < deadline, "timed out after {limit:?} waiting for: {what}\n{}", agent.log_end());
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
        Ok(Instant::now())
    }

    /// Waits until there was no request for a second, for ten seconds at most.
    pub async fn quiet(&self) {
        let mut last = self.api.last();
        for _ in 0..10 {
            tokio::time::sleep(Duration::from_secs(1)).await;
            let now = self.api.last();
            if now == last {
                return;
            }
            last = now;
        }
    }
}

/// Number of requests by verb, resource, and status code, one per line.
pub fn kinds(requests: &Requests) -> String {
    let mut kinds = BTreeMap::<String, usize>::new();
    for logged in requests.iter() {
        let code = logged.code.map_or_else(|| "-".to_owned(), |code| code.to_string());
        let kind = format!("{:<6} {}/{} {code}", logged.verb, logged.resource, logged.subresource);
        *kinds.entry(kind).or_default() += 1;
    }
    kinds.iter().map(|(kind, count)| format!("{count:>6} {kind}\n")).collect()
}

/// Whether the request changes an object; agents use PATCH or PUT.
pub fn is_write(logged: &RecordedRequest) -> bool {
    ["patch", "update"].contains(&logged.verb)
}

/// Start of the first matching request.
pub fn begun(requests: &Requests, is_it: impl Fn(&RecordedRequest) -> bool) -> Option<Instant> {
    requests.iter().find(|logged| is_it(logged)).map(|logged| logged.begun.into_std())
}

/// Spec fields of a pod that runs to completion: restart policy Never.
pub fn once() -> Value {
    json!({"restartPolicy": "Never"})
}

/// Whether an object has that condition with status True.
pub fn has_condition(object: &Value, kind: &str) -> bool {
    let conditions = object["status"]["conditions"].as_array();
    conditions.is_some_and(|all| all.iter().any(|c| c["type"] == kind && c["status"] == "True"))
}
