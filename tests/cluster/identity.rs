//! Who the node is to others: serving certificates that the cluster signs, client certificates that are replaced
//! (spec 10a §12, spec 01).

use serde_json::json;

use crate::{
    NAMESPACE, World,
    kit::{
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
