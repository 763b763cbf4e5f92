//! klog text format of a log record.
//!
//! `Lmmdd hh:mm:ss.uuuuuu PPPPPPP file:line] "message" err="…" key="value" …`
//!
//! Implements spec 01 §6.1.

use std::fmt::Write as _;

use jiff::tz::TimeZone;

use super::record::{FieldValue, LogRecord, Severity};
use berth_config::text::quote;

/// Formats a record as a line with its newline. Writing to a string cannot fail, so the results are ignored.
pub(super) fn line(record: &LogRecord<'_>, zone: &TimeZone, pid: u32) -> String {
    let mut out = String::with_capacity(160);
    let letter = match record.severity {
        Severity::Info => 'I',
        Severity::Warning => 'W',
        Severity::Error => 'E',
    };
    let at = zone.to_datetime(record.at);
    let _ = write!(
        out,
        "{letter}{:02}{:02} {:02}:{:02}:{:02}.{:06} {pid:7} {}:{}] {}",
        at.month(),
        at.day(),
        at.hour(),
        at.minute(),
        at.second(),
        at.subsec_nanosecond() / 1000,
        record.file.rsplit('/').next().unwrap_or("???"),
        record.line,
        quote(&record.fields.message),
    );
    if let Some(error) = &record.fields.error {
        text(&mut out, "err", error);
    }
    for (key, value) in &record.fields.values {
        match value {
            FieldValue::Text(value) => text(&mut out, key, value),
            FieldValue::Plain(value) => {
                let _ = write!(out, " {key}={value}");
            }
            FieldValue::List(items) => {
                let items: Vec<String> = items.iter().map(|item| quote(item)).collect();
                let _ = write!(out, " {key}=[{}]", items.join(","));
            }
        }
    }
    out.push('\n');
    out
}

/// Formats a string value: quoted, or as an indented block if it has several lines.
fn text(out: &mut String, key: &str, value: &str) {
    if !value.contains('\n') {
        let _ = write!(out, " {key}={}", quote(value));
        return;
    }
    let _ = writeln!(out, " {key}=<");
    for line in value.strip_suffix('\n').unwrap_or(value).split('\n') {
        let _ = writeln!(out, "\t{line}");
    }
    out.push_str(" >");
}
