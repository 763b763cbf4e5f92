//! Ports of the debug endpoints: log verbosity, pprof profiles, pod diagnostics, and checkpoints.

use std::{sync::Arc, time::Duration};

use async_trait::async_trait;
use bytes::Bytes;

use berth_types::Pod;

/// Log verbosity of the process.
pub trait Verbosity: Send + Sync + 'static {
    /// Sets the verbosity: records up to this level are written from now on.
    fn set(&self, level: u32);
}

/// Reason why a profile is unavailable.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum ProfileError {
    /// Another profile is being taken.
    #[error("cpu profiling already in use")]
    Busy,
    /// The profile cannot be taken.
    #[error("{0}")]
    Failed(String),
}

/// Default value type of a heap profile.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum MemoryView {
    /// Bytes in use.
    InUse,
    /// Bytes allocated.
    Allocated,
}

/// Profiles of this process.
#[async_trait]
pub trait Profiles: Send + Sync + 'static {
    /// CPU profile over `time`, as gzipped pprof. Dropping the future stops it.
    ///
    /// # Errors
    /// If the profile cannot be taken.
    async fn processor(&self, time: Duration) -> Result<Bytes, ProfileError>;
    /// Heap profile (allocations and live memory) as gzipped pprof: over `time`, or since sampling began. Sampling has
    /// a cost and therefore begins with the first request.
    ///
    /// # Errors
    /// If the profile cannot be taken.
    async fn memory(&self, view: MemoryView, time: Option<Duration>) -> Result<Bytes, ProfileError>;
    /// The threads of this process, as text.
    fn threads(&self) -> String;
    /// Command line of the process, joined by NUL.
    fn command_line(&self) -> Bytes;
}

/// Explains the state of pods for `berth why`.
pub trait PodDiagnostics: Send + Sync + 'static {
    /// The document of `/debug/why/{namespace}/{pod}`, newline included; `None` where there is no such pod. Never
    /// blocks.
    fn why(&self, namespace: &str, pod: &str) -> Option<Bytes>;
}

/// Reason why a container was not checkpointed.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum CheckpointError {
    /// A checkpoint of the container is in progress, or the node has reached its limit of checkpoints.
    #[error("too many checkpoints in progress")]
    Busy,
    /// Any other reason, including the runtime's error text.
    #[error("{0}")]
    Failed(String),
}

/// Creates container checkpoints.
#[async_trait]
pub trait Checkpoints: Send + Sync + 'static {
    /// Checkpoints a running container and returns the path of the archive. `timeout` is the client's request in
    /// seconds; one shorter than the configured timeout is ignored.
    ///
    /// # Errors
    /// If no archive was created.
    async fn checkpoint(
        &self,
        pod: &Arc<Pod>,
        container: &str,
        timeout: Option<i64>,
    ) -> Result<String, CheckpointError>;
}
