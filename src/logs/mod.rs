//! Container logs: CRI log format, reader, rotation, links, termination messages.
//!
//! The runtime writes `<podLogsDir>/<namespace>_<name>_<uid>/<container>/<restart>.log`; this module
//! reads, rotates, links, and removes these files. Input: the traits [`ContainerLogs`] and
//! [`TerminationMessages`], [`LogReader::read`] for the server. Output: file operations, and
//! `ReopenContainerLog` after each rotation. State: [`LogManager`] owns the set of locked logs, so that
//! removal and rotation of one log exclude each other.
//!
//! Memory is bounded for any input: lines are passed on in pieces, files are compressed as streams.
//!
//! Implements spec 03b §9-11, 01 §17.4, 03a §7 step 8 and §11.
//!
//! [`ContainerLogs`]: berth_ports::ContainerLogs
//! [`TerminationMessages`]: berth_ports::TerminationMessages

mod compression;
mod confined_path;
mod dirs;
mod filter;
mod first_write_watch;
mod line;
mod links;
mod log_instance;
mod log_locks;
mod log_reader;
mod log_rotation;
mod log_watcher;
mod manager;
mod open_log;
mod retention;
mod rotation_schedule;
mod tail;
mod termination;

pub use confined_path::PlaceError;
pub use filter::{Filter, LogFormatError, LogOptions, LogStreams, since};
pub use line::{DockerLine, Head, Header, LineError, LineStream, Stamp, docker, head};
pub use log_instance::{NoInstance, instance};
pub use log_reader::{LogReader, ObservedRunning, ReadError};
pub use log_rotation::{RunningLog, RunningLogs};
pub use manager::{LogManager, LogsConfig, LogsDeps};
