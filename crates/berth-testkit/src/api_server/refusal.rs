//! API errors as `Status` objects of a real server, and the few that are plain text. Pure.
//!
//! Implements spec 10a §3 "errors".

use serde_json::{Value, json};

/// Cause of a validation error: one invalid field.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Cause {
    /// Cause type: `FieldValueInvalid`, `FieldValueRequired`, …
    pub reason: &'static str,
    /// Field path: `metadata.uid`; empty if the cause concerns no field.
    pub field: String,
    /// Text after the field: `Invalid value: "U": field is immutable`.
    pub message: String,
}

impl Cause {
    /// Cause `field: Invalid value: "value": detail`; strings are quoted, other values are not.
    pub fn invalid(field: &str, value: &Value, detail: &str) -> Self {
        Self::new("FieldValueInvalid", field, format!("Invalid value: {value}: {detail}"))
    }

    /// Cause `field: Required value: detail`.
    pub fn required(field: &str, detail: &str) -> Self {
        let tail = if detail.is_empty() { String::new() } else { format!(": {detail}") };
        Self::new("FieldValueRequired", field, format!("Required value{tail}"))
    }

    /// Cause `field: Forbidden: detail`.
    pub fn forbidden(field: &str, detail: &str) -> Self {
        Self::new("FieldValueForbidden", field, format!("Forbidden: {detail}"))
    }

    /// Cause `field: Duplicate value: value`.
    pub fn duplicate(field: &str, value: &Value) -> Self {
        Self::new("FieldValueDuplicate", field, format!("Duplicate value: {value}"))
    }

    /// Cause with any reason and message.
    pub fn new(reason: &'static str, field: &str, message: impl Into<String>) -> Self {
        Self { reason, field: field.to_owned(), message: message.into() }
    }

    fn text(&self) -> String {
        if self.field.is_empty() { self.message.clone() } else { format!("{}: {}", self.field, self.message) }
    }
}

/// Object in the `details` of a refusal; empty if it concerns no object.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct About {
    /// `details.name`.
    pub name: String,
    /// `details.group`.
    pub group: String,
    /// `details.kind`: the resource's plural, or the kind for validation errors.
    pub kind: String,
}

/// Error response to a refused request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refusal {
    /// HTTP status.
    pub code: u16,
    /// `NotFound`, `Conflict`, …; may be empty.
    pub reason: String,
    /// Human-readable message.
    pub message: String,
    /// Object that the refusal concerns.
    pub about: Box<About>,
    /// `details.causes`.
    pub causes: Vec<Cause>,
    /// `details.retryAfterSeconds` and the `Retry-After` header, in seconds.
    pub retry_after: Option<u32>,
    /// Whether the body is the message as plain text instead of a `Status`.
    pub is_text: bool,
}

/// Splits `leases.coordination.k8s.io` into plural and group.
pub fn split(resource: &str) -> (&str, &str) {
    resource.split_once('.').unwrap_or((resource, ""))
}

impl Refusal {
    /// `Status` that concerns no object.
    pub fn new(code: u16, reason: &str, message: impl Into<String>) -> Self {
        Self {
            code,
            reason: reason.to_owned(),
            message: message.into(),
            about: Box::default(),
            causes: Vec::new(),
            retry_after: None,
            is_text: false,
        }
    }

    /// `Status` that concerns one object of a resource (`pods`, `leases.coordination.k8s.io`).
    pub fn about(code: u16, reason: &str, resource: &str, name: &str, message: impl Into<String>) -> Self {
        let (plural, group) = split(resource);
        let about = About { name: name.to_owned(), group: group.to_owned(), kind: plural.to_owned() };
        Self { about: Box::new(about), ..Self::new(code, reason, message) }
    }

    /// 404: the object does not exist.
    pub fn not_found(resource: &str, name: &str) -> Self {
        Self::about(404, "NotFound", resource, name, format!("{resource} \"{name}\" not found"))
    }

    /// 409: the object of a create exists already.
    pub fn already_exists(resource: &str, name: &str) -> Self {
        Self::about(409, "AlreadyExists", resource, name, format!("{resource} \"{name}\" already exists"))
    }

    /// 409: `Operation cannot be fulfilled on pods "p": why`.
    pub fn conflict(resource: &str, name: &str, why: &str) -> Self {
        let message = format!("Operation cannot be fulfilled on {resource} \"{name}\": {why}");
        Self::about(409, "Conflict", resource, name, message)
    }

    /// 409: the resource version is stale.
    pub fn modified(resource: &str, name: &str) -> Self {
        let why = "the object has been modified; please apply your changes to the latest version and try again";
        Self::conflict(resource, name, why)
    }

    /// 403: `pods "p" is forbidden: why`; without a name `pods is forbidden: why`.
    pub fn forbidden(resource: &str, name: &str, why: &str) -> Self {
        let name_part = if name.is_empty() { String::new() } else { format!(" \"{name}\"") };
        Self::about(403, "Forbidden", resource, name, format!("{resource}{name_part} is forbidden: {why}"))
    }

    /// 422: `Pod "p" is invalid: …`; kinds of named groups are `Lease.coordination.k8s.io`.
    pub fn invalid(kind: &str, name: &str, causes: Vec<Cause>) -> Self {
        let texts: Vec<String> = causes.iter().map(Cause::text).collect();
        let text = match texts.as_slice() {
            [one] => one.clone(),
            several => format!("[{}]", several.join(", ")),
        };
        let message = format!("{kind} \"{name}\" is invalid: {text}");
        Self { causes, ..Self::about(422, "Invalid", kind, name, message) }
    }

    /// 400: malformed request.
    pub fn bad_request(message: impl Into<String>) -> Self {
        Self::new(400, "BadRequest", message)
    }

    /// 401: not authenticated.
    pub fn unauthorized() -> Self {
        Self::new(401, "Unauthorized", "Unauthorized")
    }

    /// 500: `Internal error occurred: …`.
    pub fn internal(why: &str) -> Self {
        let message = format!("Internal error occurred: {why}");
        Self { causes: vec![Cause::new("", "", why)], ..Self::new(500, "InternalError", message) }
    }

    /// 500 without a reason: plain error of the server's own code.
    pub fn plain(message: impl Into<String>) -> Self {
        Self::new(500, "", message)
    }

    /// Plain-text response without a `Status`.
    pub fn text(code: u16, message: &str) -> Self {
        Self { is_text: true, ..Self::new(code, "", message) }
    }

    /// Adds a cause.
    #[must_use]
    pub fn because(mut self, cause: Cause) -> Self {
        self.causes.push(cause);
        self
    }

    /// Sets `Retry-After`, in seconds.
    #[must_use]
    pub fn after(mut self, seconds: u32) -> Self {
        self.retry_after = Some(seconds);
        self
    }

    /// The `Status` object.
    pub fn status(&self) -> Value {
        let mut status = json!({"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure",
                                "message": self.message, "code": self.code});
        let mut details = json!({});
        let About { name, group, kind } = &*self.about;
        for (key, value) in [("name", name), ("group", group), ("kind", kind)] {
            if !value.is_empty() {
                details[key] = json!(value);
            }
        }
        if !self.causes.is_empty() {
            details["causes"] = self.causes.iter().map(cause_value).collect();
        }
        if let Some(seconds) = self.retry_after {
            details["retryAfterSeconds"] = json!(seconds);
        }
        if !self.reason.is_empty() {
            status["reason"] = json!(self.reason);
        }
        if details != json!({}) {
            status["details"] = details;
        }
        status
    }
}

fn cause_value(cause: &Cause) -> Value {
    let mut value = json!({"message": cause.message});
    if !cause.reason.is_empty() {
        value["reason"] = json!(cause.reason);
    }
    if !cause.field.is_empty() {
        value["field"] = json!(cause.field);
    }
    value
}
