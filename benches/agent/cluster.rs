//! A cluster of one node: the test API server, which remembers when which request began, a scripted runtime, and
//! an agent between them. Users act on the server directly, without a request.

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
    scripted_ground::{PATIENCE, Runtime},
};
use berth_testkit::{
    api_server::{ApiServer, Logged, Requests},
    scripted::Fact,
};

/// As the test API server names them.
pub const LEASES: &str = "leases.coordination.k8s.io";
const NAMESPACE: &str = "default";

/// The control plane and the runtime.
pub struct Cluster {
    /// Remembers all requests.
    pub api: ApiServer,
    /// Remembers all calls.
    pub runtime: Runtime,
}

impl Cluster {
    /// With an agent whose node is Ready and renews its lease; the runtime does at most `parallel` changing calls
    /// at once.
    pub async fn joined(target: &Target, parallel: usize) -> Result<(Self, Agent)> {
        Self::joined_with(target, parallel, &json!({}), None).await
    }

    /// The same with an agent whose configuration has these fields, and that has the settings of that file.
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
        // Other agents watch pods and services when they are Ready, not before.
        cluster.quiet().await;
        Ok((cluster, agent))
    }

    fn is_joined(&self) -> bool {
        let is_ready = self.api.get("nodes", "", NODE).is_some_and(|node| has_condition(&node, "Ready"));
        is_ready && self.api.get(LEASES, "kube-node-lease", NODE).is_some()
    }

    /// Creates a pod that nobody has assigned yet.
    pub fn create(&self, name: &str, fields: Value) {
        let mut pod = manifest::scripted(name, 1);
        for (key, value) in fields.as_object().into_iter().flatten() {
            pod["spec"][key] = value.clone();
        }
        self.api.create(pod);
    }

    /// Assigns it to the node. Returns when that was.
    pub fn bind(&self, name: &str) -> Instant {
        let at = Instant::now();
        self.api.bind(NAMESPACE, name, NODE);
        at
    }

    /// So many pods, `<prefix>0`, …, each with these fields of the specification; all are Ready.
    pub async fn run_pods(&self, agent: &Agent, prefix: &str, count: usize, fields: &Value) -> Result<Vec<String>> {
        let names: Vec<String> = (0..count).map(|i| format!("{prefix}{i}")).collect();
        for name in &names {
            self.create(name, fields.clone());
            self.bind(name);
        }
        self.until("all pods are Ready", agent, |cluster| names.iter().all(|name| cluster.is_ready(name))).await?;
        Ok(names)
    }

    /// Deletes a pod as users do.
    pub fn delete(&self, name: &str) {
        self.api.delete("pods", NAMESPACE, name, None);
    }

    /// Whether it is Running and Ready, for all that the server knows.
    pub fn is_ready(&self, name: &str) -> bool {
        self.pod(name).is_some_and(|pod| pod["status"]["phase"] == "Running" && has_condition(&pod, "Ready"))
    }

    /// As the server has it.
    pub fn pod(&self, name: &str) -> Option<Arc<Value>> {
        self.api.get("pods", NAMESPACE, name)
    }

    /// Its only container.
    ///
    /// # Errors
    /// It does not run.
    pub fn container(&self, name: &str) -> Result<String> {
        self.runtime.cri.running(name, "c0").pop().with_context(|| format!("{name} does not run"))
    }

    /// When a container ended.
    pub fn exit_of(&self, container: &str) -> Option<Instant> {
        let moments = self.runtime.cri.history().0;
        let found = moments.iter().rev().find(|m| matches!(&m.fact, Fact::Exited(id, _) if id == container));
        found.map(|moment| moment.at.into_std())
    }

    /// Requests of the node since that one.
    pub fn asked(&self, since: u64) -> Requests {
        self.api.log().since(since).by(&format!("system:node:{NODE}"))
    }

    /// The first request about the status of a pod that began then or later.
    pub fn told(&self, since: u64, name: &str, from: Instant) -> Option<Instant> {
        let writes = self.asked(since).at("pods", NAMESPACE, name).sub("status");
        begun(&writes, |logged| is_write(logged) && logged.begun.into_std() >= from)
    }

    /// The first deletion of a pod.
    pub fn deleted(&self, since: u64, name: &str) -> Option<Instant> {
        begun(&self.asked(since).at("pods", NAMESPACE, name), |logged| logged.verb == "delete")
    }

    /// Good renewals of the lease, as they ended.
    pub fn renewals(&self, since: u64) -> Vec<Instant> {
        let asked = self.asked(since).at(LEASES, "kube-node-lease", NODE);
        let good = asked.filter(|logged| is_write(logged) && logged.code == Some(200));
        good.iter().filter_map(|logged| logged.ended).map(|at| at.into_std()).collect()
    }

    /// Waits until something holds; tells what the agent logged where it does not.
    ///
    /// # Errors
    /// It does not within [`PATIENCE`].
    pub async fn until(&self, what: &str, agent: &Agent, holds: impl Fn(&Self) -> bool) -> Result<Instant> {
        self.until_within(PATIENCE, what, agent, holds).await
    }

    /// The same with other patience.
    ///
    /// # Errors
    /// It does not in time.
    pub async fn until_within(
        &self,
        limit: Duration,
        what: &str,
        agent: &Agent,
        holds: impl Fn(&Self) -> bool,
    ) -> Result<Instant> {
        let deadline = Instant::now() + limit;
        while !holds(self) {
            ensure!(Instant::now() < deadline, "not within {limit:?}: {what}\n{}", agent.log_end());
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
        Ok(Instant::now())
    }

    /// Waits until nothing was asked for a second, or ten have passed.
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

/// How many requests there were of each kind, as lines.
pub fn kinds(requests: &Requests) -> String {
    let mut kinds = BTreeMap::<String, usize>::new();
    for logged in requests.iter() {
        let code = logged.code.map_or_else(|| "-".to_owned(), |code| code.to_string());
        let kind = format!("{:<6} {}/{} {code}", logged.verb, logged.resource, logged.subresource);
        *kinds.entry(kind).or_default() += 1;
    }
    kinds.iter().map(|(kind, count)| format!("{count:>6} {kind}\n")).collect()
}

/// Whether it changes something: agents patch, or put.
pub fn is_write(logged: &Logged) -> bool {
    ["patch", "update"].contains(&logged.verb)
}

/// When the first such request began.
pub fn begun(requests: &Requests, is_it: impl Fn(&Logged) -> bool) -> Option<Instant> {
    requests.iter().find(|logged| is_it(logged)).map(|logged| logged.begun.into_std())
}

/// A pod whose end is its end.
pub fn once() -> Value {
    json!({"restartPolicy": "Never"})
}

/// Whether an object says that of itself.
pub fn has_condition(object: &Value, kind: &str) -> bool {
    let conditions = object["status"]["conditions"].as_array();
    conditions.is_some_and(|all| all.iter().any(|c| c["type"] == kind && c["status"] == "True"))
}
