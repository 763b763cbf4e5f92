//! Context that all sandboxes share: settings, layout, event hub, metrics, and tasks.

use std::{path::PathBuf, sync::Arc};

use tokio::task::JoinHandle;
use tokio_util::{sync::CancellationToken, task::TaskTracker};

use super::{
    config::EmbeddedConfig,
    events::EventBroadcaster,
    log_totals::LogTotals,
    ports::{Groups, Shims},
    sandbox::Sandbox,
    store::Layout,
};
use berth_metrics::EmbeddedMetrics;

/// Context that all sandboxes share.
pub struct RuntimeContext {
    /// Settings.
    pub config: EmbeddedConfig,
    /// Directory layout.
    pub layout: Layout,
    /// Distributes CRI events to subscribers.
    pub hub: EventBroadcaster,
    /// Counters and durations of launches, pulls, execs, and network operations.
    pub metrics: EmbeddedMetrics,
    /// Log counters of deleted and existing pods.
    pub logs: LogTotals,
    /// Cgroups.
    pub groups: Arc<dyn Groups>,
    /// Connects to running shims.
    pub shims: Arc<dyn Shims>,
    /// Tracker of all tasks.
    pub tasks: TaskTracker,
    /// Cancelled on shutdown; pods keep running.
    pub stop: CancellationToken,
}

impl RuntimeContext {
    /// Spawns a task that must end by itself.
    pub fn spawn<F>(&self, work: F) -> JoinHandle<F::Output>
    where
        F: Future<Output: Send> + Send + 'static,
    {
        self.tasks.spawn(work)
    }

    /// Path of a container's exit record, which its shim writes.
    pub fn exit_record(&self, sandbox: &Sandbox, container: &str) -> PathBuf {
        self.layout.shim(sandbox.id()).join("exits").join(container)
    }
}
