//! Port of the device manager: devices of device plugins at admission, container creation, and status.

use std::{
    collections::{BTreeMap, HashSet},
    sync::Arc,
};

use async_trait::async_trait;

use berth_proto::cri;
use berth_types::{Pod, PodUid, api};

/// Why resources cannot be allocated to a pod.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct AllocationRefusal {
    /// Reason of the pod's status if the error has one of its own (`TopologyAffinityError`); otherwise the reason is
    /// `UnexpectedAdmissionError`.
    pub reason: Option<&'static str>,
    /// Text of the error.
    pub message: String,
    /// What was missing and what would have sufficed, for the log and for the explanation of the pod's state.
    pub detail: Option<String>,
}

/// An error without a reason of its own.
impl From<String> for AllocationRefusal {
    fn from(message: String) -> Self {
        Self { reason: None, message, detail: None }
    }
}

/// Decision of the resource managers on a pod (spec 06c §1.6, 06b §3.2).
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum DeviceAdmission {
    /// All resources are allocated, or the pod requests none.
    Allocated,
    /// The allocation has not finished: wait for [`PodDevices::settled`], then ask again. Names the resource whose
    /// plugin has to register first, if that is the cause.
    Pending(Option<String>),
    /// The resources cannot be allocated.
    Rejected(AllocationRefusal),
}

/// Options of a container that its devices require, merged over all resources (spec 06c §1.7).
#[derive(Clone, PartialEq, Debug, Default)]
pub struct ContainerDevices {
    /// Environment variables; names are unique.
    pub envs: Vec<(String, String)>,
    /// Mounts; container paths are unique.
    pub mounts: Vec<cri::Mount>,
    /// Device nodes; container paths are unique.
    pub devices: Vec<cri::Device>,
    /// Qualified CDI device names.
    pub cdi_devices: Vec<cri::CdiDevice>,
    /// Annotations of the container; keys are unique.
    pub annotations: Vec<(String, String)>,
}

/// Numbers of devices of one resource.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct DeviceCapacity {
    /// Healthy and unhealthy devices.
    pub capacity: u64,
    /// Healthy devices.
    pub allocatable: u64,
}

/// Allocates devices to pods.
#[async_trait]
pub trait PodDevices: Send + Sync + 'static {
    /// Decides on a pod. The first call starts the allocation if a plugin has to be called. A pod with running
    /// containers (`is_running`) keeps its devices. `active` returns the pods that keep their devices, in addition to
    /// this one; `None` while a source is not ready: then no pod loses any.
    fn admit(&self, pod: &Arc<Pod>, is_running: bool, active: &dyn Fn() -> Option<HashSet<PodUid>>) -> DeviceAdmission;

    /// Allocates the exclusive CPUs that a running pod needs once it is resized. A container that has CPUs keeps them,
    /// whatever it requests now; devices and memory do not change. Never blocks.
    ///
    /// # Errors
    /// The CPUs are not available, or cannot be aligned. Containers before the one that failed keep what they got.
    fn admit_resize(&self, pod: &Pod) -> Result<(), AllocationRefusal>;

    /// Returns when no allocation of the pod is in progress.
    async fn settled(&self, pod: &PodUid);

    /// Of each resource that a pod has devices of: the number of its healthy devices, or of those that pods have if
    /// that is larger. The node object may list fewer.
    fn allocatable(&self, pod: &PodUid) -> BTreeMap<String, u64>;

    /// Releases the devices of a pod that will not run.
    fn release(&self, pod: &PodUid);

    /// Prepares the devices of a container for its start and returns the options that they require.
    ///
    /// # Errors
    /// The text of the failure: a device is missing, or the plugin refused.
    async fn container_devices(&self, pod: &Arc<Pod>, container: &api::Container) -> Result<ContainerDevices, String>;

    /// Health of the devices of a container, for `allocatedResourcesStatus`; sorted by resource and ID.
    fn health(&self, pod: &PodUid, container: &str) -> Vec<api::ResourceStatus>;
}

/// No device manager: pods get no devices.
#[derive(Clone, Copy, Debug)]
pub struct NoDevices;

#[async_trait]
impl PodDevices for NoDevices {
    fn admit(&self, _: &Arc<Pod>, _: bool, _: &dyn Fn() -> Option<HashSet<PodUid>>) -> DeviceAdmission {
        DeviceAdmission::Allocated
    }

    fn admit_resize(&self, _: &Pod) -> Result<(), AllocationRefusal> {
        Ok(())
    }

    async fn settled(&self, _: &PodUid) {}

    fn allocatable(&self, _: &PodUid) -> BTreeMap<String, u64> {
        BTreeMap::new()
    }

    fn release(&self, _: &PodUid) {}

    async fn container_devices(&self, _: &Arc<Pod>, _: &api::Container) -> Result<ContainerDevices, String> {
        Ok(ContainerDevices::default())
    }

    fn health(&self, _: &PodUid, _: &str) -> Vec<api::ResourceStatus> {
        Vec::new()
    }
}
