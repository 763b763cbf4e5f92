//! Request authentication: client certificate, bearer or WebSocket token, anonymous (spec 04 §6.1).

use std::{
    net::IpAddr,
    num::NonZeroUsize,
    sync::{Arc, Mutex, PoisonError},
};

use arc_swap::ArcSwapOption;
use axum::{
    http::{StatusCode, header, request::Parts},
    response::{IntoResponse, Response},
};
use jiff::{SignedDuration, Timestamp};
use lru::LruCache;
use rustls::pki_types::CertificateDer;
use sha2::{Digest, Sha256};
use tracing::info;

use super::{
    bearer,
    identity::UserInfo,
    token_cache::{TokenCache, TokenLookup},
    x509::{self, ClientCas, VerifiedIdentity, X509Error},
};
use berth_metrics::AuthMetrics;

/// How long a verified certificate chain is cached, as long as the CA bundle does not change.
const PROOF_TTL: SignedDuration = SignedDuration::from_secs(60);
/// Capacity of the cache of verified chains.
const PROOFS: NonZeroUsize = NonZeroUsize::new(1024).expect("not zero");

/// Reason why a request is not authenticated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AuthenticationError {
    /// Missing or invalid credentials: 401.
    InvalidCredentials,
    /// Too many token reviews are in progress: 429.
    TooMany,
}

impl AuthenticationError {
    /// Status code and body of the response.
    pub fn answer(self) -> (StatusCode, &'static str) {
        match self {
            Self::InvalidCredentials => (StatusCode::UNAUTHORIZED, "Unauthorized"),
            Self::TooMany => (StatusCode::TOO_MANY_REQUESTS, "Too many requests, please try again later."),
        }
    }
}

impl IntoResponse for AuthenticationError {
    fn into_response(self) -> Response {
        let (status, body) = self.answer();
        let mut response = (status, [(header::CONTENT_TYPE, "text/plain; charset=utf-8")], body).into_response();
        if self == Self::TooMany {
            response.headers_mut().insert(header::RETRY_AFTER, header::HeaderValue::from_static("1"));
        }
        response
    }
}

/// Current client CAs; `None`: certificates do not authenticate.
pub type ClientRoots = Arc<ArcSwapOption<ClientCas>>;

/// Client address, which the authentication layer inserts into the request extensions.
#[derive(Clone, Copy, Debug)]
pub struct SourceAddress(pub IpAddr);

/// Dependencies of an [`Authenticator`].
pub struct AuthenticatorDeps {
    /// Trusted client CAs.
    pub client_roots: ClientRoots,
    /// Token cache; `None`: tokens do not authenticate.
    pub tokens: Option<Arc<TokenCache>>,
    /// Policy for requests without credentials.
    pub anonymous: Anonymous,
    /// Metrics of authentication.
    pub metrics: AuthMetrics,
    /// Clock.
    pub now: Arc<dyn Fn() -> Timestamp + Send + Sync>,
}

/// Policy for requests without credentials (`authentication.anonymous`).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Anonymous {
    /// Continue as `system:anonymous`; authorization still applies.
    Allow,
    /// Reject with 401.
    Reject,
}

/// Authenticates requests.
pub struct Authenticator {
    deps: AuthenticatorDeps,
    proofs: Mutex<LruCache<[u8; 32], CachedProof>>,
}

struct CachedProof {
    proof: VerifiedIdentity,
    /// CA bundle it was verified against.
    cas: Arc<ClientCas>,
    until: Timestamp,
}

/// Authentication methods, in the order they are tried.
#[derive(Clone, Copy)]
enum AuthMethod {
    Certificate,
    Header,
    Protocol,
}

/// Result of one authentication method.
enum Attempt {
    Succeeded(Box<UserInfo>),
    NoOpinion,
    Failed(String),
    Busy,
}

impl Authenticator {
    /// Creates an authenticator with an empty cache.
    pub fn new(deps: AuthenticatorDeps) -> Self {
        Self { deps, proofs: Mutex::new(LruCache::new(PROOFS)) }
    }

    /// Authenticates a request on a connection with the peer's certificate chain, leaf first.
    ///
    /// Tries all methods; the first success wins. A credential that fails excludes the request from anonymous access.
    /// Removes the credential that succeeded from the headers.
    ///
    /// # Errors
    /// If the request is not authenticated.
    pub async fn authenticate(
        &self,
        parts: &mut Parts,
        peer_chain: &[CertificateDer<'static>],
    ) -> Result<UserInfo, AuthenticationError> {
        let mut failures = Vec::new();
        for way in [AuthMethod::Certificate, AuthMethod::Header, AuthMethod::Protocol] {
            let attempt = match way {
                AuthMethod::Certificate => self.by_certificate(peer_chain),
                AuthMethod::Header => self.by_header(parts).await,
                AuthMethod::Protocol => self.by_protocol(parts).await,
            };
            match attempt {
                Attempt::Succeeded(identity) => return Ok(*identity),
                Attempt::NoOpinion => {}
                Attempt::Failed(why) => failures.push(why),
                Attempt::Busy => return Err(AuthenticationError::TooMany),
            }
        }
        if !failures.is_empty() {
            info!(v = 2, err = failures.join(", "), "Unable to authenticate the request due to an error");
            return Err(AuthenticationError::InvalidCredentials);
        }
        match self.deps.anonymous {
            Anonymous::Allow => Ok(UserInfo::anonymous()),
            Anonymous::Reject => Err(AuthenticationError::InvalidCredentials),
        }
    }

    fn by_certificate(&self, chain: &[CertificateDer<'static>]) -> Attempt {
        let Some(leaf) = chain.first() else { return Attempt::NoOpinion };
        let Some(cas) = self.deps.client_roots.load_full() else { return Attempt::NoOpinion };
        let now = (self.deps.now)();
        if let Some(seconds) = x509::seconds_left(leaf, now) {
            self.deps.metrics.certificate_left(seconds);
        }
        match self.proof(chain, &cas, now) {
            Ok(Some(proof)) => Attempt::Succeeded(Box::new(proof.identity.authenticated())),
            Ok(None) => Attempt::NoOpinion,
            Err(error) => Attempt::Failed(error.to_string()),
        }
    }

    /// Verifies the chain or returns the cached proof: a persistent connection presents the same chain with every
    /// request, and a signature check costs as much as the rest of a response.
    fn proof(
        &self,
        chain: &[CertificateDer<'static>],
        cas: &Arc<ClientCas>,
        now: Timestamp,
    ) -> Result<Option<VerifiedIdentity>, X509Error> {
        let mut hash = Sha256::new();
        for certificate in chain {
            hash.update(certificate.len().to_be_bytes());
            hash.update(certificate);
        }
        let key = hash.finalize().into();
        let mut proofs = self.proofs.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(known) = proofs.get(&key).filter(|known| Arc::ptr_eq(&known.cas, cas) && now < known.until) {
            return Ok(Some(known.proof.clone()));
        }
        drop(proofs);
        let proof = x509::identify(chain, cas, now)?;
        if let Some(proof) = &proof {
            let until = now.checked_add(PROOF_TTL).unwrap_or(now).min(proof.expires);
            let known = CachedProof { proof: proof.clone(), cas: cas.clone(), until };
            proofs = self.proofs.lock().unwrap_or_else(PoisonError::into_inner);
            proofs.put(key, known);
        }
        Ok(proof)
    }

    async fn by_header(&self, parts: &mut Parts) -> Attempt {
        let Some(tokens) = &self.deps.tokens else { return Attempt::NoOpinion };
        let Some(token) = bearer::of_header(&parts.headers) else { return Attempt::NoOpinion };
        let attempt = by_token(tokens, &token, parts).await;
        if matches!(attempt, Attempt::Succeeded(_)) {
            bearer::strip_header(&mut parts.headers);
        }
        attempt
    }

    async fn by_protocol(&self, parts: &mut Parts) -> Attempt {
        let Some(tokens) = &self.deps.tokens else { return Attempt::NoOpinion };
        let offered = match bearer::of_protocols(&parts.headers) {
            Ok(Some(offered)) => offered,
            Ok(None) => return Attempt::NoOpinion,
            Err(error) => return Attempt::Failed(error.to_string()),
        };
        let attempt = by_token(tokens, &offered.token, parts).await;
        if matches!(attempt, Attempt::Succeeded(_)) {
            bearer::strip_protocol(&mut parts.headers, &offered);
        }
        attempt
    }
}

async fn by_token(tokens: &Arc<TokenCache>, token: &str, parts: &Parts) -> Attempt {
    let address = parts.extensions.get::<SourceAddress>().map(|source| source.0);
    match tokens.lookup(token, address).await {
        TokenLookup::Accepted(identity) => Attempt::Succeeded(Box::new((*identity).clone())),
        TokenLookup::Rejected(why) | TokenLookup::Failed(why) => Attempt::Failed(why),
        TokenLookup::Busy => Attempt::Busy,
    }
}

#[cfg(test)]
mod tests;
