//! What the server asks of the rest of the agent, as snapshots.

use bytes::Bytes;

/// The pages of the read-only port.
pub trait Pages: Send + Sync + 'static {
    /// The `PodList` document of `/pods`, newline included.
    fn pods(&self) -> Bytes;
    /// The exposition of `/metrics` in text format 0.0.4.
    ///
    /// # Errors
    /// The gatherer's text; answered with 500.
    fn metrics(&self) -> Result<Bytes, String>;
    /// Unix seconds of the process start, for `Process-Start-Time-Unix`.
    fn process_start(&self) -> u64;
}

/// Health checks by name, in the order they are reported.
pub trait Health: Send + Sync + 'static {
    /// Names of all checks; `ping` is not among them, it always passes.
    fn names(&self) -> &[&'static str];
    /// `None` where the check passes, else why it does not. Unknown names pass.
    fn check(&self, name: &str) -> Option<String>;
}
