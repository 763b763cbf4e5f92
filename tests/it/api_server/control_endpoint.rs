//! Control endpoint of a standalone test API server. Spec 10a §1, §9, §10.

use std::{net::SocketAddr, sync::Arc};

use serde_json::{Value, json};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
};

use crate::api_server::client::Client;
use berth_testkit::api_server::{ApiServer, sim};

const MAPS: &str = "/api/v1/namespaces/default/configmaps";
const CSRS: &str = "certificatesigningrequests.certificates.k8s.io";

/// Sends a request to the control endpoint; returns status and response.
async fn ask(endpoint: SocketAddr, method: &str, path: &str, body: &Value) -> (u16, Value) {
    let body = if body.is_null() { String::new() } else { body.to_string() };
    let request = format!(
        "{method} /sim/v1/{path} HTTP/1.1\r\nHost: sim\r\nConnection: close\r\nContent-Length: {}\r\n\r\n{body}",
        body.len()
    );
    let mut stream = TcpStream::connect(endpoint).await.expect("it is open");
    stream.write_all(request.as_bytes()).await.expect("asked");
    let mut answer = String::new();
    stream.read_to_string(&mut answer).await.expect("answered");
    let (head, body) = answer.split_once("\r\n\r\n").expect("a head");
    let status = head.split(' ').nth(1).and_then(|code| code.parse().ok()).expect("a status");
    (status, serde_json::from_str(body).unwrap_or_else(|_| json!(body)))
}

#[tokio::test]
async fn a_standalone_server_is_driven_through_its_control_endpoint() {
    let server = Arc::new(ApiServer::start().await);
    let endpoint = sim::open(server.clone(), 0).await;
    assert!(endpoint.ip().is_loopback());
    let mut client = Client::admin(&server).await;
    let map = json!({"kind": "ConfigMap", "apiVersion": "v1", "metadata": {"name": "a"}});

    let refused = json!({"effect": {"status": [503, "ServiceUnavailable", "later"]}, "verb": "create",
        "resource": "configmaps", "times": 0});
    let (code, made) = ask(endpoint, "POST", "faults", &refused).await;
    assert_eq!(code, 200, "{made}");
    for _ in 0..2 {
        let answer = client.ask("POST", MAPS, Some(&map)).await;
        assert_eq!((answer.code, &answer.body["message"]), (503, &json!("later")));
    }
    let fault = format!("faults/{}", made["id"]);
    assert_eq!(ask(endpoint, "GET", &fault, &Value::Null).await.1["hits"], 2);
    assert_eq!(ask(endpoint, "DELETE", &fault, &Value::Null).await.0, 204);
    assert_eq!(client.ask("POST", MAPS, Some(&map)).await.code, 201);

    let (_, asked) = ask(endpoint, "GET", "requests", &Value::Null).await;
    let codes: Vec<&Value> = asked.as_array().expect("a list").iter().map(|logged| &logged["code"]).collect();
    assert_eq!(codes, [503, 503, 201], "{asked:#}");
    assert_eq!((&asked[2]["verb"], &asked[2]["body"]["metadata"]["name"]), (&json!("create"), &json!("a")));
    let (_, later) = ask(endpoint, "GET", &format!("requests?since={}", asked[1]["id"]), &Value::Null).await;
    assert_eq!(later.as_array().map(Vec::len), Some(1), "{later:#}");
    let (_, open) = ask(endpoint, "GET", "connections", &Value::Null).await;
    assert_eq!(open[0]["alpn"], "h2", "{open}");

    let before = server.now();
    assert_eq!(ask(endpoint, "POST", "clock", &json!({"seconds": 3600})).await.0, 200);
    assert!(server.now().as_second() - before.as_second() >= 3600);
    for (path, body) in [
        ("faults", json!({"effect": "explode"})),
        ("faults", json!({"effect": "hang", "name": "("})),
        ("bind", json!({"namespace": "default", "pod": "none", "node": "n"})),
        ("certificates", json!({"name": "none", "decision": "approve"})),
        ("network", json!({"state": "odd"})),
    ] {
        let (code, message) = ask(endpoint, "POST", path, &body).await;
        assert_eq!(code, 400, "{path} {body}: {message}");
    }
}

#[tokio::test]
async fn it_acts_as_controllers_and_as_the_network() {
    let server = Arc::new(ApiServer::start().await);
    let endpoint = sim::open(server.clone(), 0).await;
    let pod = json!({"kind": "Pod", "apiVersion": "v1", "metadata": {"name": "p", "namespace": "default"},
        "spec": {"containers": [{"name": "c", "image": "i"}]}});
    server.create(pod);
    let bind = json!({"namespace": "default", "pod": "p", "node": "n"});
    assert_eq!(ask(endpoint, "POST", "bind", &bind).await.0, 204);
    assert_eq!(server.get("pods", "default", "p").expect("there")["spec"]["nodeName"], "n");
    assert!(server.all(CSRS).is_empty());

    let is_there = async || TcpStream::connect(server.address()).await.is_ok();
    for (state, expected) in [("gone", false), ("there", true), ("there", true)] {
        assert_eq!(ask(endpoint, "POST", "network", &json!({"state": state})).await.0, 204);
        assert_eq!(is_there().await, expected, "{state}");
    }
    assert_eq!(ask(endpoint, "POST", "restart", &json!({"keepsEvents": true})).await.0, 204);
    assert!(is_there().await);
    assert_eq!(ask(endpoint, "POST", "compact", &json!({"resource": "pods"})).await.0, 204);
    let mut client = Client::admin(&server).await;
    let old = client.get("/api/v1/pods?watch=true&resourceVersion=1").await;
    assert!(old.text.contains("too old resource version"), "{}", old.text);
}
