//! `/exec`, `/attach`, `/portForward`, `/run`: byte pipes into containers and pods (spec 04b part I).
//!
//!   request ─► endpoint: who, which pod, which container ─► the runtime's one-time URL ─► `splice`
//!                                                                  │ WebSocket v5 ─► translated to SPDY
//!                                                                  └ WebSocket tunnel ─► its SPDY, unwrapped
//!
//! Before a runtime of its own the server is a proxy. What the runtime's streaming server speaks is passed on as bytes
//! and never looked at; only what it does not speak ends here (`websocket/`). Where the runtime is ours there is nobody to
//! pass it on to: the streams end here (`serve/`). A stream is one task that
//! owns both connections: when either ends, or the agent stops, both are closed. The endpoints'
//! answers before that are decided by pure files: `query`, `decide`, `url`.

mod answer;
mod backend;
mod caps;
mod copy;
pub(super) mod decide;
mod pipe;
pub mod query;
pub mod serve;
pub mod spdy;
pub(super) mod splice;
mod url;
pub mod websocket;

pub use backend::Tls;
pub use pipe::{Streaming, StreamingConfig};

pub use caps::{Caps, Permit};

pub(super) use answer::{bare, busy, failed, line};
