//! Ports for TokenReview and SubjectAccessReview by the API server (spec 04 §6).

use std::collections::BTreeMap;

use async_trait::async_trait;

use crate::auth::UserInfo;

/// Error text of a review that has no verdict.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct ReviewError(pub String);

/// Result of a token review.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TokenVerdict {
    /// The token authenticates this user.
    Accepted {
        /// User name.
        name: String,
        /// UID of the user; may be empty.
        uid: String,
        /// Groups from the TokenReview, before `system:authenticated` is added.
        groups: Vec<String>,
        /// Extra attributes of the user.
        extra: BTreeMap<String, Vec<String>>,
    },
    /// Not authenticated, without an error text.
    Rejected,
    /// Not authenticated, with the review's error text.
    Invalid(String),
}

/// Authenticates bearer tokens. Every call is bounded by a timeout of the implementation.
#[async_trait]
pub trait TokenReviewer: Send + Sync + 'static {
    /// Reviews a token without audiences.
    ///
    /// # Errors
    /// If the reviewer is unreachable or its response is invalid.
    async fn review(&self, token: &str) -> Result<TokenVerdict, ReviewError>;
}

/// Access to this node's API that needs authorization.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AccessRequest {
    /// Authenticated user.
    pub identity: UserInfo,
    /// Requested verb; may be empty.
    pub verb: String,
    /// Subresource of `nodes`.
    pub subresource: String,
    /// Node name.
    pub node: String,
}

/// Result of an access review.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct AccessVerdict {
    /// Whether an authorizer allows the access.
    pub allowed: bool,
    /// Whether an authorizer denies the access explicitly.
    pub denied: bool,
}

/// Authorizes requests. Every call is bounded by a timeout of the implementation.
#[async_trait]
pub trait AccessReviewer: Send + Sync + 'static {
    /// Reviews an access request.
    ///
    /// # Errors
    /// If the reviewer is unreachable or its response is invalid.
    async fn review(&self, request: &AccessRequest) -> Result<AccessVerdict, ReviewError>;
}
