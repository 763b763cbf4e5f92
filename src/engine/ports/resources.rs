//! The role of the resources room: pod cgroups, and what it adds to a container.

use std::sync::Arc;

use async_trait::async_trait;

use crate::{
    pod::{ContainerKind, Pod, PodRef, PodUid},
    proto::cri,
};

/// A pod's cgroup.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct PodCgroup {
    /// The parent in the driver's notation, as CRI wants it (`/kubepods/burstable/pod…` or
    /// `kubepods-burstable-pod….slice`).
    pub parent: String,
    /// Whether this call created it.
    pub created: bool,
}

/// What resource managers add to a container.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct ContainerTuning {
    /// CPU set, empty for none.
    pub cpuset_cpus: String,
    /// Memory nodes, empty for none.
    pub cpuset_mems: String,
    /// Whether the CPUs are exclusive (quota off).
    pub exclusive_cpus: bool,
    /// Device-plugin and DRA environment, mounts, devices, annotations, CDI devices.
    pub envs: Vec<(String, String)>,
    /// Mounts that stand before the volume mounts.
    pub mounts: Vec<cri::Mount>,
    /// Devices.
    pub devices: Vec<cri::Device>,
    /// CDI devices.
    pub cdi_devices: Vec<cri::CdiDevice>,
    /// Annotations.
    pub annotations: Vec<(String, String)>,
}

/// Why a cgroup operation failed.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("{0}")]
pub struct ResourceError(pub String);

/// Pod cgroups and container tuning.
#[async_trait]
pub trait ResourceManager: Send + Sync + 'static {
    /// The parent cgroup of a pod, without touching anything.
    fn cgroup_parent(&self, pod: &Pod) -> String;
    /// Whether the pod's cgroup exists.
    async fn exists(&self, pod: &Pod) -> bool;
    /// Creates or updates the pod's cgroup.
    async fn ensure(&self, pod: &Arc<Pod>) -> Result<PodCgroup, ResourceError>;
    /// Removes the pod's cgroup and kills what is left in it.
    async fn remove(&self, pod: &PodRef) -> Result<(), ResourceError>;
    /// UIDs of all pod cgroups on this machine.
    async fn pods(&self) -> Vec<PodUid>;
    /// What is added to a container that is about to be created.
    fn tuning(&self, pod: &Pod, kind: ContainerKind, container: &str) -> Result<ContainerTuning, ResourceError>;
    /// A container of the pod was removed or stopped for good.
    fn released(&self, pod: &PodUid, container: &str);
}
