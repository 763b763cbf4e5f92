//! Service account tokens in projected volumes: renewal, failures, and outages (spec 10a §20).

use std::{
    fs,
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
};

use base64::{Engine, engine::general_purpose::URL_SAFE_NO_PAD};
use serde_json::{Value, json};

use crate::cluster::{ClusterFixture, NAMESPACE, a_moment, pod_of, pod_start::walk};
use berth_testkit::{
    api_server::{Effect, Fault, Requests},
    process::{Agent, skips},
};

/// Lifetime of tokens in seconds; they are renewed after eight.
const LIFE: i64 = 10;
const ACCOUNT: &str = "robot";

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_token_is_renewed_as_long_as_its_pod_lives() {
    // AC-10-31, 10a §20 steps 1, 2, 5, 6
    if skips("a_token_is_renewed_as_long_as_its_pod_lives") {
        return;
    }
    let (world, agent) = robots().await;
    let account = create_account(&world);
    let [holder, other] = [run(&world, "holder"), run(&world, "other")];
    let file = token_file(&world, &agent, "holder", &holder).await;
    let (first, shape, link) = (read(&file), shape(&file), version(&file));
    assert_eq!(shape, (0o640, 1000, 2000));
    assert_eq!(claims(&first)["kubernetes.io"]["serviceaccount"]["uid"], account);
    // A concurrent reader finds a complete token: `read` fails otherwise.
    agent.until("the token is renewed", async || read(&file) != first).await;
    assert_eq!(self::shape(&file), shape, "given to the same");
    assert_ne!(version(&file), link, "all files at once");
    let folder = file.parent().expect("a folder");
    agent.until("the old version goes", async || !folder.join(&link).exists()).await;
    let due = issued_at(&read(&file)) - issued_at(&first);
    assert!(due >= LIFE - LIFE / 5, "after {due} s");

    let started = world.runtime.cri.count("start_container");
    world.api.delete("serviceaccounts", NAMESPACE, ACCOUNT, None);
    let account = create_account(&world);
    let is_new = |file: &Path| claims(&read(file))["kubernetes.io"]["serviceaccount"]["uid"] == account;
    agent.until("the token is the new account's", async || is_new(&file)).await;
    assert_eq!(world.runtime.cri.count("start_container"), started, "nothing is restarted");

    world.api.delete("pods", NAMESPACE, "holder", Some(1));
    world.until_gone(&agent, "holder").await;
    a_moment().await; // a request may be in flight
    let before = world.api.last();
    let renewals = |of: &Value| asked(&world, of).since(before).filter(|logged| logged.code == Some(201)).len();
    world.until(&agent, "the other's is renewed twice", |_| renewals(&other) >= 2).await;
    assert!(asked(&world, &holder).since(before).is_empty(), "{}", asked(&world, &holder));
    drop(agent);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_token_that_cannot_be_renewed_stays() {
    // AC-07-12, 10a §20 steps 3, 4
    if skips("a_token_that_cannot_be_renewed_stays") {
        return;
    }
    let (world, agent) = robots().await;
    create_account(&world);
    let holder = run(&world, "holder");
    let file = token_file(&world, &agent, "holder", &holder).await;
    let refused = Fault::new(Effect::status(500, "InternalError", "no tokens today"));
    let fault = world.api.fault(refused.on("create", "serviceaccounts").subresource("token").always());
    world.until(&agent, "a token is refused", |_| world.api.hits(fault) >= 1).await;
    let token = read(&file);
    world.until(&agent, "it is asked again", |_| world.api.hits(fault) >= 3).await;
    assert_eq!(read(&file), token);
    // The token expires; its holder keeps the file.
    let has_event = |pod: &str, text: &str| {
        let events = world.api.all("events");
        let is_it =
            |event: &&std::sync::Arc<Value>| event["involvedObject"]["name"] == pod && event["reason"] == "FailedMount";
        events.iter().filter(is_it).any(|event| event["message"].as_str().unwrap_or_default().contains(text))
    };
    let expired = format!("token {ACCOUNT} expired and refresh failed: no tokens today");
    world.until(&agent, "expiry is reported", |_| has_event("holder", &expired)).await;
    assert_eq!(read(&file), token);
    world.api.create(robot_pod("late"));
    world.api.bind(NAMESPACE, "late", berth_testkit::process::NODE);
    world.until(&agent, "a new pod waits", |_| has_event("late", "failed to fetch token: no tokens today")).await;
    // Retries after one, two, and four seconds; the renewal was due two seconds before the expiry.
    let end = claims(&token)["exp"].as_i64().expect("seconds");
    let tries = asked(&world, &holder).filter(|logged| logged.fault.is_some() && logged.at.as_second() < end);
    assert!(tries.len() <= 3, "{tries}");
    world.api.clear(fault);
    agent.until("the token is renewed", async || read(&file) != token).await;
    world.until_ready(&agent, "late").await;
    assert_eq!(world.runtime.cri.count("start_container"), 2, "each once");
    drop(agent);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_token_outlives_its_server() {
    // 10a §20 step 4, AC-07-12
    if skips("a_token_outlives_its_server") {
        return;
    }
    let (world, agent) = robots().await;
    create_account(&world);
    let holder = run(&world, "holder");
    let file = token_file(&world, &agent, "holder", &holder).await;
    let refused = Fault::new(Effect::status(500, "InternalError", "no tokens today"));
    let fault = world.api.fault(refused.on("create", "serviceaccounts").subresource("token").always());
    // The pod is known before the outage, and has no token yet.
    world.run(robot_pod("late"));
    agent.until_log("failed to fetch token: no tokens today").await;
    let started = world.runtime.cri.count("start_container");
    world.api.take_offline().await;
    world.api.clear(fault);
    let (token, shape, link) = (read(&file), shape(&file), version(&file));
    agent.until_log("failed to fetch token: dial tcp").await;
    let end = claims(&token)["exp"].as_i64().expect("seconds");
    agent.until("its end has come", async || world.api.now().as_second() > end).await;
    agent.until_log(&format!("token {ACCOUNT} expired and refresh failed: dial tcp")).await;
    a_moment().await;
    assert_eq!((read(&file), self::shape(&file), version(&file)), (token.clone(), shape, link), "its files stay");
    assert_eq!(world.runtime.cri.count("start_container"), started, "nothing is restarted, and nothing starts without");
    assert_eq!(world.runtime.cri.running("holder", "main").len(), 1);

    world.api.bring_online().await;
    agent.until("the token is renewed", async || read(&file) != token).await;
    world.until_ready(&agent, "late").await;
    assert_eq!(world.runtime.cri.count("start_container"), started + 1, "each once");
    drop(agent);
}

/// A node in a cluster with short-lived tokens.
async fn robots() -> (ClusterFixture, Agent) {
    let (world, agent) = ClusterFixture::joined().await;
    world.api.rules(|rules| rules.token_seconds = Some(LIFE));
    (world, agent)
}

/// Creates the pods' service account; returns its UID.
fn create_account(world: &ClusterFixture) -> String {
    let metadata = json!({"name": ACCOUNT, "namespace": NAMESPACE});
    let account = json!({"apiVersion": "v1", "kind": "ServiceAccount", "metadata": metadata});
    world.api.create(account)["metadata"]["uid"].as_str().expect("a UID").to_owned()
}

fn robot_pod(name: &str) -> Value {
    let context = json!({"runAsUser": 1000, "fsGroup": 2000});
    pod_of(name, json!({"serviceAccountName": ACCOUNT, "securityContext": context, "containers": [{"name": "main"}]}))
}

fn run(world: &ClusterFixture, name: &str) -> Value {
    (*world.run(robot_pod(name))).clone()
}

/// Path of the token of a running pod.
async fn token_file(world: &ClusterFixture, agent: &Agent, name: &str, pod: &Value) -> PathBuf {
    world.until_ready(agent, name).await;
    let uid = pod["metadata"]["uid"].as_str().expect("a UID");
    walk(&world.home.root().join("pods").join(uid).join("volumes/kubernetes.io~projected"), "token")
}

fn read(file: &Path) -> String {
    let token = fs::read_to_string(file).expect("always there");
    assert_eq!(token.split('.').count(), 3, "a whole JWT");
    token
}

/// Mode, user, and group.
fn shape(file: &Path) -> (u32, u32, u32) {
    let metadata = fs::metadata(file).expect("there");
    (metadata.mode() & 0o7777, metadata.uid(), metadata.gid())
}

/// Target of the `..data` link: the current version of all files.
fn version(file: &Path) -> PathBuf {
    fs::read_link(file.with_file_name("..data")).expect("a link")
}

fn claims(token: &str) -> Value {
    let claims = token.split('.').nth(1).and_then(|claims| URL_SAFE_NO_PAD.decode(claims).ok());
    serde_json::from_slice(&claims.expect("encoded")).expect("JSON")
}

fn issued_at(token: &str) -> i64 {
    claims(token)["iat"].as_i64().expect("seconds")
}

/// Token requests for that pod.
fn asked(world: &ClusterFixture, pod: &Value) -> Requests {
    let tokens = world.agent_requests().of("serviceaccounts").sub("token");
    tokens.filter(|logged| logged.body["spec"]["boundObjectRef"]["uid"] == pod["metadata"]["uid"])
}
