//! Resource usage of pods, as far as it matters for eviction. Pure.
//!
//! Implements spec 05 §3.3, §3.5.

use std::{collections::BTreeSet, sync::Arc};

use super::signals::Layout;
use berth_config::eviction::Signal;
use berth_types::{
    Pod,
    quantity::Amount,
    resources::{EPHEMERAL_STORAGE, MEMORY, Overhead, amount_of, amounts, pod_requests},
};

/// Disk usage.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct DiskUse {
    /// Used bytes.
    pub bytes: u64,
    /// Used inodes.
    pub inodes: u64,
}

/// Usage of a container.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct ContainerUse {
    /// Name of the container.
    pub name: String,
    /// Memory: bytes of the working set.
    pub memory: Option<u64>,
    /// Disk usage of the writable layer.
    pub rootfs: Option<DiskUse>,
    /// Disk usage of the logs.
    pub logs: Option<DiskUse>,
}

/// Usage of a pod.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct PodUse {
    /// Memory: bytes of the working set.
    pub memory: Option<u64>,
    /// Number of processes.
    pub processes: Option<u64>,
    /// Total bytes of local ephemeral storage.
    pub storage: Option<u64>,
    /// Disk usage of volumes, by name.
    pub volumes: Vec<(String, DiskUse)>,
    /// Usage of containers, in the order of the statistics.
    pub containers: Vec<ContainerUse>,
}

/// An active pod that eviction considers.
#[derive(Clone, Debug)]
pub struct Candidate {
    /// The pod, with its allocated resources.
    pub pod: Arc<Pod>,
    /// Usage of the pod; `None` if unknown.
    pub usage: Option<PodUse>,
}

/// Parts of a pod that are stored on a disk.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct DiskParts {
    rootfs: bool,
    logs: bool,
    volumes: bool,
}

impl DiskParts {
    const ALL: Self = Self { rootfs: true, logs: true, volumes: true };
    const OF_NODE: Self = Self { rootfs: false, logs: true, volumes: true };
    const LAYERS: Self = Self { rootfs: true, logs: false, volumes: false };
    const NONE: Self = Self { rootfs: false, logs: false, volumes: false };

    /// Parts that are stored on the file system of a signal.
    fn on(signal: Signal, layout: Layout) -> Self {
        match (signal, layout) {
            (Signal::NodeFs | Signal::NodeFsInodes, Layout::DedicatedImages) => Self::OF_NODE,
            (Signal::ImageFs | Signal::ImageFsInodes, Layout::Split) => Self::NONE,
            (
                Signal::ImageFs | Signal::ImageFsInodes | Signal::ContainerFs | Signal::ContainerFsInodes,
                Layout::DedicatedImages,
            ) => Self::LAYERS,
            _ => Self::ALL,
        }
    }
}

impl Candidate {
    /// Usage of the signal's resource; 0 if unknown.
    pub fn used(&self, signal: Signal, layout: Layout) -> u64 {
        let Some(usage) = &self.usage else { return 0 };
        match signal {
            Signal::Memory | Signal::AllocatableMemory => usage.memory.unwrap_or_default(),
            Signal::Pid => usage.processes.unwrap_or_default(),
            Signal::NodeFs | Signal::ImageFs | Signal::ContainerFs => self.on_disk(signal, layout).bytes,
            Signal::NodeFsInodes | Signal::ImageFsInodes | Signal::ContainerFsInodes => {
                self.on_disk(signal, layout).inodes
            }
        }
    }

    fn on_disk(&self, signal: Signal, layout: Layout) -> DiskUse {
        let (parts, Some(usage)) = (DiskParts::on(signal, layout), &self.usage) else { return DiskUse::default() };
        let layers = usage.containers.iter().filter(|_| parts.rootfs).filter_map(|container| container.rootfs);
        let logs = usage.containers.iter().filter(|_| parts.logs).filter_map(|container| container.logs);
        let local = if parts.volumes { local_volumes(&self.pod) } else { BTreeSet::new() };
        let volumes = usage.volumes.iter().filter(|(name, _)| local.contains(name.as_str())).map(|(_, used)| *used);
        layers.chain(logs).chain(volumes).fold(DiskUse::default(), |sum, used| DiskUse {
            bytes: sum.bytes.saturating_add(used.bytes),
            inodes: sum.inodes.saturating_add(used.inodes),
        })
    }

    /// Request of the signal's resource; 0 for inodes and processes, which cannot be requested.
    pub fn requested(&self, signal: Signal) -> u64 {
        let request = match signal {
            Signal::Memory | Signal::AllocatableMemory => self.request(MEMORY),
            Signal::NodeFs | Signal::ImageFs | Signal::ContainerFs => self.request(EPHEMERAL_STORAGE),
            Signal::NodeFsInodes | Signal::ImageFsInodes | Signal::ContainerFsInodes | Signal::Pid => return 0,
        };
        u64::try_from(request.value()).unwrap_or_default()
    }

    /// Request of the pod; its overhead is added only if the request is not zero.
    fn request(&self, resource: &str) -> Amount {
        let own = amount_of(&pod_requests(self.pod.spec(), Overhead::Excluded), resource);
        if own.is_zero() {
            return own;
        }
        own.plus(amount_of(&amounts(self.pod.spec().overhead.as_ref()), resource))
    }
}

/// Names of volumes that are stored on the node's disk.
fn local_volumes(pod: &Pod) -> BTreeSet<String> {
    let is_local = |volume: &berth_types::api::Volume| {
        let on_disk = volume.empty_dir.as_ref().is_some_and(|dir| dir.medium.as_deref() != Some("Memory"));
        on_disk || volume.host_path.is_some() || volume.config_map.is_some() || volume.git_repo.is_some()
    };
    pod.spec().volumes().filter(is_local).map(|volume| volume.name).collect()
}
