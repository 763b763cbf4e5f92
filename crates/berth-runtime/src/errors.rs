//! Why the runtime refuses or fails, and the gRPC code of each. Texts are those of spec 09a §1.

use tonic::{Code, Status};

use berth_metrics::Outcome;

/// What callers tell apart.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ErrorKind {
    /// There is no such object.
    NotFound,
    /// The request itself is wrong.
    Invalid,
    /// The object is in another state.
    State,
    /// The name belongs to something else.
    Taken,
    /// It took too long.
    Deadline,
    /// There is no room left, or too much at once.
    Exhausted,
    /// Not built, or not possible here.
    Unimplemented,
    /// Not now.
    Unavailable,
    /// Everything else.
    Other,
}

/// Why something was not done.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("{text}")]
pub struct RuntimeError {
    /// What kind of failure it is.
    pub kind: ErrorKind,
    /// For people, and for the kubelet, which reads some of them.
    pub text: String,
}

/// The result of whatever the runtime does.
pub type RuntimeResult<T> = Result<T, RuntimeError>;

impl RuntimeError {
    /// A failure of that kind.
    pub fn new(kind: ErrorKind, text: impl Into<String>) -> Self {
        Self { kind, text: text.into() }
    }

    /// The request is wrong.
    pub fn invalid(text: impl Into<String>) -> Self {
        Self::new(ErrorKind::Invalid, text)
    }

    /// The object is in another state.
    pub fn state(text: impl Into<String>) -> Self {
        Self::new(ErrorKind::State, text)
    }

    /// Something failed that has no kind of its own.
    pub fn other(text: impl Into<String>) -> Self {
        Self::new(ErrorKind::Other, text)
    }

    /// It took too long; names the step.
    pub fn deadline(text: impl Into<String>) -> Self {
        Self::new(ErrorKind::Deadline, text)
    }

    /// There is no such container.
    pub fn no_container(id: &str) -> Self {
        let text = format!("an error occurred when try to find container \"{id}\": not found");
        Self::new(ErrorKind::NotFound, text)
    }

    /// There is no such sandbox.
    pub fn no_sandbox(id: &str) -> Self {
        let text = format!("an error occurred when try to find sandbox \"{id}\": not found");
        Self::new(ErrorKind::NotFound, text)
    }

    /// The sandbox is not ready.
    pub fn not_ready(id: &str) -> Self {
        Self::state(format!("sandbox container \"{id}\" is not running"))
    }

    /// The same failure, saying first during what.
    #[must_use]
    pub fn during(self, what: &str) -> Self {
        Self { text: format!("{what}: {}", self.text), ..self }
    }

    /// A failed file operation: what was tried, on which path, and what the kernel said. A full disk is told apart.
    pub fn file(what: &str, path: &std::path::Path, error: &std::io::Error) -> Self {
        let kind = match error.kind() {
            std::io::ErrorKind::StorageFull | std::io::ErrorKind::QuotaExceeded => ErrorKind::Exhausted,
            _ => ErrorKind::Other,
        };
        Self::new(kind, format!("{what} {}: {error}", path.display()))
    }
}

/// How something ended, as it is counted.
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
