//! Errors of API requests and the `Status` object of a refusal. Pure.
//!
//! Implements spec 10 §2.6.

use std::time::Duration;

/// Why a call has no usable response.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum ApiError {
    /// The server answered with an error status.
    #[error("{0}")]
    Refused(Box<ApiStatus>),
    /// The request was not sent: no connection, a failed TLS handshake, or no usable credentials.
    #[error("{0}")]
    Unreachable(String),
    /// The connection was lost: the server may have processed the request.
    #[error("{0}")]
    Lost(String),
    /// No response before the deadline: the server may have processed the request.
    #[error("request timed out after {0:?}")]
    Timeout(Duration),
    /// Unusable response: not JSON, of another type, or too large.
    #[error("{0}")]
    Malformed(String),
}

/// API `Status` object; synthesized from the HTTP status code where the body is none.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct ApiStatus {
    /// HTTP status code.
    pub code: u16,
    /// Machine-readable reason (`NotFound`, `AlreadyExists`, `Conflict`, `Expired`); error handling branches on it.
    pub reason: String,
    /// Human-readable message.
    pub message: String,
    /// `details.causes`.
    pub causes: Vec<ApiStatusCause>,
    /// Delay the server requests before a retry.
    pub retry_after: Option<Duration>,
}

/// One entry of `details.causes`.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct ApiStatusCause {
    /// Machine-readable reason (`FieldValueInvalid`).
    pub reason: String,
    /// Human-readable message.
    pub message: String,
    /// Field the cause refers to.
    pub field: String,
}

impl std::fmt::Display for ApiStatus {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.message)
    }
}

impl ApiError {
    /// The server's `Status`; `None` if the server did not answer with an error status.
    pub fn status(&self) -> Option<&ApiStatus> {
        match self {
            Self::Refused(status) => Some(status),
            _ => None,
        }
    }

    /// HTTP status code of a refusal, otherwise 0.
    pub fn code(&self) -> u16 {
        self.status().map_or(0, |status| status.code)
    }

    /// Machine-readable reason of a refusal, otherwise empty.
    pub fn reason(&self) -> &str {
        self.status().map_or("", |status| status.reason.as_str())
    }

    /// The object does not exist.
    pub fn is_not_found(&self) -> bool {
        self.reason() == "NotFound"
    }

    /// An object of that name already exists.
    pub fn is_already_exists(&self) -> bool {
        self.reason() == "AlreadyExists"
    }

    /// A concurrent update or an unmet precondition prevented the write.
    pub fn is_conflict(&self) -> bool {
        self.reason() == "Conflict"
    }

    /// The server denied access; the node authorizer also denies access to objects that do not exist (spec 10 §6.1).
    pub fn is_forbidden(&self) -> bool {
        self.reason() == "Forbidden"
    }

    /// The object failed validation (422).
    pub fn is_invalid(&self) -> bool {
        self.reason() == "Invalid"
    }

    /// The requested resource version has expired (410).
    pub fn is_gone(&self) -> bool {
        matches!(self.reason(), "Expired" | "Gone")
    }

    /// The server throttled the request (429).
    pub fn is_throttled(&self) -> bool {
        self.reason() == "TooManyRequests"
    }

    /// The requested resource version is newer than the server's cache (spec 10 §3.2).
    pub fn is_version_too_large(&self) -> bool {
        self.status().is_some_and(|status| status.causes.iter().any(|cause| cause.reason == "ResourceVersionTooLarge"))
    }

    /// Delay the server requests before a retry.
    pub fn retry_after(&self) -> Option<Duration> {
        self.status()?.retry_after
    }
}
