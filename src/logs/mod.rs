//! Container logs: CRI log format, reader, rotation, links, termination messages.
//!
//! The runtime writes `<podLogsDir>/<namespace>_<name>_<uid>/<container>/<restart>.log`; this module
//! reads, rotates, links, and removes these files. Input: the traits [`ContainerLogs`] and
//! [`TerminationMessages`], [`LogReader::read`] for the server. Output: file operations, and
//! `ReopenContainerLog` after each rotation. State: [`Manager`] owns the set of locked logs, so that
//! removal and rotation of one log exclude each other.
//!
//! Memory is bounded for any input: lines are passed on in pieces, files are compressed as streams.
//!
//! Implements spec 03b §9-11, 01 §17.4, 03a §7 step 8 and §11.
//!
//! [`ContainerLogs`]: berth_ports::ContainerLogs
//! [`TerminationMessages`]: berth_ports::TerminationMessages

mod busy;
mod dirs;
mod filter;
mod follow;
mod instance;
mod line;
mod links;
mod manager;
mod own;
mod pace;
mod pack;
mod read;
mod rotate;
mod rotated;
mod tail;
mod termination;
mod wakes;
mod watch;

pub use filter::{Filter, LogFormatError, LogOptions, LogStreams, since};
pub use instance::{NoInstance, instance};
pub use line::{DockerLine, Head, Header, LineError, Stamp, Stream, docker, head};
pub use manager::{LogsConfig, LogsDeps, Manager};
pub use own::PlaceError;
pub use read::{LogReader, ReadError, Told};
pub use rotate::{RunningLog, RunningLogs};
