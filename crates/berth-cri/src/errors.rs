//! What can go wrong with a call to a runtime.

use std::time::Duration;

/// The result of a CRI call.
pub type CriResult<T> = Result<T, CriError>;

/// One cause per variant; the texts are part of waiting messages and events.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum CriError {
    /// The runtime answered with a gRPC error.
    #[error("rpc error: code = {} desc = {message}", code_name(*code))]
    Rpc {
        /// gRPC code.
        code: tonic::Code,
        /// The runtime's words.
        message: String,
    },
    /// No answer within the client's deadline.
    #[error("rpc error: code = DeadlineExceeded desc = {op}: no answer within {limit:?}")]
    TimedOut {
        /// The operation's metric label, e.g. `run_podsandbox`.
        op: &'static str,
        /// The deadline that passed.
        limit: Duration,
    },
    /// The answer lacks something it must have (spec 03a §2.2 "Reply validation").
    #[error("{0}")]
    Invalid(String),
    /// A command run by `ExecSync` ended with a code other than 0.
    #[error("command '{command}' exited with {code}: {stderr}")]
    Exit {
        /// The command, joined by blanks.
        command: String,
        /// Its exit code.
        code: i32,
        /// Its standard output.
        stdout: String,
        /// Its standard error.
        stderr: String,
    },
    /// A command run by `ExecSync` did not end in time.
    #[error("command timed out: \"{command}\" timed out after {limit:?}")]
    ExecTimedOut {
        /// The command, joined by blanks.
        command: String,
        /// The limit that passed.
        limit: Duration,
    },
}

impl CriError {
    /// Whether the runtime does not know the object.
    pub fn is_not_found(&self) -> bool {
        matches!(self, Self::Rpc { code: tonic::Code::NotFound, .. })
    }

    /// Whether the runtime does not know the call.
    pub fn is_unimplemented(&self) -> bool {
        matches!(self, Self::Rpc { code: tonic::Code::Unimplemented, .. })
    }

    /// Whether the outcome of the call is unknown: it may still be carried out.
    pub fn is_timeout(&self) -> bool {
        matches!(self, Self::TimedOut { .. } | Self::Rpc { code: tonic::Code::DeadlineExceeded, .. })
    }

    /// Whether the runtime could not be reached.
    pub fn is_unavailable(&self) -> bool {
        matches!(self, Self::Rpc { code: tonic::Code::Unavailable, .. })
    }
}

impl From<tonic::Status> for CriError {
    /// A status with a source was made on this side, because the connection broke: whatever
    /// the code, the runtime was not reached (as gRPC's Go library tells it).
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

/// The code as gRPC's Go library prints it; people grep for these.
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
