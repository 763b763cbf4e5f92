//! API server misbehavior: pods keep running whatever it responds (spec 10a §9).
//!
//! The bad input of issue "A node in a cluster".

use std::{sync::Arc, time::Duration};

use jiff::SignedDuration;
use serde_json::{Value, json};

use crate::cluster::{ClusterFixture, NAMESPACE, a_moment, condition, pod};
use berth_testkit::{
    api_server::{Effect, Fault, Ring},
    process::{Agent, NODE, skips},
};

const LEASES: &str = "leases.coordination.k8s.io";

/// A node with a running pod `a`.
struct HealthyNode {
    world: ClusterFixture,
    agent: Agent,
    a: Arc<Value>,
}

impl HealthyNode {
    /// Starts the node; `None` if the test is skipped.
    async fn new(test: &str) -> Option<Self> {
        if skips(test) {
            return None;
        }
        let (world, agent) = ClusterFixture::joined().await;
        world.run(pod("a"));
        let a = world.until_ready(&agent, "a").await;
        Some(Self { world, agent, a })
    }

    /// Asserts that `a` is restarted locally when it exits, whatever the server does.
    async fn restarts(&self) {
        self.is_restarted(&self.a).await;
    }

    /// Asserts that a pod is restarted locally when it exits for the first time.
    async fn is_restarted(&self, pod: &Value) {
        let started = self.world.runtime.cri.count("start_container");
        self.world.end(pod, 1);
        let is_back = |cri: &berth_testkit::scripted_cri::ScriptedCri| cri.count("start_container") > started;
        self.world.runtime.until("what ended is restarted", &self.agent, is_back).await;
    }

    /// Asserts that `a` still has its first sandbox, and that a new pod starts.
    async fn goes_on(&mut self, name: &str) -> Arc<Value> {
        assert!(!self.agent.has_ended(), "{}", self.agent.log_end());
        self.world.run(pod(name));
        let new = self.world.until_ready(&self.agent, name).await;
        assert_eq!(self.world.runtime.cri.count("stop_podsandbox"), 0, "no pod is stopped\n{}", self.agent.log_end());
        let uid = &self.world.pod("a").expect("there")["metadata"]["uid"];
        assert_eq!(*uid, self.a["metadata"]["uid"]);
        new
    }

    /// Closes all connections, and with them the watches.
    fn cut(&self) {
        self.world.api.connections().iter().for_each(|connection| connection.close());
    }
}

fn answers(code: u16, kind: &'static str, body: &str) -> Effect {
    Effect::Answer(code, None, kind, body.to_owned())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn answers_without_sense() {
    let Some(mut calm) = HealthyNode::new("answers_without_sense").await else { return };
    let page = "<html><body><h1>502 Bad Gateway</h1></body></html>";
    let odd = [
        answers(200, "application/json", "{\"kind\":"),
        answers(200, "text/html", page),
        answers(502, "text/html", page),
        answers(200, "application/json", "[]"),
        answers(200, "application/json", "{\"kind\":\"Status\",\"status\":\"Success\"}"),
        answers(200, "application/json", ""),
    ];
    let mut newest = calm.a.clone();
    for (at, effect) in odd.into_iter().enumerate() {
        let before = calm.world.api.last();
        let description = format!("{effect:?}");
        calm.world.api.fault(Fault::new(effect).user(&format!("system:node:{NODE}")).always());
        calm.cut();
        calm.is_restarted(&newest).await;
        a_moment().await;
        let asked = calm.world.agent_requests().since(before);
        assert!(asked.len() < 150, "{description}: {} requests\n{asked}", asked.len());
        calm.world.api.clear_all();
        println!("{description}");
        newest = calm.goes_on(&format!("b-{at}")).await;
    }
    let world = &calm.world;
    world.until_pod(&calm.agent, "a", "tells its restarts", |pod| restarts(pod) > 0).await;
}

fn restarts(pod: &Value) -> u64 {
    pod["status"]["containerStatuses"][0]["restartCount"].as_u64().unwrap_or_default()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn watches_that_last_for_one_event() {
    let Some(mut calm) = HealthyNode::new("watches_that_last_for_one_event").await else { return };
    calm.world.api.fault(Fault::new(Effect::EndWatch(1)).on("watch", "pods").always());
    calm.cut();
    let before = calm.world.api.last();
    calm.goes_on("b").await;
    calm.goes_on("c").await;
    let asked = calm.world.agent_requests().since(before).of("pods").verb("watch");
    assert!(asked.len() < 60, "{asked}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn versions_that_are_too_old_for_ever() {
    // A resumed watch gets 410; a new list and watch is served.
    let Some(mut calm) = HealthyNode::new("versions_that_are_too_old_for_ever").await else { return };
    let gone = Effect::status(410, "Expired", "too old resource version: 1 (2)");
    calm.world.api.fault(Fault::new(gone).on("watch", "pods").always());
    calm.cut();
    let before = calm.world.api.last();
    calm.restarts().await;
    tokio::time::sleep(Duration::from_secs(3)).await;
    let asked =
        calm.world.agent_requests().since(before).of("pods").filter(|logged| ["watch", "list"].contains(&logged.verb));
    assert!((1..40).contains(&asked.len()), "{asked}");
    calm.world.api.clear_all();
    calm.goes_on("b").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_server_that_forgot_what_happened() {
    let Some(mut calm) = HealthyNode::new("a_server_that_forgot_what_happened").await else { return };
    let started = calm.world.runtime.cri.count("start_container");
    let before = calm.world.api.last();
    calm.world.api.restart(Ring::Wipe, Duration::from_millis(300)).await;
    calm.goes_on("b").await;
    a_moment().await;
    assert_eq!(calm.world.runtime.cri.count("start_container"), started + 1, "only the new one is started");
    let asked = calm.world.agent_requests().since(before);
    assert!(asked.at("pods", NAMESPACE, "a").is_empty(), "{asked}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_server_that_takes_its_time() {
    let Some(mut calm) = HealthyNode::new("a_server_that_takes_its_time").await else { return };
    let slow = Effect::Delay(Duration::from_millis(1500));
    calm.world.api.fault(Fault::new(slow).user(&format!("system:node:{NODE}")).always());
    calm.restarts().await;
    calm.goes_on("b").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_clock_that_is_an_hour_off() {
    let Some(mut calm) = HealthyNode::new("a_clock_that_is_an_hour_off").await else { return };
    for (name, minutes) in [("ahead", 60), ("behind", -110)] {
        calm.world.api.jump(SignedDuration::from_mins(minutes));
        let before = calm.world.api.last();
        calm.goes_on(name).await;
        calm.world
            .until(&calm.agent, "the lease is renewed", |seen| {
                let renewals = seen.log().since(before).at(LEASES, "kube-node-lease", NODE);
                renewals.iter().any(|logged| logged.code == Some(200))
            })
            .await;
        let node = calm.world.api.get("nodes", "", NODE).expect("there");
        assert_eq!(condition(&node, "Ready"), "True", "{name}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn credentials_that_ran_out() {
    let Some(mut calm) = HealthyNode::new("credentials_that_ran_out").await else { return };
    let before = calm.world.api.last();
    calm.world.api.jump(SignedDuration::from_hours(24 * 31));
    calm.cut();
    calm.restarts().await;
    calm.world
        .until(&calm.agent, "it is refused", |seen| {
            seen.log().since(before).iter().any(|logged| logged.code == Some(401))
        })
        .await;
    a_moment().await;
    let asked = calm.world.api.log().since(before);
    assert!(asked.len() < 150, "{} requests\n{asked}", asked.len());
    // New credentials are put in place.
    calm.world.api.jump(-SignedDuration::from_hours(24 * 31));
    calm.world.api.node_kubeconfig(NODE);
    calm.goes_on("b").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_node_that_is_deleted_and_created_again() {
    let Some(mut calm) = HealthyNode::new("a_node_that_is_deleted_and_created_again").await else { return };
    let old = calm.world.api.get("nodes", "", NODE).expect("there")["metadata"]["uid"].clone();
    calm.world.api.delete("nodes", "", NODE, None);
    calm.restarts().await;
    a_moment().await;
    assert!(calm.world.api.get("nodes", "", NODE).is_none(), "who deletes it may want it gone");
    calm.world.api.create(json!({"apiVersion": "v1", "kind": "Node", "metadata": {"name": NODE}}));
    let is_new = |node: &Value| node["metadata"]["uid"] != old && condition(node, "Ready") == "True";
    calm.world
        .until(&calm.agent, "the node is there again", |seen| {
            seen.object("nodes", "", NODE).is_some_and(|node| is_new(&node))
        })
        .await;
    calm.goes_on("b").await;
    let new = calm.world.api.get("nodes", "", NODE).expect("there")["metadata"]["uid"].clone();
    calm.world
        .until(&calm.agent, "the lease is the new node's", |seen| {
            let lease = seen.object(LEASES, "kube-node-lease", NODE);
            lease.is_some_and(|lease| lease["metadata"]["ownerReferences"] != json!(null) && owner(&lease) == new)
        })
        .await;
}

fn owner(object: &Value) -> Value {
    object["metadata"]["ownerReferences"][0]["uid"].clone()
}
