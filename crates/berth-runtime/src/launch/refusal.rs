//! Why a request is not carried out. Pure. Behaviour: spec 09a §1.

/// A request that is refused, with the text its sender gets.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("{text}")]
pub struct Refusal {
    /// Which status code it becomes.
    pub kind: RefusalKind,
    /// For people.
    pub text: String,
}

/// Status codes of refusals.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum RefusalKind {
    /// The request contradicts itself or the interface.
    InvalidArgument,
    /// Something it names is not there.
    NotFound,
    /// Something it needs is in another state.
    FailedPrecondition,
    /// It is not possible on this machine.
    Unimplemented,
    /// Everything else.
    Unknown,
}

impl Refusal {
    /// The request is wrong.
    pub fn invalid(text: impl Into<String>) -> Self {
        Self { kind: RefusalKind::InvalidArgument, text: text.into() }
    }

    /// Something is not there.
    pub fn missing(text: impl Into<String>) -> Self {
        Self { kind: RefusalKind::NotFound, text: text.into() }
    }

    /// Something is in another state.
    pub fn state(text: impl Into<String>) -> Self {
        Self { kind: RefusalKind::FailedPrecondition, text: text.into() }
    }

    /// Not on this machine.
    pub fn impossible(text: impl Into<String>) -> Self {
        Self { kind: RefusalKind::Unimplemented, text: text.into() }
    }

    /// Plain text, as other runtimes answer.
    pub fn plain(text: impl Into<String>) -> Self {
        Self { kind: RefusalKind::Unknown, text: text.into() }
    }
}
