//! Sample OTLP collector: receives spans by gRPC on a TCP port, and shows them to the test.

use std::{collections::BTreeMap, net::SocketAddr, time::Duration};

use opentelemetry_proto::tonic::{
    collector::trace::v1::{
        ExportTraceServiceRequest, ExportTraceServiceResponse,
        trace_service_server::{TraceService, TraceServiceServer},
    },
    common::v1::{AnyValue, KeyValue, any_value::Value},
    trace::v1::{Span, status::StatusCode},
};
use tokio::{net::TcpListener, sync::watch, task::JoinHandle, time::timeout};
use tokio_stream::wrappers::TcpListenerStream;
use tonic::{Request, Response, Status, transport::Server};

/// Maximum time that [`OtlpCollector::wait_for`] waits.
const LIMIT: Duration = Duration::from_secs(60);

/// A received span, with identifiers in hexadecimal.
#[derive(Clone, PartialEq, Debug)]
pub struct ReceivedSpan {
    /// Attributes of the resource.
    pub resource: BTreeMap<String, String>,
    /// Name of the instrumentation scope.
    pub scope: String,
    /// What it covers: an operation, a method, or a route.
    pub name: String,
    /// ID of its trace.
    pub trace_id: String,
    /// Identifies it within its trace.
    pub span_id: String,
    /// ID of its parent; empty for a root span.
    pub parent_id: String,
    /// Trace IDs and span IDs of its links.
    pub links: Vec<(String, String)>,
    /// Names of its events.
    pub events: Vec<String>,
    /// Values as text.
    pub attributes: BTreeMap<String, String>,
    /// Description of its error; `None` if its status is not Error.
    pub error: Option<String>,
}

/// Collector that listens until it is dropped.
pub struct OtlpCollector {
    address: SocketAddr,
    received: watch::Receiver<Vec<ReceivedSpan>>,
    serving: JoinHandle<()>,
}

impl OtlpCollector {
    /// Listens on a free port of the loopback interface.
    ///
    /// # Panics
    /// No port is free.
    pub async fn start() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
        let address = listener.local_addr().expect("a bound socket");
        let (sender, received) = watch::channel(Vec::new());
        let serving = tokio::spawn(async move {
            let service = TraceServiceServer::new(Receiver(sender));
            let served = Server::builder().add_service(service).serve_with_incoming(TcpListenerStream::new(listener));
            served.await.expect("served");
        });
        Self { address, received, serving }
    }

    /// `host:port`, as `tracing.endpoint` expects it.
    pub fn endpoint(&self) -> String {
        self.address.to_string()
    }

    /// All received spans, as soon as `found` is true of them.
    ///
    /// # Panics
    /// It is not within a minute.
    pub async fn wait_for(&self, found: impl Fn(&[ReceivedSpan]) -> bool) -> Vec<ReceivedSpan> {
        let mut received = self.received.clone();
        match timeout(LIMIT, received.wait_for(|spans| found(spans))).await {
            Ok(spans) => spans.expect("the collector runs").clone(),
            Err(_) => panic!("not received within {LIMIT:?}: {:#?}", self.received.borrow()),
        }
    }
}

impl Drop for OtlpCollector {
    fn drop(&mut self) {
        self.serving.abort();
    }
}

struct Receiver(watch::Sender<Vec<ReceivedSpan>>);

#[tonic::async_trait]
impl TraceService for Receiver {
    async fn export(
        &self,
        request: Request<ExportTraceServiceRequest>,
    ) -> Result<Response<ExportTraceServiceResponse>, Status> {
        let mut spans = Vec::new();
        for of_resource in request.into_inner().resource_spans {
            let resource = attributes(of_resource.resource.map(|resource| resource.attributes).unwrap_or_default());
            for of_scope in of_resource.scope_spans {
                let scope = of_scope.scope.map(|scope| scope.name).unwrap_or_default();
                spans.extend(of_scope.spans.into_iter().map(|span| received(&resource, &scope, span)));
            }
        }
        self.0.send_modify(|known| known.append(&mut spans));
        Ok(Response::new(ExportTraceServiceResponse::default()))
    }
}

fn received(resource: &BTreeMap<String, String>, scope: &str, span: Span) -> ReceivedSpan {
    let status = span.status.unwrap_or_default();
    ReceivedSpan {
        resource: resource.clone(),
        scope: scope.to_owned(),
        name: span.name,
        trace_id: hex::encode(&span.trace_id),
        span_id: hex::encode(&span.span_id),
        parent_id: hex::encode(&span.parent_span_id),
        links: span.links.iter().map(|link| (hex::encode(&link.trace_id), hex::encode(&link.span_id))).collect(),
        events: span.events.into_iter().map(|event| event.name).collect(),
        attributes: attributes(span.attributes),
        error: (status.code == i32::from(StatusCode::Error)).then_some(status.message),
    }
}

fn attributes(values: Vec<KeyValue>) -> BTreeMap<String, String> {
    values.into_iter().map(|pair| (pair.key, text(pair.value))).collect()
}

fn text(value: Option<AnyValue>) -> String {
    match value.and_then(|value| value.value) {
        Some(Value::StringValue(text)) => text,
        Some(Value::IntValue(number)) => number.to_string(),
        Some(Value::BoolValue(is)) => is.to_string(),
        other => format!("{other:?}"),
    }
}
