//! What the API server is asked about those who ask us (spec 04 §6).

use std::collections::BTreeMap;

use async_trait::async_trait;

use crate::auth::Identity;

/// Why there is no verdict.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct ReviewError(pub String);

/// Whose token it is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TokenVerdict {
    /// This user's.
    Accepted {
        /// User name.
        name: String,
        /// Unique id; may be empty.
        uid: String,
        /// Groups.
        groups: Vec<String>,
        /// What else is known.
        extra: BTreeMap<String, Vec<String>>,
    },
    /// Nobody's: the review says no and nothing else.
    Rejected,
    /// Nobody's: the review says what is wrong with it.
    Invalid(String),
}

/// Tells whose a bearer token is. Every call ends by itself.
#[async_trait]
pub trait TokenReviewer: Send + Sync + 'static {
    /// Reviews a token, without audiences.
    ///
    /// # Errors
    /// The reviewer cannot be reached or makes no sense.
    async fn review(&self, token: &str) -> Result<TokenVerdict, ReviewError>;
}

/// Who wants to do what with this node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AccessRequest {
    /// Who.
    pub identity: Identity,
    /// What he wants to do; may be empty.
    pub verb: String,
    /// With which subresource of `nodes`.
    pub subresource: String,
    /// The node's name.
    pub node: String,
}

/// What the reviewer says.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct AccessVerdict {
    /// Whether somebody allows it.
    pub allowed: bool,
    /// Whether somebody forbids it.
    pub denied: bool,
}

/// Tells whether somebody may do something. Every call ends by itself.
#[async_trait]
pub trait AccessReviewer: Send + Sync + 'static {
    /// Reviews an access.
    ///
    /// # Errors
    /// The reviewer cannot be reached or makes no sense.
    async fn review(&self, request: &AccessRequest) -> Result<AccessVerdict, ReviewError>;
}
