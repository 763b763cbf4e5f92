//! Node certificates: serving certificates signed by the cluster, and client certificate rotation.
//!
//! Behavior: spec 10a §12, spec 01.

use std::{path::PathBuf, sync::Arc, time::Duration};

use berth::certificates::Validity;
use jiff::SignedDuration;
use serde_json::{Value, json};

use crate::cluster::{ClusterFixture, NAMESPACE, a_moment, kubectl::open_world, pod};
use berth_testkit::{
    api_server::RecordedRequest,
    main_port::MainPort,
    process::{NODE, manifest, skips},
    scripted_cri::Behaviour,
};

const CSRS: &str = "certificatesigningrequests.certificates.k8s.io";

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_serving_certificate_comes_from_the_cluster() {
    if skips("a_serving_certificate_comes_from_the_cluster") {
        return;
    }
    let (mut world, port): (ClusterFixture, MainPort) = open_world().await;
    world.home = world.home.with(json!({"serverTLSBootstrap": true, "tlsCertFile": "", "tlsPrivateKeyFile": ""}));
    let agent = world.start().await;
    // The test API server's scheduler binds it.
    world.api.create(pod("a"));
    world.until_ready(&agent, "a").await;
    world.until(&agent, "it asks for a certificate", |seen| !seen.all(CSRS).is_empty()).await;
    let csr = world.api.all(CSRS).first().cloned().expect("there");
    assert_eq!(csr["spec"]["signerName"], "kubernetes.io/kubelet-serving", "{csr:#}");
    assert_eq!(csr["spec"]["username"], format!("system:node:{NODE}"), "{csr:#}");
    let answer = port.curl("/healthz", &["-k", "--max-time", "2"]).await;
    assert_eq!(answer.status, 0, "nothing to show yet: {answer:?}");
    world.api.approve(csr["metadata"]["name"].as_str().expect("a name"));
    agent
        .until("it has one to show", async || port.curl("/healthz", &["-k", "--max-time", "2"]).await.status == 401)
        .await;
    assert_eq!(world.api.all(CSRS).len(), 1, "one is enough");
    assert_eq!(world.runtime.cri.count("stop_podsandbox"), 0);
    assert!(world.agent_requests().at("pods", NAMESPACE, "a").verb("delete").is_empty());
    drop(agent);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_client_certificate_is_replaced() {
    // AC-10-37
    if skips("a_client_certificate_is_replaced") {
        return;
    }
    let mut world = ClusterFixture::new().await;
    let (user, groups) = (format!("system:node:{NODE}"), ["system:nodes"]);
    let pair = world.home.path().join("client.pem");
    let put = |world: &ClusterFixture| {
        let issued = world.api.client(&user, &groups, 5);
        let draft = pair.with_extension("draft");
        std::fs::write(&draft, issued.certificate + &issued.key).expect("written");
        std::fs::rename(&draft, &pair).expect("renamed");
    };
    put(&world);
    let kubeconfig = world.home.path().join("client.kubeconfig");
    let text = world.api.kubeconfig_text(&json!({"client-certificate": pair, "client-key": pair}));
    std::fs::write(&kubeconfig, text).expect("written");
    world.home = world.home.flag(format!("--kubeconfig={}", kubeconfig.display()));
    let agent = world.start().await;
    world.run(pod("a"));
    world.until_ready(&agent, "a").await;
    let old = world.agent_requests().last().expect("it asked").serial.clone();
    assert!(!old.is_empty());
    let before = world.api.last();
    put(&world);
    world
        .until(&agent, "it shows the new one", |seen| {
            seen.log().since(before).by(&user).iter().any(|logged| logged.serial != old)
        })
        .await;
    let renewed = |logged: &berth_testkit::api_server::RecordedRequest| logged.serial != old && logged.verb == "watch";
    world
        .until(&agent, "pods are watched with it", |seen| {
            seen.log().since(before).of("pods").iter().any(|logged| renewed(logged))
        })
        .await;
    world.run(pod("b"));
    world.until_ready(&agent, "b").await;
    let asked = world.agent_requests().since(before);
    assert!(asked.verb("list").is_empty(), "{asked}");
    assert!(asked.codes().iter().all(|code| *code != 401), "{asked}");
    drop(agent);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_serving_certificate_that_is_denied_is_asked_for_again() {
    if skips("a_serving_certificate_that_is_denied_is_asked_for_again") {
        return;
    }
    let (mut world, port): (ClusterFixture, MainPort) = open_world().await;
    world.home = world.home.with(json!({"serverTLSBootstrap": true, "tlsCertFile": "", "tlsPrivateKeyFile": ""}));
    let agent = world.start().await;
    let name = |csr: &serde_json::Value| csr["metadata"]["name"].as_str().expect("a name").to_owned();
    world.until(&agent, "it asks for a certificate", |seen| !seen.all(CSRS).is_empty()).await;
    let denied = name(world.api.all(CSRS).first().expect("there"));
    world.api.deny(&denied);
    world.until(&agent, "it asks again", |seen| seen.all(CSRS).iter().any(|csr| name(csr) != denied)).await;
    let second = world.api.all(CSRS).iter().map(|csr| name(csr)).find(|name| *name != denied).expect("there");
    // The request stays undecided for a while; pods do not wait for it.
    world.api.create(pod("a"));
    world.until_ready(&agent, "a").await;
    world.api.approve(&second);
    agent
        .until("it has one to show", async || port.curl("/healthz", &["-k", "--max-time", "2"]).await.status == 401)
        .await;
    assert_eq!(world.api.all(CSRS).len(), 2);
    drop(agent);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_client_certificate_is_rotated_before_it_ends() {
    // AC-01-33, AC-01-34, AC-10-37
    if skips("a_client_certificate_is_rotated_before_it_ends") {
        return;
    }
    let (world, _) = rotating().await;
    let agent = world.start().await;
    world.run(pod("a"));
    world.until_ready(&agent, "a").await;
    let asked = world.agent_requests();
    let old = asked.iter().map(|logged| logged.serial.clone()).find(|serial| !serial.is_empty()).expect("it has one");
    world
        .until(&agent, "it asks for the next", |seen| {
            seen.log().by(&user()).of(CSRS).verb("create").codes().contains(&201)
        })
        .await;
    let log = world.api.log();
    let requests = log.of(CSRS).verb("create");
    let begun: Vec<_> = requests.iter().filter(|logged| logged.code == Some(201)).map(|logged| logged.begun).collect();
    let [first, second, ..] = begun.as_slice() else { panic!("{requests}") };
    // 70 to 90 % of its lifetime, which begins with a full second before the request.
    let waited = second.duration_since(*first);
    assert!(waited >= Duration::from_secs_f64(0.7 * LIFE as f64 - 1.0), "{waited:?}\n{requests}");
    world
        .until(&agent, "pods are watched with the new one", |seen| {
            seen.log().of("pods").verb("watch").iter().any(|logged| is_other(logged, &old))
        })
        .await;
    world
        .until(&agent, "the lease is renewed with the new one", |seen| {
            seen.log().of("leases.coordination.k8s.io").verb("update").iter().any(|logged| is_other(logged, &old))
        })
        .await;
    let shown: Vec<u64> = world.agent_requests().iter().filter(|l| l.serial == old).map(|l| l.connection).collect();
    agent
        .until("no connection shows the old one", async || {
            !world.api.connections().iter().any(|open| shown.contains(&open.id) && !open.is_ended())
        })
        .await;
    world.run(pod("b"));
    world.until_ready(&agent, "b").await;
    let asked = world.agent_requests();
    assert!(asked.verb("list").of("pods").is_empty(), "watches are resumed\n{asked}");
    assert!(asked.codes().iter().all(|code| *code != 401), "{asked}");
    assert_eq!(world.runtime.cri.count("stop_podsandbox"), 0);
    drop(agent);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_client_certificate_that_ran_out_is_replaced_while_pods_run() {
    // 10 §8.3, 10a §14: it expires before the end of a pod can be reported.
    if skips("a_client_certificate_that_ran_out_is_replaced_while_pods_run") {
        return;
    }
    let (world, _) = rotating().await;
    world.runtime.cri.behave("ends/main", [Behaviour::stubborn()]);
    let mut agent = world.start().await;
    for name in ["stays", "ends"] {
        world.run(pod(name));
        world.until_ready(&agent, name).await;
    }
    let started = world.runtime.cri.count("start_container");
    world.api.rules(|rules| rules.approver = None);
    world.until(&agent, "it asks for the next", |seen| pending(&seen.all(CSRS)).is_some()).await;
    // At most ten seconds of its lifetime are left: the container outlives it.
    world.api.delete("pods", NAMESPACE, "ends", Some(12));
    agent.until_log("The certificate has expired").await;
    let expired = world.api.last();
    world.runtime.until("the container has stopped", &agent, |cri| cri.running("ends", "main").is_empty()).await;
    world
        .until(&agent, "who had it joined is asked with", |seen| {
            seen.log().since(expired).of(CSRS).iter().any(|logged| logged.user.starts_with("system:bootstrap:"))
        })
        .await;
    assert!(world.pod("ends").is_some(), "nobody could tell its end");
    let believed = world.agent_requests().since(expired).filter(|logged| logged.code != Some(401));
    assert!(believed.is_empty(), "{believed}");

    let csr = pending(&world.api.all(CSRS)).expect("it waits");
    world.api.approve(&csr);
    world.until_gone(&agent, "ends").await;
    world
        .until(&agent, "the lease is renewed", |seen| {
            seen.log().since(expired).of("leases.coordination.k8s.io").verb("update").codes().contains(&200)
        })
        .await;
    assert!(!agent.has_ended(), "it is the same process");
    let asked = world.agent_requests().since(expired);
    assert!(asked.verb("list").of("pods").is_empty(), "watches are resumed\n{asked}");
    assert_eq!(world.runtime.cri.count("start_container"), started);
    assert_eq!(world.runtime.cri.running("stays", "main").len(), 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_node_that_was_off_for_too_long_comes_back() {
    // Spec 01 §20: the bootstrap kubeconfig is deleted by then, as kubeadm leaves a node.
    if skips("a_node_that_was_off_for_too_long_comes_back") {
        return;
    }
    let (world, bootstrap) = rotating().await;
    let agent = world.start().await;
    world.run(pod("a"));
    world.until_ready(&agent, "a").await;
    agent.kill().await;
    let text = std::fs::read(&bootstrap).expect("there");
    std::fs::remove_file(&bootstrap).expect("removed");
    let pki = world.home.path().join("pki/kubelet-client-current.pem");
    std::fs::write(&pki, expired_pair(&world)).expect("written");
    world.home.put_pod(&manifest("fixed"));
    let before = world.api.last();
    let mut agent = world.home.start().await;
    agent.until_ready("fixed").await;
    agent.until_log("No valid client certificate and no bootstrap kubeconfig found").await;
    agent.until_log("Failed while requesting a signed certificate from the control plane").await;
    a_moment().await;
    assert!(!agent.has_ended(), "{}", agent.log_end());
    assert!(world.agent_requests().since(before).is_empty(), "{}", world.agent_requests().since(before));
    assert_eq!(world.runtime.cri.running("a", "main").len(), 1, "nothing is stopped on half a knowledge");

    std::fs::write(&bootstrap, text).expect("written");
    world.until_ready(&agent, &format!("fixed-{NODE}")).await;
    world.until_ready(&agent, "a").await;
    assert_eq!(world.runtime.cri.count("stop_podsandbox"), 0);
    assert!(!agent.has_ended(), "it is the same process");
}

/// A node that joins with a token and rotates its certificate, and its bootstrap kubeconfig.
async fn rotating() -> (ClusterFixture, PathBuf) {
    let mut world = ClusterFixture::new().await;
    world.api.rules(|rules| rules.certificates_live = Some(SignedDuration::from_secs(LIFE)));
    world.api.bootstrap_token("abcdef.0123456789abcdef", SignedDuration::from_hours(1));
    let bootstrap = world.api.bootstrap_kubeconfig("abcdef.0123456789abcdef");
    let (pki, kubeconfig) = (world.home.path().join("pki"), world.home.path().join("kubelet.conf"));
    world.home = world
        .home
        .with(json!({"rotateCertificates": true}))
        .flag(format!("--cert-dir={}", pki.display()))
        .flag(format!("--bootstrap-kubeconfig={}", bootstrap.display()))
        .flag(format!("--kubeconfig={}", kubeconfig.display()));
    (world, bootstrap)
}

/// Name of an undecided certificate signing request.
fn pending(requests: &[Arc<Value>]) -> Option<String> {
    let is_open = |csr: &&Arc<Value>| csr["status"]["conditions"].as_array().is_none_or(Vec::is_empty);
    requests.iter().find(is_open).and_then(|csr| csr["metadata"]["name"].as_str()).map(str::to_owned)
}

/// The node's certificate, expired for a year.
fn expired_pair(world: &ClusterFixture) -> String {
    let year = SignedDuration::from_hours(365 * 24);
    let validity = Validity::days(world.api.now() - year, 1);
    let issued = world.api.authority.client(&user(), &["system:nodes"], validity).expect("a certificate");
    issued.certificate + &issued.key
}

/// Lifetime of client certificates, in seconds.
const LIFE: i64 = 30;

fn user() -> String {
    format!("system:node:{NODE}")
}

fn is_other(logged: &RecordedRequest, old: &str) -> bool {
    logged.serial != old && logged.user == user()
}
