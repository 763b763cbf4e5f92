//! Authentication and authorization of kubelet API requests (spec 04 §6).
//!
//! ```text
//!  peer certificates ─► x509 ──┐
//!  Authorization ──► bearer ───┼─► Identity ─► attributes ─► authorizer ─► Allowed
//!  WebSocket protocol ─────────┘       ▲                        │           Forbidden (403)
//!  no credentials ──► anonymous ──────┘                         │           Failed (500)
//!                                                    policy · access cache ─► AccessReviewer
//!            token cache ─► TokenReviewer
//! ```
//!
//! Cached with a bound each: verified certificates (60 s), and verdicts on tokens and accesses. The API server is
//! behind two ports, so that this module depends on no client.

mod access_cache;
pub mod attributes;
mod authenticator;
mod authorizer;
mod bearer;
mod identity;
mod policy;
mod review_flights;
mod review_rate_limiter;
mod token_cache;
mod x509;

pub use access_cache::{AccessCache, AccessTtls, MONITORING_SUBRESOURCES};
pub use authenticator::{Anonymous, AuthenticationError, Authenticator, AuthenticatorDeps, ClientRoots, SourceAddress};
pub use authorizer::{AuthorizationDecision, Authorizer};
pub use identity::{ANONYMOUS, AUTHENTICATED, AuthenticatedBy, MASTERS, UNAUTHENTICATED, UserInfo};
pub use policy::{AuthorizationPolicy, LIMIT as POLICY_LIMIT, PolicyError};
pub(crate) use review_rate_limiter::network;
pub use token_cache::TokenCache;
pub use x509::{BundleError, ClientCas, VerifiedIdentity, X509Error, identify};
