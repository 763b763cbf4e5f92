//! Spans: start, current span of a task, outcome, end.

use std::{
    fmt,
    sync::atomic::{AtomicBool, Ordering},
};

use http::HeaderMap;
use opentelemetry::{
    Context, KeyValue, StringValue, Value,
    trace::{FutureExt, SpanContext, SpanKind, Status, TraceContextExt, TraceId, TraceState, Tracer},
};
use opentelemetry_sdk::trace::{SdkTracer, SdkTracerProvider};

use super::{export, propagation};

/// Maximum length of an attribute's value or an error message, in bytes: both come from clients and runtimes, and thousands
/// of spans wait for export.
const TEXT_LIMIT: usize = 1024;

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

/// A span in progress; it ends when it is dropped. Without a tracer provider it is empty.
#[must_use]
pub struct Span {
    /// The span, for its descendants; `None` without a tracer provider.
    context: Option<Context>,
    /// Whether the span is a call that has no outcome yet: if it is dropped so, the call was cancelled.
    is_pending: AtomicBool,
}

/// Starts the span of a call to another process: a child of the current span, or a root span if there is none. A call
/// without [`Span::set_ok`] or [`Span::set_error`] was cancelled. `attributes` is not called if the span is not recorded.
pub fn client_span(scope: Scope, name: &'static str, attributes: impl FnOnce() -> Vec<KeyValue>) -> Span {
    let Some(provider) = export::provider() else { return Span::empty() };
    Span::start(&scope.tracer(provider), name, SpanKind::Client, Context::current(), attributes)
}

/// Starts a root span.
pub fn root_span(scope: Scope, name: &'static str, attributes: impl FnOnce() -> Vec<KeyValue>) -> Span {
    let Some(provider) = export::provider() else { return Span::empty() };
    Span::start(&scope.tracer(provider), name, SpanKind::Internal, Context::new(), attributes)
}

/// Starts the span of a received request: a root span with a link to the client's span, because clients are not trusted
/// to decide what is sampled. `describe` returns its name and attributes.
pub fn server_span(headers: &HeaderMap, describe: impl FnOnce() -> (&'static str, Vec<KeyValue>)) -> Span {
    let Some(provider) = export::provider() else { return Span::empty() };
    let (name, attributes) = describe();
    let span = Span::start(&Scope::Server.tracer(provider), name, SpanKind::Server, Context::new(), || attributes);
    if let (Some(context), Some(client)) = (&span.context, propagation::client_span(headers)) {
        let (trace, id, flags) = (client.trace_id(), client.span_id(), client.trace_flags());
        let without_state = SpanContext::new(trace, id, flags, true, TraceState::default());
        context.span().add_link(without_state, Vec::new());
    }
    span
}

impl Span {
    fn empty() -> Self {
        Self { context: None, is_pending: AtomicBool::new(false) }
    }

    pub(crate) fn start(
        tracer: &SdkTracer,
        name: &'static str,
        kind: SpanKind,
        parent: Context,
        attributes: impl FnOnce() -> Vec<KeyValue>,
    ) -> Self {
        let is_pending = kind == SpanKind::Client;
        let span = tracer.build_with_context(tracer.span_builder(name).with_kind(kind), &parent);
        let context = parent.with_span(span);
        if context.span().is_recording() {
            context.span().set_attributes(attributes().into_iter().map(bounded_attribute));
        }
        Self { context: Some(context), is_pending: is_pending.into() }
    }

    #[cfg(test)]
    pub(crate) fn context(&self) -> Context {
        self.context.clone().unwrap_or_default()
    }

    /// Runs work with this span as the current one.
    pub fn run<T>(&self, work: impl Future<Output = T>) -> impl Future<Output = T> {
        // Not an async function, which would store `work` twice.
        work.with_context(self.context.clone().unwrap_or_default())
    }

    /// Adds the trace context to the headers of a request.
    pub fn inject(&self, headers: &mut HeaderMap) {
        if let Some(context) = &self.context {
            propagation::inject(context, headers);
        }
    }

    /// Adds an attribute; `value` is not called if the span is not recorded.
    pub fn set_attribute(&self, key: &'static str, value: impl FnOnce() -> Value) {
        if let Some(context) = self.context.as_ref().filter(|context| context.span().is_recording()) {
            context.span().set_attribute(bounded_attribute(KeyValue::new(key, value())));
        }
    }

    /// Ends the call successfully.
    pub fn set_ok(&self) {
        self.is_pending.store(false, Ordering::Relaxed);
    }

    /// Sets the status to Error; `message` is not called if the span is not recorded.
    pub fn set_error(&self, message: impl FnOnce() -> String) {
        self.is_pending.store(false, Ordering::Relaxed);
        if let Some(context) = self.context.as_ref().filter(|context| context.span().is_recording()) {
            context.span().set_status(Status::error(bounded_text(&message())));
        }
    }
}

impl Drop for Span {
    fn drop(&mut self) {
        if self.is_pending.load(Ordering::Relaxed) {
            self.set_error(|| "canceled".to_owned());
        }
        if let Some(context) = &self.context {
            // Clones of the context in tasks that still run must not extend the span.
            context.span().end();
        }
    }
}

/// Sets the status of the current span to Error, and records the exception.
pub fn record_exception(message: &str) {
    Context::map_current(|context| {
        let span = context.span();
        if span.is_recording() {
            let message = bounded_text(message);
            span.record_error(&Exception(message.clone()));
            span.set_status(Status::error(message));
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

fn bounded_attribute(mut attribute: KeyValue) -> KeyValue {
    if let Value::String(text) = &mut attribute.value
        && text.as_str().len() > TEXT_LIMIT
    {
        *text = StringValue::from(bounded_text(text.as_str()));
    }
    attribute
}

fn bounded_text(text: &str) -> String {
    berth_types::cut_at_char(text, TEXT_LIMIT).to_owned()
}

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
