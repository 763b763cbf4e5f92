//! The tracer provider: sampling, resource, batches, OTLP over gRPC. Losses are counted and logged.

use std::{
    io,
    os::{
        linux::net::SocketAddrExt,
        unix::net::{SocketAddr, UnixStream as StdUnixStream},
    },
    path::Path,
    sync::{
        Arc, Mutex, OnceLock, PoisonError,
        atomic::{AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};

use hyper_util::rt::TokioIo;
use opentelemetry::{Context, KeyValue};
use opentelemetry_otlp::{WithExportConfig, WithTonicConfig};
use opentelemetry_sdk::{
    Resource,
    error::OTelSdkResult,
    trace::{
        BatchConfigBuilder, BatchSpanProcessor, Sampler, SdkTracerProvider, Span, SpanData, SpanExporter, SpanProcessor,
    },
};
use tokio::net::UnixStream;
use tonic::transport::{Channel, Endpoint};
use tracing::error;

use super::collector_address::{CollectorAddress, InvalidCollectorAddress};
use berth_metrics::{Registry, TraceMetrics};

/// Ended spans that wait for their batch (spec 08 §18).
const QUEUE: usize = 2048;
/// Spans of one export request.
const BATCH: usize = 512;
/// Longest wait of an ended span for its batch to fill.
const DELAY: Duration = Duration::from_secs(5);
/// Deadline of an export request, with its retries.
const EXPORT_TIMEOUT: Duration = Duration::from_secs(30);
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// Least time between two log records about lost spans.
const REPORT_INTERVAL: Duration = Duration::from_secs(600);

/// Set once; absent while tracing is not configured.
static PROVIDER: OnceLock<SdkTracerProvider> = OnceLock::new();

pub(crate) fn provider() -> Option<&'static SdkTracerProvider> {
    PROVIDER.get()
}

/// Settings of the export: `tracing` of the configuration.
#[derive(Clone, PartialEq, Debug)]
pub struct TraceExportSettings {
    /// `tracing.endpoint`; `None` for `localhost:4317`.
    pub endpoint: Option<String>,
    /// `tracing.samplingRatePerMillion`, of root spans; 0 to record only what belongs to a sampled remote span.
    pub sampling_rate_per_million: u32,
    /// Attribute `host.name`.
    pub host_name: String,
}

/// Why traces cannot be exported.
#[derive(Debug, thiserror::Error)]
pub enum ExportError {
    /// The endpoint is not an address.
    #[error(transparent)]
    Address(#[from] InvalidCollectorAddress),
    /// The exporter was not built.
    #[error("OTLP exporter: {0}")]
    Exporter(String),
    /// The process exports already.
    #[error("traces are exported already")]
    Started,
}

/// Starts to record and export spans of this process. Must be called in a tokio runtime, which sends the batches.
///
/// # Errors
/// The endpoint is no address, or the process exports already.
pub fn start_export(settings: &TraceExportSettings, registry: &Registry) -> Result<(), ExportError> {
    let provider = build_provider(settings, TraceMetrics::new(registry))?;
    PROVIDER.set(provider).map_err(|_| ExportError::Started)
}

/// Stops recording, and exports what is queued for up to `patience`; kubelet loses it.
pub async fn stop_export(patience: Duration) {
    let Some(provider) = provider() else { return };
    let stopped = tokio::task::spawn_blocking(move || provider.shutdown_with_timeout(patience));
    if let Ok(Err(error)) = stopped.await {
        error!(err = %error, "Failed to export the last spans");
    }
}

pub(crate) fn build_provider(
    settings: &TraceExportSettings,
    metrics: TraceMetrics,
) -> Result<SdkTracerProvider, ExportError> {
    let address = CollectorAddress::parse(settings.endpoint.as_deref())?;
    let exporter = opentelemetry_otlp::SpanExporter::builder()
        .with_tonic()
        .with_channel(channel(&address)?)
        .with_timeout(EXPORT_TIMEOUT)
        .build()
        .map_err(|error| ExportError::Exporter(error.to_string()))?;
    let ledger = Arc::new(Ledger { queued: AtomicUsize::new(0), metrics, reported_at: Mutex::new(None) });
    let exporter = CountedExporter { inner: exporter, ledger: ledger.clone() };
    let config = BatchConfigBuilder::default()
        .with_max_queue_size(QUEUE)
        .with_max_export_batch_size(BATCH)
        .with_scheduled_delay(DELAY)
        .build();
    let inner = BatchSpanProcessor::builder(exporter).with_batch_config(config).build();
    let resource = Resource::builder()
        .with_service_name("kubelet")
        .with_attribute(KeyValue::new("host.name", settings.host_name.clone()))
        .build();
    Ok(SdkTracerProvider::builder()
        .with_sampler(sampler(settings.sampling_rate_per_million))
        .with_resource(resource)
        .with_span_processor(CountedProcessor { inner, ledger })
        .build())
}

/// Follows the parent's decision; of root spans it samples a share.
pub(crate) fn sampler(rate_per_million: u32) -> Sampler {
    let root = match rate_per_million {
        0 => Sampler::AlwaysOff,
        rate => Sampler::TraceIdRatioBased(f64::from(rate) / 1_000_000.0),
    };
    Sampler::ParentBased(Box::new(root))
}

fn channel(address: &CollectorAddress) -> Result<Channel, ExportError> {
    let endpoint = |authority: &str| {
        let endpoint = Endpoint::from_shared(format!("http://{authority}"))
            .map_err(|error| ExportError::Exporter(error.to_string()))?;
        Ok::<_, ExportError>(endpoint.connect_timeout(CONNECT_TIMEOUT).timeout(EXPORT_TIMEOUT))
    };
    Ok(match address {
        CollectorAddress::Tcp(authority) => endpoint(authority)?.connect_lazy(),
        CollectorAddress::Unix(path) => {
            let path: Arc<Path> = path.as_path().into();
            endpoint("localhost")?.connect_with_connector_lazy(tower::service_fn(move |_: http::Uri| {
                let path = path.clone();
                async move { UnixStream::connect(&*path).await.map(TokioIo::new) }
            }))
        }
        CollectorAddress::Abstract(name) => {
            let name: Arc<[u8]> = name.as_slice().into();
            endpoint("localhost")?.connect_with_connector_lazy(tower::service_fn(move |_: http::Uri| {
                let connected = connect_abstract(&name);
                async move { connected.map(TokioIo::new) }
            }))
        }
    })
}

/// Connects to an abstract socket. The kernel does not block: it refuses if the backlog is full.
fn connect_abstract(name: &[u8]) -> io::Result<UnixStream> {
    let stream = StdUnixStream::connect_addr(&SocketAddr::from_abstract_name(name)?)?;
    stream.set_nonblocking(true)?;
    UnixStream::from_std(stream)
}

/// Spans between their end and their export.
#[derive(Debug)]
struct Ledger {
    queued: AtomicUsize,
    metrics: TraceMetrics,
    reported_at: Mutex<Option<Instant>>,
}

impl Ledger {
    /// Counts lost spans; logs the first loss, and then one in ten minutes.
    fn lost(&self, spans: usize, cause: &str) {
        self.metrics.dropped(spans);
        let now = Instant::now();
        let mut reported_at = self.reported_at.lock().unwrap_or_else(PoisonError::into_inner);
        if reported_at.is_none_or(|at| now.duration_since(at) >= REPORT_INTERVAL) {
            *reported_at = Some(now);
            drop(reported_at);
            error!(err = cause, spans, "Failed to export traces");
        }
    }
}

/// Bounds the queue: the library's processor drops what does not fit without counting it.
#[derive(Debug)]
struct CountedProcessor {
    inner: BatchSpanProcessor,
    ledger: Arc<Ledger>,
}

impl SpanProcessor for CountedProcessor {
    fn on_start(&self, span: &mut Span, context: &Context) {
        self.inner.on_start(span, context);
    }

    fn on_end(&self, span: SpanData) {
        if !span.span_context.is_sampled() {
            return;
        }
        if self.ledger.queued.fetch_add(1, Ordering::Relaxed) >= QUEUE {
            self.ledger.queued.fetch_sub(1, Ordering::Relaxed);
            self.ledger.lost(1, "the queue of ended spans is full");
            return;
        }
        self.inner.on_end(span);
    }

    fn force_flush(&self) -> OTelSdkResult {
        self.inner.force_flush()
    }

    fn shutdown_with_timeout(&self, timeout: Duration) -> OTelSdkResult {
        self.inner.shutdown_with_timeout(timeout)
    }

    fn set_resource(&mut self, resource: &Resource) {
        self.inner.set_resource(resource);
    }
}

/// Counts the spans of failed export requests.
#[derive(Debug)]
struct CountedExporter<E> {
    inner: E,
    ledger: Arc<Ledger>,
}

impl<E: SpanExporter> SpanExporter for CountedExporter<E> {
    async fn export(&self, batch: Vec<SpanData>) -> OTelSdkResult {
        let spans = batch.len();
        self.ledger.queued.fetch_sub(spans, Ordering::Relaxed);
        let exported = self.inner.export(batch).await;
        if let Err(error) = &exported {
            self.ledger.lost(spans, &error.to_string());
        }
        exported
    }

    fn shutdown_with_timeout(&self, timeout: Duration) -> OTelSdkResult {
        self.inner.shutdown_with_timeout(timeout)
    }

    fn force_flush(&self) -> OTelSdkResult {
        self.inner.force_flush()
    }

    fn set_resource(&mut self, resource: &Resource) {
        self.inner.set_resource(resource);
    }
}
