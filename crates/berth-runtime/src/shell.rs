//! What all sandboxes share: settings, places, who is told, what is counted, and the tasks.

use std::{path::PathBuf, sync::Arc};

use tokio::task::JoinHandle;
use tokio_util::{sync::CancellationToken, task::TaskTracker};

use super::{
    config::EmbeddedConfig,
    events::Hub,
    logs::Logs,
    ports::{Groups, Shims},
    sandbox::Sandbox,
    store::Layout,
};
use berth_metrics::EmbeddedMetrics;

/// What all sandboxes share.
pub struct Shell {
    /// Settings.
    pub config: EmbeddedConfig,
    /// Places.
    pub layout: Layout,
    /// Who wants to hear.
    pub hub: Hub,
    /// What is counted.
    pub metrics: EmbeddedMetrics,
    /// What containers have written.
    pub logs: Logs,
    /// Control groups.
    pub groups: Arc<dyn Groups>,
    /// Finds shims again.
    pub shims: Arc<dyn Shims>,
    /// Every task there is.
    pub tasks: TaskTracker,
    /// Cancelled when we are to end; pods go on.
    pub stop: CancellationToken,
}

impl Shell {
    /// Starts a task that ends by itself.
    pub fn spawn<F>(&self, work: F) -> JoinHandle<F::Output>
    where
        F: Future<Output: Send> + Send + 'static,
    {
        self.tasks.spawn(work)
    }

    /// Where a shim notes how a container ended.
    pub fn exit_record(&self, sandbox: &Sandbox, container: &str) -> PathBuf {
        self.layout.shim(sandbox.id()).join("exits").join(container)
    }
}
