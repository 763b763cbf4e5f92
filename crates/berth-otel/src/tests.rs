//! Sampling, parents, and losses, without a collector.

use std::{
    net::TcpListener,
    sync::{Arc, Mutex},
    time::{Duration, Instant},
};

use http::{HeaderMap, HeaderValue};
use opentelemetry::{
    Context,
    trace::{SpanKind, TraceContextExt},
};
use opentelemetry_sdk::{
    error::OTelSdkResult,
    trace::{SdkTracerProvider, SpanData, SpanExporter},
};

use super::{
    export::{TraceExportSettings, build_provider, sampler},
    extract,
    propagation::inject,
    span::{Scope, Span},
};
use berth_metrics::{Registry, TraceMetrics};

const REMOTE: &str = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";
const NOT_SAMPLED: &str = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-00";

#[derive(Clone, Default, Debug)]
struct Exported(Arc<Mutex<Vec<SpanData>>>);

impl SpanExporter for Exported {
    async fn export(&self, mut batch: Vec<SpanData>) -> OTelSdkResult {
        self.0.lock().expect("whole").append(&mut batch);
        Ok(())
    }
}

/// Names of the spans that are exported of a root span, of a child of each remote span, and of a grandchild.
fn exported(rate_per_million: u32) -> Vec<String> {
    let exported = Exported::default();
    let provider = SdkTracerProvider::builder()
        .with_sampler(sampler(rate_per_million))
        .with_simple_exporter(exported.clone())
        .build();
    let tracer = Scope::Kubelet.tracer(&provider);
    let start =
        |name: &'static str, parent: Context| Span::start(&tracer, name.into(), SpanKind::Internal, parent, Vec::new);
    let remote = |header: &'static str| {
        let headers = HeaderMap::from_iter([("traceparent".parse().expect("valid"), HeaderValue::from_static(header))]);
        extract(&headers).0
    };
    drop(start("root", Context::new()));
    let parent = start("of a sampled span", remote(REMOTE));
    drop(start("grandchild", parent.context().clone()));
    drop(parent);
    drop(start("of a span that is not sampled", remote(NOT_SAMPLED)));
    let spans = exported.0.lock().expect("whole");
    spans.iter().map(|span| span.name.to_string()).collect()
}

#[test]
fn the_rate_decides_about_roots_and_parents_decide_about_the_others() {
    assert_eq!(exported(0), ["grandchild", "of a sampled span"]);
    assert_eq!(exported(1_000_000), ["root", "grandchild", "of a sampled span"]);
}

#[test]
fn trace_context_passes_through_headers_and_malformed_headers_count_as_absent() {
    let mut headers = HeaderMap::new();
    headers.insert("traceparent", HeaderValue::from_static(REMOTE));
    headers.insert("tracestate", HeaderValue::from_static("vendor=1"));
    headers.insert("baggage", HeaderValue::from_static("tenant=a"));
    let mut sent = HeaderMap::new();
    inject(&extract(&headers).0, &mut sent);
    assert_eq!(sent, headers);

    for malformed in ["", "00-x-y-01", "00-00000000000000000000000000000000-b7ad6b7169203331-01", "\u{ff}"] {
        headers.insert("traceparent", HeaderValue::from_bytes(malformed.as_bytes()).expect("a header value"));
        assert!(!extract(&headers).0.span().span_context().is_valid(), "{malformed:?}");
    }
}

fn settings(endpoint: String) -> TraceExportSettings {
    TraceExportSettings { endpoint: Some(endpoint), sampling_rate_per_million: 1_000_000, host_name: "n".to_owned() }
}

fn dropped(registry: &Registry) -> u64 {
    let families = registry.gather();
    let family = families.iter().find(|family| family.name() == "berth_spans_dropped_total").expect("registered");
    #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a count of spans")]
    let count = family.get_metric()[0].get_counter().get_value() as u64;
    count
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn spans_that_no_collector_receives_are_counted() {
    let registry = Registry::new();
    let free = TcpListener::bind("127.0.0.1:0").expect("a free port").local_addr().expect("bound");
    let provider = build_provider(&settings(free.to_string()), TraceMetrics::new(&registry)).expect("built");
    let tracer = Scope::Kubelet.tracer(&provider);
    for _ in 0..3 {
        drop(Span::start(&tracer, "lost".into(), SpanKind::Internal, Context::new(), Vec::new));
    }
    let flushed = tokio::task::spawn_blocking(move || provider.force_flush()).await.expect("not panicked");
    assert!(flushed.is_err());
    assert_eq!(dropped(&registry), 3);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn a_hanging_collector_does_not_delay_spans_and_the_overflow_is_counted() {
    const QUEUE: usize = 2048;
    const BATCH: usize = 512;
    let registry = Registry::new();
    let hanging = TcpListener::bind("127.0.0.1:0").expect("a free port"); // accepts nothing
    let endpoint = hanging.local_addr().expect("bound").to_string();
    let provider = build_provider(&settings(endpoint), TraceMetrics::new(&registry)).expect("built");
    let tracer = Scope::Kubelet.tracer(&provider);
    let begun = Instant::now();
    for _ in 0..QUEUE + BATCH + 100 {
        drop(Span::start(&tracer, "late".into(), SpanKind::Internal, Context::new(), Vec::new));
    }
    assert!(begun.elapsed() < Duration::from_secs(10), "{:?}", begun.elapsed());
    let lost = usize::try_from(dropped(&registry)).expect("few");
    assert!((100..=100 + BATCH).contains(&lost), "{lost}");
    // The shutdown of the provider would wait for the collector.
    std::mem::forget(provider);
}
