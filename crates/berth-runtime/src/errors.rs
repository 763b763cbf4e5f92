//! Runtime errors and their gRPC codes. Texts are those of spec 09a §1.

use tonic::{Code, Status};

use berth_metrics::Outcome;

/// Kind of an error, as far as callers distinguish it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ErrorKind {
    /// The object does not exist.
    NotFound,
    /// The request is invalid.
    Invalid,
    /// The object is in the wrong state.
    State,
    /// The name is reserved for another object.
    Taken,
    /// The operation timed out.
    Deadline,
    /// A disk is full, or a limit is reached.
    Exhausted,
    /// Not implemented, or not supported by this host.
    Unimplemented,
    /// Temporarily unavailable.
    Unavailable,
    /// Any other failure.
    Other,
}

/// Failure of a CRI call; the kind determines its gRPC code.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("{text}")]
pub struct RuntimeError {
    /// Kind of the error.
    pub kind: ErrorKind,
    /// Message for people; the kubelet parses some of them.
    pub text: String,
}

/// Result of a runtime operation.
pub type RuntimeResult<T> = Result<T, RuntimeError>;

impl RuntimeError {
    /// An error of that kind.
    pub fn new(kind: ErrorKind, text: impl Into<String>) -> Self {
        Self { kind, text: text.into() }
    }

    /// The request is invalid.
    pub fn invalid(text: impl Into<String>) -> Self {
        Self::new(ErrorKind::Invalid, text)
    }

    /// The object is in the wrong state.
    pub fn state(text: impl Into<String>) -> Self {
        Self::new(ErrorKind::State, text)
    }

    /// A failure without a kind of its own.
    pub fn other(text: impl Into<String>) -> Self {
        Self::new(ErrorKind::Other, text)
    }

    /// The operation timed out; the text names the step.
    pub fn deadline(text: impl Into<String>) -> Self {
        Self::new(ErrorKind::Deadline, text)
    }

    /// The container does not exist.
    pub fn no_container(id: &str) -> Self {
        let text = format!("an error occurred when try to find container \"{id}\": not found");
        Self::new(ErrorKind::NotFound, text)
    }

    /// The sandbox does not exist.
    pub fn no_sandbox(id: &str) -> Self {
        let text = format!("an error occurred when try to find sandbox \"{id}\": not found");
        Self::new(ErrorKind::NotFound, text)
    }

    /// The sandbox is not ready.
    pub fn not_ready(id: &str) -> Self {
        Self::state(format!("sandbox container \"{id}\" is not running"))
    }

    /// Prefixes the text with the operation that failed.
    #[must_use]
    pub fn during(self, what: &str) -> Self {
        Self { text: format!("{what}: {}", self.text), ..self }
    }

    /// A failed file operation, with path and I/O error; a full disk or quota is [`ErrorKind::Exhausted`].
    pub fn file(what: &str, path: &std::path::Path, error: &std::io::Error) -> Self {
        let kind = match error.kind() {
            std::io::ErrorKind::StorageFull | std::io::ErrorKind::QuotaExceeded => ErrorKind::Exhausted,
            _ => ErrorKind::Other,
        };
        Self::new(kind, format!("{what} {}: {error}", path.display()))
    }
}

/// Outcome label of a result for metrics.
pub fn outcome<T>(result: &RuntimeResult<T>) -> Outcome {
    match result {
        Ok(_) => Outcome::Succeeded,
        Err(error) if error.kind == ErrorKind::Deadline => Outcome::TimedOut,
        Err(_) => Outcome::Failed,
    }
}

impl From<RuntimeError> for Status {
    fn from(error: RuntimeError) -> Self {
        let code = match error.kind {
            ErrorKind::NotFound => Code::NotFound,
            ErrorKind::Invalid => Code::InvalidArgument,
            ErrorKind::State => Code::FailedPrecondition,
            ErrorKind::Taken => Code::AlreadyExists,
            ErrorKind::Deadline => Code::DeadlineExceeded,
            ErrorKind::Exhausted => Code::ResourceExhausted,
            ErrorKind::Unimplemented => Code::Unimplemented,
            ErrorKind::Unavailable => Code::Unavailable,
            ErrorKind::Other => Code::Unknown,
        };
        Status::new(code, error.text)
    }
}
