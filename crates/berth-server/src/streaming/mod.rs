//! Streaming endpoints `/exec`, `/attach`, `/portForward`, `/run` (spec 04b part I).
//!
//!   request ─► endpoint: caller, pod, container ─► the runtime's one-time URL ─► `splice`
//!                                                         │ WebSocket v5 ─► translated to SPDY
//!                                                         └ WebSocket tunnel ─► its SPDY, unwrapped
//!
//! With an external runtime the server is a proxy: it copies protocols that the runtime's streaming server supports as
//! bytes, and terminates only the others (`websocket/`). With the embedded runtime the streams are served in-process
//! (`server/`). A stream is one task that owns both connections: when either ends, or the agent stops, both are closed.
//! Pure modules decide the responses before that: `query`, `upgrade_protocol`, `url`.

mod byte_copy;
mod error_response;
pub mod query;
mod runtime_dialer;
pub mod server;
pub mod spdy;
mod stream_limit;
mod streaming_context;
pub(super) mod upgrade_protocol;
pub(super) mod upgrade_proxy;
mod url;
pub mod websocket;

pub use runtime_dialer::Tls;
pub use streaming_context::{StreamingConfig, StreamingContext};

pub use stream_limit::{CallerLimit, Permit};

pub(super) use error_response::{bare, busy, failed, line};
