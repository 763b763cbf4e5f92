//! HTTP lifecycle hooks, against real sockets.

use std::time::Duration;

use serde_json::{Value, json};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpListener,
    task::JoinHandle,
};

use crate::runtime::fixture::Fixture;
use berth_testkit::pods::pod;

/// Responds to each connection with the next text; returns the requests.
async fn serve(answers: Vec<&'static str>) -> (u16, JoinHandle<Vec<String>>) {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let port = listener.local_addr().expect("bound").port();
    let served = tokio::spawn(async move {
        let mut asked = Vec::new();
        for answer in answers {
            let (mut peer, _) = listener.accept().await.expect("a connection");
            let mut buffer = vec![0; 4096];
            let length = peer.read(&mut buffer).await.expect("a request");
            asked.push(String::from_utf8_lossy(&buffer[..length]).into_owned());
            peer.write_all(answer.as_bytes()).await.expect("answered");
            let _closed = peer.shutdown().await;
        }
        asked
    });
    (port, served)
}

async fn run(bench: &Fixture, action: Value) -> Result<(), String> {
    let mut action = action;
    action["host"] = "127.0.0.1".into();
    let hook = json!({"preStop": {"httpGet": action}});
    let web =
        pod("web", json!({"terminationGracePeriodSeconds": 20, "containers": [{"name": "main", "lifecycle": hook}]}));
    bench.good_turn(&web).await;
    tokio::time::timeout(Duration::from_secs(30), bench.kill(&web, None)).await.expect("in time")
}

fn hook_failed(bench: &Fixture) -> bool {
    bench.events().iter().any(|e| e.starts_with("FailedPreStopHook"))
}

#[tokio::test]
async fn any_status_counts_as_done() {
    // AC-03b-29
    let bench = Fixture::new();
    let (port, asked) = serve(vec!["HTTP/1.1 500 Oops\r\ncontent-length: 4\r\n\r\noops"]).await;
    let headers = json!([{"name": "X-One", "value": "1"}, {"name": "Accept", "value": ""}]);
    run(&bench, json!({"path": "/bye?now=1", "port": port, "httpHeaders": headers})).await.expect("killed");
    let asked = asked.await.expect("served").remove(0).to_lowercase();
    assert!(asked.starts_with("get /bye?now=1 http/1.1\r\n"), "{asked}");
    assert!(asked.contains("x-one: 1\r\n") && asked.contains("user-agent: kube-lifecycle/1.36\r\n"), "{asked}");
    assert!(!asked.contains("accept:"), "{asked}");
    assert!(!hook_failed(&bench));
}

#[tokio::test]
async fn https_answered_in_plain_http_is_tried_again_without_credentials() {
    // AC-03b-30
    let bench = Fixture::new();
    let bad = "HTTP/1.1 400 Bad Request\r\ncontent-length: 0\r\n\r\n";
    let (port, asked) = serve(vec![bad, "HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n"]).await;
    let headers = json!([{"name": "Authorization", "value": "secret"}]);
    run(&bench, json!({"path": "/", "port": port, "scheme": "HTTPS", "httpHeaders": headers})).await.expect("killed");
    let second = asked.await.expect("served").remove(1).to_lowercase();
    assert!(second.starts_with("get / http/1.1\r\n") && !second.contains("secret"), "{second}");
    let text = format!(
        "LifecycleHTTPFallback: request to HTTPS lifecycle hook 127.0.0.1:{port} got HTTP response, retry with HTTP succeeded"
    );
    assert!(bench.events().contains(&text), "{:?}", bench.events());
    assert_eq!(bench.metric("kubelet_lifecycle_handler_http_fallbacks_total", ""), 1.0);
    assert!(!hook_failed(&bench));
}

#[tokio::test]
async fn redirects_are_followed_on_the_same_host_only() {
    let bench = Fixture::new();
    let there = "HTTP/1.1 302 Found\r\nlocation: /there\r\ncontent-length: 0\r\n\r\n";
    let elsewhere = "HTTP/1.1 302 Found\r\nlocation: http://127.0.0.2:1/\r\ncontent-length: 0\r\n\r\n";
    let (port, asked) = serve(vec![there, elsewhere]).await;
    run(&bench, json!({"path": "/here", "port": port})).await.expect("killed");
    let asked = asked.await.expect("served");
    assert!(asked[0].starts_with("GET /here ") && asked[1].starts_with("GET /there "), "{asked:?}");
    assert!(!hook_failed(&bench));
}

#[tokio::test]
async fn a_hook_without_a_listener_fails() {
    let bench = Fixture::new();
    let (port, served) = serve(Vec::new()).await;
    served.await.expect("closed");
    run(&bench, json!({"path": "/", "port": port})).await.expect("killed all the same");
    assert!(hook_failed(&bench));
}
