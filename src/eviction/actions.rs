//! Eviction adapters: pods through the engine, reclaim through runtime manager and image manager.

use std::{collections::HashMap, sync::Arc, time::Duration};

use async_trait::async_trait;
use tokio::{sync::mpsc, time::timeout};

use super::{
    message::EvictionVerdict,
    page_cache::PageCache,
    ports::{MemoryShortage, Pods, Reclaim, UsageScope},
    usage::{ContainerUse, DiskUse, PodUse},
};
use crate::{
    engine::{
        PodReader, SyncLoopCommand,
        allocation::Allocations,
        kill_and_wait,
        lifecycle::{StatusOverride, StopCause},
    },
    images,
    runtime::{GcMode, RuntimeManager},
};
use berth_ports::PodStateProvider;
use berth_stats::{
    Form, StatsProvider,
    summary::{ContainerStats, FsStats, PodStats},
};
use berth_types::{Pod, PodUid};

/// Maximum age of disk measurements for [`UsageScope::DisksNow`]: older ones do not show which pod filled the disk.
const MEASURED: Duration = Duration::from_secs(5);
/// Deadline for the removal of dead containers and for the removal of unused images.
const RECLAIM_LIMIT: Duration = Duration::from_secs(120);

/// [`Pods`] adapter: reads pods from the engine, and evicts them with kill commands.
pub struct EnginePods {
    /// Reads the pods of this node.
    pub pods: PodReader,
    /// Receives kill commands of the sync loop.
    pub commands: mpsc::Sender<SyncLoopCommand>,
    /// Allocated resources of pods.
    pub allocations: Allocations,
    /// Resource usage of pods.
    pub statistics: StatsProvider,
}

#[async_trait]
impl Pods for EnginePods {
    fn active(&self) -> Vec<Arc<Pod>> {
        let pods = self.pods.desired();
        let active = pods.iter().filter(|pod| self.pods.is_active(pod.uid()));
        active.map(|pod| self.allocations.allocated(pod)).collect()
    }

    async fn usages(&self, needs: UsageScope) -> Result<HashMap<PodUid, PodUse>, String> {
        let summary = match needs {
            UsageScope::Memory => self.statistics.values(Form::Short).await,
            UsageScope::Processes => {
                let counts = self.statistics.processes().await?;
                let only = |(pod, processes)| (pod, PodUse { processes, ..PodUse::default() });
                return Ok(counts.into_iter().map(only).collect());
            }
            UsageScope::Disks => self.statistics.values(Form::Full).await,
            UsageScope::DisksNow => self.statistics.values_now(MEASURED).await,
        }?;
        Ok(summary.pods.iter().map(|pod| (pod.id.uid.clone(), usage(pod))).collect())
    }

    async fn evict(&self, pod: &Arc<Pod>, verdict: &EvictionVerdict) -> Result<(), String> {
        let message = verdict.message.clone();
        let disruption = verdict.is_disruption.then(|| ("TerminationByKubelet".to_owned(), message.clone()));
        let reason = "Evicted".to_owned();
        let status = StatusOverride {
            reason,
            message,
            disruption,
            keeps_success: false,
            is_unready: false,
            status_reserve: Duration::ZERO,
        };
        kill_and_wait(&self.commands, pod, StopCause::Evicted, Some(verdict.grace), Some(status)).await
    }

    async fn cleaned_up(&self, pod: &PodUid) {
        self.pods.finished(pod).await;
    }
}

fn usage(pod: &PodStats) -> PodUse {
    let disk = |fs: &FsStats| Some(DiskUse { bytes: fs.used?, inodes: fs.inodes_used.unwrap_or_default() });
    let container = |container: &ContainerStats| ContainerUse {
        name: container.name.clone(),
        memory: container.usage.memory.and_then(|memory| memory.working_set),
        rootfs: container.rootfs.as_ref().and_then(disk),
        logs: container.logs.as_ref().and_then(disk),
    };
    PodUse {
        memory: pod.usage.memory.and_then(|memory| memory.working_set),
        processes: pod.processes,
        storage: pod.ephemeral_storage.and_then(|storage| storage.used),
        volumes: pod.volumes.iter().filter_map(|volume| Some((volume.name.clone(), disk(&volume.fs)?))).collect(),
        containers: pod.containers.iter().map(container).collect(),
    }
}

/// [`Reclaim`] of this node: dead containers, unused images, and page cache.
pub struct NodeReclaimer {
    /// Removes dead containers.
    pub runtime: Arc<RuntimeManager>,
    /// Removes images.
    pub images: Arc<images::ImageManager>,
    /// Decides whether the content of a pod may be removed.
    pub pod_states: Arc<dyn PodStateProvider>,
    /// Reclaims page cache.
    pub page_cache: PageCache,
}

#[async_trait]
impl Reclaim for NodeReclaimer {
    async fn containers(&self) -> Result<(), String> {
        let collected = self.runtime.collect_garbage(&self.pod_states, GcMode::EvictTerminated);
        timeout(RECLAIM_LIMIT, collected).await.unwrap_or_else(|_| Err(late("dead containers")))
    }

    async fn images(&self) -> Result<(), String> {
        match timeout(RECLAIM_LIMIT, self.images.delete_unused()).await {
            Ok(deleted) => deleted.map(drop).map_err(|error| error.to_string()),
            Err(_) => Err(late("unused images")),
        }
    }

    async fn page_cache(&self, worst: &PodUid, missing: MemoryShortage) -> bool {
        self.page_cache.reclaim(worst, missing).await
    }
}

fn late(what: &str) -> String {
    format!("{what} were not removed within {RECLAIM_LIMIT:?}")
}
