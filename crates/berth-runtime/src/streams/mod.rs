//! Exec, attach, and port-forward streams: prepared by a CRI call, then claimed once by a token.
//!
//! ```text
//!  Exec, Attach, PortForward ─► ask (validated) ─► store ─► URL with a token
//!                                                    │
//!  client with the token ◄── Prepared ◄──────────────┘ ─► process or connection, opened only now
//! ```
//!
//! This module is independent of the client protocol: the server (SPDY, WebSockets) takes the prepared stream and
//! copies the bytes. Implements spec 09a §4, 04b §5.

mod attach;
mod command;
mod exec;
mod exec_output;
mod prepared_stream;
mod request;
mod terminal;
mod tokens;

pub use command::{CommandStreams, Reader, Writer};
pub use exec::check_exec_limit;
pub use prepared_stream::{IN_PROCESS, PendingStreams, PreparedStream};
pub use request::{StdioStreams, StreamRequest};
pub use terminal::Terminal;
