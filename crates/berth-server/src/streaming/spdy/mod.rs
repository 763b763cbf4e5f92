//! SPDY/3.1 as used by container runtimes and Kubernetes clients (spec 04b §3).
//!
//!   bytes ─► decoder ─► session task ─► stream queues (256 KiB each) ─► readers
//!   bytes ◄─ encoder ◄─ session task ◄─ one fair queue of frames     ◄─ writers
//!
//! One task per connection owns both directions. A full stream queue blocks reading from the whole connection, because
//! TCP provides the only flow control; a slow reader has no other effect. [`session`] is used by the WebSocket
//! translation (as the client), and by the streaming server (as the server), which negotiates with [`handshake`] and
//! collects streams with [`command`] and [`pairing`].

pub mod command;
mod dictionary;
pub mod frames;
pub mod handshake;
mod headers;
pub mod pairing;
mod session;
mod stream;
#[cfg(test)]
mod tests;

pub use frames::{SpdyError, StreamId};
pub use headers::Headers;
pub use session::{
    ConnectionDriver, ConnectionError, ConnectionLimits, IncomingStreams, Role, SpdyConnection, session,
};
pub use stream::{Sender, SpdyStream, StreamClosed};
