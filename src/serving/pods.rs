//! Pods for the gRPC services and the debugging endpoints, from the engine and the status manager.

use std::sync::Arc;

use async_trait::async_trait;
use futures::{
    StreamExt,
    stream::{self, BoxStream},
};

use crate::engine::PodReader;
use berth_ports::PodStateProvider;
use berth_server::ports::{Allocatable, Claim, ExclusiveAllocations, ExclusiveResources, PodDirectory, PodFeed};
use berth_status::StatusManager;
use berth_types::{Pod, PodUid, api};

/// [`PodDirectory`] and [`PodFeed`] adapter: desired pods of the engine with their statuses.
pub struct EnginePods {
    /// Desired pods.
    pub pods: PodReader,
    /// Pod statuses.
    pub status: Arc<StatusManager>,
}

impl PodDirectory for EnginePods {
    fn pods(&self) -> Arc<Vec<Arc<Pod>>> {
        self.pods.desired()
    }

    fn is_active(&self, pod: &Pod) -> bool {
        if self.pods.is_terminated(pod.uid()) {
            return false;
        }
        let own = self.status.status(pod.uid());
        let phase = own.as_deref().map_or(pod.api_phase(), |status| status.phase.as_deref().unwrap_or_default());
        let is_terminal = pod.is_api_terminal() || matches!(phase, "Succeeded" | "Failed");
        !is_terminal || self.pods.is_stopping(pod.uid())
    }

    fn status(&self, uid: &PodUid) -> Option<Arc<api::PodStatus>> {
        self.status.status(uid)
    }
}

impl PodFeed for EnginePods {
    fn changes(&self) -> BoxStream<'static, ()> {
        let statuses = stream::unfold(self.status.changes(), async |mut changes| {
            changes.changed().await.ok().map(|()| ((), changes))
        });
        stream::select(self.pods.changes(), statuses).boxed()
    }
}

/// Stub of the resource managers: no exclusive CPUs, memory, or devices are allocated yet.
pub struct NothingExclusive;

#[async_trait]
impl ExclusiveResources for NothingExclusive {
    async fn reconcile(&self) {}

    fn allocations(&self, _pod: &Pod, _container: &str) -> ExclusiveAllocations {
        ExclusiveAllocations::default()
    }

    fn claims(&self, _pod: &Pod, _container: &str) -> Result<Vec<Claim>, String> {
        Ok(Vec::new())
    }

    fn allocatable(&self) -> Allocatable {
        Allocatable::default()
    }
}
