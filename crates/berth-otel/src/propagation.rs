//! Trace context in request headers: W3C `traceparent` and `tracestate`.
//!
//! Baggage is not passed on: the agent has none of its own, and that of strangers must not reach the runtime or the API
//! server.

use std::sync::LazyLock;

use http::{HeaderMap, HeaderName, HeaderValue};
use opentelemetry::{
    Context,
    propagation::{Extractor, Injector, TextMapPropagator},
    trace::{SpanContext, TraceContextExt},
};
use opentelemetry_sdk::propagation::TraceContextPropagator;

static PROPAGATOR: LazyLock<TraceContextPropagator> = LazyLock::new(TraceContextPropagator::new);

/// Span of the client of a request; `None` if the headers are absent or malformed.
pub(crate) fn client_span(headers: &HeaderMap) -> Option<SpanContext> {
    let context = PROPAGATOR.extract_with_context(&Context::new(), &HeaderReader(headers));
    let span = context.span().span_context().clone();
    span.is_valid().then_some(span)
}

/// Adds the trace context to a request, in place of what is there.
pub(crate) fn inject(context: &Context, headers: &mut HeaderMap) {
    PROPAGATOR.inject_context(context, &mut HeaderWriter(headers));
}

struct HeaderReader<'a>(&'a HeaderMap);

impl Extractor for HeaderReader<'_> {
    fn get(&self, key: &str) -> Option<&str> {
        self.0.get(key)?.to_str().ok()
    }

    fn keys(&self) -> Vec<&str> {
        self.0.keys().map(HeaderName::as_str).collect()
    }
}

struct HeaderWriter<'a>(&'a mut HeaderMap);

impl Injector for HeaderWriter<'_> {
    fn set(&mut self, key: &str, value: String) {
        if value.is_empty() {
            return; // an empty `tracestate`
        }
        if let (Ok(name), Ok(value)) = (HeaderName::try_from(key), HeaderValue::try_from(value)) {
            self.0.insert(name, value);
        }
    }
}
