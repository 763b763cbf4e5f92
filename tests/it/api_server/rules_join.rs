//! Node bootstrap rules of the test API server: token, CSR, approval, certificate, and their expiry.
//!
//! Spec 10a §6, §7, §12.

use base64::{Engine, engine::general_purpose::STANDARD};
use jiff::SignedDuration;
use serde_json::{Value, json};

use crate::api_server::client::Client;
use berth_testkit::api_server::{ApiServer, rules::csr};

const TOKEN: &str = "abcdef.0123456789abcdef";
const CSRS: &str = "certificatesigningrequests.certificates.k8s.io";
const PATH: &str = "/apis/certificates.k8s.io/v1/certificatesigningrequests";

fn request(signer: &str, names: &[&str], usages: &[&str]) -> Value {
    let names: Vec<String> = names.iter().map(|name| (*name).to_owned()).collect();
    let mut params = rcgen::CertificateParams::new(names).expect("names");
    params.distinguished_name = rcgen::DistinguishedName::new();
    params.distinguished_name.push(rcgen::DnType::OrganizationName, "system:nodes");
    params.distinguished_name.push(rcgen::DnType::CommonName, "system:node:n");
    let key = rcgen::KeyPair::generate().expect("a key");
    let pem = params.serialize_request(&key).expect("a request").pem().expect("text");
    json!({"kind": "CertificateSigningRequest", "apiVersion": "certificates.k8s.io/v1", "metadata": {"generateName": "csr-"},
        "spec": {"request": STANDARD.encode(pem), "signerName": signer, "usages": usages}})
}

/// Conditions of a CSR and whether it has a certificate, once it has either.
async fn outcome(server: &ApiServer, name: &str) -> (Vec<String>, bool) {
    for _ in 0..1000 {
        let csr = server.get(CSRS, "", name).expect("stored");
        let conditions = csr["status"]["conditions"].as_array().cloned().unwrap_or_default();
        let types: Vec<String> = conditions.iter().map(|c| c["type"].as_str().unwrap_or_default().to_owned()).collect();
        let is_signed = csr["status"]["certificate"].is_string();
        if is_signed || types.iter().any(|kind| kind != "Approved") {
            return (types, is_signed);
        }
        tokio::time::sleep(std::time::Duration::from_millis(2)).await;
    }
    panic!("nobody decided about {name}");
}

#[tokio::test]
async fn a_token_leads_to_a_certificate() {
    let server = ApiServer::start().await;
    let client = || async { Client::connect(&server, None, "h2").await.expect("connected").bearer(TOKEN) };
    let body = request(csr::CLIENT_SIGNER, &[], &["digital signature", "client auth"]);
    assert_eq!(client().await.ask("POST", PATH, Some(&body)).await.code, 401, "no such token yet");
    server.bootstrap_token(TOKEN, SignedDuration::from_hours(1));
    let made = client().await.ask("POST", PATH, Some(&body)).await;
    assert_eq!((made.code, &made.body["spec"]["username"]), (201, &json!("system:bootstrap:abcdef")), "{made:?}");
    let name = made.body["metadata"]["name"].as_str().expect("a name");
    assert_eq!(outcome(&server, name).await, (vec!["Approved".to_owned()], true));
    assert_eq!(client().await.get("/api/v1/nodes/n").await.code, 403, "a token is for this only");
    server.jump(SignedDuration::from_hours(2));
    assert_eq!(client().await.get(PATH).await.code, 401, "the token is over");
}

#[tokio::test]
async fn a_serving_certificate_waits_for_people() {
    // AC-10a-21
    let server = ApiServer::start().await;
    let mut node = Client::node(&server, "n").await;
    let body = request(csr::SERVING_SIGNER, &["n.example"], &["digital signature", "server auth"]);
    let mut names = Vec::new();
    for _ in 0..3 {
        let made = node.ask("POST", PATH, Some(&body)).await;
        assert_eq!(made.code, 201, "{made:?}");
        names.push(made.body["metadata"]["name"].as_str().expect("a name").to_owned());
    }
    server.approve(&names[0]);
    assert_eq!(outcome(&server, &names[0]).await, (vec!["Approved".to_owned()], true));
    server.deny(&names[1]);
    assert_eq!(outcome(&server, &names[1]).await, (vec!["Denied".to_owned()], false));
    server.fail(&names[2], "no");
    assert_eq!(outcome(&server, &names[2]).await, (vec!["Failed".to_owned()], false));
}

#[tokio::test]
async fn a_certificate_ends_on_an_open_connection() {
    // AC-10a-20
    let server = ApiServer::start().await;
    let mut node = Client::node(&server, "n").await;
    assert_eq!(node.get("/api/v1/nodes/n").await.code, 404);
    server.jump(SignedDuration::from_hours(48));
    let refused = node.get("/api/v1/nodes/n").await;
    assert_eq!((refused.code, &refused.body["reason"]), (401, &json!("Unauthorized")));
    let mut next = Client::node(&server, "n").await;
    assert_eq!(next.get("/api/v1/nodes/n").await.code, 404, "a new one is fine");
}

#[tokio::test]
async fn permissions_are_a_little_late() {
    // AC-10-29 depends on this: 403 until the authorizer's graph contains the pod.
    let server = ApiServer::start().await;
    server.rules(|rules| rules.graph_lag = std::time::Duration::from_secs(60));
    server.create(json!({"kind": "Secret", "apiVersion": "v1", "metadata": {"name": "s"}}));
    server.create(json!({"kind": "Pod", "apiVersion": "v1", "metadata": {"name": "p"}, "spec": {"nodeName": "n",
        "containers": [{"name": "c", "image": "i"}], "volumes": [{"name": "v", "secret": {"secretName": "s"}}]}}));
    let mut node = Client::node(&server, "n").await;
    let path = "/api/v1/namespaces/default/secrets/s";
    let refused = node.get(path).await;
    assert!(refused.code == 403 && refused.text.contains("no relationship found between node 'n' and this object"));
    server.jump(SignedDuration::from_secs(61));
    assert_eq!(node.get(path).await.code, 200);
}
