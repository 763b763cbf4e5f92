//! Log record: severity, source location, and fields of an event and its spans, before formatting.

use std::fmt::{Debug, Write as _};

use tracing::{
    Event, Level,
    field::{Field, Visit},
};

/// Severity of a record.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Severity {
    Info,
    Warning,
    Error,
}

impl Severity {
    pub(super) fn of(level: Level) -> Self {
        match level {
            Level::ERROR => Self::Error,
            Level::WARN => Self::Warning,
            _ => Self::Info,
        }
    }
}

/// Text, number, boolean, or list, as the format prints it.
#[derive(Clone, PartialEq, Debug)]
pub(super) enum FieldValue {
    /// String, error, or other value printed as a string.
    Text(String),
    /// Number or boolean in JSON notation.
    Plain(String),
    /// List of strings.
    List(Vec<String>),
}

/// Fields of an event or a span.
#[derive(Clone, PartialEq, Debug, Default)]
pub(super) struct Fields {
    pub(super) message: String,
    pub(super) error: Option<String>,
    pub(super) level: Option<u32>,
    pub(super) values: Vec<(&'static str, FieldValue)>,
}

impl Fields {
    pub(super) fn of(event: &Event<'_>) -> Self {
        let mut fields = Self::default();
        event.record(&mut fields);
        fields
    }

    /// Adds a value. A later value replaces an earlier one with the same key and takes the later position, unless both
    /// are equal.
    pub(super) fn add(&mut self, key: &'static str, value: FieldValue) {
        if let Some(at) = self.values.iter().position(|(known, _)| *known == key) {
            if self.values.get(at).is_some_and(|(_, known)| *known == value) {
                return;
            }
            self.values.remove(at);
        }
        self.values.push((key, value));
    }

    fn text(&mut self, field: &Field, text: String) {
        match field.name() {
            "message" => self.message = text,
            "err" | "error" => self.error = Some(text),
            // A field called "message" would replace the record's own message.
            "eventMessage" => self.add("message", FieldValue::Text(text)),
            name => self.add(name.strip_prefix("r#").unwrap_or(name), FieldValue::Text(text)),
        }
    }

    fn plain(&mut self, field: &Field, value: impl ToString) {
        self.add(field.name(), FieldValue::Plain(value.to_string()));
    }
}

impl Visit for Fields {
    fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
        let mut text = String::new();
        // Writing to a string fails only if the value's `Debug` fails; the text so far is used.
        let _ = write!(text, "{value:?}");
        match serde_json::from_str::<Vec<String>>(&text) {
            Ok(list) if text.starts_with('[') => self.add(field.name(), FieldValue::List(list)),
            _ => self.text(field, text),
        }
    }

    fn record_str(&mut self, field: &Field, value: &str) {
        self.text(field, value.to_owned());
    }

    fn record_error(&mut self, field: &Field, value: &(dyn std::error::Error + 'static)) {
        self.text(field, value.to_string());
    }

    fn record_u64(&mut self, field: &Field, value: u64) {
        if field.name() == "v" {
            self.level = Some(u32::try_from(value).unwrap_or(u32::MAX));
        } else {
            self.plain(field, value);
        }
    }

    fn record_i64(&mut self, field: &Field, value: i64) {
        if field.name() == "v" {
            self.level = Some(u32::try_from(value).unwrap_or(0));
        } else {
            self.plain(field, value);
        }
    }

    fn record_f64(&mut self, field: &Field, value: f64) {
        match serde_json::Number::from_f64(value) {
            Some(_) => self.plain(field, value),
            None => self.text(field, value.to_string()),
        }
    }

    fn record_bool(&mut self, field: &Field, value: bool) {
        self.plain(field, value);
    }
}

/// Visitor that extracts the level of an event only.
#[derive(Default)]
pub(super) struct LevelOf(pub(super) Option<u32>);

impl Visit for LevelOf {
    fn record_debug(&mut self, _: &Field, _: &dyn Debug) {}

    fn record_u64(&mut self, field: &Field, value: u64) {
        if field.name() == "v" {
            self.0 = Some(u32::try_from(value).unwrap_or(u32::MAX));
        }
    }

    fn record_i64(&mut self, field: &Field, value: i64) {
        self.record_u64(field, u64::try_from(value).unwrap_or(0));
    }
}

/// Record ready to be formatted.
#[derive(Clone, PartialEq, Debug)]
pub(super) struct LogRecord<'a> {
    pub(super) severity: Severity,
    /// Time of the event; the format converts it to local time if needed.
    pub(super) at: jiff::Timestamp,
    /// Source file, as the compiler reports it.
    pub(super) file: &'a str,
    pub(super) line: u32,
    /// Verbosity level of an info record.
    pub(super) level: u32,
    pub(super) fields: Fields,
}
