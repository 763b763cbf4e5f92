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

mod ask;
mod attach;
mod command;
mod drained;
mod exec;
mod prepared;
mod terminal;
mod tokens;

pub use ask::{Ask, Wanted};
pub use command::{Command, Reader, Writer};
pub use exec::has_place;
pub use prepared::{IN_PROCESS, Places, Prepared};
pub use terminal::Terminal;
