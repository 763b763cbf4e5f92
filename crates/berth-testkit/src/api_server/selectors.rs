//! Field and label selectors: parsing and matching. Pure.
//!
//! Implements spec 10a §3.

use serde_json::Value;

use super::refusal::Refusal;

/// Selector operator.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Op {
    /// `=` or `==`.
    Equal,
    /// `!=`; matches a missing value.
    NotEqual,
    /// `in (a,b)`.
    In,
    /// `notin (a,b)`; matches a missing value.
    NotIn,
    /// `key`.
    Exists,
    /// `!key`.
    Absent,
}

/// One requirement of a selector; all must match.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Requirement {
    /// Field path or label key: `spec.nodeName`.
    pub key: String,
    /// Operator.
    pub op: Op,
    /// One value; several for `In` and `NotIn`; none for `Exists` and `Absent`.
    pub values: Vec<String>,
}

impl Requirement {
    fn new(key: &str, op: Op, values: Vec<String>) -> Self {
        Self { key: key.trim().to_owned(), op, values }
    }

    fn holds(&self, value: Option<&str>) -> bool {
        let is_listed = value.is_some_and(|value| self.values.iter().any(|v| v == value));
        match self.op {
            Op::Equal | Op::In => is_listed,
            Op::NotEqual | Op::NotIn => !is_listed,
            Op::Exists => value.is_some(),
            Op::Absent => value.is_none(),
        }
    }
}

/// Parses a field selector: `=`, `==`, `!=`, comma. Implements spec 10a §3.
///
/// # Errors
/// 400: the selector is malformed.
pub fn parse_fields(text: &str) -> Result<Vec<Requirement>, Refusal> {
    let parts = text.split(',').filter(|part| !part.is_empty());
    let requirement = |part: &str| {
        let wrong = || Refusal::bad_request(format!("invalid selector: '{part}'; can't understand '{part}'"));
        let (key, op, value) = equality(part).ok_or_else(wrong)?;
        Ok(Requirement::new(key, op, vec![value.to_owned()]))
    };
    parts.map(requirement).collect()
}

/// Checks that the resource supports these fields; name and namespace are always supported.
///
/// # Errors
/// 400: a field is not supported.
pub fn check_fields(selector: &[Requirement], known: &[&str]) -> Result<(), Refusal> {
    let is_known = |key: &str| ["metadata.name", "metadata.namespace"].contains(&key) || known.contains(&key);
    match selector.iter().find(|requirement| !is_known(&requirement.key)) {
        Some(other) => Err(Refusal::bad_request(format!("field label not supported: {}", other.key))),
        None => Ok(()),
    }
}

fn equality(part: &str) -> Option<(&str, Op, &str)> {
    let split = |sign: &str| part.split_once(sign).map(|(key, value)| (key.trim(), value.trim()));
    let not = split("!=").map(|(key, value)| (key, Op::NotEqual, value));
    not.or_else(|| split("==").or_else(|| split("=")).map(|(key, value)| (key, Op::Equal, value)))
}

/// Parses a label selector: equality, `in`, `notin`, existence.
///
/// # Errors
/// 400: the selector is malformed.
pub fn parse_labels(text: &str) -> Result<Vec<Requirement>, Refusal> {
    outside_brackets(text).into_iter().map(|part| label(part.trim())).collect()
}

/// Splits at the commas outside of parentheses.
fn outside_brackets(text: &str) -> Vec<&str> {
    let (mut parts, mut start, mut depth) = (Vec::new(), 0, 0_u32);
    for (at, c) in text.char_indices() {
        match c {
            '(' => depth += 1,
            ')' => depth = depth.saturating_sub(1),
            ',' if depth == 0 => {
                parts.push(&text[start..at]);
                start = at + 1;
            }
            _ => {}
        }
    }
    parts.push(&text[start..]);
    parts.retain(|part| !part.trim().is_empty());
    parts
}

fn label(part: &str) -> Result<Requirement, Refusal> {
    let wrong = || Refusal::bad_request(format!("unable to parse requirement: found '{part}'"));
    if let Some((head, list)) = part.split_once('(') {
        let list = list.trim_end().strip_suffix(')').ok_or_else(wrong)?;
        let values = list.split(',').map(|value| value.trim().to_owned()).collect();
        return match head.split_whitespace().collect::<Vec<_>>().as_slice() {
            [key, "in"] => Ok(Requirement::new(key, Op::In, values)),
            [key, "notin"] => Ok(Requirement::new(key, Op::NotIn, values)),
            _ => Err(wrong()),
        };
    }
    if let Some((key, op, value)) = equality(part) {
        return Ok(Requirement::new(key, op, vec![value.to_owned()]));
    }
    match part.strip_prefix('!') {
        Some(key) => Ok(Requirement::new(key, Op::Absent, Vec::new())),
        None if part.contains(char::is_whitespace) => Err(wrong()),
        None => Ok(Requirement::new(part, Op::Exists, Vec::new())),
    }
}

/// Whether the selectors match an object.
pub fn selects(fields: &[Requirement], labels: &[Requirement], object: &Value) -> bool {
    fields.iter().all(|r| r.holds(Some(&field(object, &r.key))))
        && labels.iter().all(|r| r.holds(object["metadata"]["labels"][r.key.as_str()].as_str()))
}

/// Text of a field; a missing field is empty, as in a real server.
fn field(object: &Value, key: &str) -> String {
    if key == "source" {
        let component = &object["source"]["component"];
        return text(if component.is_string() { component } else { &object["reportingComponent"] });
    }
    let value = key.split('.').fold(object, |value, part| &value[part]);
    match (key, value) {
        ("spec.hostNetwork" | "spec.unschedulable", Value::Null) => "false".to_owned(),
        _ => text(value),
    }
}

fn text(value: &Value) -> String {
    match value {
        Value::Null => String::new(),
        Value::String(text) => text.clone(),
        other => other.to_string(),
    }
}
