//! Inputs of launch planning: properties of the host and resources resolved on it. Pure.
//!
//! The agent reads the host's properties once at start (`host.rs`) and resolves what a request names once per container
//! (`resolver.rs`).

use std::{collections::BTreeMap, path::PathBuf};

use super::{cdi, image::LaunchImage};
use crate::seccomp::CpuArchitecture;
use berth_proto::cri;
use berth_shim::plan::Root;

/// Properties of the host and settings that apply to all containers.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Host {
    /// Major and minor version of the kernel.
    pub kernel: (u32, u32),
    /// CPU architecture, for seccomp filters.
    pub machine: CpuArchitecture,
    /// Capabilities that the kernel knows and the agent has in its bounding set, as a bit mask.
    pub capabilities: u64,
    /// Whether the kernel supports seccomp filters.
    pub has_seccomp: bool,
    /// Whether the kernel supports `SECCOMP_FILTER_FLAG_SPEC_ALLOW`.
    pub has_spec_allow: bool,
    /// Whether AppArmor is enabled.
    pub has_apparmor: bool,
    /// Whether SELinux is enabled, enforcing or permissive.
    pub has_selinux: bool,
    /// Version of the cgroup hierarchy.
    pub groups: Groups,
    /// Whether recursive read-only mounts are supported (Linux 5.12).
    pub has_recursive_read_only: bool,
    /// Whether pods can have a user namespace.
    pub has_user_namespaces: bool,
    /// The agent's own `oom_score_adj` as the lower bound for containers; `None` if it can set lower values.
    pub least_oom_score_adj: Option<i32>,
    /// Default rlimits as resource, soft and hard limit: `defaultUlimits` over those of the host's process 1.
    pub limits: Vec<(u32, u64, u64)>,
    /// `deviceOwnershipFromSecurityContext`.
    pub owns_devices: bool,
    /// `ignoreImageVolumes`.
    pub ignores_image_volumes: bool,
    /// `unprivilegedPorts`.
    pub unprivileged_ports: bool,
    /// `unprivilegedICMP`.
    pub unprivileged_icmp: bool,
    /// `allow32BitSystemCalls`.
    pub allows_32_bit: bool,
}

/// Version of the cgroup hierarchy.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Groups {
    /// cgroup v1: one hierarchy per controller.
    V1,
    /// cgroup v2, with the relevant mount options: `nsdelegate`, `memory_recursiveprot`.
    V2 {
        /// The mount options, comma-separated.
        options: String,
    },
}

/// A pod sandbox, as its containers' plans need it.
#[derive(Clone, Copy, Debug)]
pub struct Sandbox<'a> {
    /// Sandbox id.
    pub id: &'a str,
    /// CRI configuration of the sandbox.
    pub config: &'a cri::PodSandboxConfig,
    /// Host name of the pod, or of the node for pods in the host network.
    pub hostname: &'a str,
    /// Directory that contains `hostname`, `hosts`, and `resolv.conf`.
    pub files: &'a std::path::Path,
    /// Source of `/dev/shm`: the sandbox's own, or the host's.
    pub shm: &'a std::path::Path,
}

/// Container whose process namespace is shared (`NamespaceMode` `TARGET`).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct TargetContainer<'a> {
    /// Container id.
    pub id: &'a str,
    /// Id of its sandbox.
    pub sandbox: &'a str,
    /// State as CRI spells it: `CONTAINER_RUNNING`.
    pub state: &'a str,
    /// Process id of its first process, while it runs.
    pub pid: Option<u32>,
}

/// All inputs of a container's launch plan.
#[derive(Clone, Debug)]
pub struct LaunchInputs<'a> {
    /// Container id.
    pub id: &'a str,
    /// CRI configuration of the container.
    pub config: &'a cri::ContainerConfig,
    /// The container's sandbox.
    pub sandbox: Sandbox<'a>,
    /// Container defaults, `/etc/passwd`, and `/etc/group` of the container's image.
    pub image: &'a LaunchImage,
    /// Properties of the host.
    pub host: &'a Host,
    /// Resources resolved on the host for this request.
    pub found: &'a ResolvedResources,
    /// The container that `target_id` names; `None` if it is unknown.
    pub target: Option<TargetContainer<'a>>,
    /// Root file system; the plan decides whether it is read-only and shared.
    pub root: Root,
    /// Cgroup directories, one per hierarchy.
    pub groups: Vec<PathBuf>,
    /// Maximum length of a log record in bytes; 0: no limit.
    pub longest_record: usize,
    /// Timeout of the start in milliseconds.
    pub limit_ms: u64,
    /// Bundle directory where hooks find the container's `config.json`.
    pub bundle: PathBuf,
}

/// Host resources that a request names, after their lookup.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct ResolvedResources {
    /// Resolved sources of the request's mounts, one per mount and in their order.
    pub places: Vec<MountSource>,
    /// Nodes of the request's devices.
    pub devices: Vec<LinuxDevice>,
    /// All device nodes of the host, for privileged containers.
    pub host_devices: Vec<LinuxDevice>,
    /// Content of the seccomp profile that `Localhost` names.
    pub profile: Option<Vec<u8>>,
    /// Names of the loaded AppArmor profiles.
    pub apparmor: Vec<String>,
    /// Container edits of CDI devices.
    pub edits: cdi::Edits,
    /// Directories that back the image's volumes, by path in the container.
    pub volumes: BTreeMap<String, PathBuf>,
}

/// Resolved source of a requested mount.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum MountSource {
    /// A path of the host, without symbolic links.
    Host {
        /// The resolved path.
        path: PathBuf,
        /// Mount point that contains the path.
        on: PathBuf,
        /// Whether that mount is in a peer group (shared).
        is_shared: bool,
        /// Whether that mount is a slave of another peer group.
        is_slave: bool,
    },
    /// An image volume.
    Image {
        /// Directory of the layers.
        layers: PathBuf,
        /// Layer directories, from top to bottom.
        lower: Vec<String>,
    },
}

/// A device node of the host.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct LinuxDevice {
    /// Path in the container.
    pub path: String,
    /// Node type: `b`, `c`, or `p`.
    pub kind: char,
    /// Major and minor number.
    pub numbers: (u32, u32),
    /// Permission bits.
    pub mode: u32,
    /// Owner's user id.
    pub uid: u32,
    /// Owner's group id.
    pub gid: u32,
    /// Cgroup device access: a subset of `r`, `w`, and `m`.
    pub access: String,
}
