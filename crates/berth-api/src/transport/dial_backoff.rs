//! Back-off state of a connection pool while it cannot connect.
//!
//! Implements spec 10 §8.2.

use tokio::time::Instant;

/// Back-off state of a pool.
#[derive(Default)]
pub struct DialBackoff {
    /// Consecutive failed attempts.
    pub failures: u32,
    /// No attempt before this time.
    pub opens: Option<Instant>,
    /// Whether a connection was requested since the last attempt.
    pub is_wanted: bool,
    /// Whether connections were lost or could not be established: watches are spread when they reconnect.
    pub is_recovering: bool,
    /// End of the time over which they are spread.
    pub spread: Option<Instant>,
}
