//! Trace context in request headers: W3C `traceparent`, `tracestate`, and `baggage`.

use std::sync::LazyLock;

use http::{HeaderMap, HeaderName, HeaderValue};
use opentelemetry::{
    Context,
    propagation::{Extractor, Injector, TextMapCompositePropagator, TextMapPropagator},
};
use opentelemetry_sdk::propagation::{BaggagePropagator, TraceContextPropagator};

static PROPAGATOR: LazyLock<TextMapCompositePropagator> = LazyLock::new(|| {
    TextMapCompositePropagator::new(vec![Box::new(TraceContextPropagator::new()), Box::new(BaggagePropagator::new())])
});

/// Trace context that a client sent.
#[derive(Clone, Debug)]
pub struct RemoteContext(pub(crate) Context);

/// Reads the trace context of a request; malformed headers count as absent.
pub fn extract(headers: &HeaderMap) -> RemoteContext {
    RemoteContext(PROPAGATOR.extract_with_context(&Context::new(), &HeaderReader(headers)))
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
        if let (Ok(name), Ok(value)) = (HeaderName::try_from(key), HeaderValue::try_from(value)) {
            self.0.insert(name, value);
        }
    }
}
