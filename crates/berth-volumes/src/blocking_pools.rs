//! Blocking pools of volumes: operations, files, and usage measurements have separate threads.
//!
//! Hung devices leave threads for the file-based volumes of all other pods, and all volumes together leave threads for
//! logs, exec, and the rest of the agent. Implements spec 07 §17.

use std::time::Duration;

use berth_sys::blocking_pool::BlockingPool;

/// Threads for all volumes of the node: two thirds of the blocking pool of the agent.
pub const THREADS: usize = 32;
/// Share of [`THREADS`] for the agent's own files, directories, and leftovers on disk.
const FILES: usize = 8;
/// Share of [`THREADS`] for usage measurements.
const USAGE: usize = 4;
/// How long an operation waits for a free thread.
pub const WAIT: Duration = Duration::from_secs(30);

/// Name of the pools in errors.
pub const NAME: &str = "volumes";

/// Creates the pool for operations: what the other pools leave.
pub fn operations() -> BlockingPool {
    BlockingPool::new(NAME, THREADS - FILES - USAGE)
}

/// Creates the pool for the agent's own files.
pub fn files() -> BlockingPool {
    BlockingPool::new(NAME, FILES)
}

/// Creates the pool for usage measurements.
pub fn usage() -> BlockingPool {
    BlockingPool::new(NAME, USAGE)
}
