//! WebSockets that end here (spec 04b §4): version 5 of the channel protocol, which is translated
//! to SPDY streams of the runtime, and tunnels, which carry SPDY as it is.

pub(super) mod accept;
pub mod channels;
pub(super) mod status;
pub(super) mod translate;
pub(super) mod tunnel;

pub use accept::limits;
pub(crate) use translate::{Command, translate};
pub(crate) use tunnel::tunnel;
