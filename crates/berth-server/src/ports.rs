//! What the server asks of the rest of the agent, as snapshots.

mod exclusive;
mod node_logs;
mod pod_directory;
mod reviews;
pub mod streams;
pub mod targets;
mod tools;

use std::sync::Arc;

use async_trait::async_trait;
use bytes::Bytes;
use futures::Sink;
use jiff::Timestamp;

use berth_metrics::exposition::Format;
use berth_types::{ContainerId, Pod, api};

pub use exclusive::{Allocatable, Claim, ClaimDevice, Device, ExclusiveResources, Held, MemoryBlock};
pub use node_logs::{NodeDirectory, NodeEntry, NodeFile, NodeLogError, NodeLogs};
pub use pod_directory::{PodDirectory, PodFeed};
pub use reviews::{AccessRequest, AccessReviewer, AccessVerdict, ReviewError, TokenReviewer, TokenVerdict};
pub use tools::{CheckpointError, Checkpoints, Explains, MemoryView, ProfileError, Profiles, Verbosity};

/// Pages made from snapshots.
pub trait Pages: Send + Sync + 'static {
    /// The `PodList` document of `/pods`, newline included.
    fn pods(&self) -> Bytes;
    /// The exposition of `/metrics` in a format, gzipped or not; at most a second old.
    ///
    /// # Errors
    /// The gatherer's text; answered with 500.
    fn metrics(&self, format: Format, is_zipped: bool) -> Result<Bytes, String>;
    /// Unix seconds of the process start, for `Process-Start-Time-Unix`.
    fn process_start(&self) -> u64;
}

/// Health checks by name, in the order they are reported.
pub trait Health: Send + Sync + 'static {
    /// Names of all checks; `ping` is not among them, it always passes.
    fn names(&self) -> &[&'static str];
    /// `None` where the check passes, else why it does not. Unknown names pass.
    fn check(&self, name: &str) -> Option<String>;
    /// Told of every check that was asked as one of all, and whether it passed.
    fn checked(&self, _name: &str, _passed: bool) {}
}

/// What is asked of a container's log (spec 04 §5.3).
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[allow(clippy::struct_excessive_bools, reason = "the query's flags")]
pub struct LogQuery {
    /// Whether lines that come later are wanted too.
    pub follow: bool,
    /// Whether the instance before the last one is meant.
    pub previous: bool,
    /// Whether each line is to begin with its time.
    pub timestamps: bool,
    /// So many lines from the end.
    pub tail: Option<u64>,
    /// Not older than so many seconds.
    pub since_seconds: Option<i64>,
    /// Not older than that.
    pub since_time: Option<Timestamp>,
    /// At most so many bytes.
    pub limit_bytes: Option<u64>,
    /// Of which stream.
    pub stream: Option<LogStream>,
}

/// Output streams of a container.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LogStream {
    /// Both.
    All,
    /// Standard output.
    Stdout,
    /// Standard error.
    Stderr,
}

impl LogStream {
    /// As a query spells it.
    pub fn name(self) -> &'static str {
        match self {
            Self::All => "All",
            Self::Stdout => "Stdout",
            Self::Stderr => "Stderr",
        }
    }
}

/// Why a log cannot be had, in the reference's words.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum LogRefusal {
    /// No such pod or container; 404.
    NotFound(String),
    /// Anything else; 400.
    Other(String),
}

/// A pod whose logs are wanted, and after [`ContainerLogs::instance`] the instance.
#[derive(Clone, Debug)]
pub struct LogSource {
    /// The pod.
    pub pod: Arc<Pod>,
    /// Its status as we know it.
    pub status: Option<Arc<api::PodStatus>>,
    /// The instance; `None` until it was chosen.
    pub instance: Option<ContainerId>,
}

/// Logs of containers.
#[async_trait]
pub trait ContainerLogs: Send + Sync + 'static {
    /// The pod, if it has a container of that name.
    ///
    /// # Errors
    /// The text of the answer.
    async fn find(&self, namespace: &str, pod: &str, container: &str) -> Result<LogSource, LogRefusal>;

    /// The instance that is meant.
    ///
    /// # Errors
    /// Why there is none.
    fn instance(&self, source: &LogSource, container: &str, is_previous: bool) -> Result<LogSource, String>;

    /// Writes what is asked for.
    ///
    /// # Errors
    /// What to tell the reader at the end of what he got.
    async fn read(&self, source: &LogSource, query: &LogQuery, out: &mut LogPieces<'_>) -> Result<(), String>;
}

/// Takes a log, piece by piece.
pub type LogPieces<'a> = dyn Sink<Vec<u8>, Error = std::io::Error> + Unpin + Send + 'a;

/// What runs, according to the runtime.
#[async_trait]
pub trait RunningPods: Send + Sync + 'static {
    /// The `PodList` document of `/runningpods/`, newline included.
    ///
    /// # Errors
    /// The runtime's text; answered with 500.
    async fn list(&self) -> Result<Bytes, String>;
}

/// How much of the summary is asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SummaryForm {
    /// Everything.
    Full,
    /// Processor, memory and swap.
    Short,
}

/// Pages of metrics beside `/metrics`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MetricsPage {
    /// `/metrics/resource`
    Resource,
    /// `/metrics/cadvisor`
    Cadvisor,
    /// `/metrics/probes`
    Probes,
}

/// What the node, its pods and their containers use.
#[async_trait]
pub trait Statistics: Send + Sync + 'static {
    /// The document of `/stats/summary`, at most a second old.
    ///
    /// # Errors
    /// The text behind `Internal Error: `; answered with 500.
    async fn summary(&self, form: SummaryForm) -> Result<Bytes, String>;
    /// A page of metrics in a format, gzipped or not; at most a second old.
    ///
    /// # Errors
    /// The gatherer's text; answered with 500.
    async fn metrics(&self, page: MetricsPage, format: Format, is_zipped: bool) -> Result<Bytes, String>;
    /// Unix seconds of the process start, for `Process-Start-Time-Unix`.
    fn process_start(&self) -> u64;
}
