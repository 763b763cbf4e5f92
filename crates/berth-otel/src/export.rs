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
use opentelemetry_otlp::{RetryPolicy, WithExportConfig, WithTonicConfig};
use opentelemetry_sdk::{
    Resource,
    error::OTelSdkResult,
    trace::{
        BatchConfigBuilder, BatchSpanProcessor, Sampler, SdkTracerProvider, Span, SpanData, SpanExporter, SpanLimits,
        SpanProcessor,
    },
};
use tokio::net::UnixStream;
use tonic::transport::{Channel, Endpoint};
use tracing::{error, warn};

use super::collector_address::{CollectorAddress, InvalidCollectorAddress};
use berth_metrics::{Registry, TraceMetrics};

/// Ended spans that wait for their batch (spec 08 §18).
const QUEUE: usize = 2048;
/// Spans of one export request.
const BATCH: usize = 512;
/// Longest wait of an ended span for its batch to fill.
const DELAY: Duration = Duration::from_secs(5);
/// Time in which a batch is sent again after a failure.
const EXPORT_TIMEOUT: Duration = Duration::from_secs(30);
/// Timeout of one export request.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(10);
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// First and longest pause between two attempts to export a batch. A collector that restarts loses nothing.
const RETRY_PAUSES: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(5));
/// Bound of attempts; [`EXPORT_TIMEOUT`] is reached before.
const MAX_RETRIES: usize = 20;
/// Pings on the connection to the collector: without them a connection whose other end is gone is used for minutes.
const KEEP_ALIVE: Duration = Duration::from_secs(20);
/// Least time between two log records about lost spans.
const REPORT_INTERVAL: Duration = Duration::from_secs(600);

/// Set once; absent while tracing is not configured.
static EXPORT: OnceLock<TraceExport> = OnceLock::new();

pub(crate) struct TraceExport {
    pub(crate) provider: SdkTracerProvider,
    losses: Arc<SpanLosses>,
}

#[cfg(test)]
impl TraceExport {
    pub(crate) fn queued(&self) -> usize {
        self.losses.queued.load(Ordering::Relaxed)
    }
}

pub(crate) fn provider() -> Option<&'static SdkTracerProvider> {
    EXPORT.get().map(|export| &export.provider)
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
    let export = build(settings, TraceMetrics::new(registry), EXPORT_TIMEOUT)?;
    EXPORT.set(export).map_err(|_| ExportError::Started)
}

/// Stops recording, and exports what is queued for up to `limit`; kubelet loses it.
pub async fn stop_export(limit: Duration) {
    let Some(export) = EXPORT.get() else { return };
    let shutdown = tokio::task::spawn_blocking(move || export.provider.shutdown_with_timeout(limit));
    let in_time = tokio::time::timeout(limit + Duration::from_millis(100), shutdown).await;
    if !matches!(in_time, Ok(Ok(Ok(())))) {
        warn!(limit = ?limit, "Timed out exporting the last spans");
    }
    export.losses.record(export.losses.queued.load(Ordering::Relaxed), "the agent stops");
    export.losses.report("the agent stops");
}

/// Builds the provider; a batch is sent again for up to `export_timeout`.
pub(crate) fn build(
    settings: &TraceExportSettings,
    metrics: TraceMetrics,
    export_timeout: Duration,
) -> Result<TraceExport, ExportError> {
    let address = CollectorAddress::parse(settings.endpoint.as_deref())?;
    let exporter = opentelemetry_otlp::SpanExporter::builder()
        .with_tonic()
        .with_channel(channel(&address)?)
        .with_timeout(export_timeout)
        .with_retry_policy(
            RetryPolicy::default()
                .with_max_retries(MAX_RETRIES)
                .with_initial_delay(RETRY_PAUSES.0)
                .with_max_delay(RETRY_PAUSES.1),
        )
        .build()
        .map_err(|error| ExportError::Exporter(error.to_string()))?;
    let losses = Arc::new(SpanLosses { queued: AtomicUsize::new(0), metrics, unreported: Mutex::default() });
    let exporter = CountedExporter { inner: exporter, losses: losses.clone() };
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
    let provider = SdkTracerProvider::builder()
        .with_sampler(sampler(settings.sampling_rate_per_million))
        .with_resource(resource)
        .with_span_limits(SpanLimits::default())
        .with_span_processor(CountedProcessor { inner, losses: losses.clone() })
        .build();
    Ok(TraceExport { provider, losses })
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
        let endpoint = endpoint.connect_timeout(CONNECT_TIMEOUT).timeout(REQUEST_TIMEOUT);
        Ok::<_, ExportError>(endpoint.http2_keep_alive_interval(KEEP_ALIVE).keep_alive_timeout(REQUEST_TIMEOUT))
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

/// Counts of ended spans: those that wait for export, and those that are lost.
#[derive(Debug)]
struct SpanLosses {
    queued: AtomicUsize,
    metrics: TraceMetrics,
    unreported: Mutex<UnreportedLosses>,
}

/// Lost spans since the last log record, and when that was written.
#[derive(Default, Debug)]
struct UnreportedLosses {
    spans: usize,
    reported_at: Option<Instant>,
}

impl SpanLosses {
    /// Counts lost spans; logs the first loss, and then the sum once in ten minutes.
    fn record(&self, spans: usize, cause: &str) {
        self.metrics.dropped(spans);
        let mut unreported = self.unreported.lock().unwrap_or_else(PoisonError::into_inner);
        unreported.spans += spans;
        let is_due = unreported.reported_at.is_none_or(|at| at.elapsed() >= REPORT_INTERVAL);
        drop(unreported);
        if is_due {
            self.report(cause);
        }
    }

    /// Logs the losses since the last record, if there are any.
    fn report(&self, cause: &str) {
        let mut unreported = self.unreported.lock().unwrap_or_else(PoisonError::into_inner);
        let spans = std::mem::take(&mut unreported.spans);
        if spans > 0 {
            unreported.reported_at = Some(Instant::now());
            drop(unreported);
            error!(err = cause, spans, "Failed to export traces");
        }
    }
}

/// Bounds the queue: the library's processor drops what does not fit without counting it.
#[derive(Debug)]
struct CountedProcessor {
    inner: BatchSpanProcessor,
    losses: Arc<SpanLosses>,
}

impl SpanProcessor for CountedProcessor {
    fn on_start(&self, span: &mut Span, context: &Context) {
        self.inner.on_start(span, context);
    }

    fn on_end(&self, span: SpanData) {
        if !span.span_context.is_sampled() {
            return;
        }
        if self.losses.queued.fetch_add(1, Ordering::Relaxed) >= QUEUE {
            self.losses.queued.fetch_sub(1, Ordering::Relaxed);
            self.losses.record(1, "the queue of ended spans is full");
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
    losses: Arc<SpanLosses>,
}

impl<E: SpanExporter> SpanExporter for CountedExporter<E> {
    async fn export(&self, batch: Vec<SpanData>) -> OTelSdkResult {
        let spans = batch.len();
        self.losses.queued.fetch_sub(spans, Ordering::Relaxed);
        let exported = self.inner.export(batch).await;
        if let Err(error) = &exported {
            self.losses.record(spans, &error.to_string());
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
