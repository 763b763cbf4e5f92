//! Who asks, and whether they may (spec 04 §6).
//!
//! ```text
//!  peer certificates ─► x509 ──┐
//!  Authorization ──► bearer ───┼─► Identity ─► attributes ─► authorizer ─► Allowed
//!  WebSocket protocol ─────────┘       ▲                        │           Forbidden (403)
//!  nothing at all ────► anonymous ─────┘                        │           Failed (500)
//! ```

pub mod attributes;
mod identity;

pub use identity::{Identity, Via};
