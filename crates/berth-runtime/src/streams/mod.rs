//! Streams of processes and connections into pods: prepared by a call, met once under the name the call gave them.
//!
//! ```text
//!  Exec, Attach, PortForward ─► ask (checked) ─► store ─► URL with a token
//!                                                  │
//!  whoever shows the token ◄── Prepared ◄──────────┘ ─► process or connection, opened only now
//! ```
//!
//! Nothing here knows what clients speak: who serves them (SPDY, WebSockets) takes what was prepared and moves the
//! bytes. Behaviour: spec 09a §4, 04b §5.

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
