//! What the small endpoints for people with a problem ask: the log's level, profiles, checkpoints.

use std::{sync::Arc, time::Duration};

use async_trait::async_trait;
use bytes::Bytes;

use berth_types::Pod;

/// How much the log says.
pub trait Verbosity: Send + Sync + 'static {
    /// From now on, records up to this level are written.
    fn set(&self, level: u32);
}

/// Why there is no profile.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum ProfileError {
    /// One is being taken.
    #[error("cpu profiling already in use")]
    Busy,
    /// It cannot be taken.
    #[error("{0}")]
    Failed(String),
}

/// Which of its values a profile of memory shows first.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum MemoryView {
    /// Bytes that are held.
    Held,
    /// Bytes that were asked for.
    Asked,
}

/// Looks into this process.
#[async_trait]
pub trait Profiles: Send + Sync + 'static {
    /// Where processor time goes within that time: a gzipped pprof profile. Dropping the future ends it.
    ///
    /// # Errors
    /// There is none.
    async fn processor(&self, time: Duration) -> Result<Bytes, ProfileError>;
    /// Who asked for memory and who holds it: a gzipped pprof profile, of what was asked for within that time, or
    /// since sampling began. It begins with the first request, because it is not free.
    ///
    /// # Errors
    /// There is none.
    async fn memory(&self, view: MemoryView, time: Option<Duration>) -> Result<Bytes, ProfileError>;
    /// The threads of this process, for people.
    fn threads(&self) -> String;
    /// What the process was started with, joined by NUL.
    fn command_line(&self) -> Bytes;
}

/// Tells why pods are as they are.
pub trait Explains: Send + Sync + 'static {
    /// The document of `/debug/why/{namespace}/{pod}`, newline included; `None` where there is no such pod. Waits for
    /// nobody.
    fn why(&self, namespace: &str, pod: &str) -> Option<Bytes>;
}

/// Why a container was not checkpointed.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum CheckpointError {
    /// It, or as many as the node stands, are being checkpointed.
    #[error("too many checkpoints are being written")]
    Busy,
    /// Anything else, the runtime's words included.
    #[error("{0}")]
    Failed(String),
}

/// Writes containers to files.
#[async_trait]
pub trait Checkpoints: Send + Sync + 'static {
    /// Checkpoints a running container and returns the path of the archive. `timeout` is the caller's wish, in
    /// seconds; a shorter one than the configured is not heeded.
    ///
    /// # Errors
    /// There is no archive.
    async fn checkpoint(
        &self,
        pod: &Arc<Pod>,
        container: &str,
        timeout: Option<i64>,
    ) -> Result<String, CheckpointError>;
}
