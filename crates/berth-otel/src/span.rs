//! Spans: start, current span of a task, end.

use std::{borrow::Cow, fmt};

use http::HeaderMap;
use opentelemetry::{
    Context, KeyValue, Value,
    baggage::{BaggageExt, KeyValueMetadata},
    trace::{FutureExt, SpanKind, Status, TraceContextExt, TraceId, Tracer},
};
use opentelemetry_sdk::trace::{SdkTracer, SdkTracerProvider};

use super::{
    export,
    propagation::{self, RemoteContext},
};

/// Instrumentation scope of a span: the name of the package that records it in the reference.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Scope {
    /// Pod workers.
    Kubelet,
    /// Container garbage collection.
    Kuberuntime,
    /// Image garbage collection.
    Images,
    /// Calls of the CRI.
    GrpcClient,
    /// Requests to the API server.
    HttpClient,
    /// Requests to the agent's server.
    Server,
}

impl Scope {
    fn name(self) -> &'static str {
        match self {
            Self::Kubelet => "k8s.io/kubernetes/pkg/kubelet",
            Self::Kuberuntime => "k8s.io/kubernetes/pkg/kubelet/kuberuntime",
            Self::Images => "k8s.io/kubernetes/pkg/kubelet/images",
            Self::GrpcClient => "go.opentelemetry.io/contrib/instrumentation/google.golang.org/grpc/otelgrpc",
            Self::HttpClient => "go.opentelemetry.io/contrib/instrumentation/net/http/otelhttp",
            Self::Server => "go.opentelemetry.io/contrib/instrumentation/github.com/emicklei/go-restful/otelrestful",
        }
    }

    pub(crate) fn tracer(self, provider: &SdkTracerProvider) -> SdkTracer {
        use opentelemetry::trace::TracerProvider;
        provider.tracer(self.name())
    }
}

/// A span in progress; it ends when it is dropped. Without a tracer provider it only carries the trace context of its
/// parent.
#[must_use]
pub struct Span {
    context: Context,
    /// Whether the span in the context is this one, not the parent.
    is_own: bool,
}

/// Starts a span of the current span, or a root span if there is none. `attributes` is not called while no span is
/// recorded.
pub fn span(
    scope: Scope,
    name: impl Into<Cow<'static, str>>,
    kind: SpanKind,
    attributes: impl FnOnce() -> Vec<KeyValue>,
) -> Span {
    let Some(provider) = export::provider() else { return Span { context: Context::current(), is_own: false } };
    Span::start(&scope.tracer(provider), name.into(), kind, Context::current(), attributes)
}

/// Starts a root span.
pub fn root_span(scope: Scope, name: &'static str, attributes: impl FnOnce() -> Vec<KeyValue>) -> Span {
    let Some(provider) = export::provider() else { return Span { context: Context::new(), is_own: false } };
    Span::start(&scope.tracer(provider), name.into(), SpanKind::Internal, Context::new(), attributes)
}

/// Starts the span of a received request: a root span with a link to the client's span, because clients are not trusted
/// to decide what is sampled.
pub fn server_span(name: &'static str, remote: RemoteContext, attributes: impl FnOnce() -> Vec<KeyValue>) -> Span {
    let RemoteContext(remote) = remote;
    let Some(provider) = export::provider() else { return Span { context: remote, is_own: false } };
    let tracer = Scope::Server.tracer(provider);
    let client = remote.span().span_context().clone();
    // Baggage of the client is kept; its span is not the parent.
    let entries = remote
        .baggage()
        .iter()
        .map(|(key, (value, metadata))| KeyValueMetadata::new(key.clone(), value.clone(), metadata.clone()));
    let parent = Context::new().with_baggage(entries);
    let span = Span::start(&tracer, name.into(), SpanKind::Server, parent, attributes);
    if client.is_valid() {
        span.context.span().add_link(client, Vec::new());
    }
    span
}

impl Span {
    pub(crate) fn start(
        tracer: &SdkTracer,
        name: Cow<'static, str>,
        kind: SpanKind,
        parent: Context,
        attributes: impl FnOnce() -> Vec<KeyValue>,
    ) -> Self {
        let span = tracer.build_with_context(tracer.span_builder(name).with_kind(kind), &parent);
        let context = parent.with_span(span);
        let started = context.span();
        if started.is_recording() {
            started.set_attributes(attributes());
        }
        Self { context, is_own: true }
    }

    #[cfg(test)]
    pub(crate) fn context(&self) -> &Context {
        &self.context
    }

    /// Runs work with this span as the current one.
    pub async fn run<T>(&self, work: impl Future<Output = T>) -> T {
        work.with_context(self.context.clone()).await
    }

    /// Adds the trace context to the headers of a request.
    pub fn inject(&self, headers: &mut HeaderMap) {
        if self.context.has_active_span() {
            propagation::inject(&self.context, headers);
        }
    }

    /// Adds an attribute.
    pub fn set_attribute(&self, attribute: KeyValue) {
        if self.is_own {
            self.context.span().set_attribute(attribute);
        }
    }

    /// Adds an attribute whose value costs something; `value` is not called if the span is not recorded.
    pub fn set_attribute_with(&self, key: &'static str, value: impl FnOnce() -> Value) {
        if self.is_own && self.context.span().is_recording() {
            self.context.span().set_attribute(KeyValue::new(key, value()));
        }
    }

    /// Sets the status to Error.
    pub fn set_error(&self, message: impl Into<Cow<'static, str>>) {
        if self.is_own {
            self.context.span().set_status(Status::error(message));
        }
    }
}

impl Drop for Span {
    fn drop(&mut self) {
        // Clones of the context in tasks that still run must not extend the span.
        if self.is_own {
            self.context.span().end();
        }
    }
}

/// Sets the status of the current span to Error, and records the exception.
pub fn record_exception(message: &str) {
    Context::map_current(|context| {
        let span = context.span();
        if span.is_recording() {
            span.record_error(&Exception(message.to_owned()));
            span.set_status(Status::error(message.to_owned()));
        }
    });
}

#[derive(Debug)]
struct Exception(String);

impl fmt::Display for Exception {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Exception {}

/// Makes the current span also the current one of work that another task runs.
pub fn in_current_span<T>(work: impl Future<Output = T>) -> impl Future<Output = T> {
    work.with_current_context()
}

/// ID of the trace of the current span, if it is sampled.
pub fn current_trace_id() -> Option<TraceId> {
    Context::map_current(|context| {
        let span = context.span();
        let current = span.span_context();
        current.is_sampled().then(|| current.trace_id())
    })
}
