//! Interfaces (ports) through which the server reads pods, logs, metrics, and reviews from the agent.

mod debug_endpoints;
mod device_list;
mod exclusive_resources;
mod node_logs;
mod pod_directory;
mod reviews;
pub mod stream_targets;
pub mod streams;
mod topology_map;

use std::sync::Arc;

use async_trait::async_trait;
use bytes::Bytes;
use futures::Sink;
use jiff::Timestamp;

use berth_metrics::exposition::ExpositionFormat;
use berth_types::{ContainerId, Pod, api};

pub use debug_endpoints::{
    CheckpointError, Checkpoints, MemoryView, PodDiagnostics, ProfileError, Profiles, Verbosity,
};
pub use device_list::{AssignedContainer, DeviceEntry, DeviceHealth, DeviceList};
pub use exclusive_resources::{
    Allocatable, Claim, ClaimDevice, Device, ExclusiveAllocations, ExclusiveResources, MemoryBlock,
};
pub use node_logs::{NodeDirectory, NodeEntry, NodeFile, NodeLogError, NodeLogs};
pub use pod_directory::{PodDirectory, PodFeed};
pub use reviews::{AccessRequest, AccessReviewer, AccessVerdict, ReviewError, TokenReviewer, TokenVerdict};
pub use topology_map::{
    CpuEntry, CpuUse, HugePagePool, ManagerPolicies, NumaNodeEntry, PinnedContainer, PinnedMemory, TopologyMap,
    TopologyMapSource, TopologyRefusal,
};

/// Pages rendered from snapshots.
pub trait SnapshotPages: Send + Sync + 'static {
    /// The `PodList` document of `/pods`, newline included.
    fn pods(&self) -> Bytes;
    /// The body of `/metrics` in the given exposition format, optionally gzipped; at most 1 s old.
    ///
    /// # Errors
    /// The gatherer's error text; the handler returns 500.
    fn metrics(&self, format: ExpositionFormat, is_zipped: bool) -> Result<Bytes, String>;
    /// Start time of the process in Unix seconds, for `Process-Start-Time-Unix`.
    fn process_start(&self) -> u64;
}

/// Health checks by name, in the order of the report.
pub trait Health: Send + Sync + 'static {
    /// Names of all checks, without `ping`, which always passes.
    fn names(&self) -> &[&'static str];
    /// `None` where the check passes, else the reason of the failure. Unknown names pass.
    fn check(&self, name: &str) -> Option<String>;
    /// Callback after each check of a request for all checks, with its result.
    fn checked(&self, _name: &str, _passed: bool) {}
}

/// Parameters of a container log request (spec 04 §5.3).
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[allow(clippy::struct_excessive_bools, reason = "the query's flags")]
pub struct LogQuery {
    /// Whether to follow the log output.
    pub follow: bool,
    /// Whether to read the log of the previous instance of the container.
    pub previous: bool,
    /// Whether to prefix each line with its timestamp.
    pub timestamps: bool,
    /// Number of lines from the end; `None` for all.
    pub tail: Option<u64>,
    /// Maximum age of a line, in seconds.
    pub since_seconds: Option<i64>,
    /// Earliest timestamp of a line.
    pub since_time: Option<Timestamp>,
    /// Maximum number of bytes.
    pub limit_bytes: Option<u64>,
    /// Stream to read; `None` where the request does not select one.
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
    /// Value of the query parameter `stream`.
    pub fn name(self) -> &'static str {
        match self {
            Self::All => "All",
            Self::Stdout => "Stdout",
            Self::Stderr => "Stderr",
        }
    }
}

/// Reason why a log is unavailable, with kubelet's error text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum LogError {
    /// No such pod or container; 404.
    NotFound(String),
    /// Any other reason; 400.
    Other(String),
}

/// Pod whose log is requested and, after [`ContainerLogs::instance`], the container instance.
#[derive(Clone, Debug)]
pub struct LogSource {
    /// Pod that has a container of the requested name.
    pub pod: Arc<Pod>,
    /// Last known status of the pod.
    pub status: Option<Arc<api::PodStatus>>,
    /// ID of the selected container instance; `None` until it is resolved.
    pub instance: Option<ContainerId>,
}

/// Access to container logs.
#[async_trait]
pub trait ContainerLogs: Send + Sync + 'static {
    /// Finds the pod, if it has a container of this name.
    ///
    /// # Errors
    /// The error text and its status code.
    async fn find(&self, namespace: &str, pod: &str, container: &str) -> Result<LogSource, LogError>;

    /// Resolves the current or previous instance of the container.
    ///
    /// # Errors
    /// The reason why there is no such instance.
    fn instance(&self, source: &LogSource, container: &str, is_previous: bool) -> Result<LogSource, String>;

    /// Writes the requested part of the log to `out`.
    ///
    /// # Errors
    /// The text to append to the response.
    async fn read(&self, source: &LogSource, query: &LogQuery, out: &mut LogSink<'_>) -> Result<(), String>;
}

/// Sink for the chunks of a log.
pub type LogSink<'a> = dyn Sink<Vec<u8>, Error = std::io::Error> + Unpin + Send + 'a;

/// Pods that run according to the container runtime.
#[async_trait]
pub trait RunningPods: Send + Sync + 'static {
    /// The `PodList` document of `/runningpods/`, newline included.
    ///
    /// # Errors
    /// The runtime's error text; the handler returns 500.
    async fn list(&self) -> Result<Bytes, String>;
}

/// Detail level of the stats summary.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SummaryForm {
    /// All statistics.
    Full,
    /// Only CPU, memory, and swap.
    Short,
}

/// Metrics pages below `/metrics/`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MetricsPage {
    /// `/metrics/resource`
    Resource,
    /// `/metrics/cadvisor`
    Cadvisor,
    /// `/metrics/probes`
    Probes,
}

/// Resource usage of the node, its pods, and their containers.
#[async_trait]
pub trait Statistics: Send + Sync + 'static {
    /// The document of `/stats/summary`, at most 1 s old.
    ///
    /// # Errors
    /// The text after `Internal Error: `; the handler returns 500.
    async fn summary(&self, form: SummaryForm) -> Result<Bytes, String>;
    /// The body of a metrics page in the given exposition format, optionally gzipped; at most 1 s old.
    ///
    /// # Errors
    /// The gatherer's error text; the handler returns 500.
    async fn metrics(&self, page: MetricsPage, format: ExpositionFormat, is_zipped: bool) -> Result<Bytes, String>;
    /// Start time of the process in Unix seconds, for `Process-Start-Time-Unix`.
    fn process_start(&self) -> u64;
}
