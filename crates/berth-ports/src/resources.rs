//! Port of the resource managers: pod cgroups, resize, and container tuning (`ResourceManager`).

use std::sync::Arc;

use async_trait::async_trait;

use berth_proto::cri;
use berth_types::{ContainerId, ContainerKind, Pod, PodRef, PodUid};

/// Result of [`ResourceManager::ensure`]: the cgroup above those of the pod's containers.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct PodCgroup {
    /// Parent cgroup in the notation of the cgroup driver, as CRI expects it (`/kubepods/burstable/pod…` or
    /// `kubepods-burstable-pod….slice`).
    pub parent: String,
    /// Whether this call created it.
    pub created: bool,
}

/// Settings that the resource managers add to a container.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct ContainerTuning {
    /// CPU set (`cpuset.cpus`); empty for no restriction.
    pub cpuset_cpus: String,
    /// NUMA memory nodes (`cpuset.mems`); empty for no restriction.
    pub cpuset_mems: String,
    /// Whether the CPUs are exclusive (CPU quota disabled).
    pub exclusive_cpus: bool,
    /// Environment variables of device plugins and DRA drivers.
    pub envs: Vec<(String, String)>,
    /// Mounts of device plugins and DRA drivers; they precede the volume mounts.
    pub mounts: Vec<cri::Mount>,
    /// Devices of device plugins and DRA drivers.
    pub devices: Vec<cri::Device>,
    /// Qualified CDI device names.
    pub cdi_devices: Vec<cri::CdiDevice>,
    /// Annotations of the container.
    pub annotations: Vec<(String, String)>,
}

/// Error text of a resource operation.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("{0}")]
pub struct ResourceError(pub String);

/// CPU and memory values of a pod's cgroup; `None` for unlimited or undeclared.
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

/// Manages pod cgroups and tunes containers.
#[async_trait]
pub trait ResourceManager: Send + Sync + 'static {
    /// Computes the parent cgroup of a pod without creating it.
    fn cgroup_parent(&self, pod: &Pod) -> String;
    /// Whether the pod's cgroup exists.
    async fn exists(&self, pod: &Pod) -> bool;
    /// Creates or updates the pod's cgroup.
    async fn ensure(&self, pod: &Arc<Pod>) -> Result<PodCgroup, ResourceError>;
    /// Removes the pod's cgroup and kills what is left in it.
    async fn remove(&self, pod: &PodRef) -> Result<(), ResourceError>;
    /// UIDs of all pod cgroups on this machine.
    async fn pods(&self) -> Vec<PodUid>;
    /// Settings to add to a container that is about to be created.
    fn tuning(&self, pod: &Pod, kind: ContainerKind, container: &str) -> Result<ContainerTuning, ResourceError>;
    /// Releases the resources of a container that was removed or stopped permanently.
    fn released(&self, pod: &PodUid, container: &str);
    /// Last hook before `CreateContainer`. Returns the CPU set of the container if it may have changed since its
    /// tuning.
    ///
    /// # Errors
    /// The message of `PreCreateHookError`.
    async fn before_create(&self, _pod: &Pod, _container: &str) -> Result<Option<String>, ResourceError> {
        Ok(None)
    }
    /// Hook between create and start (device plugins' PreStartContainer).
    ///
    /// # Errors
    /// The message of `PreStartHookError`.
    async fn before_start(&self, _pod: &Pod, _container: &str, _id: &ContainerId) -> Result<(), ResourceError> {
        Ok(())
    }
    /// Desired values of the pod's cgroup, without MemoryQoS; none if pods have no cgroups of their own: then only
    /// containers are resized (spec 06a §11).
    ///
    /// # Errors
    /// If in-place resize is not supported.
    fn desired_pod_values(&self, _pod: &Pod) -> Result<PodCgroupValues, ResourceError> {
        Err(no_resize())
    }
    /// Current values of the pod's cgroup.
    ///
    /// # Errors
    /// If they cannot be read.
    async fn current_pod_values(&self, _pod: &Pod) -> Result<PodCgroupValues, ResourceError> {
        Err(no_resize())
    }
    /// Writes the values that are set and leaves the others unchanged.
    ///
    /// # Errors
    /// If they cannot be written.
    async fn apply_pod_values(&self, _pod: &Pod, _values: PodCgroupValues) -> Result<(), ResourceError> {
        Err(no_resize())
    }
    /// Current memory usage, in bytes, of a pod or of one of its containers; `None` if pods have no cgroups of their
    /// own, so that only the runtime can report it.
    ///
    /// # Errors
    /// If there are no statistics.
    async fn memory_usage(&self, _pod: &Pod, _container: Option<&ContainerId>) -> Result<Option<u64>, ResourceError> {
        Err(no_resize())
    }
}

fn no_resize() -> ResourceError {
    ResourceError("in-place resize is not supported by this node's resource manager".to_owned())
}
