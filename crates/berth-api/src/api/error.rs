//! Why a call came to nothing. Pure. Spec 10 §2.6.

use std::time::Duration;

/// Why a call has no answer to go on with.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum ApiError {
    /// The server said no.
    #[error("{0}")]
    Refused(Box<ApiStatus>),
    /// Nobody listens, or TLS failed: the request was not made.
    #[error("{0}")]
    Unreachable(String),
    /// The connection was lost: the request may have been carried out.
    #[error("{0}")]
    Lost(String),
    /// No answer in time: the request may have been carried out.
    #[error("no answer within {0:?}")]
    Timeout(Duration),
    /// An answer that says nothing: not JSON, of another type, too large.
    #[error("{0}")]
    Malformed(String),
}

/// A `Status` of the API, made up from the code where the body is none.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct ApiStatus {
    /// HTTP status code.
    pub code: u16,
    /// Machine-readable: `NotFound`, `AlreadyExists`, `Conflict`, `Expired`; what is decided by.
    pub reason: String,
    /// For people.
    pub message: String,
    /// `details.causes`.
    pub causes: Vec<Cause>,
    /// How long the server asks to be left alone.
    pub retry_after: Option<Duration>,
}

/// One of the causes of a refusal.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Cause {
    /// Machine-readable (`FieldValueInvalid`).
    pub reason: String,
    /// For people.
    pub message: String,
    /// Which field.
    pub field: String,
}

impl std::fmt::Display for ApiStatus {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.message)
    }
}

impl ApiError {
    /// What the server said, if it said anything.
    pub fn status(&self) -> Option<&ApiStatus> {
        match self {
            Self::Refused(status) => Some(status),
            _ => None,
        }
    }

    /// HTTP status code of a refusal, else 0.
    pub fn code(&self) -> u16 {
        self.status().map_or(0, |status| status.code)
    }

    /// The reason of a refusal, else empty.
    pub fn reason(&self) -> &str {
        self.status().map_or("", |status| status.reason.as_str())
    }

    /// There is no such object.
    pub fn is_not_found(&self) -> bool {
        self.reason() == "NotFound"
    }

    /// An object of that name exists.
    pub fn is_already_exists(&self) -> bool {
        self.reason() == "AlreadyExists"
    }

    /// Somebody else changed it first, or a precondition does not hold.
    pub fn is_conflict(&self) -> bool {
        self.reason() == "Conflict"
    }

    /// We may not; also what is not there, for the node authorizer (spec 10 §6.1).
    pub fn is_forbidden(&self) -> bool {
        self.reason() == "Forbidden"
    }

    /// The request does not suit the object (422).
    pub fn is_invalid(&self) -> bool {
        self.reason() == "Invalid"
    }

    /// The version asked for is forgotten (410).
    pub fn is_gone(&self) -> bool {
        matches!(self.reason(), "Expired" | "Gone")
    }

    /// The server has too much to do (429).
    pub fn is_throttled(&self) -> bool {
        self.reason() == "TooManyRequests"
    }

    /// The version asked for has not come yet (spec 10 §3.2).
    pub fn is_version_too_large(&self) -> bool {
        self.status().is_some_and(|status| status.causes.iter().any(|cause| cause.reason == "ResourceVersionTooLarge"))
    }

    /// How long the server asks to be left alone.
    pub fn retry_after(&self) -> Option<Duration> {
        self.status()?.retry_after
    }
}
