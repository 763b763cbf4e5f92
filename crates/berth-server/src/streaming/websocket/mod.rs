//! WebSocket termination: version 5 translated to SPDY streams, and SPDY tunnels (spec 04b §4).

pub mod channels;
pub(super) mod handshake;
pub(super) mod status;
pub(super) mod translator;
pub(super) mod tunnel;

pub use handshake::limits;
pub(crate) use translator::{WebSocketCommand, translate};
pub(crate) use tunnel::tunnel;
