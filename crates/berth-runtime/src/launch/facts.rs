//! What plans are made from besides the request: the host, and what was found on it. Pure.
//!
//! The host is looked at once, at start (`host.rs`); what a request names is looked up for each container (`find.rs`).

use std::{collections::BTreeMap, path::PathBuf};

use super::{cdi, image::ImageConfig};
use crate::seccomp::Machine;
use berth_proto::cri;
use berth_shim::plan::Root;

/// What this machine can do, and what is configured for all containers.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Host {
    /// Major and minor version of the kernel.
    pub kernel: (u32, u32),
    /// The processor.
    pub machine: Machine,
    /// Capabilities the kernel knows and we have, a bit for each.
    pub capabilities: u64,
    /// Whether filters of system calls are there.
    pub has_seccomp: bool,
    /// Whether the kernel takes `SECCOMP_FILTER_FLAG_SPEC_ALLOW`.
    pub has_spec_allow: bool,
    /// Whether the host has AppArmor.
    pub has_apparmor: bool,
    /// Whether the host runs SELinux, enforcing or not.
    pub has_selinux: bool,
    /// Which kind of control groups.
    pub groups: Groups,
    /// Whether mounts can be made read-only with all below them (Linux 5.12).
    pub has_recursive_read_only: bool,
    /// Whether pods can have a user namespace.
    pub has_user_namespaces: bool,
    /// Our own `oom_score_adj`, where it cannot be lowered; none where it can.
    pub least_oom_score_adj: Option<i32>,
    /// Resource, soft and hard limit of every process: `defaultUlimits` over those of the host's process 1.
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

/// The kind of control groups a host has.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Groups {
    /// The old ones, a hierarchy for each controller.
    V1,
    /// The unified hierarchy, with those of its mount's options that matter: `nsdelegate`, `memory_recursiveprot`.
    V2 {
        /// The options, separated by commas.
        options: String,
    },
}

/// A pod's sandbox, as its containers see it.
#[derive(Clone, Copy, Debug)]
pub struct Sandbox<'a> {
    /// Its id.
    pub id: &'a str,
    /// What it was made from.
    pub config: &'a cri::PodSandboxConfig,
    /// Its host name, or the node's.
    pub hostname: &'a str,
    /// Directory that holds `hostname`, `hosts` and `resolv.conf`.
    pub files: &'a std::path::Path,
    /// What is `/dev/shm`: its own, or the host's.
    pub shm: &'a std::path::Path,
}

/// Another container whose processes are to be seen (`TARGET`).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct TargetContainer<'a> {
    /// Its id.
    pub id: &'a str,
    /// The sandbox it is in.
    pub sandbox: &'a str,
    /// Its state, as CRI spells it: `CONTAINER_RUNNING`.
    pub state: &'a str,
    /// Its first process, while it runs.
    pub pid: Option<u32>,
}

/// Everything a container's plan is made from.
#[derive(Clone, Debug)]
pub struct Inputs<'a> {
    /// The container's id.
    pub id: &'a str,
    /// What is asked.
    pub config: &'a cri::ContainerConfig,
    /// Its sandbox.
    pub sandbox: Sandbox<'a>,
    /// Its image.
    pub image: &'a ImageConfig,
    /// This machine.
    pub host: &'a Host,
    /// What was found of what the request names.
    pub found: &'a Found,
    /// The container `target_id` names, where it is known.
    pub target: Option<TargetContainer<'a>>,
    /// Its root; whether that is read-only and shared is decided here.
    pub root: Root,
    /// Its control group, a directory for each hierarchy.
    pub groups: Vec<PathBuf>,
    /// Longest record of its log in bytes; 0: no limit.
    pub longest_record: usize,
    /// How long starting may take, milliseconds.
    pub limit_ms: u64,
    /// Where hooks find the container's `config.json`.
    pub bundle: PathBuf,
}

/// What was found of what a request names.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Found {
    /// One for each of the request's mounts, in their order.
    pub places: Vec<Place>,
    /// Nodes of the request's devices.
    pub devices: Vec<Node>,
    /// All nodes of the host; for privileged containers.
    pub host_devices: Vec<Node>,
    /// Text of the profile that `Localhost` names.
    pub profile: Option<Vec<u8>>,
    /// Names of loaded AppArmor profiles.
    pub apparmor: Vec<String>,
    /// What devices of other vendors want changed.
    pub edits: cdi::Edits,
    /// Directories that stand for the image's volumes, by path in the container.
    pub volumes: BTreeMap<String, PathBuf>,
}

/// What a mount of a request leads to.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Place {
    /// A path of the host, without symbolic links.
    Host {
        /// The path.
        path: PathBuf,
        /// Where what it lies on is mounted.
        on: PathBuf,
        /// Whether that mount belongs to a peer group.
        is_shared: bool,
        /// Whether that mount receives from another group.
        is_slave: bool,
    },
    /// An image.
    Image {
        /// Directory of the layers.
        layers: PathBuf,
        /// From top to bottom.
        lower: Vec<String>,
    },
}

/// A device node of the host.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Node {
    /// Where it is in the container.
    pub path: String,
    /// `b`, `c` or `p`.
    pub kind: char,
    /// Numbers.
    pub numbers: (u32, u32),
    /// Permissions.
    pub mode: u32,
    /// Owner.
    pub uid: u32,
    /// Owning group.
    pub gid: u32,
    /// What may be done with it: of `r`, `w` and `m`.
    pub access: String,
}
