//! Pods for the gRPC services and the debugging endpoints, from the engine and the status manager.

use std::sync::Arc;

use async_trait::async_trait;
use futures::{
    StreamExt,
    stream::{self, BoxStream},
};

use crate::engine::PodReader;
use berth_ports::{AllocatablePlacement, ContainerPlacements, PlacedMemory, PodStateProvider};
use berth_resources::{
    devices::{DeviceManager, ListedDevice},
    dra::{ContainerClaim, DraManager, PreparedDevice},
};
use berth_server::ports::{
    Allocatable, Claim, ClaimDevice, Device, ExclusiveAllocations, ExclusiveResources, MemoryBlock, PodDirectory,
    PodFeed,
};
use berth_status::StatusManager;
use berth_types::{CpuSet, Pod, PodUid, api};

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

/// [`ExclusiveResources`] adapter: devices, claims, exclusive CPUs, and reserved memory.
pub struct NodeResources {
    /// Devices of device plugins.
    pub devices: Arc<DeviceManager>,
    /// Resource claims of pods.
    pub claims: Arc<DraManager>,
    /// CPUs and memory of containers.
    pub placement: Arc<dyn ContainerPlacements>,
}

fn device(listed: ListedDevice) -> Device {
    Device { resource: listed.resource, id: listed.id, nodes: listed.nodes }
}

fn memory_block(placed: PlacedMemory) -> MemoryBlock {
    MemoryBlock { kind: placed.resource, bytes: placed.bytes, nodes: placed.nodes }
}

fn claim(used: ContainerClaim) -> Claim {
    let device = |(driver, device): (String, PreparedDevice)| ClaimDevice {
        cdi: device.cdi_ids,
        driver,
        pool: device.pool,
        device: device.device,
        share_id: device.share_id,
    };
    Claim {
        name: used.key.name,
        namespace: used.key.namespace,
        devices: used.devices.into_iter().map(device).collect(),
    }
}

#[async_trait]
impl ExclusiveResources for NodeResources {
    async fn reconcile(&self) {}

    fn allocations(&self, pod: &Pod, container: &str) -> ExclusiveAllocations {
        let placement = self.placement.placement(pod.uid(), container);
        ExclusiveAllocations {
            devices: self.devices.devices_of(pod.uid(), container).into_iter().map(device).collect(),
            cpus: if placement.has_exclusive_cpus { placement.cpus } else { CpuSet::default() },
            memory: self.placement.memory(pod.uid(), container).into_iter().map(memory_block).collect(),
        }
    }

    fn claims(&self, pod: &Pod, container: &str) -> Result<Vec<Claim>, String> {
        let Some((_, container)) = pod.container(container) else { return Ok(Vec::new()) };
        Ok(self.claims.claims_of(pod, container)?.into_iter().map(claim).collect())
    }

    fn allocatable(&self) -> Allocatable {
        let healthy = self.devices.all_devices().into_iter().filter(|listed| listed.is_healthy);
        let AllocatablePlacement { cpus, memory } = self.placement.allocatable();
        Allocatable {
            devices: healthy.map(device).collect(),
            cpus,
            memory: memory.into_iter().map(memory_block).collect(),
        }
    }
}
