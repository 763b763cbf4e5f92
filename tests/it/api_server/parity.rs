//! API server parity: scripts of requests with the codes, bodies, and events of a real server.
//!
//! Spec 10a §11. Always run against the simulator; with `BERTH_TEST_APISERVER=<kubeconfig of an administrator>` against
//! that server instead, which must give the same results (AC-10a-29). A rule is changed only together with its script.

use base64::{
    Engine,
    engine::general_purpose::{STANDARD, URL_SAFE_NO_PAD},
};
use serde_json::{Value, json};

use crate::api_server::fixture::{Answer, Fixture};

fn kept(object: &Value, pointers: &[&str]) -> Vec<Value> {
    pointers.iter().map(|pointer| object.pointer(pointer).cloned().unwrap_or_default()).collect()
}

#[tokio::test]
async fn nothing_changed_is_no_change() {
    // AC-10a-1
    let world = Fixture::new("noop").await;
    let (path, pod) = world.bound("p").await;
    let same = world
        .admin
        .patch(&path, &json!({"metadata": {"labels": null}, "spec": {"schedulerName": "nobody"}}))
        .await
        .is(200);
    assert_eq!(same.at("/metadata/resourceVersion"), pod.at("/metadata/resourceVersion"));
    let status = world.admin.patch(&format!("{path}/status"), &json!({"status": {"phase": "Pending"}})).await.is(200);
    assert_eq!(status.at("/metadata/resourceVersion"), pod.at("/metadata/resourceVersion"));
    // AC-10-19: unset times are returned as null, and are no change.
    let condition = json!({"status": {"conditions": [{"type": "example.com/a", "status": "True"}]}});
    let written = world.node.patch(&format!("{path}/status"), &condition).await.is(200);
    assert_eq!(
        written.at("/status/conditions/0"),
        &json!({"type": "example.com/a", "status": "True", "lastProbeTime": null, "lastTransitionTime": null})
    );
    for patch in [json!({"spec": {"schedulerName": "nobody"}}), json!({"metadata": {"labels": {}}})] {
        let same = world.admin.patch(&path, &patch).await.is(200);
        assert_eq!(same.at("/metadata/resourceVersion"), written.at("/metadata/resourceVersion"), "{patch}");
    }
    let same = world.node.patch(&format!("{path}/status"), &condition).await.is(200);
    assert_eq!(same.at("/metadata/resourceVersion"), written.at("/metadata/resourceVersion"));
    let amount = |cpu: &str| json!({"status": {"capacity": {"cpu": cpu}}});
    let node = format!("/api/v1/nodes/{}/status", world.name);
    let written = world.node.patch(&node, &amount("2000m")).await.is(200);
    assert_eq!(written.at("/status/capacity/cpu"), "2");
    let same = world.node.patch(&node, &amount("2.0")).await.is(200);
    assert_eq!(same.at("/metadata/resourceVersion"), written.at("/metadata/resourceVersion"));
    world.end().await;
}

#[tokio::test]
async fn a_lease_is_put_and_put_back() {
    // AC-10a-2, AC-10a-3, AC-10-4
    let world = Fixture::new("lease").await;
    let leases = "/apis/coordination.k8s.io/v1/namespaces/kube-node-lease/leases";
    let name = &world.name;
    let path = format!("{leases}/{name}");
    let lease = json!({"kind": "Lease", "apiVersion": "coordination.k8s.io/v1", "metadata": {"name": name}, "spec": {"holderIdentity": name}});
    let first = world.node.post(leases, &lease).await.is(201);
    let mut second = first.body.clone();
    second["spec"]["leaseDurationSeconds"] = json!(40);
    world.node.put(&path, &second).await.is(200);
    let text = format!(
        "Operation cannot be fulfilled on leases.coordination.k8s.io \"{name}\": the object has been modified; please apply your changes to the latest version and try again"
    );
    world.node.put(&path, &second).await.fails_with(409, &text);
    world.node.delete(&path, &json!({})).await.is(200);
    world.node.put(&path, &second).await.is(409);
    world.node.get(&path).await.is(404);
    world.node.put(&path, &lease).await.is(201);
    let other = format!("{leases}/other");
    let refused = world.node.get(&other).await.is(403).text("/message");
    assert!(refused.ends_with(": can only access node lease with the same name as the requesting node"), "{refused}");
    world.node.delete(&path, &json!({})).await.is(200);
    world.end().await;
}

#[tokio::test]
async fn a_status_is_apart() {
    // AC-10a-4, AC-10a-5, AC-10a-6
    let world = Fixture::new("status").await;
    let (path, pod) = world.bound("p").await;
    let status = format!("{path}/status");
    let foreign = json!({"metadata": {"uid": "other"}, "status": {"message": "m"}});
    let refused = world.node.patch(&status, &foreign).await;
    let refused =
        refused.fails_with(422, "Pod \"p\" is invalid: metadata.uid: Invalid value: \"other\": field is immutable");
    assert_eq!(refused.at("/details/causes/0/field"), "metadata.uid");
    let owner = json!({"apiVersion": "v1", "kind": "ConfigMap", "name": "x", "uid": "x"});
    let patch =
        json!({"metadata": {"ownerReferences": [owner]}, "spec": {"nodeName": "other"}, "status": {"message": "m"}});
    let written = world.node.patch(&status, &patch).await.is(200);
    assert_eq!(
        kept(&written.body, &["/metadata/ownerReferences", "/spec", "/metadata/generation"]),
        kept(&pod.body, &["/metadata/ownerReferences", "/spec", "/metadata/generation"])
    );
    assert_eq!(written.at("/status/message"), "m");
    assert_eq!(kept(&written.body, &["/status/qosClass", "/status/phase"]), [json!("BestEffort"), json!("Pending")]);
    let text = format!("pods \"p\" is forbidden: node \"{}\" cannot update labels through pod status", world.name);
    world.node.patch(&status, &json!({"metadata": {"labels": {"a": "b"}}})).await.fails_with(403, &text);
    let unknown = world.node.patch(&status, &json!({"status": {"foo": "x"}})).await.is(200);
    assert_eq!(unknown.warning, "299 - \"unknown field \\\"status.foo\\\"\"");
    let main = world.admin.patch(&path, &json!({"status": {"message": "other"}})).await.is(200);
    assert_eq!(main.at("/status/message"), "m", "the main resource keeps the status");
    world.end().await;
}

#[tokio::test]
async fn a_status_that_cannot_be() {
    // AC-10a-17, AC-10-22
    let world = Fixture::new("wrong").await;
    let (path, _) = world.bound("p").await;
    let status = format!("{path}/status");
    let ips =
        |ip: &str| json!({"status": {"$setElementOrder/podIPs": [{"ip": ip}], "podIP": ip, "podIPs": [{"ip": ip}]}});
    world.node.patch(&status, &ips("10.0.0.1")).await.is(200);
    let refused = world.node.patch(&status, &ips("10.0.0.2")).await.is(422);
    assert!(
        refused.text("/message").contains("may specify no more than one IP for each IP family"),
        "{}",
        refused.body
    );
    let mut moved = ips("10.0.0.2");
    moved["status"]["podIPs"] = json!([{"ip": "10.0.0.2"}, {"$patch": "delete", "ip": "10.0.0.1"}]);
    assert_eq!(world.node.patch(&status, &moved).await.is(200).at("/status/podIPs"), &json!([{"ip": "10.0.0.2"}]));
    let class = world.node.patch(&status, &json!({"status": {"qosClass": "Burstable"}})).await.is(422);
    assert_eq!(class.at("/details/causes/0/field"), "status.qosClass");
    world.admin.patch(&path, &json!({"metadata": {"annotations": {"a": "b"}}})).await.is(200);
    let ended = json!({"name": "c", "image": "i", "imageID": "i", "ready": false, "restartCount": 0, "state": {"terminated": {"exitCode": 0}}});
    let never = format!("{}/pods", world.space);
    let mut pod = world.pod("never", &world.name);
    pod["spec"]["restartPolicy"] = json!("Never");
    world.admin.post(&never, &pod).await.is(201);
    let never = format!("{never}/never/status");
    world.node.patch(&never, &json!({"status": {"containerStatuses": [ended]}})).await.is(200);
    let mut again = ended.clone();
    again["state"] = json!({"running": {"startedAt": "2026-01-01T00:00:00Z"}});
    let refused = world.node.patch(&never, &json!({"status": {"containerStatuses": [again]}})).await.is(422);
    assert!(
        refused.text("/message").contains("state: Forbidden: may not be transitioned to non-terminated state"),
        "{}",
        refused.body
    );
    world.end().await;
}

#[tokio::test]
async fn a_strategic_merge_patch_is_applied() {
    // AC-10a-18, AC-10a-19, AC-10-17, AC-10-23
    let world = Fixture::new("smp").await;
    let path = format!("/api/v1/nodes/{}/status", world.name);
    let typed = |types: &[&str]| types.iter().map(|t| json!({"type": t})).collect::<Vec<_>>();
    let names = |answer: &Answer, pointer: &str, key: &str| {
        let list = answer.at(pointer).as_array().cloned().unwrap_or_default();
        list.iter().map(|item| item[key].as_str().unwrap_or_default().to_owned()).collect::<Vec<_>>()
    };
    let status = |kind: &str, status: &str| json!({"type": kind, "status": status});
    let set = |conditions: Value| json!({"status": {"conditions": conditions}});
    world
        .node
        .patch(
            &path,
            &set(json!([{"$patch": "replace"}, status("A", "True"), status("B", "True"), status("C", "True")])),
        )
        .await
        .is(200);
    let order =
        json!({"status": {"$setElementOrder/conditions": typed(&["C", "A"]), "conditions": [status("A", "False")]}});
    let ordered = world.node.patch(&path, &order).await.is(200);
    assert_eq!(names(&ordered, "/status/conditions", "type"), ["B", "C", "A"]);
    let fresh = world.node.patch(&path, &set(json!([status("D", "True")]))).await.is(200);
    assert_eq!(names(&fresh, "/status/conditions", "type"), ["D", "B", "C", "A"]);
    let gone = json!({"status": {"$setElementOrder/conditions": typed(&["A"]), "conditions": [{"type": "B", "$patch": "delete"}, {"type": "D", "$patch": "delete"}]}});
    assert_eq!(names(&world.node.patch(&path, &gone).await.is(200), "/status/conditions", "type"), ["C", "A"]);
    let bad = json!({"status": {"$setElementOrder/conditions": typed(&["A"]), "conditions": [status("X", "True")]}});
    let refused = world.node.patch(&path, &bad).await.is(500);
    assert!(refused.text("/message").starts_with("The order in patch list:\n["), "{}", refused.body);
    let nameless = world.node.patch(&path, &set(json!([{"status": "True"}]))).await.is(500);
    assert_eq!(nameless.text("/message"), "map: map[status:True] does not contain declared merge key: type");
    let address = |kind: &str, address: &str| json!({"type": kind, "address": address});
    let wanted = json!([address("InternalIP", "10.0.0.1"), address("InternalIP", "fd00::1"), address("Hostname", "n")]);
    for _ in 0..2 {
        let mut sent = wanted.clone();
        sent.as_array_mut().expect("a list").push(json!({"$patch": "replace"}));
        let written = world.node.patch(&path, &json!({"status": {"addresses": sent}})).await.is(200);
        assert_eq!(written.at("/status/addresses"), &wanted);
    }
    let twice = json!({"status": {"addresses": [{"$patch": "replace"}, address("InternalIP", "10.0.0.1"), address("InternalIP", "10.0.0.1")]}});
    let refused = world.node.patch(&path, &twice).await.is(422);
    assert!(refused.text("/message").contains("status.addresses[1]: Duplicate value"), "{}", refused.body);
    world.end().await;
}

#[tokio::test]
async fn a_pod_is_bound() {
    // AC-10a-12
    let world = Fixture::new("bind").await;
    let pods = format!("{}/pods", world.space);
    let mut watch = world.node.watch(&format!("/api/v1/pods?fieldSelector=spec.nodeName%3D{}", world.name)).await;
    world.admin.post(&pods, &world.pod("p", "")).await.is(201);
    let binding = json!({"kind": "Binding", "apiVersion": "v1", "metadata": {"name": "p"}, "target": {"kind": "Node", "name": world.name}});
    world.admin.post(&format!("{pods}/p/binding"), &binding).await.is(201);
    let (kind, pod) = watch.next().await;
    assert_eq!(
        (kind.as_str(), &pod["metadata"]["generation"], &pod["spec"]["nodeName"]),
        ("ADDED", &json!(1), &json!(world.name))
    );
    assert_eq!(
        kept(&pod, &["/status/phase", "/status/conditions/0/type", "/status/conditions/0/status"]),
        ["Pending", "PodScheduled", "True"].map(Value::from)
    );
    let text = format!(
        "Operation cannot be fulfilled on pods/binding \"p\": pod p is already assigned to node \"{}\"",
        world.name
    );
    world.admin.post(&format!("{pods}/p/binding"), &binding).await.fails_with(409, &text);
    world.end().await;
}

#[tokio::test]
async fn a_pod_is_deleted_with_grace() {
    // AC-10a-8, AC-10a-9
    let world = Fixture::new("grace").await;
    let (path, pod) = world.bound("p").await;
    let mut watch = world.admin.watch(&format!("{}/pods", world.space)).await;
    let grace = |seconds: i64| json!({"gracePeriodSeconds": seconds});
    let facts = ["/metadata/deletionGracePeriodSeconds", "/metadata/generation"];
    for (asked, expected) in [(30, 30), (10, 10), (20, 10)] {
        let answer = world.admin.delete(&path, &grace(asked)).await.is(200);
        assert_eq!(kept(&answer.body, &facts), [json!(expected), json!(2)], "{asked}");
    }
    let uid = pod.text("/metadata/uid");
    let text = format!(
        "Operation cannot be fulfilled on Pod \"p\": the UID in the precondition (other) does not match the UID in record ({uid}). The object might have been deleted and then recreated"
    );
    world
        .node
        .delete(&path, &json!({"gracePeriodSeconds": 0, "preconditions": {"uid": "other"}}))
        .await
        .fails_with(409, &text);
    world.node.delete(&path, &json!({"gracePeriodSeconds": 0, "preconditions": {"uid": uid}})).await.is(200);
    let mut last = 0;
    for (kind, grace) in [("MODIFIED", 30), ("MODIFIED", 10), ("MODIFIED", 0), ("DELETED", 0)] {
        let (seen, pod) = watch.next().await;
        assert_eq!((seen.as_str(), &pod["metadata"]["deletionGracePeriodSeconds"]), (kind, &json!(grace)));
        let rv: u64 = pod["metadata"]["resourceVersion"].as_str().and_then(|rv| rv.parse().ok()).expect("a number");
        assert!(rv > last, "each event has a version of its own");
        last = rv;
    }
    world.end().await;
}

#[tokio::test]
async fn a_pod_is_deleted_at_once() {
    // AC-10a-10, AC-10a-11
    let world = Fixture::new("force").await;
    let (path, _) = world.bound("failed").await;
    world.node.patch(&format!("{path}/status"), &json!({"status": {"phase": "Failed"}})).await.is(200);
    world.admin.delete(&path, &json!({})).await.is(200);
    world.admin.get(&path).await.fails_with(404, "pods \"failed\" not found");
    let (path, _) = world.bound("held").await;
    world.admin.patch(&path, &json!({"metadata": {"finalizers": ["example.com/held"]}})).await.is(200);
    let mut watch = world.admin.watch(&format!("{}/pods", world.space)).await;
    let response = world.node.delete(&path, &json!({"gracePeriodSeconds": 0})).await.is(200);
    assert_eq!(response.at("/metadata/deletionGracePeriodSeconds"), 0);
    assert_eq!(watch.next().await.0, "MODIFIED");
    watch.none_yet();
    world
        .admin
        .patch(&path, &json!({"metadata": {"$deleteFromPrimitiveList/finalizers": ["example.com/held"]}}))
        .await
        .is(200);
    let mut kinds = vec![watch.next().await.0];
    while kinds.last().is_some_and(|kind| kind != "DELETED") {
        kinds.push(watch.next().await.0);
    }
    world.admin.get(&path).await.is(404);
    world.end().await;
}

#[tokio::test]
async fn a_node_reads_what_is_its_own() {
    // AC-10a-7
    let world = Fixture::new("authorizer").await;
    let (name, space) = (&world.name, &world.name);
    let mut pod = world.pod("p", name);
    pod["spec"]["volumes"] = json!([{"name": "v", "configMap": {"name": "own"}}]);
    world.admin.post(&format!("{}/pods", world.space), &pod).await.is(201);
    for map in ["own", "other"] {
        let map = json!({"kind": "ConfigMap", "apiVersion": "v1", "metadata": {"name": map}});
        world.admin.post(&format!("{}/configmaps", world.space), &map).await.is(201);
    }
    let own = format!("{}/configmaps/own", world.space);
    world.until(|| world.node.get(&own), |answer| answer.code == 200).await;
    let unrelated = format!("no relationship found between node '{name}' and this object");
    let refused = |verb: &str, resource: &str, object: &str, why: &str| {
        let named = if object.is_empty() { String::new() } else { format!(" \"{object}\"") };
        format!(
            "{resource}{named} is forbidden: User \"system:node:{name}\" cannot {verb} resource \"{resource}\" in API group \"\" in the namespace \"{space}\": {why}"
        )
    };
    for object in ["other", "missing"] {
        let path = format!("{}/configmaps/{object}", world.space);
        world.node.get(&path).await.fails_with(403, &refused("get", "configmaps", object, &unrelated));
    }
    let all = format!("{}/configmaps", world.space);
    world.node.get(&all).await.fails_with(403, &refused("list", "configmaps", "", "No Object name found"));
    world.node.get(&format!("{all}?fieldSelector=metadata.name%3Down")).await.is(200);
    let gone = format!("{}/pods/gone", world.space);
    world.node.get(&gone).await.fails_with(403, &refused("get", "pods", "gone", &unrelated));
    world
        .node
        .patch(&format!("{gone}/status"), &json!({"status": {}}))
        .await
        .fails_with(404, "pods \"gone\" not found");
    world.node.delete(&gone, &json!({})).await.is(404);
    let why = "can only list/watch pods with spec.nodeName field selector";
    world.node.get(&format!("{}/pods", world.space)).await.fails_with(403, &refused("list", "pods", "", why));
    let text = format!(
        "nodes is forbidden: User \"system:node:{name}\" cannot list resource \"nodes\" in API group \"\" at the cluster scope: node '{name}' cannot read all nodes, only its own Node object"
    );
    world.node.get("/api/v1/nodes").await.fails_with(403, &text);
    world.node.get(&format!("/api/v1/nodes?fieldSelector=metadata.name%3D{name}")).await.is(200);
    world.end().await;
}

#[tokio::test]
async fn a_node_is_restricted() {
    // AC-10-27, spec 10 §6.2 and §6.3
    let world = Fixture::new("restricted").await;
    let name = &world.name;
    let uid = world.admin.get(&format!("/api/v1/nodes/{name}")).await.text("/metadata/uid");
    let pods = format!("{}/pods", world.space);
    let mirror = |uid: &str, account: &str| {
        let mut pod = world.pod("m", name);
        pod["metadata"]["annotations"] = json!({"kubernetes.io/config.mirror": "hash"});
        pod["metadata"]["ownerReferences"] =
            json!([{"apiVersion": "v1", "kind": "Node", "name": name, "uid": uid, "controller": true}]);
        if !account.is_empty() {
            pod["spec"]["serviceAccountName"] = json!(account);
        }
        pod
    };
    let plain = format!(
        "pods \"m\" is forbidden: pod does not have \"kubernetes.io/config.mirror\" annotation, node \"{name}\" can only create mirror pods"
    );
    world.node.post(&pods, &world.pod("m", name)).await.fails_with(403, &plain);
    let text = format!("pods \"m\" is forbidden: node {name} UID mismatch: expected old got {uid}");
    world.node.post(&pods, &mirror("old", "")).await.fails_with(403, &text);
    let text = "pods \"m\" is forbidden: a mirror pod may not reference service accounts";
    world.node.post(&pods, &mirror(&uid, "default")).await.fails_with(403, text);
    let made = world.node.post(&pods, &mirror(&uid, "")).await.is(201);
    assert_eq!(
        kept(&made.body, &["/status/phase", "/spec/serviceAccountName", "/spec/volumes"]),
        [json!("Pending"), Value::Null, Value::Null]
    );
    world.node.post(&pods, &mirror(&uid, "")).await.fails_with(409, "pods \"m\" already exists");
    let (other, _) = (format!("{pods}/other"), world.admin.post(&pods, &world.pod("other", "elsewhere")).await.is(201));
    let text =
        format!("pods \"other\" is forbidden: node \"{name}\" can only delete pods with spec.nodeName set to itself");
    world.node.delete(&other, &json!({})).await.fails_with(403, &text);
    let node = format!("/api/v1/nodes/{name}");
    let text =
        format!("nodes \"{name}\" is forbidden: is not allowed to modify labels: node-restriction.kubernetes.io/x");
    world
        .node
        .patch(&format!("{node}/status"), &json!({"metadata": {"labels": {"node-restriction.kubernetes.io/x": "1"}}}))
        .await
        .fails_with(403, &text);
    let text = format!("nodes \"{name}\" is forbidden: node \"{name}\" is not allowed to modify taints");
    world
        .node
        .patch(&node, &json!({"spec": {"taints": [{"key": "k", "effect": "NoSchedule"}]}}))
        .await
        .fails_with(403, &text);
    world.end().await;
}

#[tokio::test]
async fn a_pod_gets_an_account() {
    // Spec 10 §6.3
    let world = Fixture::new("account").await;
    let (_, pod) = world.bound("p").await;
    assert_eq!(pod.at("/spec/serviceAccountName"), "default");
    let volume = pod.at("/spec/volumes/0");
    assert!(volume["name"].as_str().is_some_and(|name| name.starts_with("kube-api-access-")), "{volume}");
    let sources = &volume["projected"]["sources"];
    let expected = json!([{"serviceAccountToken": {"expirationSeconds": 3607, "path": "token"}},
        {"configMap": {"name": "kube-root-ca.crt", "items": [{"key": "ca.crt", "path": "ca.crt"}]}},
        {"downwardAPI": {"items": [{"path": "namespace", "fieldRef": {"apiVersion": "v1", "fieldPath": "metadata.namespace"}}]}}]);
    assert_eq!((sources, &volume["projected"]["defaultMode"]), (&expected, &json!(420)));
    let expected =
        json!({"name": volume["name"], "readOnly": true, "mountPath": "/var/run/secrets/kubernetes.io/serviceaccount"});
    assert_eq!(pod.at("/spec/containers/0/volumeMounts/0"), &expected);
    world.end().await;
}

#[tokio::test]
async fn a_node_gets_tokens() {
    // AC-10a-23, AC-10a-24, AC-10a-25
    let world = Fixture::new("token").await;
    let (_, pod) = world.bound("p").await;
    let elsewhere = world.admin.post(&format!("{}/pods", world.space), &world.pod("q", "elsewhere")).await.is(201);
    let path = format!("{}/serviceaccounts/default/token", world.space);
    let ask = |pod: &Answer, seconds: i64| {
        json!({"kind": "TokenRequest", "apiVersion": "authentication.k8s.io/v1", "spec": {"audiences": [], "expirationSeconds": seconds,
        "boundObjectRef": {"kind": "Pod", "apiVersion": "v1", "name": pod.at("/metadata/name"), "uid": pod.at("/metadata/uid")}}})
    };
    let short = ask(&pod, 600);
    world.until(|| world.node.post(&path, &short), |answer| answer.code == 201).await;
    let token = world.node.post(&path, &ask(&pod, 3607)).await.is(201);
    let claims = token.text("/status/token");
    let claims = claims.split('.').nth(1).expect("three parts");
    let claims = URL_SAFE_NO_PAD.decode(claims).expect("encoded");
    let claims: Value = serde_json::from_slice(&claims).expect("JSON");
    let number = |pointer: &str| claims.pointer(pointer).and_then(Value::as_i64).expect("a number");
    assert_eq!(
        (number("/exp") - number("/iat"), number("/kubernetes.io/warnafter") - number("/iat")),
        (365 * 24 * 3600, 3607)
    );
    let expires: jiff::Timestamp = token.text("/status/expirationTimestamp").parse().expect("a time");
    assert!((expires.as_second() - number("/iat") - 3607).abs() <= 1);
    let text =
        "serviceaccounts \"default\" is forbidden: node requested token bound to a pod scheduled on a different node";
    world.node.post(&path, &ask(&elsewhere, 600)).await.fails_with(403, text);
    let text = "serviceaccounts \"default\" is forbidden: node requested token not bound to a pod";
    world
        .node
        .post(
            &path,
            &json!({"kind": "TokenRequest", "apiVersion": "authentication.k8s.io/v1", "spec": {"audiences": []}}),
        )
        .await
        .fails_with(403, text);
    let refused = world.node.post(&path, &ask(&pod, 599)).await.is(422);
    assert!(
        refused
            .text("/message")
            .contains("spec.expirationSeconds: Invalid value: 599: may not specify a duration less than 10 minutes")
    );
    let review = json!({"kind": "TokenReview", "apiVersion": "authentication.k8s.io/v1", "spec": {"token": token.at("/status/token")}});
    let reviews = "/apis/authentication.k8s.io/v1/tokenreviews";
    let known = world.node.post(reviews, &review).await.is(201);
    let account = format!("system:serviceaccount:{}:default", world.name);
    assert_eq!(kept(&known.body, &["/status/authenticated", "/status/user/username"]), [json!(true), json!(account)]);
    world.admin.delete(&format!("{}/pods/p", world.space), &json!({"gracePeriodSeconds": 0})).await.is(200);
    world.until(|| world.node.post(reviews, &review), |answer| answer.at("/status/authenticated") != true).await;
    world.end().await;
}

#[tokio::test]
async fn requests_for_certificates_are_approved_within_limits() {
    // AC-10a-21, AC-10a-22
    let world = Fixture::new("csr").await;
    let csrs = "/apis/certificates.k8s.io/v1/certificatesigningrequests";
    let name = format!("system:node:{}", world.name);
    let request = |suffix: &str, signer: &str, names: &[&str], common: &str, usages: &[&str]| {
        let names: Vec<String> = names.iter().map(|name| (*name).to_owned()).collect();
        let mut params = rcgen::CertificateParams::new(names).expect("names");
        params.distinguished_name = rcgen::DistinguishedName::new();
        params.distinguished_name.push(rcgen::DnType::OrganizationName, "system:nodes");
        params.distinguished_name.push(rcgen::DnType::CommonName, common);
        let key = rcgen::KeyPair::generate().expect("a key");
        let pem = params.serialize_request(&key).expect("a request").pem().expect("text");
        let encoded = STANDARD.encode(pem);
        json!({"kind": "CertificateSigningRequest", "apiVersion": "certificates.k8s.io/v1", "metadata": {"name": format!("{}-{suffix}", world.name)},
            "spec": {"request": encoded, "signerName": signer, "usages": usages}})
    };
    let (client, serving) = ("kubernetes.io/kube-apiserver-client-kubelet", "kubernetes.io/kubelet-serving");
    let usages = &["digital signature", "client auth"];
    let foreign = request("foreign", client, &[], "system:node:other", usages);
    let refused = world.node.post(csrs, &foreign).await.is(403).text("/message");
    assert!(refused.ends_with(&format!("is forbidden: can only create a node CSR with CN={name}")), "{refused}");
    world.node.post(csrs, &request("names", client, &["h.example"], &name, usages)).await.is(201);
    world
        .node
        .post(csrs, &request("serving", serving, &["h.example"], &name, &["digital signature", "server auth"]))
        .await
        .is(201);
    let made = world.node.post(csrs, &request("good", client, &[], &name, usages)).await.is(201);
    assert_eq!(made.at("/spec/username"), &json!(name));
    let path = |suffix: &str| format!("{csrs}/{}-{suffix}", world.name);
    let good = path("good");
    let signed = world.until(|| world.node.get(&good), |answer| !answer.at("/status/certificate").is_null()).await;
    assert_eq!(
        kept(&signed.body, &["/status/conditions/0/type", "/status/conditions/0/reason"]),
        ["Approved", "AutoApproved"].map(Value::from)
    );
    for suffix in ["names", "serving"] {
        // The approver processed these requests before the one that it approved.
        assert!(world.node.get(&path(suffix)).await.is(200).at("/status/conditions").is_null(), "{suffix}");
        world.admin.delete(&path(suffix), &json!({})).await.is(200);
    }
    world.admin.delete(&good, &json!({})).await.is(200);
    world.end().await;
}

#[tokio::test]
async fn a_pod_is_resized_and_evicted() {
    // Spec 10a §4 rows resize and eviction; AC-10a-35 needs the generation.
    let world = Fixture::new("resize").await;
    let mut pod = world.pod("p", &world.name);
    pod["spec"]["containers"][0]["resources"] = json!({"requests": {"cpu": "1"}});
    world.admin.post(&format!("{}/pods", world.space), &pod).await.is(201);
    let path = format!("{}/pods/p", world.space);
    let resize = json!({"spec": {"containers": [{"name": "c", "resources": {"requests": {"cpu": "2"}}}]}});
    let resized = world.admin.patch(&format!("{path}/resize"), &resize).await.is(200);
    assert_eq!(
        kept(&resized.body, &["/metadata/generation", "/spec/containers/0/resources/requests/cpu"]),
        [json!(2), json!("2")]
    );
    world.admin.patch(&path, &resize).await.is(200);
    let more = json!({"spec": {"containers": [{"name": "c", "resources": {"requests": {"cpu": "3"}}}]}});
    world.admin.patch(&path, &more).await.is(422);
    world.node.patch(&format!("{path}/resize"), &more).await.is(403);
    world.node.patch(&format!("{path}/status"), &json!({"status": {"phase": "Running"}})).await.is(200);
    let eviction = json!({"kind": "Eviction", "apiVersion": "policy/v1", "metadata": {"name": "p"}});
    world.admin.post(&format!("{path}/eviction"), &eviction).await.is(201);
    let evicted = world.admin.get(&path).await.is(200);
    let conditions = evicted.at("/status/conditions").as_array().cloned().unwrap_or_default();
    let target = conditions.iter().find(|c| c["type"] == "DisruptionTarget").expect("the condition");
    assert_eq!(
        (&target["reason"], evicted.at("/metadata/deletionGracePeriodSeconds")),
        (&json!("EvictionByEvictionAPI"), &json!(30))
    );
    world.end().await;
}

#[tokio::test]
async fn a_watch_shows_what_matches() {
    // AC-10a-14, AC-10a-16, spec 10a §5
    let world = Fixture::new("watch").await;
    let maps = format!("{}/configmaps", world.space);
    let selected = format!("{maps}?labelSelector=of%3Dparity");
    let streamed = "sendInitialEvents=true&resourceVersionMatch=NotOlderThan&allowWatchBookmarks=true&timeoutSeconds=2";
    let empty = world.admin.watch_from(&selected, streamed).await.rest().await;
    let is_marker = |(kind, object): &(String, Value)| {
        kind == "BOOKMARK" && object.pointer("/metadata/annotations/k8s.io~1initial-events-end") == Some(&json!("true"))
    };
    assert!(is_marker(&empty[0]) && empty.iter().all(|(kind, _)| kind == "BOOKMARK"), "{empty:?}");
    let mut watch = world.admin.watch(&selected).await;
    let map = json!({"kind": "ConfigMap", "apiVersion": "v1", "metadata": {"name": "m"}, "data": {"a": "1"}});
    world.admin.post(&maps, &map).await.is(201);
    let path = format!("{maps}/m");
    for (patch, kind, a) in [
        (json!({"metadata": {"labels": {"of": "parity"}}}), "ADDED", "1"),
        (json!({"data": {"a": "2"}}), "MODIFIED", "2"),
        (json!({"metadata": {"labels": {"of": null}}, "data": {"a": "3"}}), "DELETED", "2"),
    ] {
        let written = world.admin.patch(&path, &patch).await.is(200);
        let (seen, object) = watch.next().await;
        assert_eq!(
            (seen.as_str(), &object["data"]["a"], &object["metadata"]["resourceVersion"]),
            (kind, &json!(a), written.at("/metadata/resourceVersion"))
        );
    }
    let future = world
        .admin
        .get(&format!("{maps}?resourceVersion=999999999999&resourceVersionMatch=NotOlderThan"))
        .await
        .is(504);
    assert_eq!(
        (future.at("/details/causes/0/reason"), future.at("/details/retryAfterSeconds")),
        (&json!("ResourceVersionTooLarge"), &json!(1))
    ); // AC-10a-15
    let text = "field label not supported: spec.foo";
    world.admin.get(&format!("{maps}?fieldSelector=spec.foo%3Dbar")).await.fails_with(400, text);
    world.end().await;
}

#[tokio::test]
async fn an_event_is_counted() {
    // AC-10-33
    let world = Fixture::new("event").await;
    let events = format!("{}/events", world.space);
    let event = json!({"kind": "Event", "apiVersion": "v1", "metadata": {"name": "e"}, "reason": "R", "message": "m", "type": "Normal", "count": 1,
        "involvedObject": {"kind": "Pod", "namespace": world.name, "name": "p"}, "firstTimestamp": "2026-01-01T00:00:00Z", "lastTimestamp": "2026-01-01T00:00:00Z"});
    let path = format!("{events}/e");
    let again = json!({"count": 2, "lastTimestamp": "2026-01-01T00:00:01Z", "message": "n"});
    world.node.patch(&path, &again).await.fails_with(404, "events \"e\" not found");
    world.node.post(&events, &event).await.is(201);
    let counted = world.node.patch(&path, &again).await.is(200);
    assert_eq!(kept(&counted.body, &["/count", "/message", "/reason"]), [json!(2), json!("n"), json!("R")]);
    let mut foreign = event.clone();
    (foreign["metadata"]["name"], foreign["involvedObject"]["namespace"]) = (json!("f"), json!("elsewhere"));
    let refused = world.node.post(&events, &foreign).await.is(422).text("/message");
    assert!(
        refused.contains("involvedObject.namespace: Invalid value: \"elsewhere\": does not match event.namespace"),
        "{refused}"
    );
    world.end().await;
}

#[tokio::test]
async fn what_is_immutable_stays() {
    // Spec 10a §4
    let world = Fixture::new("immutable").await;
    let maps = format!("{}/configmaps", world.space);
    let map = json!({"kind": "ConfigMap", "apiVersion": "v1", "metadata": {"name": "m"}, "immutable": true, "data": {"a": "1"}});
    world.admin.post(&maps, &map).await.is(201);
    let text = "ConfigMap \"m\" is invalid: data: Forbidden: field is immutable when `immutable` is set";
    world.admin.patch(&format!("{maps}/m"), &json!({"data": {"a": "2"}})).await.fails_with(422, text);
    let (path, _) = world.bound("p").await;
    let refused =
        world.admin.patch(&path, &json!({"spec": {"containers": [{"name": "c", "command": ["x"]}]}})).await.is(422);
    assert!(
        refused.text("/message").contains("spec: Forbidden: pod updates may not change fields other than"),
        "{}",
        refused.body
    );
    let image =
        world.admin.patch(&path, &json!({"spec": {"containers": [{"name": "c", "image": "i:2"}]}})).await.is(200);
    assert_eq!(image.at("/metadata/generation"), 2);
    world.end().await;
}

#[tokio::test]
async fn a_node_reports_the_resize_of_a_claim() {
    // Spec 10 §4.8 S3, §6.2
    let world = Fixture::new("claim").await;
    let claims = format!("{}/persistentvolumeclaims", world.space);
    let claim = json!({"kind": "PersistentVolumeClaim", "apiVersion": "v1", "metadata": {"name": "c"},
        "spec": {"accessModes": ["ReadWriteOnce"], "storageClassName": "", "resources": {"requests": {"storage": "1Gi"}}}});
    world.admin.post(&claims, &claim).await.is(201);
    let mut pod = world.pod("p", &world.name);
    pod["spec"]["volumes"] = json!([{"name": "v", "persistentVolumeClaim": {"claimName": "c"}}]);
    world.admin.post(&format!("{}/pods", world.space), &pod).await.is(201);
    let path = format!("{claims}/c");
    let read = world.until(|| world.node.get(&path), |answer| answer.code == 200).await;
    assert_eq!(kept(&read.body, &["/status/phase", "/spec/volumeMode"]), ["Pending", "Filesystem"].map(Value::from));
    let condition = json!({"type": "FileSystemResizePending", "status": "True"});
    let patch = json!({"metadata": {"resourceVersion": read.at("/metadata/resourceVersion")}, "status": {"conditions": [condition]}});
    world.node.patch(&format!("{path}/status"), &patch).await.is(200);
    let stale = world.node.patch(&format!("{path}/status"), &patch).await.is(409);
    assert!(stale.text("/message").contains("the object has been modified"), "{}", stale.body);
    let refused = world.node.patch(&format!("{path}/status"), &json!({"status": {"phase": "Lost"}})).await.is(403);
    assert!(
        refused
            .text("/message")
            .contains("is not allowed to update fields other than status.quantity and status.conditions: "),
        "{}",
        refused.body
    );
    world.end().await;
}
