//! The role of the resources room: pod cgroups, and what it adds to a container.

use std::sync::Arc;

use async_trait::async_trait;

use berth_proto::cri;
use berth_types::{ContainerId, ContainerKind, Pod, PodRef, PodUid};

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

/// CPU and memory values of a pod's cgroup; `None` where not limited or not declared.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct PodCgroupValues {
    /// CPU weight in shares.
    pub cpu_shares: Option<u64>,
    /// CPU quota in microseconds per period.
    pub cpu_quota: Option<i64>,
    /// CPU period in microseconds.
    pub cpu_period: Option<u64>,
    /// Memory limit in bytes.
    pub memory_limit: Option<i64>,
}

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
    /// The last word before `CreateContainer` (exclusive CPUs, memory nodes).
    ///
    /// # Errors
    /// The message of `PreCreateHookError`.
    async fn before_create(
        &self,
        _pod: &Pod,
        _kind: ContainerKind,
        _container: &str,
        _config: &mut cri::ContainerConfig,
    ) -> Result<(), ResourceError> {
        Ok(())
    }
    /// Between create and start (device plugins' PreStartContainer).
    ///
    /// # Errors
    /// The message of `PreStartHookError`.
    async fn before_start(&self, _pod: &Pod, _container: &str, _id: &ContainerId) -> Result<(), ResourceError> {
        Ok(())
    }
    /// The values the pod's cgroup should have, without MemoryQoS; none where pods have no cgroups of
    /// their own: then only containers are resized (spec 06a §11).
    ///
    /// # Errors
    /// Where resizing is not possible here.
    fn wanted_pod_values(&self, _pod: &Pod) -> Result<PodCgroupValues, ResourceError> {
        Err(no_resize())
    }
    /// The values the pod's cgroup has now.
    ///
    /// # Errors
    /// Where they cannot be read.
    async fn current_pod_values(&self, _pod: &Pod) -> Result<PodCgroupValues, ResourceError> {
        Err(no_resize())
    }
    /// Writes the values that are set and leaves the others as they are.
    ///
    /// # Errors
    /// Where they cannot be written.
    async fn apply_pod_values(&self, _pod: &Pod, _values: PodCgroupValues) -> Result<(), ResourceError> {
        Err(no_resize())
    }
    /// Memory in use now, in bytes, of a pod or of one of its containers; `None` where pods have no
    /// cgroups of their own, so that only the runtime knows.
    ///
    /// # Errors
    /// Where there are no statistics.
    async fn memory_usage(&self, _pod: &Pod, _container: Option<&ContainerId>) -> Result<Option<u64>, ResourceError> {
        Err(no_resize())
    }
}

fn no_resize() -> ResourceError {
    ResourceError("in-place resize is not supported by this node's resource manager".to_owned())
}
