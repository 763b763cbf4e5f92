//! Authentication and authorization of the main listener's requests.

use async_trait::async_trait;
use axum::{
    http::{StatusCode, request},
    response::{IntoResponse, Response},
};
use rustls::pki_types::CertificateDer;
use tracing::info;

use super::{
    auth::{AuthenticationError, Authenticator, AuthorizationDecision, Authorizer, SourceAddress, UserInfo},
    pipeline::{Peer, RequestAuthorizer},
    routes::text::coded,
    streaming::bare,
};

/// Authenticates and authorizes each request.
pub struct AuthFilter {
    authenticator: Authenticator,
    authorizer: Authorizer,
}

impl AuthFilter {
    /// Combines an authenticator and an authorizer.
    pub fn new(authenticator: Authenticator, authorizer: Authorizer) -> Self {
        Self { authenticator, authorizer }
    }
}

#[async_trait]
impl RequestAuthorizer for AuthFilter {
    async fn authenticate(
        &self,
        parts: &mut request::Parts,
        certificates: &[CertificateDer<'static>],
    ) -> Result<UserInfo, Response> {
        if let Some(peer) = parts.extensions.get::<Peer>() {
            let source = SourceAddress(peer.address.ip());
            parts.extensions.insert(source);
        }
        self.authenticator.authenticate(parts, certificates).await.map_err(|refusal| {
            let code = match refusal {
                AuthenticationError::InvalidCredentials => "unauthenticated",
                AuthenticationError::TooMany => "too-many-reviews",
            };
            coded(refusal.into_response(), code)
        })
    }

    async fn authorize(&self, who: &UserInfo, verb: &str, subresources: &[&str]) -> Result<(), Response> {
        match self.authorizer.authorize(who, verb, subresources).await {
            AuthorizationDecision::Allowed => Ok(()),
            AuthorizationDecision::Forbidden { text } => {
                info!(v = 2, user = %who.name, verb, subresources = ?subresources, "Forbidden");
                Err(bare(StatusCode::FORBIDDEN, "forbidden", &text))
            }
            AuthorizationDecision::Failed { text } => {
                Err(bare(StatusCode::INTERNAL_SERVER_ERROR, "authorization-failed", &text))
            }
        }
    }
}
