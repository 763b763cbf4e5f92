//! `tracing` layer that filters and formats events and writes them to the log streams.

use std::sync::Arc;

use jiff::{Timestamp, tz::TimeZone};
use tracing::{
    Event, Metadata, Subscriber,
    level_filters::LevelFilter,
    span::{Attributes, Id, Record as Values},
};
use tracing_subscriber::{Layer, layer::Context, registry::LookupSpan};

use super::{
    json,
    record::{FieldValue, Fields, LevelOf, LogRecord, Severity},
    streams::OutputStreams,
    text,
    verbosity::{Verbosity, implied, is_ours},
};

/// Text as klog writes it, or JSON.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum LogFormat {
    Text,
    Json,
}

/// Layer that writes klog lines.
pub(super) struct Klog {
    format: LogFormat,
    verbosity: Arc<Verbosity>,
    streams: Arc<OutputStreams>,
    zone: TimeZone,
    pid: u32,
}

impl Klog {
    pub(super) fn new(format: LogFormat, verbosity: Arc<Verbosity>, streams: Arc<OutputStreams>) -> Self {
        Self { format, verbosity, streams, zone: TimeZone::system(), pid: std::process::id() }
    }
}

impl<S: Subscriber + for<'a> LookupSpan<'a>> Layer<S> for Klog {
    fn max_level_hint(&self) -> Option<LevelFilter> {
        Some(self.verbosity.ceiling())
    }

    /// Filters by call site; an event with an explicit level is filtered in `event_enabled`.
    fn enabled(&self, metadata: &Metadata<'_>, _: Context<'_, S>) -> bool {
        if metadata.is_span() {
            // Span fields of other crates do not belong in the agent's records.
            return is_ours(metadata);
        }
        if metadata.fields().field("v").is_some() {
            return true;
        }
        implied(metadata).is_none_or(|level| level <= self.verbosity.of_file(metadata.file().unwrap_or_default()))
    }

    fn event_enabled(&self, event: &Event<'_>, _: Context<'_, S>) -> bool {
        let metadata = event.metadata();
        let Some(implied) = implied(metadata) else { return true };
        let mut level = LevelOf::default();
        event.record(&mut level);
        level.0.unwrap_or(implied) <= self.verbosity.of_file(metadata.file().unwrap_or_default())
    }

    fn on_new_span(&self, attributes: &Attributes<'_>, id: &Id, context: Context<'_, S>) {
        let mut fields = Fields::default();
        attributes.record(&mut fields);
        if let Some(span) = context.span(id) {
            span.extensions_mut().insert(fields);
        }
    }

    fn on_record(&self, id: &Id, values: &Values<'_>, context: Context<'_, S>) {
        if let Some(span) = context.span(id)
            && let Some(fields) = span.extensions_mut().get_mut::<Fields>()
        {
            values.record(fields);
        }
    }

    fn on_event(&self, event: &Event<'_>, context: Context<'_, S>) {
        let event_fields = Fields::of(event);
        let mut fields = Fields {
            message: event_fields.message,
            error: event_fields.error,
            level: event_fields.level,
            values: Vec::new(),
        };
        for span in context.event_scope(event).into_iter().flat_map(|scope| scope.from_root()) {
            if let Some(known) = span.extensions().get::<Fields>() {
                known.values.iter().for_each(|(key, value)| fields.add(key, value.clone()));
            }
        }
        event_fields.values.into_iter().for_each(|(key, value)| fields.add(key, value));
        if let Some(trace) = berth_otel::current_trace_id() {
            fields.add("trace_id", FieldValue::Text(trace.to_string()));
        }
        let metadata = event.metadata();
        let severity = Severity::of(*metadata.level());
        let record = LogRecord {
            severity,
            at: Timestamp::now(),
            file: metadata.file().unwrap_or("???"),
            line: metadata.line().unwrap_or(0),
            level: fields.level.or_else(|| implied(metadata)).unwrap_or(0),
            fields,
        };
        let line = match self.format {
            LogFormat::Text => text::line(&record, &self.zone, self.pid),
            LogFormat::Json => json::line(&record),
        };
        self.streams.write(severity == Severity::Error, &line);
    }
}
