//! Authorization of requests: always allow, standalone policy, or SubjectAccessReview (spec 04 §6.4).

use std::sync::Arc;

use tracing::error;

use super::{access_cache::AccessCache, identity::UserInfo, policy::AuthorizationPolicy};
use crate::ports::AccessRequest;

/// Result of the authorization.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum AuthorizationDecision {
    /// The user may access at least one of the subresources.
    Allowed,
    /// Forbidden: 403.
    Forbidden {
        /// Body of the response, newline included.
        text: String,
    },
    /// The authorization failed: 500.
    Failed {
        /// Body of the response, without a newline.
        text: String,
    },
}

/// Authorization mode.
enum Mode {
    AlwaysAllow,
    Standalone(AuthorizationPolicy),
    Webhook { cache: Arc<AccessCache>, node: String },
}

/// Authorizes requests to this node.
pub struct Authorizer {
    mode: Mode,
}

impl Authorizer {
    /// Creates an authorizer that allows everything (`AlwaysAllow`).
    pub fn always_allow() -> Self {
        Self { mode: Mode::AlwaysAllow }
    }

    /// Creates an authorizer for standalone mode, which evaluates the policy.
    pub fn standalone(policy: AuthorizationPolicy) -> Self {
        Self { mode: Mode::Standalone(policy) }
    }

    /// Creates an authorizer that queries the API server about access to the node.
    pub fn webhook(cache: Arc<AccessCache>, node: impl Into<String>) -> Self {
        Self { mode: Mode::Webhook { cache, node: node.into() } }
    }

    /// Authorizes the verb for any of these subresources of `nodes`; they are checked in order until one is allowed.
    pub async fn authorize(&self, identity: &UserInfo, verb: &str, subresources: &[&str]) -> AuthorizationDecision {
        for subresource in subresources {
            match self.may(identity, verb, subresource).await {
                Ok(true) => return AuthorizationDecision::Allowed,
                Ok(false) => {}
                Err(cause) => {
                    let user = &identity.name;
                    error!(user = %user, verb, resource = "nodes", subresource, err = cause, "Authorization error");
                    let text = format!(
                        "Authorization error (user={user}, verb={verb}, resource=nodes, subresource={subresource})"
                    );
                    return AuthorizationDecision::Failed { text };
                }
            }
        }
        let (user, all) = (&identity.name, subresources.join(" "));
        let text = format!("Forbidden (user={user}, verb={verb}, resource=nodes, subresource(s)=[{all}])\n");
        AuthorizationDecision::Forbidden { text }
    }

    async fn may(&self, identity: &UserInfo, verb: &str, subresource: &str) -> Result<bool, String> {
        match &self.mode {
            Mode::AlwaysAllow => Ok(true),
            Mode::Standalone(policy) => Ok(policy.allows(identity, verb, subresource)),
            Mode::Webhook { cache, node } => {
                let (identity, node) = (identity.clone(), node.clone());
                let (verb, subresource) = (verb.to_owned(), subresource.to_owned());
                cache.decide(AccessRequest { identity, verb, subresource, node }).await
            }
        }
    }
}
