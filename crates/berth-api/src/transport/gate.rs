//! What a pool knows of its attempts to connect, while it cannot. Spec 10 §8.2.

use tokio::time::Instant;

/// Whether it is worth while to connect.
#[derive(Default)]
pub struct Gate {
    /// In a row.
    pub failures: u32,
    /// Nobody tries before.
    pub opens: Option<Instant>,
    /// Somebody has wanted a connection since the last attempt.
    pub is_wanted: bool,
    /// Connections were lost, or could not be had: who comes back comes back spread.
    pub is_recovering: bool,
    /// Until then.
    pub spread: Option<Instant>,
}
