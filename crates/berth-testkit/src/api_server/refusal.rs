//! Why a request is refused: the `Status` object of a real server, and the few refusals that are plain text.
//! Pure. Spec 10a §3 "errors".

use serde_json::{Value, json};

/// One field that is wrong.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Cause {
    /// `FieldValueInvalid`, `FieldValueRequired`, …
    pub reason: &'static str,
    /// `metadata.uid`; empty where no field is meant.
    pub field: String,
    /// What stands after the field: `Invalid value: "U": field is immutable`.
    pub message: String,
}

impl Cause {
    /// `field: Invalid value: "value": detail`; strings come quoted, other values as they are.
    pub fn invalid(field: &str, value: &Value, detail: &str) -> Self {
        Self::new("FieldValueInvalid", field, format!("Invalid value: {value}: {detail}"))
    }

    /// `field: Required value: detail`
    pub fn required(field: &str, detail: &str) -> Self {
        let tail = if detail.is_empty() { String::new() } else { format!(": {detail}") };
        Self::new("FieldValueRequired", field, format!("Required value{tail}"))
    }

    /// `field: Forbidden: detail`
    pub fn forbidden(field: &str, detail: &str) -> Self {
        Self::new("FieldValueForbidden", field, format!("Forbidden: {detail}"))
    }

    /// `field: Duplicate value: value`
    pub fn duplicate(field: &str, value: &Value) -> Self {
        Self::new("FieldValueDuplicate", field, format!("Duplicate value: {value}"))
    }

    /// Any.
    pub fn new(reason: &'static str, field: &str, message: impl Into<String>) -> Self {
        Self { reason, field: field.to_owned(), message: message.into() }
    }

    fn text(&self) -> String {
        if self.field.is_empty() { self.message.clone() } else { format!("{}: {}", self.field, self.message) }
    }
}

/// What a refusal is about; empty where it is about nothing.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct About {
    /// `details.name`.
    pub name: String,
    /// `details.group`.
    pub group: String,
    /// `details.kind`: a resource's plural, or a kind for what is invalid.
    pub kind: String,
}

/// A refused request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refusal {
    /// HTTP status.
    pub code: u16,
    /// `NotFound`, `Conflict`, …; may be empty.
    pub reason: String,
    /// For people.
    pub message: String,
    /// What it is about.
    pub about: Box<About>,
    /// `details.causes`.
    pub causes: Vec<Cause>,
    /// `details.retryAfterSeconds`, and the header.
    pub retry_after: Option<u32>,
    /// The body is the message as plain text, no `Status`.
    pub is_text: bool,
}

/// `leases.coordination.k8s.io` as plural and group.
pub fn split(resource: &str) -> (&str, &str) {
    resource.split_once('.').unwrap_or((resource, ""))
}

impl Refusal {
    /// A `Status` about no object.
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

    /// About one object of a resource (`pods`, `leases.coordination.k8s.io`).
    pub fn about(code: u16, reason: &str, resource: &str, name: &str, message: impl Into<String>) -> Self {
        let (plural, group) = split(resource);
        let about = About { name: name.to_owned(), group: group.to_owned(), kind: plural.to_owned() };
        Self { about: Box::new(about), ..Self::new(code, reason, message) }
    }

    /// 404 of an object.
    pub fn not_found(resource: &str, name: &str) -> Self {
        Self::about(404, "NotFound", resource, name, format!("{resource} \"{name}\" not found"))
    }

    /// 409 of a create.
    pub fn already_exists(resource: &str, name: &str) -> Self {
        Self::about(409, "AlreadyExists", resource, name, format!("{resource} \"{name}\" already exists"))
    }

    /// 409: `Operation cannot be fulfilled on pods "p": why`.
    pub fn conflict(resource: &str, name: &str, why: &str) -> Self {
        let message = format!("Operation cannot be fulfilled on {resource} \"{name}\": {why}");
        Self::about(409, "Conflict", resource, name, message)
    }

    /// 409 of a stale resource version.
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

    /// 400.
    pub fn bad_request(message: impl Into<String>) -> Self {
        Self::new(400, "BadRequest", message)
    }

    /// 401.
    pub fn unauthorized() -> Self {
        Self::new(401, "Unauthorized", "Unauthorized")
    }

    /// 500 `Internal error occurred: …`.
    pub fn internal(why: &str) -> Self {
        let message = format!("Internal error occurred: {why}");
        Self { causes: vec![Cause::new("", "", why)], ..Self::new(500, "InternalError", message) }
    }

    /// A plain error of the server's own code: 500, no reason.
    pub fn plain(message: impl Into<String>) -> Self {
        Self::new(500, "", message)
    }

    /// That text and nothing else.
    pub fn text(code: u16, message: &str) -> Self {
        Self { is_text: true, ..Self::new(code, "", message) }
    }

    /// With more causes.
    #[must_use]
    pub fn because(mut self, cause: Cause) -> Self {
        self.causes.push(cause);
        self
    }

    /// Try again after so many seconds.
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
