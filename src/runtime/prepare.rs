//! Gathers what a sandbox or container needs and builds its CRI configuration.
//!
//! The decisions are pure and live in [`super::request`]; here are the reads and writes around
//! them: resolv.conf, hosts file, termination log, sub-paths, objects, environment.

use std::{net::IpAddr, sync::Arc};

use crate::{
    engine::ports::{MountedVolumes, ResolvedImage},
    pod::{ContainerId, ContainerKind, Pod, api},
};

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
