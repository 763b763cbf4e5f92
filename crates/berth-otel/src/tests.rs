//! Sampling, parents, and losses, without a collector.

use std::{
    net::TcpListener,
    os::{
        linux::net::SocketAddrExt,
        unix::net::{SocketAddr, UnixListener},
    },
    sync::{Arc, Mutex},
    time::{Duration, Instant},
};

use http::{HeaderMap, HeaderName, HeaderValue};
use opentelemetry::{
    Context, KeyValue,
    trace::{SpanKind, Status, TraceContextExt},
};
use opentelemetry_sdk::{
    error::OTelSdkResult,
    trace::{SdkTracerProvider, SpanData, SpanExporter},
};

use super::{
    export::{TraceExport, TraceExportSettings, build, sampler},
    propagation::{client_span, inject},
    span::{Scope, Span, record_exception, server_span},
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

impl Exported {
    /// A provider that exports here.
    fn provider(&self, rate_per_million: u32) -> SdkTracerProvider {
        SdkTracerProvider::builder().with_sampler(sampler(rate_per_million)).with_simple_exporter(self.clone()).build()
    }
}

fn headers(pairs: &[(&'static str, &'static str)]) -> HeaderMap {
    let pair =
        |(name, value): &(&'static str, &'static str)| (HeaderName::from_static(name), HeaderValue::from_static(value));
    pairs.iter().map(pair).collect()
}

/// Names of the spans that are exported of a root span, of a child of each remote span, and of a grandchild.
fn exported(rate_per_million: u32) -> Vec<String> {
    let exported = Exported::default();
    let tracer = Scope::Kubelet.tracer(&exported.provider(rate_per_million));
    let start = |name: &'static str, parent: Context| Span::start(&tracer, name, SpanKind::Internal, parent, Vec::new);
    let remote = |header: &'static str| {
        let client = client_span(&headers(&[("traceparent", header)])).expect("a valid header");
        Context::new().with_remote_span_context(client)
    };
    drop(start("root", Context::new()));
    let parent = start("of a sampled span", remote(REMOTE));
    drop(start("grandchild", parent.context()));
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
fn a_call_without_an_outcome_was_cancelled() {
    let exported = Exported::default();
    let tracer = Scope::GrpcClient.tracer(&exported.provider(1_000_000));
    let start = |kind: SpanKind| Span::start(&tracer, "call", kind, Context::new(), Vec::new);
    start(SpanKind::Client).set_ok();
    start(SpanKind::Client).set_error(|| "refused".to_owned());
    drop(start(SpanKind::Client));
    drop(start(SpanKind::Internal));
    let spans = exported.0.lock().expect("whole");
    let statuses: Vec<&Status> = spans.iter().map(|span| &span.status).collect();
    assert_eq!(statuses, [&Status::Unset, &Status::error("refused"), &Status::error("canceled"), &Status::Unset]);
}

#[test]
fn trace_context_passes_through_headers_and_malformed_headers_count_as_absent() {
    for sent in [vec![("traceparent", REMOTE)], vec![("traceparent", REMOTE), ("tracestate", "vendor=1")]] {
        let sent = headers(&sent);
        let client = client_span(&sent).expect("a valid header");
        let mut passed_on = HeaderMap::new();
        inject(&Context::new().with_remote_span_context(client), &mut passed_on);
        assert_eq!(passed_on, sent);
    }
    for malformed in ["", "00-x-y-01", "00-00000000000000000000000000000000-b7ad6b7169203331-01"] {
        assert!(client_span(&headers(&[("traceparent", malformed)])).is_none(), "{malformed:?}");
    }
}

#[tokio::test]
async fn without_a_provider_nothing_of_a_client_is_passed_on() {
    let client = headers(&[("traceparent", REMOTE), ("tracestate", "vendor=1"), ("baggage", "tenant=a")]);
    let span = server_span(&client, || panic!("it is not recorded"));
    let mut passed_on = HeaderMap::new();
    span.inject(&mut passed_on);
    assert_eq!(passed_on, HeaderMap::new());
    assert!(!span.run(async { Context::current().has_active_span() }).await);
}

#[tokio::test]
async fn texts_of_others_are_bounded() {
    let exported = Exported::default();
    let tracer = Scope::Kubelet.tracer(&exported.provider(1_000_000));
    let long = "é".repeat(1_000_000);
    let attribute = || vec![KeyValue::new("url.path", long.clone())];
    let span = Span::start(&tracer, "long", SpanKind::Server, Context::new(), attribute);
    span.set_attribute("user_agent.original", || long.clone().into());
    span.run(async { record_exception(&long) }).await;
    span.set_error(|| long.clone());
    drop(span);
    let spans = exported.0.lock().expect("whole");
    let length = format!("{:?}", spans[0]).len();
    assert!((4 * 1024..12 * 1024).contains(&length), "{length}");
}

fn settings(endpoint: String) -> TraceExportSettings {
    TraceExportSettings { endpoint: Some(endpoint), sampling_rate_per_million: 1_000_000, host_name: "n".to_owned() }
}

fn started(endpoint: String, registry: &Registry) -> TraceExport {
    build(&settings(endpoint), TraceMetrics::new(registry), Duration::from_millis(100)).expect("an address")
}

fn end_spans(export: &TraceExport, count: usize) {
    let tracer = Scope::Kubelet.tracer(&export.provider);
    for _ in 0..count {
        drop(Span::start(&tracer, "ended", SpanKind::Internal, Context::new(), Vec::new));
    }
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
    let (registry, folder) = (Registry::new(), tempfile::tempdir().expect("a directory"));
    let socket = folder.path().join("otel.sock");
    let export = started(format!("unix://{}", socket.display()), &registry);
    end_spans(&export, 3);
    let provider = export.provider.clone();
    let flush = tokio::task::spawn_blocking(move || provider.force_flush());
    assert!(flush.await.expect("not panicked").is_err());
    assert_eq!(dropped(&registry), 3);
    assert_eq!(export.queued(), 0);
}

/// The connector of each kind of address reaches a listener.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn a_collector_is_connected_on_every_kind_of_socket() {
    let folder = tempfile::tempdir().expect("a directory");
    let path = folder.path().join("otel.sock");
    let name = format!("berth-otel-{}", std::process::id());
    let tcp = TcpListener::bind("127.0.0.1:0").expect("a free port");
    let unix = UnixListener::bind(&path).expect("a new socket");
    let abstract_address = SocketAddr::from_abstract_name(&name).expect("a short name");
    let named = UnixListener::bind_addr(&abstract_address).expect("a new name");
    let endpoints = [
        tcp.local_addr().expect("bound").to_string(),
        format!("unix://{}", path.display()),
        format!("unix-abstract:{name}"),
    ];
    for endpoint in endpoints {
        let export = started(endpoint, &Registry::new());
        end_spans(&export, 1);
        let provider = export.provider.clone();
        std::thread::spawn(move || provider.force_flush());
        // The shutdown of the provider would wait for the collector, which does not answer.
        std::mem::forget(export);
    }
    let accepted = tokio::task::spawn_blocking(move || {
        tcp.accept().expect("connected");
        unix.accept().expect("connected");
        named.accept().expect("connected");
    });
    tokio::time::timeout(Duration::from_secs(20), accepted).await.expect("in time").expect("not panicked");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn a_hanging_collector_does_not_delay_spans_and_the_overflow_is_counted() {
    const QUEUE: usize = 2048;
    const BATCH: usize = 512;
    let registry = Registry::new();
    let hanging = TcpListener::bind("127.0.0.1:0").expect("a free port"); // accepts nothing
    let export = started(hanging.local_addr().expect("bound").to_string(), &registry);
    let begun = Instant::now();
    end_spans(&export, QUEUE + BATCH + 100);
    assert!(begun.elapsed() < Duration::from_secs(10), "{:?}", begun.elapsed());
    let lost = usize::try_from(dropped(&registry)).expect("few");
    assert!((100..=100 + BATCH).contains(&lost), "{lost}");
    // The shutdown of the provider would wait for the collector.
    std::mem::forget(export);
}
