//! Registry client: pulls manifests and layers over the distribution API.
//!
//! Endpoints and mirrors ([`hosts`]), authentication ([`auth`]), TLS and connections ([`client`]), requests ([`http`]),
//! and one pull ([`session`]). Implements spec 09b §4.

pub mod auth;
pub mod client;
pub mod hosts;
pub mod http;
pub mod session;

pub use auth::RegistryCredentials;
pub use session::Session;
