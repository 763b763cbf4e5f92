//! HTTP protocols, headers, discovery, and the request recorder. Spec 10a §1, §3, §10.

use std::time::Duration;

use serde_json::{Value, json};

use crate::api_server::client::Client;
use berth_testkit::api_server::{ApiServer, Effect, Fault, Options, rules::settings::ADMIN_TOKEN};

const MAPS: &str = "/api/v1/namespaces/default/configmaps";

fn map(name: &str) -> Value {
    json!({"kind": "ConfigMap", "apiVersion": "v1", "metadata": {"name": name}})
}

#[tokio::test]
async fn both_protocols_are_spoken_and_noted() {
    let server = ApiServer::start().await;
    for alpn in ["h2", "http/1.1"] {
        let mut client = Client::connect(&server, Some(("admin", &["system:masters"])), alpn).await.expect("connected");
        let answer = client.ask("POST", MAPS, Some(&json!({"metadata": {"generateName": "m-"}}))).await;
        assert_eq!(answer.code, 201);
        for header in ["audit-id", "x-kubernetes-pf-flowschema-uid", "x-kubernetes-pf-prioritylevel-uid"] {
            assert!(answer.headers.contains_key(header), "{header}");
        }
        assert_eq!(answer.headers["cache-control"], "no-cache, private");
        let log = server.log();
        let last = log.last().expect("noted");
        assert_eq!((last.alpn, last.user.as_str(), last.verb, last.code), (alpn, "admin", "create", Some(201)));
        assert_eq!((last.resource.as_str(), last.namespace.as_str()), ("configmaps", "default"));
        assert_eq!(last.rv, Some(server.rv()));
        assert!(last.ended.is_some() && last.bytes == answer.text.len() && !last.serial.is_empty(), "{last}");
    }
    assert_eq!(server.log().connections(), 2);
    server.only_http1(true);
    assert!(Client::connect(&server, None, "h2").await.is_none());
}

#[tokio::test]
async fn streams_per_connection_are_limited() {
    let server = ApiServer::start().await;
    server.max_streams(2);
    let mut client = Client::admin(&server).await;
    let path = format!("{MAPS}?watch=true&resourceVersion={}", server.rv());
    assert_eq!(client.get("/version").await.code, 200);
    let _watches = (client.watch(&path).await, client.watch(&path).await);
    let third = tokio::time::timeout(Duration::from_millis(300), client.get("/healthz")).await;
    assert!(third.is_err(), "it waits for a stream");
}

#[tokio::test]
async fn a_connection_with_goaway_finishes_its_requests() {
    let server = ApiServer::start().await;
    let mut client = Client::admin(&server).await;
    server.fault(Fault::new(Effect::Goaway).on("create", "configmaps"));
    assert_eq!(client.ask("POST", MAPS, Some(&map("m"))).await.code, 201);
    server.wait_until("it is closed", Duration::from_secs(30), |_| server.connections().is_empty()).await;
}

#[tokio::test]
async fn pages_that_are_no_objects() {
    let server = ApiServer::start().await;
    let mut client = Client::admin(&server).await;
    for path in ["/healthz", "/livez", "/readyz"] {
        assert_eq!(client.get(path).await.text, "ok");
    }
    assert_eq!(client.get("/version").await.body["minor"], "36");
    let core = client.get("/api/v1").await.body;
    let names: Vec<&str> =
        core["resources"].as_array().expect("a list").iter().filter_map(|r| r["name"].as_str()).collect();
    for name in ["nodes/status", "pods/binding", "pods/eviction", "pods/resize", "serviceaccounts/token"] {
        assert!(names.contains(&name), "{name}");
    }
    let groups = client.get("/apis").await.body;
    assert_eq!(groups["groups"].as_array().map(Vec::len), Some(7), "{groups}");
    assert_eq!(client.get("/apis/certificates.k8s.io/v1beta1").await.code, 200);
    for path in ["/apis/certificates.k8s.io/v1alpha1", "/openapi/v2", "/api/v1/replicationcontrollers", "/nope"] {
        let missing = client.get(path).await;
        assert_eq!((missing.code, missing.text.as_str()), (404, "404 page not found\n"), "{path}");
    }
    server.switch(|switches| switches.absent.push("serviceaccounts/token".to_owned()));
    let token = json!({"kind": "TokenRequest", "apiVersion": "authentication.k8s.io/v1", "spec": {}});
    let absent = client.ask("POST", "/api/v1/namespaces/default/serviceaccounts/default/token", Some(&token)).await;
    assert_eq!(absent.code, 404);
    assert_eq!(client.ask("PUT", "/version", None).await.code, 200);
    assert_eq!(client.ask("PATCH", MAPS, Some(&json!({}))).await.code, 405);
}

#[tokio::test]
async fn too_much_is_too_much() {
    let server = ApiServer::start().await;
    let mut client = Client::admin(&server).await;
    let mut large = map("m");
    large["data"] = json!({"a": "x".repeat(4 << 20)});
    assert_eq!(client.ask("POST", MAPS, Some(&large)).await.code, 413);
    server.switch(|switches| switches.padding = 5000);
    assert!(client.ask("POST", MAPS, Some(&map("m"))).await.text.len() > 5000);
}

#[tokio::test]
#[should_panic(expected = "PATCH /api/v1/namespaces/default/configmaps/m")]
async fn a_timed_out_wait_reports_the_requests() {
    let server = ApiServer::start().await;
    server.create(map("m"));
    Client::admin(&server).await.ask("PATCH", &format!("{MAPS}/m"), Some(&json!({"data": {"a": "1"}}))).await;
    let holds = |seen: &berth_testkit::api_server::ConditionContext<'_>| {
        seen.object("configmaps", "default", "m").is_some_and(|map| map["data"]["a"] == "2")
    };
    server.wait_until("the value is 2", Duration::from_millis(50), holds).await;
}

#[tokio::test]
async fn a_certificate_expires_by_the_clock_of_the_server() {
    // AC-10a-20
    let server = ApiServer::start().await;
    let mut client = Client::admin(&server).await;
    assert_eq!(client.get(MAPS).await.code, 200);
    server.jump(jiff::SignedDuration::from_hours(30));
    let late = client.get(MAPS).await;
    assert_eq!((late.code, &late.body["message"]), (401, &json!("Unauthorized")), "on the same connection");
    assert_eq!(Client::admin(&server).await.get(MAPS).await.code, 200, "a new one");
    let stranger = || async { Client::connect(&server, None, "h2").await.expect("connected") };
    assert_eq!(stranger().await.get(MAPS).await.code, 403);
    assert_eq!(stranger().await.bearer("nobody's").get(MAPS).await.code, 401);
    assert_eq!(stranger().await.bearer(ADMIN_TOKEN).get(MAPS).await.code, 200);
}

#[tokio::test]
async fn kubeconfigs_authenticate_as_their_users() {
    let server = ApiServer::start().await;
    let node = server.node_kubeconfig("n1");
    let text: Value = serde_json::from_str(&std::fs::read_to_string(node).expect("written")).expect("JSON");
    assert!(text["users"][0]["user"]["client-certificate-data"].is_string());
    server.bootstrap_kubeconfig("abcdef.0123456789abcdef");
    let mut client = Client::connect(&server, None, "h2").await.expect("connected").bearer("abcdef.0123456789abcdef");
    assert_eq!(client.get(MAPS).await.code, 403);
    assert_eq!(server.log().last().map(|l| l.user.clone()), Some("system:bootstrap:abcdef".to_owned()));
    let mut node = Client::node(&server, "n1").await;
    let refused = node.get("/api/v1/nodes").await;
    let text = "node 'n1' cannot read all nodes, only its own Node object";
    assert!(refused.code == 403 && refused.text.contains(text), "{refused:?}");
    assert_eq!(node.get("/api/v1/nodes?fieldSelector=metadata.name%3Dn1").await.code, 200);
}

#[tokio::test]
async fn what_was_dumped_is_there_again() {
    let server = ApiServer::start().await;
    let made = server.create(map("m"));
    let other = ApiServer::start().await;
    other.load(&server.dump());
    let again = other.get("configmaps", "default", "m").expect("there");
    assert_eq!(again["metadata"]["uid"], made["metadata"]["uid"]);
}

#[tokio::test]
async fn logs_are_asked_of_the_kubelet_of_the_node() {
    let server = ApiServer::start().await;
    // A kubelet connects to any server of the same CA: the second server's recorder shows the requests.
    let authority = Some(server.authority.own().clone());
    let kubelet = ApiServer::start_with(Options { authority, ..Options::default() }).await;
    let mut client = Client::admin(&server).await;
    let path = "/api/v1/namespaces/default/pods/p/log";
    assert_eq!(client.get(path).await.code, 404);
    server.create(json!({"kind": "Pod", "apiVersion": "v1", "metadata": {"name": "p", "namespace": "default"},
                         "spec": {"nodeName": "n", "containers": [{"name": "c", "image": "i"}]}}));
    assert_eq!(client.get(path).await.code, 400, "nobody knows its node");
    server.create(json!({"kind": "Node", "apiVersion": "v1", "metadata": {"name": "n"}, "status": {
        "addresses": [{"type": "InternalIP", "address": "127.0.0.1"}],
        "daemonEndpoints": {"kubeletEndpoint": {"Port": kubelet.address().port()}}}}));
    for alpn in ["h2", "http/1.1"] {
        let admin: (&str, &[&str]) = ("admin", &["system:masters"]);
        let mut client = Client::connect(&server, Some(admin), alpn).await.expect("connected");
        let response = client.get(&format!("{path}?tailLines=5")).await;
        let status: Value = serde_json::from_str(&response.text).expect("a Status");
        assert_eq!((response.code, &status["message"]), (404, &json!("404 page not found\n")), "the kubelet's words");
        let asked = kubelet.log().last().cloned().expect("asked");
        assert_eq!(
            (asked.path.as_str(), asked.user.as_str()),
            ("/containerLogs/default/p/c?tailLines=5", "kube-apiserver-kubelet-client")
        );
    }
}
