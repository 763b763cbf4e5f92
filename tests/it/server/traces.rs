//! Spans of requests (spec 08 §13). One test: a process exports its traces once.

use berth_metrics::Registry;
use berth_otel::TraceExportSettings;
use berth_testkit::otlp_collector::{OtlpCollector, ReceivedSpan};

use super::fixture::{ALL, RunningListener};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn admitted_requests_have_a_span_and_a_panic_is_an_error_of_it() {
    let collector = OtlpCollector::start().await;
    let settings = TraceExportSettings {
        endpoint: Some(collector.endpoint()),
        sampling_rate_per_million: 1_000_000,
        host_name: "node".to_owned(),
    };
    berth_otel::start_export(&settings, &Registry::new()).expect("an address");
    // Other tests of the process may send requests, too.
    let agent = "user-agent: trace-test\r\n";
    let guarded = RunningListener::guarded(&[("get", "pods")]).await;
    let refused = "GET /pods HTTP/1.1\r\nHost: x\r\nConnection: close\r\nuser-agent: trace-test\r\n\r\n";
    assert!(guarded.raw(refused).await.starts_with("HTTP/1.1 401 "));
    assert_eq!(guarded.ask("GET", "/metrics", agent).await.0, 403);
    assert_eq!(guarded.ask("GET", "/nothing", agent).await.0, 404);
    assert_eq!(guarded.ask("DELETE", "/pods", agent).await.0, 403);
    assert_eq!(guarded.ask("GET", "/pods", agent).await.0, 200);
    let panicking = RunningListener::start(ALL, None, true).await;
    assert_eq!(panicking.ask("GET", "/pods", agent).await.0, 500);

    let of_test = |spans: &[ReceivedSpan]| -> Vec<(String, Option<String>)> {
        let is_ours = |span: &&ReceivedSpan| {
            span.attributes.get("user_agent.original").is_some_and(|agent| agent == "trace-test")
        };
        let ours = spans.iter().filter(is_ours);
        ours.map(|span| (span.attributes["http.response.status_code"].clone(), span.error.clone())).collect()
    };
    let spans = collector.wait_for(|spans| of_test(spans).len() >= 2).await;
    assert_eq!(of_test(&spans), [("200".to_owned(), None), ("500".to_owned(), Some(String::new()))]);
}
