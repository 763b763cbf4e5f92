//! The HTTP source of static pods (AC-02a-2, 5) against a misbehaving server.

use std::sync::{Arc, atomic::Ordering};

use async_trait::async_trait;
use berth::sources::{SourcesConfig, ports::PodSourceFeed};
use berth_metrics::SourceMetrics;
use berth_types::{Operation, Pod, PodSource};
use tokio::{net::TcpListener, sync::mpsc};

use super::fixture::{Fixture, manifest, none};
use berth_testkit::misbehaving_server::{Answer, Server, ok};

fn list(names: &[&str]) -> String {
    let items: Vec<String> = names
        .iter()
        .map(|name| format!("{{\"metadata\":{{\"name\":\"{name}\"}},\"spec\":{{\"containers\":[{{\"name\":\"c\",\"image\":\"b\"}}]}}}}"))
        .collect();
    format!("{{\"apiVersion\":\"v1\",\"kind\":\"PodList\",\"items\":[{}]}}", items.join(","))
}

fn failures(metrics: &SourceMetrics) -> u64 {
    metrics.failures.with_label_values(&["http"]).get()
}

#[tokio::test]
async fn a_pod_of_a_url_has_no_toleration() {
    // AC-02a-2
    let server = Server::start([ok(manifest("web"))]).await;
    let mut house = Fixture::of_url(&server.url());
    assert_eq!(house.registered(), [PodSource::Http]);
    let pods = house.pods(Operation::Add).await;
    assert_eq!((pods[0].name(), pods[0].annotation("kubernetes.io/config.source")), ("web-node-a", Some("http")));
    assert_eq!(pods[0].spec().tolerations, None);
    house.stop().await;
}

#[tokio::test]
async fn a_list_is_taken_whole_or_not_at_all() {
    let bad = list(&["a", "b"]).replace("\"image\":\"b\"", "\"image\":\"\"");
    let server = Server::start([ok(list(&["a", "b"])), ok(bad), ok(list(&["b", "c"]))]).await;
    let mut house = Fixture::of_url(&server.url());
    assert_eq!(house.next_operation().await, "Add a-node-a b-node-a");
    assert_eq!(house.next_operation().await, "Remove a-node-a");
    assert_eq!(house.next_operation().await, "Add c-node-a");
    assert_eq!(house.metrics.rejected.with_label_values(&["http", "invalid"]).get(), 1);
    house.stop().await;
}

#[tokio::test]
async fn an_empty_answer_removes_everything_and_the_same_bytes_bring_it_back() {
    // The reference would ignore the second response, whose bytes equal the last ones.
    let server = Server::start([ok(manifest("a")), ok(""), ok(manifest("a")), ok(manifest("a"))]).await;
    let mut house = Fixture::of_url(&server.url());
    assert_eq!(house.next_operation().await, "Add a-node-a");
    assert_eq!(house.next_operation().await, "Remove a-node-a");
    assert_eq!(house.next_operation().await, "Add a-node-a");
    assert_eq!(failures(&house.metrics), 1);
    house.stop().await;
}

#[tokio::test]
async fn refused_bytes_are_refused_again() {
    let server = Server::start([ok("kind: Teapot\napiVersion: v1")]).await;
    let house = Fixture::of_url(&server.url());
    house.counted("every refusal", |m| m.rejected.with_label_values(&["http", "parse"]).get(), 3).await;
    assert!(failures(&house.metrics) >= 3, "an unchanged bad answer is no success");
    house.stop().await;
}

#[tokio::test]
async fn whatever_goes_wrong_keeps_the_last_set() {
    let body = |bytes: usize| manifest("large") + &"#".repeat(bytes);
    let server = Server::start([
        ok(manifest("a")),
        Answer::Plain(500, manifest("x")),
        Answer::Plain(404, String::new()),
        Answer::Plain(204, String::new()),
        ok("garbage"),
        ok("kind: ["),
        Answer::Garbage,
        ok(body(11 * 1024 * 1024)),
        Answer::Endless,
        Answer::Redirect("ftp://nowhere/"),
        ok(manifest("b")),
    ])
    .await;
    let mut house = Fixture::of_url(&server.url());
    assert_eq!(house.next_operation().await, "Add a-node-a");
    assert_eq!(house.next_operation().await, "Remove a-node-a", "only by the next good answer");
    assert_eq!(house.next_operation().await, "Add b-node-a");
    assert_eq!(failures(&house.metrics), 9);
    let sent = server.sent.load(Ordering::Relaxed);
    assert!(sent < 64 * 1024 * 1024, "a body of 10 GB is not read: {sent}");
    house.stop().await;
}

#[tokio::test]
async fn an_answer_that_never_comes_is_given_up() {
    tokio::time::pause();
    let mut server = Server::start([Answer::Hang, ok(manifest("a"))]).await;
    let mut house = Fixture::of_url(&server.url());
    // The paused clock skips the timeout of ten seconds.
    server.heads.recv().await.expect("the first request");
    server.heads.recv().await.expect("the second request");
    tokio::time::resume();
    assert_eq!(house.next_operation().await, "Add a-node-a");
    assert!(failures(&house.metrics) >= 1);
    house.stop().await;
}

#[tokio::test]
async fn redirects_are_followed_but_not_for_ever() {
    let server = Server::start([Answer::Redirect("/there"), Answer::Redirect("again?x=1"), ok(manifest("a"))]).await;
    let mut house = Fixture::of_url(&server.url());
    assert_eq!(house.next_operation().await, "Add a-node-a");
    assert_eq!(failures(&house.metrics), 0);
    let Server { mut heads, .. } = server;
    let mut lines = Vec::new();
    for _ in 0..3 {
        lines.push(heads.recv().await.expect("a request").lines().next().unwrap_or_default().to_owned());
    }
    assert_eq!(lines, ["GET /pods HTTP/1.1", "GET /there HTTP/1.1", "GET /again?x=1 HTTP/1.1"]);
    house.stop().await;

    let mut endless = Server::start([Answer::Redirect("/again")]).await;
    let mut house = Fixture::of_url(&endless.url());
    house.counted("giving up", failures, 1).await;
    for i in 0..10 {
        let head = endless.heads.recv().await.expect("a request");
        assert_eq!(head.starts_with("GET /pods "), i == 0, "{i}: {head}");
    }
    endless.then(ok(manifest("a")));
    assert_eq!(house.next_operation().await, "Add a-node-a");
    house.stop().await;
}

#[tokio::test]
async fn headers_go_along_in_order() {
    let mut server = Server::start([ok(manifest("a"))]).await;
    let pair = |name: &str, value: &str| (name.to_owned(), value.to_owned());
    let mut house = Fixture::start(
        SourcesConfig {
            static_pod_url: Some(server.url().replace("//", "//me:pw@")),
            static_pod_url_headers: vec![pair("X-A", "1"), pair("x-a", "2"), pair("Metadata-Flavor", "Google")],
            ..none()
        },
        None,
    );
    assert_eq!(house.next_operation().await, "Add a-node-a");
    let head = server.heads.recv().await.expect("a request").to_lowercase();
    for line in ["x-a: 1\r\nx-a: 2\r\n", "metadata-flavor: google\r\n", "authorization: basic bwu6chc=\r\n"] {
        assert!(head.contains(line), "{head}");
    }
    assert!(!head.contains("@"), "{head}");
    house.stop().await;
}

#[tokio::test]
async fn an_unreachable_url_is_a_failure_and_no_set() {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let url = format!("http://{}/", listener.local_addr().expect("an address"));
    drop(listener);
    for url in [url.as_str(), "not a url", "gopher://x/"] {
        let house = Fixture::of_url(url);
        house.counted("failures", failures, 2).await;
        house.stop().await;
    }
}

struct Feed(mpsc::Receiver<Vec<Arc<Pod>>>);

#[async_trait]
impl PodSourceFeed for Feed {
    async fn next_set(&mut self) -> Option<Vec<Arc<Pod>>> {
        self.0.recv().await
    }
}

#[tokio::test]
async fn the_feed_of_the_api_is_a_source_of_its_own() {
    // AC-02a-5
    let (sets, feed) = mpsc::channel(1);
    let mut house = Fixture::start(none(), Some(Box::new(Feed(feed))));
    assert_eq!(house.registered(), [PodSource::Api]);
    sets.send(Vec::new()).await.expect("open");
    let change = house.change().await;
    assert_eq!((change.operation, change.source, change.pods.len()), (Operation::Add, PodSource::Api, 0));
    house.stop().await;
}

#[tokio::test]
async fn without_sources_the_stream_ends() {
    let house = Fixture::start(none(), None);
    assert_eq!(house.registered(), []);
    house.stop().await;
}
