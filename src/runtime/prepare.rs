//! Gathers what a sandbox or container needs and builds its CRI configuration.
//!
//! The decisions are pure and live in [`super::request`]; here are the reads and writes around
//! them: resolv.conf, hosts file, termination log, sub-paths, objects, environment.

use std::{collections::HashMap, net::IpAddr, sync::Arc};

use async_trait::async_trait;

use berth_ports::{MountedVolumes, ResolvedImage};
use berth_proto::cri;
use berth_types::{ContainerId, ContainerKind, Pod, api, observed::ObservedContainer};

/// What a sandbox is made from.
pub struct SandboxRequest<'a> {
    /// The pod, with allocated resources.
    pub pod: &'a Arc<Pod>,
    /// `metadata.attempt` (spec 03a §3.1).
    pub attempt: u32,
    /// The pod's cgroup in the driver's notation.
    pub cgroup_parent: &'a str,
    /// The runtime handler, `""` for the default.
    pub handler: &'a str,
}

/// What a container is made from.
pub struct ContainerRequest<'a> {
    /// The pod, with allocated resources.
    pub pod: &'a Arc<Pod>,
    /// Which list it stands in.
    pub kind: ContainerKind,
    /// Its definition (ephemeral ones converted).
    pub container: &'a api::Container,
    /// For ephemeral containers with a target: the target's id.
    pub target: Option<&'a ContainerId>,
    /// Restart count: metadata attempt and log file name.
    pub restart_count: u32,
    /// The image, resolved.
    pub image: &'a ResolvedImage,
    /// Images that it mounts, by the names of their volumes.
    pub volume_images: &'a HashMap<String, cri::ImageSpec>,
    /// Addresses of the pod; empty for host network.
    pub pod_ips: &'a [IpAddr],
    /// Volumes that are mounted.
    pub volumes: &'a MountedVolumes,
    /// The runtime handler.
    pub handler: &'a str,
}

/// Why a configuration cannot be built; for containers the text of `CreateContainerConfigError`.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("{0}")]
pub struct PrepareError(pub String);

/// Resources of a pod as the runtime is told them (spec 03a §5, §6.5).
#[derive(Clone, PartialEq, Debug, Default)]
pub struct PodLinuxResources {
    /// Pod totals without overhead.
    pub resources: cri::LinuxContainerResources,
    /// The overhead alone; empty where the pod has none.
    pub overhead: cri::LinuxContainerResources,
}

/// The role of the request side: who carries out plans needs configurations, and nothing else of it.
#[async_trait]
pub trait Prepare: Send + Sync + 'static {
    /// The configuration of a sandbox. Creates the pod's log directory.
    ///
    /// # Errors
    /// The text that follows `Failed to create pod sandbox: `.
    async fn sandbox(&self, request: SandboxRequest<'_>) -> Result<cri::PodSandboxConfig, PrepareError>;
    /// The configuration of a container. Creates its log directory, writes the hosts file and
    /// the termination log, and asks the resources room for its tuning.
    ///
    /// # Errors
    /// The message of `CreateContainerConfigError`.
    async fn container(&self, request: ContainerRequest<'_>) -> Result<cri::ContainerConfig, PrepareError>;
    /// Restart count of the next instance: the newest one's plus 1, else one more than the
    /// highest log file number, else 0 (spec 03a §6.1).
    async fn restart_count(&self, pod: &Pod, container: &str, newest: Option<&ObservedContainer>) -> u32;
    /// What `UpdateContainerResources` is told for a container of a pod (spec 03a §10).
    fn container_resources(&self, pod: &Pod, container: &api::Container) -> cri::LinuxContainerResources;
    /// What `UpdatePodSandboxResources` is told for a pod (spec 03a §10).
    fn pod_resources(&self, pod: &Pod) -> PodLinuxResources;
}
