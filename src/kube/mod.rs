//! The API server: the client, and what we ask of it.
//!
//! Today: who the bearer of a token is and what somebody may do, for the server. In comes a
//! kubeconfig, out go answers; nothing is kept but the connection. Behaviour: spec 01 §10, spec 04
//! §6.

mod attempt;
mod client;
mod counted;
mod paced;
mod reviews;

pub use client::{ConnectError, connect, connect_counted};
pub use paced::Rate;
pub use reviews::{ReviewFailure, Reviews};
