//! Streaming endpoints `/exec`, `/attach`, `/portForward`, `/run` (spec 04b part I).
//!
//!   request ─► endpoint: caller, pod, container ─► the runtime's one-time URL ─► `splice`
//!                                                         │ WebSocket v5 ─► translated to SPDY
//!                                                         └ WebSocket tunnel ─► its SPDY, unwrapped
//!
//! With an external runtime the server is a proxy: it copies protocols that the runtime's streaming server supports as
//! bytes, and terminates only the others (`websocket/`). With the embedded runtime the streams are served in-process
//! (`serve/`). A stream is one task that owns both connections: when either ends, or the agent stops, both are closed.
//! Pure modules decide the responses before that: `query`, `decide`, `url`.

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
