//! CRI error type and result alias, with gRPC code names as Go prints them.

use std::time::Duration;

/// Result of a CRI call.
pub type CriResult<T> = Result<T, CriError>;

/// Error of a CRI call, one cause per variant; the texts appear in waiting messages and events.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum CriError {
    /// The runtime returned a gRPC error.
    #[error("rpc error: code = {} desc = {message}", code_name(*code))]
    Rpc {
        /// gRPC status code.
        code: tonic::Code,
        /// Error message of the runtime.
        message: String,
    },
    /// No response within the client's deadline.
    #[error("rpc error: code = DeadlineExceeded desc = {op}: no response within {limit:?}")]
    TimedOut {
        /// Metric label of the operation, e.g. `run_podsandbox`.
        op: &'static str,
        /// The exceeded deadline.
        limit: Duration,
    },
    /// The reply lacks a required field (spec 03a §2.2 "Reply validation").
    #[error("{0}")]
    Invalid(String),
    /// A command run by `ExecSync` exited with a code other than 0.
    #[error("command '{command}' exited with {code}: {stderr}")]
    Exit {
        /// The command, joined by spaces.
        command: String,
        /// Exit code.
        code: i32,
        /// Standard output.
        stdout: String,
        /// Standard error.
        stderr: String,
    },
    /// A command run by `ExecSync` exceeded its timeout.
    #[error("command timed out: \"{command}\" timed out after {limit:?}")]
    ExecTimedOut {
        /// The command, joined by spaces.
        command: String,
        /// The exceeded timeout.
        limit: Duration,
    },
}

impl CriError {
    /// Whether the runtime does not know the object.
    pub fn is_not_found(&self) -> bool {
        matches!(self, Self::Rpc { code: tonic::Code::NotFound, .. })
    }

    /// Whether the runtime does not implement the call.
    pub fn is_unimplemented(&self) -> bool {
        matches!(self, Self::Rpc { code: tonic::Code::Unimplemented, .. })
    }

    /// Whether the outcome of the call is unknown: the runtime may still complete it.
    pub fn is_timeout(&self) -> bool {
        matches!(self, Self::TimedOut { .. } | Self::Rpc { code: tonic::Code::DeadlineExceeded, .. })
    }

    /// Whether the runtime could not be reached.
    pub fn is_unavailable(&self) -> bool {
        matches!(self, Self::Rpc { code: tonic::Code::Unavailable, .. })
    }
}

impl From<tonic::Status> for CriError {
    /// A status `Unknown` or `Internal` with a source was created on the client side because the connection broke: the
    /// runtime was not reached, which gRPC's Go library reports as `Unavailable`.
    fn from(status: tonic::Status) -> Self {
        use tonic::Code;
        let broken = matches!(status.code(), Code::Unknown | Code::Internal);
        if let (true, Some(source)) = (broken, std::error::Error::source(&status)) {
            let mut message = status.message().to_owned();
            let mut next = Some(source);
            while let Some(cause) = next {
                let text = cause.to_string();
                if !message.contains(&text) {
                    message = format!("{message}: {text}");
                }
                next = cause.source();
            }
            return Self::Rpc { code: Code::Unavailable, message };
        }
        Self::Rpc { code: status.code(), message: status.message().to_owned() }
    }
}

/// Name of the code as gRPC's Go library prints it; people search logs for these names.
pub fn code_name(code: tonic::Code) -> &'static str {
    use tonic::Code;
    match code {
        Code::Ok => "OK",
        Code::Cancelled => "Canceled",
        Code::Unknown => "Unknown",
        Code::InvalidArgument => "InvalidArgument",
        Code::DeadlineExceeded => "DeadlineExceeded",
        Code::NotFound => "NotFound",
        Code::AlreadyExists => "AlreadyExists",
        Code::PermissionDenied => "PermissionDenied",
        Code::ResourceExhausted => "ResourceExhausted",
        Code::FailedPrecondition => "FailedPrecondition",
        Code::Aborted => "Aborted",
        Code::OutOfRange => "OutOfRange",
        Code::Unimplemented => "Unimplemented",
        Code::Internal => "Internal",
        Code::Unavailable => "Unavailable",
        Code::DataLoss => "DataLoss",
        Code::Unauthenticated => "Unauthenticated",
    }
}
