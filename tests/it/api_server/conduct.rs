//! The API server's checks of node conduct. Spec 10a §10.

use serde_json::{Value, json};

use crate::api_server::client::Client;
use berth_testkit::api_server::{ApiServer, RecordedRequest};

const LEASE: &str = "/apis/coordination.k8s.io/v1/namespaces/kube-node-lease/leases";

fn node() -> Value {
    json!({"kind": "Node", "apiVersion": "v1", "metadata": {"name": "n"}})
}

fn lease(renewed: u32) -> Value {
    json!({"kind": "Lease", "apiVersion": "coordination.k8s.io/v1", "metadata": {"name": "n"},
           "spec": {"holderIdentity": "n", "renewTime": format!("2026-01-01T00:00:{renewed:02}.000000Z")}})
}

#[track_caller]
fn accused(server: &ApiServer, of: &[&str]) {
    let found = server.violations(|_| false);
    assert_eq!(found.len(), of.len(), "{found:#?}");
    for (offence, expected) in found.iter().zip(of) {
        assert!(offence.contains(expected), "{offence}: no {expected}");
    }
}

#[tokio::test]
async fn a_kubelet_is_accused_of_nothing() {
    let server = ApiServer::start().await;
    let mut client = Client::node(&server, "n").await;
    assert_eq!(client.ask("POST", "/api/v1/nodes", Some(&node())).await.code, 201);
    assert_eq!(client.get("/api/v1/pods?fieldSelector=spec.nodeName%3Dn").await.code, 200);
    assert_eq!(client.get("/apis/storage.k8s.io/v1/csidrivers").await.code, 200);
    let patch = json!({"status": {"conditions": [{"type": "Ready", "status": "True"}]}});
    assert_eq!(client.ask("PATCH", "/api/v1/nodes/n/status", Some(&patch)).await.code, 200);
    let mut made = client.ask("POST", LEASE, Some(&lease(1))).await.body;
    made["spec"] = lease(2)["spec"].clone();
    assert_eq!(client.ask("PUT", &format!("{LEASE}/n"), Some(&made)).await.code, 200);
    server.assert_conformance();
}

#[tokio::test]
async fn what_no_kubelet_does() {
    let server = ApiServer::start().await;
    let mut client = Client::node(&server, "n").await;
    client.ask("POST", "/api/v1/nodes", Some(&node())).await;
    client.get("/api/v1/pods").await;
    accused(&server, &["unexpected 403 Forbidden", "list or watch without fieldSelector"]);
    let announced = |logged: &RecordedRequest| logged.verb == "list" && logged.resource == "pods";
    assert_eq!(server.violations(announced).len(), 1);
    let server = ApiServer::start().await;
    let mut client = Client::node(&server, "n").await;
    client.ask("POST", "/api/v1/nodes", Some(&node())).await;
    client.ask("PUT", "/api/v1/nodes/n", Some(&node())).await;
    accused(&server, &["PUT of a pod or node"]);
    for _ in 0..2 {
        client
            .ask(
                "PATCH",
                "/api/v1/nodes/n/status",
                Some(&json!({"metadata": {"uid": server.get("nodes", "", "n").expect("there")["metadata"]["uid"]}})),
            )
            .await;
    }
    accused(&server, &["PUT of a pod or node", "2 empty patches of nodes /n"]);
}

#[tokio::test]
async fn a_lease_moves_forward_only() {
    let server = ApiServer::start().await;
    let mut client = Client::node(&server, "n").await;
    client.ask("POST", "/api/v1/nodes", Some(&node())).await;
    let first = client.ask("POST", LEASE, Some(&lease(5))).await.body;
    let mut back = first.clone();
    back["spec"] = lease(4)["spec"].clone();
    let second = client.ask("PUT", &format!("{LEASE}/n"), Some(&back)).await;
    assert_eq!(second.code, 200);
    assert_eq!(client.ask("PUT", &format!("{LEASE}/n"), Some(&first)).await.code, 409);
    accused(&server, &["older than the client's last write", "renewTime went backwards"]);
}

#[tokio::test]
async fn the_dead_do_not_live() {
    let server = ApiServer::start().await;
    let pod = json!({"kind": "Pod", "apiVersion": "v1", "metadata": {"name": "p", "namespace": "default"},
                     "spec": {"nodeName": "n", "containers": [{"name": "c", "image": "i"}]}});
    server.create(pod);
    let within = std::time::Duration::from_secs(30);
    server.wait_until("it is there", within, |_| server.get("pods", "default", "p").is_some()).await;
    let status = |status: Value| server.admin().patch_sub("pods", "default", "p", "status", json!({"status": status}));
    let ended = json!([{"name": "c", "image": "i", "imageID": "", "ready": false, "restartCount": 0,
                        "state": {"terminated": {"exitCode": 0}}}]);
    status(json!({"phase": "Running", "containerStatuses": ended})).expect("stored");
    accused(&server, &[]);
    let mut running = ended.clone();
    running[0]["state"] = json!({"running": {"startedAt": "2026-01-01T00:00:00Z"}});
    status(json!({"containerStatuses": running.clone()})).expect("stored");
    accused(&server, &["container c restarted without"]);
    let ready = json!([{"type": "Ready", "status": "True"}]);
    status(json!({"phase": "Failed", "conditions": ready})).expect("stored");
    accused(&server, &["container c restarted without", "condition Ready is True in phase \"Failed\""]);
    status(json!({"phase": "Running"})).expect("stored");
    assert!(
        server
            .violations(|_| false)
            .iter()
            .any(|offence| offence.contains("phase changed to \"Running\" after \"Failed\""))
    );
}
