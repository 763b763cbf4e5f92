//! SPDY/3.1 as container runtimes and their clients speak it (spec 04b §3).
//!
//!   bytes ─► decoder ─► session task ─► stream queues (256 KiB each) ─► readers
//!   bytes ◄─ encoder ◄─ session task ◄─ one fair queue of frames     ◄─ writers
//!
//! One task per connection owns both directions. A full stream queue stops reading of the whole
//! connection, as there is no flow control but TCP's; nothing else is bounded by a slow reader.
//! [`session`] is used by the translation of WebSockets (as the client), and by whoever serves
//! streams (as the server), who finds the handshake in [`handshake`] and the sets of streams in
//! [`command`] and [`pairing`].

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
pub use session::{Connection, Driver, Ending, Incoming, Limits, Role, session};
pub use stream::{Closed, Sender, Stream};
