//! Storage rules and verbs of all resources. Spec 10a §2, §3.

use std::time::{Duration, Instant};

use jiff::SignedDuration;
use serde_json::{Value, json};

use crate::api_server::client::{Client, rv};
use berth_testkit::api_server::ApiServer;

const MAPS: &str = "/api/v1/namespaces/default/configmaps";
const LEASES: &str = "/apis/coordination.k8s.io/v1/namespaces/kube-node-lease/leases";

fn map(name: &str) -> Value {
    json!({"kind": "ConfigMap", "apiVersion": "v1", "metadata": {"name": name}, "data": {"a": "1"}})
}

fn lease(name: &str) -> Value {
    json!({"kind": "Lease", "apiVersion": "coordination.k8s.io/v1", "metadata": {"name": name},
           "spec": {"holderIdentity": name}})
}

#[tokio::test]
async fn a_change_of_nothing_is_none() {
    // AC-10a-1
    let server = ApiServer::start().await;
    let mut client = Client::admin(&server).await;
    let made = client.ask("POST", MAPS, Some(&map("m"))).await;
    assert_eq!(made.code, 201, "{made:?}");
    assert!(rv(&made.body) > 1000);
    let mut watch = client.watch(&format!("{MAPS}?watch=true&resourceVersion={}", rv(&made.body))).await;
    let same = client.ask("PATCH", &format!("{MAPS}/m"), Some(&json!({"data": {"a": "1"}}))).await;
    assert_eq!((same.code, rv(&same.body)), (200, rv(&made.body)));
    let put = client.ask("PUT", &format!("{MAPS}/m"), Some(&made.body)).await;
    assert_eq!((put.code, rv(&put.body)), (200, rv(&made.body)));
    let other = client.ask("PATCH", &format!("{MAPS}/m"), Some(&json!({"data": {"a": "2"}}))).await;
    assert_eq!(watch.event().await, ("MODIFIED".to_owned(), "m".to_owned(), rv(&other.body)));
    assert_eq!(other.body["metadata"]["managedFields"][0]["manager"], "kubelet");
}

#[tokio::test]
async fn a_put_is_checked_against_version_and_uid() {
    let server = ApiServer::start().await;
    let mut client = Client::admin(&server).await;
    let old = client.ask("POST", LEASES, Some(&lease("n"))).await.body;
    let path = format!("{LEASES}/n");
    let mut new = old.clone();
    new["spec"]["leaseDurationSeconds"] = json!(40);
    let put = client.ask("PUT", &path, Some(&new)).await;
    assert_eq!(put.code, 200, "{put:?}");
    // AC-10a-2
    let stale = client.ask("PUT", &path, Some(&old)).await;
    let text = "Operation cannot be fulfilled on leases.coordination.k8s.io \"n\": the object has been modified; please \
                apply your changes to the latest version and try again";
    assert_eq!((stale.code, stale.body["message"].as_str()), (409, Some(text)));
    assert_eq!(stale.body["reason"], "Conflict");
    assert_eq!(stale.body["details"], json!({"name": "n", "group": "coordination.k8s.io", "kind": "leases"}));
    let bare = client.ask("PUT", &path, Some(&lease("n"))).await;
    let text = "metadata.resourceVersion: Invalid value: 0: must be specified for an update";
    assert!(bare.code == 422 && bare.text.contains(text), "{bare:?}");
    // AC-10a-3
    client.ask("DELETE", &path, None).await;
    let gone = client.ask("PUT", &path, Some(&put.body)).await;
    assert!(gone.code == 409 && gone.text.contains("Precondition failed: UID in precondition: "), "{gone:?}");
    let fresh = client.ask("PUT", &path, Some(&lease("n"))).await;
    assert_eq!(fresh.code, 201, "{fresh:?}");
    let mut foreign = fresh.body.clone();
    foreign["metadata"]["uid"] = json!("other");
    let foreign = client.ask("PUT", &path, Some(&foreign)).await;
    assert!(foreign.code == 409 && foreign.text.contains("UID in precondition: other"), "{foreign:?}");
    // A PUT does not create other resources.
    assert_eq!(client.ask("PUT", &format!("{MAPS}/m"), Some(&map("m"))).await.code, 404);
}

#[tokio::test]
async fn what_makes_a_name() {
    let server = ApiServer::start().await;
    let mut client = Client::admin(&server).await;
    let mut nameless = map("");
    let answer = client.ask("POST", MAPS, Some(&nameless)).await;
    let text = "ConfigMap \"\" is invalid: metadata.name: Required value: name or generateName is required";
    assert_eq!((answer.code, answer.body["message"].as_str()), (422, Some(text)));
    nameless["metadata"] = json!({"generateName": "x".repeat(70)});
    let long = client.ask("POST", MAPS, Some(&nameless)).await.body;
    let name = long["metadata"]["name"].as_str().expect("a name");
    assert_eq!(name.len(), 63, "{name}");
    let uid = long["metadata"]["uid"].as_str().expect("a uid");
    assert!(uid.len() == 36 && uid.as_bytes()[14] == b'4', "{uid}");
    assert_eq!(client.ask("POST", MAPS, Some(&map("UPPER"))).await.code, 422);
    assert_eq!(client.ask("POST", MAPS, Some(&map("m"))).await.code, 201);
    let twice = client.ask("POST", MAPS, Some(&map("m"))).await;
    assert_eq!((twice.code, twice.body["message"].as_str()), (409, Some("configmaps \"m\" already exists")));
    assert_eq!(client.ask("PUT", &format!("{MAPS}/n"), Some(&map("m"))).await.code, 400);
    let missing = client.get(&format!("{MAPS}/nope")).await;
    assert_eq!((missing.code, missing.body["message"].as_str()), (404, Some("configmaps \"nope\" not found")));
    // The same seed generates the same names.
    let again = ApiServer::start().await;
    assert_eq!(again.create(map("m"))["metadata"]["uid"].as_str().map(str::len), Some(36));
}

#[tokio::test]
async fn a_namespace_that_goes_takes_nothing_new() {
    let server = ApiServer::start().await;
    server.switch(|switches| switches.namespaces_on_use = false);
    let mut client = Client::admin(&server).await;
    let path = "/api/v1/namespaces/far/configmaps";
    let missing = client.ask("POST", path, Some(&map("m"))).await;
    assert_eq!((missing.code, missing.body["message"].as_str()), (404, Some("namespaces \"far\" not found")));
    server.create(json!({"kind": "Namespace", "apiVersion": "v1", "metadata": {"name": "far"}}));
    assert_eq!(client.ask("POST", path, Some(&map("m"))).await.code, 201);
    let patch = json!({"status": {"phase": "Terminating"}});
    server.admin().patch_sub("namespaces", "", "far", "status", patch).expect("patched");
    let refused = client.ask("POST", path, Some(&map("n"))).await;
    let cause = &refused.body["details"]["causes"][0];
    assert_eq!((refused.code, &cause["reason"]), (403, &json!("NamespaceTerminating")), "{refused:?}");
}

#[tokio::test]
async fn metadata_is_the_servers() {
    let server = ApiServer::start().await;
    let mut client = Client::admin(&server).await;
    let made = client.ask("POST", MAPS, Some(&map("m"))).await.body;
    let mut forged = made.clone();
    forged["metadata"]["creationTimestamp"] = json!("2001-01-01T00:00:00Z");
    forged["metadata"]["deletionTimestamp"] = json!("2001-01-01T00:00:00Z");
    forged["metadata"]["labels"] = json!({"a": "b"});
    let put = client.ask("PUT", &format!("{MAPS}/m"), Some(&forged)).await.body;
    assert_eq!(put["metadata"]["creationTimestamp"], made["metadata"]["creationTimestamp"]);
    assert!(put["metadata"]["deletionTimestamp"].is_null() && put["metadata"]["labels"]["a"] == "b");
    let patch = json!({"metadata": {"uid": "U"}});
    let refused = client.ask("PATCH", &format!("{MAPS}/m"), Some(&patch)).await;
    let text = "ConfigMap \"m\" is invalid: metadata.uid: Invalid value: \"U\": field is immutable";
    assert_eq!((refused.code, refused.body["message"].as_str()), (422, Some(text)));
    let stale = json!({"metadata": {"resourceVersion": "7"}, "data": {"b": "1"}});
    assert_eq!(client.ask("PATCH", &format!("{MAPS}/m"), Some(&stale)).await.code, 409);
}

#[tokio::test]
async fn status_and_the_rest_keep_apart() {
    // AC-10a-5, as far as it holds for all resources
    let server = ApiServer::start().await;
    let mut client = Client::admin(&server).await;
    let node = json!({"kind": "Node", "apiVersion": "v1", "metadata": {"name": "n"}, "spec": {"podCIDR": "10.0.0.0/24"},
                      "status": {"phase": "kept"}});
    server.create(node);
    let patch = json!({"spec": {"unschedulable": true}, "status": {"nodeInfo": {"machineID": "m"}}});
    let status = client.ask("PATCH", "/api/v1/nodes/n/status", Some(&patch)).await.body;
    assert!(status["spec"]["unschedulable"].is_null() && status["status"]["nodeInfo"]["machineID"] == "m", "{status}");
    let main = client
        .ask(
            "PATCH",
            "/api/v1/nodes/n",
            Some(&json!({"spec": {"unschedulable": true},
        "status": {"nodeInfo": {"machineID": "other"}}})),
        )
        .await
        .body;
    assert!(main["spec"]["unschedulable"] == true && main["status"]["nodeInfo"]["machineID"] == "m", "{main}");
}

#[tokio::test]
async fn lists_by_selector_and_version() {
    let server = ApiServer::start().await;
    let mut client = Client::admin(&server).await;
    for (name, label) in [("a", "x"), ("b", "y"), ("c", "x")] {
        let mut map = map(name);
        map["metadata"]["labels"] = json!({"l": label});
        client.ask("POST", MAPS, Some(&map)).await;
    }
    let names = |list: &Value| -> Vec<String> {
        let items = list["items"].as_array().expect("items");
        items.iter().map(|item| item["metadata"]["name"].as_str().expect("a name").to_owned()).collect()
    };
    for (selector, expected) in [
        ("labelSelector=l%3Dx", vec!["a", "c"]),
        ("labelSelector=l+in+(y,z)", vec!["b"]),
        ("labelSelector=l+notin+(y)", vec!["a", "c"]),
        ("labelSelector=!l", vec![]),
        ("labelSelector=l,l!%3Dx", vec!["b"]),
        ("fieldSelector=metadata.name%3Db", vec!["b"]),
        ("fieldSelector=metadata.name!%3Db,metadata.namespace%3D%3Ddefault", vec!["a", "c"]),
    ] {
        let list = client.get(&format!("{MAPS}?{selector}")).await.body;
        let mut found = names(&list);
        found.retain(|name| name != "kube-root-ca.crt");
        assert_eq!(found, expected, "{selector}");
        assert_eq!((&list["kind"], rv(&list)), (&json!("ConfigMapList"), server.rv()));
        assert!(list["items"].as_array().expect("items").iter().all(|item| item["kind"].is_null()));
    }
    // AC-10a-16
    let wrong = client.get("/api/v1/pods?fieldSelector=spec.foo%3Dbar").await;
    assert_eq!((wrong.code, wrong.body["message"].as_str()), (400, Some("field label not supported: spec.foo")));
    // All pages of a list are of one resource version.
    let first = client.get(&format!("{MAPS}?limit=2&labelSelector=l")).await.body;
    assert_eq!((names(&first), &first["metadata"]["remainingItemCount"]), (vec!["a".into(), "b".into()], &Value::Null));
    client.ask("DELETE", &format!("{MAPS}/c"), None).await;
    let token = first["metadata"]["continue"].as_str().expect("a token");
    let second = client.get(&format!("{MAPS}?limit=2&labelSelector=l&continue={token}")).await.body;
    assert_eq!((names(&second), rv(&second)), (vec!["c".into()], rv(&first)));
    server.compact("configmaps", server.rv());
    let late = client.get(&format!("{MAPS}?limit=2&continue={token}")).await;
    assert_eq!((late.code, &late.body["reason"]), (410, &json!("Expired")));
    let clash = client.get(&format!("{MAPS}?sendInitialEvents=true")).await;
    assert!(clash.code == 422 && clash.text.contains("sendInitialEvents is forbidden for list"), "{clash:?}");
}

#[tokio::test]
async fn a_list_from_the_future_waits_a_while() {
    // AC-10a-15
    let server = ApiServer::start().await;
    let mut client = Client::admin(&server).await;
    let (begun, far) = (Instant::now(), server.rv() + 100);
    let late = client.get(&format!("{MAPS}?resourceVersion={far}")).await;
    assert!(begun.elapsed() >= Duration::from_secs(3), "{:?}", begun.elapsed());
    assert_eq!((late.code, late.headers["retry-after"].to_str().ok()), (504, Some("1")));
    let text = format!("Timeout: Too large resource version: {far}, current: {}", server.rv());
    assert_eq!(late.body["message"], text);
    assert_eq!(late.body["details"]["causes"][0]["reason"], "ResourceVersionTooLarge");
    let near = server.rv() + 1;
    let path = format!("{MAPS}?resourceVersion={near}");
    let (list, ()) = tokio::join!(client.get(&path), async {
        server
            .wait_until("the list came", Duration::from_secs(30), |seen| {
                seen.log().last().is_some_and(|l| l.path == path)
            })
            .await;
        server.create(map("m"));
    });
    assert_eq!((list.code, rv(&list.body)), (200, near));
}

#[tokio::test]
async fn what_goes_and_what_stays() {
    let server = ApiServer::start().await;
    let mut client = Client::admin(&server).await;
    client.ask("POST", MAPS, Some(&map("m"))).await;
    let gone = client.ask("DELETE", &format!("{MAPS}/m"), None).await;
    assert_eq!((gone.code, &gone.body["status"]), (200, &json!("Success")), "{gone:?}");
    assert_eq!((&gone.body["details"]["name"], &gone.body["details"]["kind"]), (&json!("m"), &json!("configmaps")));
    assert_eq!(client.ask("DELETE", &format!("{MAPS}/m"), None).await.code, 404);
    for name in ["a", "b"] {
        client.ask("POST", MAPS, Some(&map(name))).await;
    }
    let all = client.ask("DELETE", &format!("{MAPS}?fieldSelector=metadata.name%3Da"), None).await;
    assert_eq!((all.code, all.body["items"].as_array().map(Vec::len)), (200, Some(1)));
    assert!(server.get("configmaps", "default", "a").is_none() && server.get("configmaps", "default", "b").is_some());
}

#[tokio::test]
async fn events_live_for_an_hour() {
    let server = ApiServer::start().await;
    let event = |name: &str| {
        json!({"kind": "Event", "apiVersion": "v1", "metadata": {"name": name, "namespace": "default"}, "reason": "R",
               "involvedObject": {"kind": "Pod", "name": "p", "namespace": "default"}})
    };
    server.create(event("old"));
    server.jump(SignedDuration::from_mins(50));
    server.create(event("new"));
    server.jump(SignedDuration::from_mins(11));
    let mut client = Client::admin(&server).await;
    let selector = "fieldSelector=involvedObject.name%3Dp,reason%3DR";
    let list = client.get(&format!("/api/v1/namespaces/default/events?{selector}")).await.body;
    let items = list["items"].as_array().expect("items");
    assert!(items.len() == 1 && items[0]["metadata"]["name"] == "new", "{list}");
    assert_eq!(
        client.ask("PATCH", "/api/v1/namespaces/default/events/old", Some(&json!({"count": 2}))).await.code,
        404
    );
}
