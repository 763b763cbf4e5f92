//! Fault injection of the test API server. Spec 10a §9.

use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::api_server::client::{Client, Next};
use berth_testkit::api_server::{ApiServer, Effect, Fault};

const MAPS: &str = "/api/v1/namespaces/default/configmaps";

fn map(name: &str) -> Value {
    json!({"kind": "ConfigMap", "apiVersion": "v1", "metadata": {"name": name}, "data": {"a": "1"}})
}

#[tokio::test]
async fn a_status_fault_applies_the_configured_number_of_times() {
    let server = ApiServer::start().await;
    let mut client = Client::admin(&server).await;
    let fault = server.fault(Fault::new(Effect::too_many(3)).on("create", "configmaps").skip(1).times(2));
    let mut codes = Vec::new();
    for name in ["a", "b", "c", "d"] {
        codes.push(client.ask("POST", MAPS, Some(&map(name))).await.code);
    }
    assert_eq!((codes, server.hits(fault)), (vec![201, 429, 429, 201], 2));
    server.fault(Fault::new(Effect::too_many(3)).on("get", "configmaps"));
    let busy = client.get(&format!("{MAPS}/a")).await;
    assert_eq!(busy.text, "Too many requests, please try again later.\n");
    assert!(busy.headers["content-type"].to_str().is_ok_and(|t| t.starts_with("text/plain")));
    assert_eq!(busy.headers["retry-after"], "3");
    server.fault(Fault::new(Effect::status(500, "", "etcdserver: leader changed")).on("get", "configmaps").name("a"));
    assert_eq!(client.get(&format!("{MAPS}/d")).await.code, 200);
    let plain = client.get(&format!("{MAPS}/a")).await;
    assert_eq!((plain.code, &plain.body["message"]), (500, &json!("etcdserver: leader changed")));
}

#[tokio::test]
async fn connections_break_before_and_after_the_deed() {
    // AC-10a-26, the server's part
    let server = ApiServer::start().await;
    for (effect, alpn) in
        [(Effect::Close, "h2"), (Effect::Reset, "h2"), (Effect::Close, "http/1.1"), (Effect::Reset, "http/1.1")]
    {
        let connect =
            || async { Client::connect(&server, Some(("admin", &["system:masters"])), alpn).await.expect("connected") };
        server.create(map("m"));
        server.fault(Fault::new(effect.clone()).on("delete", "configmaps"));
        let path = format!("{MAPS}/m");
        assert!(connect().await.try_ask("DELETE", &path, None).await.is_none(), "{effect:?} {alpn}");
        assert!(server.get("configmaps", "default", "m").is_some(), "{effect:?} {alpn}");
        server.fault(Fault::new(effect.clone()).on("delete", "configmaps").after_commit());
        assert!(connect().await.try_ask("DELETE", &path, None).await.is_none(), "{effect:?} {alpn}");
        assert!(server.get("configmaps", "default", "m").is_none(), "{effect:?} {alpn}");
        assert_eq!(connect().await.ask("DELETE", &path, None).await.code, 404);
    }
}

#[tokio::test]
async fn a_hung_request_blocks_no_other_client() {
    // AC-10a-27, the server's part
    let server = ApiServer::start().await;
    let mut one = Client::admin(&server).await;
    let mut other = Client::admin(&server).await;
    server.create(map("m"));
    let hang = server.fault(Fault::new(Effect::Hang).on("patch", "configmaps"));
    let patch = json!({"data": {"a": "2"}});
    let path = format!("{MAPS}/m");
    let hung = one.ask("PATCH", &path, Some(&patch));
    let release = async {
        server
            .wait_until("it hangs", Duration::from_secs(30), |seen| seen.log().iter().any(|l| l.fault.is_some()))
            .await;
        for n in 0..20 {
            assert_eq!(other.ask("PATCH", &path, Some(&json!({"data": {"b": n.to_string()}}))).await.code, 200);
        }
        server.clear(hang);
    };
    let (answer, ()) = tokio::join!(hung, release);
    assert_eq!((answer.code, &answer.body["data"]), (200, &json!({"a": "2", "b": "19"})));
    server.fault(Fault::new(Effect::Delay(Duration::from_millis(300))).on("get", "configmaps"));
    let begun = Instant::now();
    assert_eq!(other.get(&path).await.code, 200);
    assert!(begun.elapsed() >= Duration::from_millis(300));
}

#[tokio::test]
async fn watches_and_bodies_are_cut_where_configured() {
    // AC-10a-28, the server's part
    let server = ApiServer::start().await;
    for name in ["a", "b"] {
        server.create(map(name));
    }
    let path = format!(
        "{MAPS}?watch=true&allowWatchBookmarks=true&sendInitialEvents=true&resourceVersionMatch=NotOlderThan&\
                        fieldSelector=metadata.name!%3Dkube-root-ca.crt"
    );
    for alpn in ["h2", "http/1.1"] {
        let connect =
            || async { Client::connect(&server, Some(("admin", &["system:masters"])), alpn).await.expect("connected") };
        server.fault(Fault::new(Effect::Truncate(1, 10)).on("watch", "configmaps"));
        let mut watch = connect().await.watch(&path).await;
        assert_eq!(watch.event().await.1, "a");
        assert_eq!(watch.next().await, Next::Broken("{\"type\":\"A".to_owned()), "{alpn}");
        server.fault(Fault::new(Effect::CutBeforeMarker).on("watch", "configmaps"));
        let mut watch = connect().await.watch(&path).await;
        assert_eq!((watch.event().await.1, watch.event().await.1), ("a".to_owned(), "b".to_owned()));
        assert_eq!(watch.next().await, Next::Broken(String::new()), "{alpn}");
        server.fault(Fault::new(Effect::EndWatch(1)).on("watch", "configmaps"));
        let mut watch = connect().await.watch(&path).await;
        assert_eq!((watch.event().await.1, watch.next().await), ("a".to_owned(), Next::End(String::new())));
        server.fault(Fault::new(Effect::CutBody(7)).on("get", "configmaps"));
        assert!(connect().await.try_ask("GET", &format!("{MAPS}/a"), None).await.is_none());
    }
    server.fault(Fault::new(Effect::Slow(1000)).on("get", "configmaps"));
    let (begun, mut client) = (Instant::now(), Client::admin(&server).await);
    let slow = client.get(&format!("{MAPS}/a")).await;
    assert_eq!(slow.body["metadata"]["name"], "a");
    let least = Duration::from_millis(slow.text.len() as u64 / 100 * 100);
    assert!(begun.elapsed() >= least, "{:?} {least:?}", begun.elapsed());
}

#[tokio::test]
async fn a_black_hole_swallows_and_gives_back() {
    let server = ApiServer::start().await;
    let mut client = Client::admin(&server).await;
    server.create(map("m"));
    let path = format!("{MAPS}/m");
    assert_eq!(client.get(&path).await.code, 200);
    server.set_black_hole(true);
    let asked = tokio::time::timeout(Duration::from_millis(300), client.get(&path)).await;
    assert!(asked.is_err(), "{asked:?}");
    assert!(tokio::time::timeout(Duration::from_millis(300), Client::admin(&server)).await.is_err());
    server.set_black_hole(false);
    assert_eq!(client.get(&path).await.code, 200);
}

#[tokio::test]
async fn a_server_is_away_and_back() {
    let server = ApiServer::start().await;
    let mut client = Client::admin(&server).await;
    server.create(map("m"));
    server.take_offline().await;
    assert!(client.try_ask("GET", &format!("{MAPS}/m"), None).await.is_none());
    assert!(Client::connect(&server, None, "h2").await.is_none());
    server.bring_online().await;
    assert_eq!(Client::admin(&server).await.get(&format!("{MAPS}/m")).await.code, 200);
}

#[tokio::test]
async fn old_worlds_are_shown_to_who_asks_for_any() {
    let server = ApiServer::start().await;
    server.create(map("m"));
    server.jump(jiff::SignedDuration::from_secs(60));
    server.patch("configmaps", "default", "m", json!({"data": {"a": "2"}}));
    server.switch(|switches| switches.stale = Some(Duration::from_secs(30)));
    let mut client = Client::admin(&server).await;
    for (query, expected) in [("?resourceVersion=0", "1"), ("", "2")] {
        assert_eq!(client.get(&format!("{MAPS}/m{query}")).await.body["data"]["a"], expected);
        let selector =
            if query.is_empty() { "?fieldSelector=metadata.name%3Dm" } else { "&fieldSelector=metadata.name%3Dm" };
        let list = client.get(&format!("{MAPS}{query}{selector}")).await.body;
        assert_eq!(list["items"][0]["data"]["a"], expected);
    }
    let mut watch = client.watch(&format!("{MAPS}?watch=true&resourceVersion=0&fieldSelector=metadata.name%3Dm")).await;
    assert_eq!((watch.event().await.0, watch.event().await.0), ("ADDED".to_owned(), "MODIFIED".to_owned()));
}
