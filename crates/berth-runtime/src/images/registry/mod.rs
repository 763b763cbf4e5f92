//! Pulling from registries: who is asked ([`hosts`]), who we say we are ([`auth`]), over which connections ([`client`]), how
//! ([`http`]), and what for ([`session`]).
//!
//! Behaviour: spec 09b §4.

pub mod auth;
pub mod client;
pub mod hosts;
pub mod http;
pub mod session;

pub use auth::Credentials;
pub use session::Session;
