//! Interface for building CRI configurations of sandboxes and containers.
//!
//! The decisions are pure and in [`super::request`]; implementations do the I/O around them:
//! resolv.conf, hosts file, termination log, subpaths, objects, environment.

use std::{collections::HashMap, net::IpAddr, sync::Arc};

use async_trait::async_trait;

use berth_ports::{MountedVolumes, ResolvedImage};
use berth_proto::cri;
use berth_types::{ContainerId, ContainerKind, Pod, api, observation::ObservedContainer};

/// Inputs of a sandbox configuration.
pub struct SandboxRequest<'a> {
    /// The pod with its allocated resources.
    pub pod: &'a Arc<Pod>,
    /// `metadata.attempt` (spec 03a §3.1).
    pub attempt: u32,
    /// The pod's cgroup in the notation of the cgroup driver.
    pub cgroup_parent: &'a str,
    /// The runtime handler; `""` for the default.
    pub handler: &'a str,
}

/// Inputs of a container configuration.
pub struct ContainerRequest<'a> {
    /// The pod with its allocated resources.
    pub pod: &'a Arc<Pod>,
    /// Kind of the container: init, regular, or ephemeral.
    pub kind: ContainerKind,
    /// Its definition (ephemeral containers converted).
    pub container: &'a api::Container,
    /// ID of the target container, for ephemeral containers with a target.
    pub target: Option<&'a ContainerId>,
    /// Restart count: `metadata.attempt` and log file name.
    pub restart_count: u32,
    /// The resolved image.
    pub image: &'a ResolvedImage,
    /// Images to mount, by volume name.
    pub volume_images: &'a HashMap<String, cri::ImageSpec>,
    /// Addresses of the pod; empty for host network.
    pub pod_ips: &'a [IpAddr],
    /// The mounted volumes of the pod.
    pub volumes: &'a MountedVolumes,
    /// The runtime handler; `""` for the default.
    pub handler: &'a str,
}

/// Why a configuration cannot be built; for containers the message of `CreateContainerConfigError`.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("{0}")]
pub struct PrepareError(pub String);

/// Resources of a pod as passed to the runtime (spec 03a §5, §6.5).
#[derive(Clone, PartialEq, Debug, Default)]
pub struct PodLinuxResources {
    /// Pod totals without overhead.
    pub resources: cri::LinuxContainerResources,
    /// Pod overhead; empty if the pod has none.
    pub overhead: cri::LinuxContainerResources,
}

/// Builds CRI configurations, decoupled from the execution of syncs.
#[async_trait]
pub trait Prepare: Send + Sync + 'static {
    /// Builds the configuration of a sandbox. Creates the pod's log directory.
    ///
    /// # Errors
    /// The text that follows `Failed to create pod sandbox: `.
    async fn sandbox(&self, request: SandboxRequest<'_>) -> Result<cri::PodSandboxConfig, PrepareError>;
    /// Builds the configuration of a container. Creates its log directory, writes the hosts file and
    /// the termination log, and reads its tuning from the resource manager.
    ///
    /// # Errors
    /// The message of `CreateContainerConfigError`.
    async fn container(&self, request: ContainerRequest<'_>) -> Result<cri::ContainerConfig, PrepareError>;
    /// Restart count of the next instance: that of the newest instance plus 1, else the highest log
    /// file number plus 1, else 0 (spec 03a §6.1).
    async fn restart_count(&self, pod: &Pod, container: &str, newest: Option<&ObservedContainer>) -> u32;
    /// Resources for `UpdateContainerResources` of a container (spec 03a §10).
    fn container_resources(&self, pod: &Pod, container: &api::Container) -> cri::LinuxContainerResources;
    /// Resources for `UpdatePodSandboxResources` of a pod (spec 03a §10).
    fn pod_resources(&self, pod: &Pod) -> PodLinuxResources;
}
