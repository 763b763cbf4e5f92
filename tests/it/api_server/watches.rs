//! Watch semantics, row by row of spec 10a §5.

use std::time::Duration;

use serde_json::{Value, json};

use crate::api_server::client::{Client, Next, rv};
use berth_testkit::api_server::{ApiServer, Ring};

const MAPS: &str = "/api/v1/namespaces/default/configmaps";
const STREAM: &str = "watch=true&allowWatchBookmarks=true&sendInitialEvents=true&resourceVersionMatch=NotOlderThan";

fn map(name: &str, label: &str) -> Value {
    json!({"kind": "ConfigMap", "apiVersion": "v1", "metadata": {"name": name, "labels": {"l": label}}})
}

fn event(kind: &str, name: &str, rv: u64) -> (String, String, u64) {
    (kind.to_owned(), name.to_owned(), rv)
}

#[tokio::test]
async fn a_streaming_list_ends_with_its_marker() {
    let server = ApiServer::start().await;
    let mut client = Client::admin(&server).await;
    // AC-10a-14
    let mut empty = client.watch(&format!("/api/v1/pods?{STREAM}")).await;
    let Next::Event(kind, marker) = empty.next().await else { panic!("no marker") };
    assert_eq!((kind.as_str(), rv(&marker)), ("BOOKMARK", server.rv()));
    assert_eq!(marker["metadata"]["annotations"], json!({"k8s.io/initial-events-end": "true"}));
    assert_eq!((&marker["kind"], &marker["apiVersion"]), (&json!("Pod"), &json!("v1")));
    let (a, b) = (rv(&server.create(map("a", "x"))), rv(&server.create(map("b", "x"))));
    let mut stream = client.watch(&format!("{MAPS}?{STREAM}&labelSelector=l")).await;
    assert_eq!(stream.event().await, event("ADDED", "a", a));
    assert_eq!(stream.event().await, event("ADDED", "b", b));
    assert_eq!(stream.event().await.0, "BOOKMARK");
    let c = rv(&server.create(map("c", "x")));
    assert_eq!(stream.event().await, event("ADDED", "c", c));
    // A watch without a resource version: no initial-events-end bookmark.
    let mut old = client.watch(&format!("{MAPS}?watch=1&labelSelector=l")).await;
    for name in ["a", "b", "c"] {
        assert_eq!(old.event().await.1, name);
    }
    server.delete("configmaps", "default", "a", None);
    assert_eq!(old.event().await, event("DELETED", "a", server.rv()));
    server.switch(|switches| switches.watch_list = false);
    let refused = client.get(&format!("{MAPS}?{STREAM}")).await;
    let text = "sendInitialEvents is forbidden for watch unless the WatchList feature gate is enabled";
    assert!(refused.code == 422 && refused.text.contains(text), "{refused:?}");
    let clash = client.get(&format!("{MAPS}?watch=true&resourceVersionMatch=NotOlderThan")).await;
    let text = "resourceVersionMatch is forbidden for watch unless sendInitialEvents is provided";
    assert!(clash.code == 422 && clash.text.contains(text), "{clash:?}");
}

#[tokio::test]
async fn objects_move_in_and_out_of_a_selector() {
    let server = ApiServer::start().await;
    let mut client = Client::admin(&server).await;
    let mut watch =
        client.watch(&format!("{MAPS}?watch=true&resourceVersion={}&labelSelector=l%3Dx", server.rv())).await;
    server.create(map("m", "y"));
    let label = |label: &str| json!({"metadata": {"labels": {"l": label}}});
    let into = rv(&server.patch("configmaps", "default", "m", label("x")));
    let within = rv(&server.patch("configmaps", "default", "m", json!({"data": {"a": "1"}})));
    let out = rv(&server.patch("configmaps", "default", "m", label("z")));
    server.delete("configmaps", "default", "m", None);
    let last = rv(&server.create(map("n", "x")));
    assert_eq!(watch.event().await, event("ADDED", "m", into));
    assert_eq!(watch.event().await, event("MODIFIED", "m", within));
    let Next::Event(kind, gone) = watch.next().await else { panic!("an event") };
    assert_eq!((kind.as_str(), rv(&gone), &gone["metadata"]["labels"]["l"]), ("DELETED", out, &json!("x")));
    assert_eq!(gone["data"]["a"], "1", "its last matching content");
    assert_eq!(watch.event().await, event("ADDED", "n", last));
}

#[tokio::test]
async fn a_watch_goes_on_where_it_was_as_long_as_the_ring_reaches() {
    let server = ApiServer::start().await;
    let mut client = Client::admin(&server).await;
    let start = rv(&server.create(map("a", "x")));
    let b = rv(&server.create(map("b", "x")));
    let mut watch = client.watch(&format!("{MAPS}?watch=true&resourceVersion={start}&labelSelector=l")).await;
    assert_eq!(watch.event().await, event("ADDED", "b", b));
    // AC-10a-13
    server.compact("configmaps", b);
    let mut late = client.watch(&format!("{MAPS}?watch=true&resourceVersion={start}")).await;
    let Next::Event(kind, status) = late.next().await else { panic!("an event") };
    assert_eq!((kind.as_str(), &status["code"], &status["reason"]), ("ERROR", &json!(410), &json!("Expired")));
    assert_eq!(status["message"], format!("too old resource version: {start} ({b})"));
    assert_eq!(late.next().await, Next::End(String::new()));
    // The ring buffer contains a thousand events.
    for n in 0..1001 {
        server.patch("configmaps", "default", "a", json!({"data": {"n": n.to_string()}}));
    }
    let mut old = client.watch(&format!("{MAPS}?watch=true&resourceVersion={b}")).await;
    assert_eq!(old.event().await.0, "ERROR");
    // A watch from a future version starts only after that version.
    let far = server.rv() + 1;
    let mut future = client.watch(&format!("{MAPS}?watch=true&resourceVersion={far}")).await;
    server.create(map("skipped", "x"));
    let next = rv(&server.create(map("told", "x")));
    assert_eq!(future.event().await, event("ADDED", "told", next));
}

#[tokio::test]
async fn a_watch_ends_in_time_with_a_bookmark() {
    let server = ApiServer::start().await;
    let mut client = Client::admin(&server).await;
    let made = rv(&server.create(map("a", "x")));
    server.create(json!({"kind": "Secret", "apiVersion": "v1", "metadata": {"name": "s"}}));
    let path = format!("{MAPS}?watch=true&allowWatchBookmarks=true&resourceVersion={made}&timeoutSeconds=3");
    let (begun, mut watch) = (std::time::Instant::now(), client.watch(&path).await);
    let (kind, _, version) = watch.event().await;
    assert_eq!((kind.as_str(), version), ("BOOKMARK", made), "2 s before the end");
    assert!(begun.elapsed() >= Duration::from_millis(950), "{:?}", begun.elapsed());
    assert_eq!(watch.next().await, Next::End(String::new()));
    assert!(begun.elapsed() >= Duration::from_millis(2950), "{:?}", begun.elapsed());
    server
        .wait_until("noted", Duration::from_secs(30), |seen| seen.log().iter().any(|l| l.end == Some("deadline")))
        .await;
}

#[tokio::test]
async fn who_does_not_read_is_cut_off() {
    let server = ApiServer::start().await;
    let mut client = Client::admin(&server).await;
    let mut watch = client.watch(&format!("{MAPS}?watch=true&resourceVersion={}", server.rv())).await;
    server.create(map("a", "x"));
    // More than socket buffers and flow control windows can store.
    let filler = "x".repeat(200_000);
    for n in 0..160 {
        server.patch("configmaps", "default", "a", json!({"data": {"n": format!("{n}{filler}")}}));
    }
    assert_eq!(server.watches("configmaps"), 0);
    let mut count = 0;
    while let Next::Event(..) = watch.next().await {
        count += 1;
    }
    assert!((100..160).contains(&count), "{count}");
}

#[tokio::test]
async fn a_server_that_goes_down_ends_its_watches() {
    let server = ApiServer::start().await;
    let mut client = Client::admin(&server).await;
    let start = server.rv();
    let mut watch = client.watch(&format!("{MAPS}?watch=true&resourceVersion={start}")).await;
    server.restart(Ring::Keep, Duration::from_millis(100)).await;
    assert_eq!(watch.next().await, Next::End(String::new()));
    let made = rv(&server.create(map("a", "x")));
    let mut client = Client::admin(&server).await;
    let mut watch = client.watch(&format!("{MAPS}?watch=true&resourceVersion={start}&labelSelector=l")).await;
    assert_eq!(watch.event().await, event("ADDED", "a", made), "versions and events survive");
    server.restart(Ring::Wipe, Duration::ZERO).await;
    let mut client = Client::admin(&server).await;
    let mut watch = client.watch(&format!("{MAPS}?watch=true&resourceVersion={start}")).await;
    assert_eq!(watch.event().await.0, "ERROR");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn two_thousand_watches_of_a_thousand_pods() {
    let begun = std::time::Instant::now();
    let server = ApiServer::start().await;
    println!("started within {:?}", begun.elapsed());
    server.max_streams(1000);
    let put = |n: usize| {
        let object = json!({"kind": "Pod", "apiVersion": "v1", "metadata": {"name": format!("p{n}"), "namespace": "default"},
            "spec": {"nodeName": format!("n{}", n % 10), "containers": [{"name": "c", "image": "i"}]}, "status": {"phase": "Pending"}});
        berth_testkit::api_server::view::Write::Put { resource: "pods".to_owned(), object }
    };
    server.with(|core| core.apply((0..1000).map(put).collect()));
    let mut watches = Vec::new();
    for _ in 0..4 {
        let mut client = Client::admin(&server).await;
        for n in 0..500 {
            let selector = format!("fieldSelector=spec.nodeName%3Dn{}", n % 1000);
            watches.push(
                client.watch(&format!("/api/v1/pods?watch=true&resourceVersion={}&{selector}", server.rv())).await,
            );
        }
    }
    server.wait_until("all watch", Duration::from_secs(30), |_| true).await;
    assert_eq!(server.watches("pods"), 2000);
    let begun = std::time::Instant::now();
    for n in 0..100 {
        server.patch("pods", "default", &format!("p{n}"), json!({"metadata": {"labels": {"seen": "yes"}}}));
    }
    let written = begun.elapsed();
    for (at, watch) in watches.iter_mut().enumerate().filter(|(at, _)| at % 500 < 10) {
        for round in 0..10 {
            assert_eq!(watch.event().await.1, format!("p{}", round * 10 + at % 500));
        }
    }
    println!("100 writes within {written:?}, told within {:?}", begun.elapsed());
    assert!(begun.elapsed() < Duration::from_secs(60), "{:?}", begun.elapsed());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_node_of_many_pods_is_answered_soon() {
    let server = ApiServer::start().await;
    let put = |n: usize| {
        let object = json!({"kind": "Pod", "apiVersion": "v1", "metadata": {"name": format!("p{n}"), "namespace": "default"},
            "spec": {"nodeName": "n", "serviceAccountName": "default", "containers": [{"name": "c", "image": "i"}],
                     "volumes": [{"name": "v", "configMap": {"name": format!("m{}", n % 300)}}]}, "status": {"phase": "Running"}});
        berth_testkit::api_server::view::Write::Put { resource: "pods".to_owned(), object }
    };
    server.with(|core| core.apply((0..1000).map(put).collect()));
    (0..300).for_each(|n| drop(server.create(map(&format!("m{n}"), "x"))));
    let mut client = Client::node(&server, "n").await;
    let begun = std::time::Instant::now();
    for n in 0..300 {
        let refused = client.get(&format!("{MAPS}/m{n}")).await;
        assert_eq!(refused.code, 200, "{refused:?}");
    }
    println!("300 reads within {:?}", begun.elapsed());
    let begun = std::time::Instant::now();
    for n in 0..300 {
        let patch = json!({"status": {"message": n.to_string()}});
        let path = format!("/api/v1/namespaces/default/pods/p{n}/status");
        let answer = client.ask("PATCH", &path, Some(&patch)).await;
        assert_eq!(answer.code, 200, "{answer:?}");
    }
    println!("300 writes within {:?}", begun.elapsed());
    let begun = std::time::Instant::now();
    for n in 0..300 {
        assert_eq!(client.get(&format!("{MAPS}/m{n}")).await.code, 200);
        let patch = json!({"status": {"message": format!("again {n}")}});
        client.ask("PATCH", &format!("/api/v1/namespaces/default/pods/p{n}/status"), Some(&patch)).await;
    }
    println!("300 of both within {:?}", begun.elapsed());
    assert!(begun.elapsed() < Duration::from_secs(60), "{:?}", begun.elapsed());
}
