//! Whether somebody may: any of the subresources will do (spec 04 §6.4).

use std::sync::Arc;

use tracing::error;

use super::{access_cache::AccessCache, identity::Identity, policy::Policy};
use crate::ports::AccessRequest;

/// The answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// He may.
    Allowed,
    /// He may not: 403.
    Forbidden {
        /// The body of the answer, its newline included.
        text: String,
    },
    /// It cannot be found out: 500.
    Failed {
        /// The body of the answer; no newline ends it.
        text: String,
    },
}

/// Who decides.
enum Mode {
    AlwaysAllow,
    Standalone(Policy),
    Webhook { cache: Arc<AccessCache>, node: String },
}

/// Tells whether somebody may.
pub struct Authorizer {
    mode: Mode,
}

impl Authorizer {
    /// Everybody may everything.
    pub fn always_allow() -> Self {
        Self { mode: Mode::AlwaysAllow }
    }

    /// Without an API server: what the policy says.
    pub fn standalone(policy: Policy) -> Self {
        Self { mode: Mode::Standalone(policy) }
    }

    /// The API server decides about the node of that name.
    pub fn webhook(cache: Arc<AccessCache>, node: impl Into<String>) -> Self {
        Self { mode: Mode::Webhook { cache, node: node.into() } }
    }

    /// Whether somebody may do something with any of these subresources of `nodes`, asked for in
    /// that order up to the first that is allowed.
    pub async fn authorize(&self, identity: &Identity, verb: &str, subresources: &[&str]) -> Verdict {
        for subresource in subresources {
            match self.may(identity, verb, subresource).await {
                Ok(true) => return Verdict::Allowed,
                Ok(false) => {}
                Err(cause) => {
                    let user = &identity.name;
                    error!(user = %user, verb, resource = "nodes", subresource, err = cause, "Authorization error");
                    let text = format!(
                        "Authorization error (user={user}, verb={verb}, resource=nodes, subresource={subresource})"
                    );
                    return Verdict::Failed { text };
                }
            }
        }
        let (user, all) = (&identity.name, subresources.join(" "));
        let text = format!("Forbidden (user={user}, verb={verb}, resource=nodes, subresource(s)=[{all}])\n");
        Verdict::Forbidden { text }
    }

    async fn may(&self, identity: &Identity, verb: &str, subresource: &str) -> Result<bool, String> {
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
