//! WebSocket termination: version 5 translated to SPDY streams, and SPDY tunnels (spec 04b §4).

pub(super) mod accept;
pub mod channels;
pub(super) mod status;
pub(super) mod translate;
pub(super) mod tunnel;

pub use accept::limits;
pub(crate) use translate::{WebSocketCommand, translate};
pub(crate) use tunnel::tunnel;
