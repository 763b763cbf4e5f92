//! Spans of requests to the API server (spec 08 §13, 10 §10).

use berth_testkit::{
    api_server::{Effect, Fault},
    otlp_collector::{OtlpCollector, ReceivedSpan},
    process::skips,
};
use serde_json::json;

use crate::cluster::{ClusterFixture, pod};

fn is_get_of_node(span: &ReceivedSpan, retry: &str) -> bool {
    let has = |key: &str, value: &str| span.attributes.get(key).is_some_and(|found| found == value);
    span.name == "HTTP GET" && has("k8s.verb", "get") && has("k8s.resource", "nodes") && has("retry", retry)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn each_request_to_the_api_server_has_a_span() {
    if skips("each_request_to_the_api_server_has_a_span") {
        return;
    }
    let collector = OtlpCollector::start().await;
    let mut world = ClusterFixture::new().await;
    world.home =
        world.home.with(json!({"tracing": {"endpoint": collector.endpoint(), "samplingRatePerMillion": 1_000_000}}));
    let busy = Effect::Answer(503, Some(0), "application/json", String::new());
    world.api.fault(Fault::new(busy).on("get", "nodes"));
    let agent = world.start().await;
    world.run(pod("a"));
    world.until_ready(&agent, "a").await;

    let is_status = |span: &ReceivedSpan| span.name == "HTTP PATCH" && span.attributes["k8s.resource"] == "pods";
    let spans = collector
        .wait_for(|spans| spans.iter().any(|span| is_get_of_node(span, "1")) && spans.iter().any(is_status))
        .await;
    let refused = spans.iter().find(|span| is_get_of_node(span, "0")).expect("the first attempt");
    assert_eq!(refused.attributes["http.response.status_code"], "503");
    assert_eq!(refused.error.as_deref(), Some(""));
    let answered = spans.iter().find(|span| is_get_of_node(span, "1")).expect("it was waited for");
    assert_eq!((answered.attributes["http.response.status_code"].as_str(), &answered.error), ("200", &None));
    assert_eq!(answered.attributes["http.request.method"], "GET");
    let url = &answered.attributes["url.full"];
    assert!(url.starts_with("https://") && url.contains("/api/v1/nodes/test-node"), "{url}");

    // What the server records of a request belongs to the same trace.
    for span in [refused, answered] {
        let parent = format!("00-{}-{}-01", span.trace_id, span.span_id);
        let requests = world.api.log();
        let is_sent = requests.iter().any(|request| request.header("traceparent") == parent);
        assert!(is_sent, "{parent}");
    }
}
