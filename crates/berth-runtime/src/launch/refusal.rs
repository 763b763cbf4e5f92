//! Error of launch planning: a rejected CRI request, with gRPC status code and message. Pure.
//! Implements spec 09a §1.

/// A rejected request, with the message that the client receives.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("{text}")]
pub struct LaunchError {
    /// Determines the gRPC status code.
    pub kind: LaunchErrorKind,
    /// Message for the client.
    pub text: String,
}

/// gRPC status codes of rejections.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum LaunchErrorKind {
    /// The request contradicts itself or the interface.
    InvalidArgument,
    /// An object that the request names does not exist.
    NotFound,
    /// An object that the request needs is in the wrong state.
    FailedPrecondition,
    /// This host does not support the request.
    Unimplemented,
    /// Any other reason.
    Unknown,
}

impl LaunchError {
    /// `INVALID_ARGUMENT`.
    pub fn invalid(text: impl Into<String>) -> Self {
        Self { kind: LaunchErrorKind::InvalidArgument, text: text.into() }
    }

    /// `NOT_FOUND`.
    pub fn missing(text: impl Into<String>) -> Self {
        Self { kind: LaunchErrorKind::NotFound, text: text.into() }
    }

    /// `FAILED_PRECONDITION`.
    pub fn state(text: impl Into<String>) -> Self {
        Self { kind: LaunchErrorKind::FailedPrecondition, text: text.into() }
    }

    /// `UNIMPLEMENTED`: this host does not support the request.
    pub fn impossible(text: impl Into<String>) -> Self {
        Self { kind: LaunchErrorKind::Unimplemented, text: text.into() }
    }

    /// `UNKNOWN`, the code that other runtimes return for plain errors.
    pub fn plain(text: impl Into<String>) -> Self {
        Self { kind: LaunchErrorKind::Unknown, text: text.into() }
    }
}
