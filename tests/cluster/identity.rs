//! Who the node is to others: serving certificates that the cluster signs, client certificates that are replaced
//! (spec 10a §12, spec 01).

use std::time::Duration;

use jiff::SignedDuration;
use serde_json::json;

use crate::{
    NAMESPACE, World,
    kit::{
        api_server::Logged,
        main_port::MainPort,
        process::{NODE, skips},
    },
    kubectl::open_world,
    pod,
};

const CSRS: &str = "certificatesigningrequests.certificates.k8s.io";

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_serving_certificate_comes_from_the_cluster() {
    if skips("a_serving_certificate_comes_from_the_cluster") {
        return;
    }
    let (mut world, port): (World, MainPort) = open_world().await;
    world.home = world.home.with(json!({"serverTLSBootstrap": true, "tlsCertFile": "", "tlsPrivateKeyFile": ""}));
    let agent = world.start().await;
    world.run(pod("a"));
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
    assert_eq!(world.ground.cri.count("stop_podsandbox"), 0);
    assert!(world.asked().at("pods", NAMESPACE, "a").verb("delete").is_empty());
    drop(agent);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_client_certificate_is_replaced() {
    // AC-10-37
    if skips("a_client_certificate_is_replaced") {
        return;
    }
    let mut world = World::new().await;
    let (user, groups) = (format!("system:node:{NODE}"), ["system:nodes"]);
    let pair = world.home.path().join("client.pem");
    let put = |world: &World| {
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
    let old = world.asked().last().expect("it asked").serial.clone();
    assert!(!old.is_empty());
    let before = world.api.last();
    put(&world);
    world
        .until(&agent, "it shows the new one", |seen| {
            seen.log().since(before).by(&user).iter().any(|logged| logged.serial != old)
        })
        .await;
    let renewed = |logged: &crate::kit::api_server::Logged| logged.serial != old && logged.verb == "watch";
    world
        .until(&agent, "pods are watched with it", |seen| {
            seen.log().since(before).of("pods").iter().any(|logged| renewed(logged))
        })
        .await;
    world.run(pod("b"));
    world.until_ready(&agent, "b").await;
    let asked = world.asked().since(before);
    assert!(asked.verb("list").is_empty(), "{asked}");
    assert!(asked.codes().iter().all(|code| *code != 401), "{asked}");
    drop(agent);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_serving_certificate_that_is_denied_is_asked_for_again() {
    if skips("a_serving_certificate_that_is_denied_is_asked_for_again") {
        return;
    }
    let (mut world, port): (World, MainPort) = open_world().await;
    world.home = world.home.with(json!({"serverTLSBootstrap": true, "tlsCertFile": "", "tlsPrivateKeyFile": ""}));
    let agent = world.start().await;
    let name = |csr: &serde_json::Value| csr["metadata"]["name"].as_str().expect("a name").to_owned();
    world.until(&agent, "it asks for a certificate", |seen| !seen.all(CSRS).is_empty()).await;
    let denied = name(world.api.all(CSRS).first().expect("there"));
    world.api.deny(&denied);
    world.until(&agent, "it asks again", |seen| seen.all(CSRS).iter().any(|csr| name(csr) != denied)).await;
    let second = world.api.all(CSRS).iter().map(|csr| name(csr)).find(|name| *name != denied).expect("there");
    // Nobody looks at it for a while; pods do not wait for it.
    world.run(pod("a"));
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
    let mut world = World::new().await;
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
    let agent = world.start().await;
    world.run(pod("a"));
    world.until_ready(&agent, "a").await;
    let asked = world.asked();
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
    // 70 to 90 % of its life, which begins with a full second before it was asked for.
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
    let shown: Vec<u64> = world.asked().iter().filter(|l| l.serial == old).map(|l| l.connection).collect();
    agent
        .until("no connection shows the old one", async || {
            !world.api.connections().iter().any(|open| shown.contains(&open.id) && !open.is_ended())
        })
        .await;
    world.run(pod("b"));
    world.until_ready(&agent, "b").await;
    let asked = world.asked();
    assert!(asked.verb("list").of("pods").is_empty(), "watches are resumed\n{asked}");
    assert!(asked.codes().iter().all(|code| *code != 401), "{asked}");
    assert_eq!(world.ground.cri.count("stop_podsandbox"), 0);
    drop(agent);
}

/// Seconds a client certificate lives there.
const LIFE: i64 = 30;

fn user() -> String {
    format!("system:node:{NODE}")
}

fn is_other(logged: &Logged, old: &str) -> bool {
    logged.serial != old && logged.user == user()
}
