//! Traces of the agent: OpenTelemetry spans, propagation of trace context, OTLP export. Implements spec 08 §13.
//!
//! ```text
//!  worker, GC ── root span ─┐
//!  server ── new root, link ┤ current span (per task) ──► CRI and API requests: child span, traceparent header
//!                           └─ ended spans ──► queue ──► batches ──► OTLP collector
//! ```
//!
//! The tracer provider is one per process, as the agent log is: [`start_export`] installs it. Without it no span is
//! recorded, and no trace context is sent.

mod collector_address;
mod export;
mod propagation;
mod span;
#[cfg(test)]
mod tests;

pub use collector_address::InvalidCollectorAddress;
pub use export::{ExportError, TraceExportSettings, start_export, stop_export};
pub use opentelemetry::{KeyValue, Value};
pub use span::{Scope, Span, client_span, current_trace_id, in_current_span, record_exception, root_span, server_span};
