//! Protocol messages between the agent and a pod's shim: requests, replies, events. Pure.
//!
//! The agent makes every decision: the shim executes the plan in the order given and knows nothing of CRI, images, or
//! Kubernetes. File descriptors travel beside a message (`SCM_RIGHTS`), in the order in which [`ShimRequest`] lists them.
//! Implements spec 09a §10-§14.

use std::{collections::BTreeMap, path::PathBuf};

use serde::{Deserialize, Deserializer, Serialize};

pub use hooks::{Hook, HookPoint, Hooks};

mod hooks;

/// Protocol version of both peers; a shim speaks exactly one version.
pub const VERSION: u16 = 1;
/// First field of every datagram.
pub const MAGIC: u16 = 0x5348;
/// Maximum size of a datagram's body, bytes.
pub const MAX_BODY: usize = 1 << 20;

/// A request from the agent to the shim.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub enum ShimRequest {
    /// Identifies the shim. Answered by [`Reply::Hello`] with the descriptors of the namespaces the shim keeps open.
    Hello,
    /// Creates the pod's namespaces; at most once per shim.
    MakeNamespaces(NamespacePlan),
    /// Starts a container.
    Launch(Box<LaunchPlan>),
    /// Starts another process in a container. Without a terminal, stdin, stdout, and stderr are passed as descriptors.
    Exec(Box<ExecPlan>),
    /// Sends a signal.
    Signal {
        /// Receiving process.
        to: ProcessTarget,
        /// Signal number.
        signal: i32,
        /// Whether only that process, its process group, or its whole cgroup receives the signal.
        scope: Scope,
    },
    /// Sets the size of a container's terminal, in columns and rows. (The agent resizes exec terminals itself.)
    Resize {
        /// Container whose terminal is resized.
        of: ProcessTarget,
        /// Width in character cells.
        columns: u16,
        /// Height in character cells.
        rows: u16,
    },
    /// Closes a container's stdin permanently.
    CloseStdin(String),
    /// Reopens a container's log file after log rotation renamed it.
    ReopenLog(String),
    /// Copies a container's further output to a client. Descriptors: stdin (if `stdin` is set), stdout, stderr.
    Attach {
        /// Container id.
        container: String,
        /// Whether the client's input is forwarded to the container.
        stdin: bool,
    },
    /// Acknowledges all events up to and including this number; the shim stops repeating them.
    Acknowledge(u64),
    /// Removes the record of a container that has exited.
    Forget(String),
    /// Terminates the shim and kills the pod's process 1; refused while a container runs or starts.
    Shutdown,
}

/// Process that a request or event refers to.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize, Deserialize)]
pub enum ProcessTarget {
    /// The first process of a container, by container id.
    Container(String),
    /// An exec process: container id and exec id.
    Exec(String, String),
    /// The pod's process 1, if the pod shares its process namespace.
    Init,
}

/// Recipients of a signal.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub enum Scope {
    /// Only that process.
    Process,
    /// Its process group.
    Group,
    /// Every process in the container's cgroup.
    ControlGroup,
}

/// A reply from the shim; carries the sequence number of its request.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub enum Reply {
    /// The request succeeded and has no result.
    Done,
    /// Reply to [`ShimRequest::Hello`]; carries the descriptors of [`Hello::namespaces`] in the same order.
    Hello(Hello),
    /// The namespaces exist; their descriptors are attached in the order of [`Namespace`].
    Namespaces {
        /// Namespaces that were created.
        made: Vec<Namespace>,
        /// Process id of the pod's process 1, if the pod shares its process namespace.
        init: Option<u32>,
    },
    /// The process runs. For an [`ShimRequest::Exec`] with a terminal, the descriptor of the pty master is attached.
    Started(StartedProcess),
    /// The request failed.
    Failed(ShimFailure),
}

/// State that a shim reports to a connecting agent.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct Hello {
    /// Protocol version the shim speaks.
    pub version: u16,
    /// Process id of the shim.
    pub pid: u32,
    /// Namespaces whose descriptors the shim keeps open.
    pub namespaces: Vec<Namespace>,
    /// Process id of the pod's process 1, if any.
    pub init: Option<u32>,
    /// Containers that were started and not yet forgotten.
    pub containers: Vec<ContainerRecord>,
    /// Containers being started for an agent that disconnected: each soon appears in `containers` or leaves no trace.
    #[serde(default)]
    pub starting: Vec<String>,
    /// Events that were not acknowledged yet.
    pub events: Vec<ExitEvent>,
}

/// Record of a started container in its shim.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct ContainerRecord {
    /// Container id.
    pub id: String,
    /// The container's first process; kept after its exit.
    pub started: StartedProcess,
    /// Exit of the first process; `None` while it runs.
    pub exit: Option<Exit>,
}

/// Identity and start time of a started process.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct StartedProcess {
    /// Process id in the host's PID namespace.
    pub pid: u32,
    /// Start time in clock ticks since boot (field 22 of `/proc/<pid>/stat`): detects PID reuse.
    pub start_ticks: u64,
    /// Wall-clock start time, nanoseconds since the epoch.
    pub at_ns: i64,
    /// Durations of the steps of its start.
    #[serde(default)]
    pub took: StartTimings,
}

/// Durations of the steps of a container start, microseconds.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct StartTimings {
    /// Preparing the mounts and the root file system.
    pub root: u32,
    /// From then until the process existed.
    pub clone: u32,
}

/// Error of a failed request.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize, thiserror::Error)]
#[error("{text}")]
pub struct ShimFailure {
    /// Class of the failure.
    pub kind: FailureKind,
    /// Message for people: the attempted operation, its path, and the kernel's error.
    pub text: String,
}

/// Failure classes that callers distinguish.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub enum FailureKind {
    /// The container or process does not exist.
    Unknown,
    /// The object exists already or is in a state that forbids the request.
    State,
    /// The program cannot be executed: `exec: "x": executable file not found in $PATH`.
    Program,
    /// The deadline expired.
    Deadline,
    /// Any other failure.
    Other,
}

/// An unsolicited notification of a process exit, repeated until acknowledged.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct ExitEvent {
    /// Sequence number, counting up from 1.
    pub number: u64,
    /// Process that exited.
    pub of: ProcessTarget,
    /// Exit code, time, and OOM attribution.
    pub exit: Exit,
}

/// Exit of a process; also the content of `exits/<container>`.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Exit {
    /// Exit code, 0 to 255; 128 plus the signal number for signals.
    pub code: i32,
    /// Whether a signal terminated the process.
    pub is_signal: bool,
    /// Wall-clock exit time, nanoseconds since the epoch.
    pub at_ns: i64,
    /// Whether the exit counts as OOM-killed: code 137, an OOM kill in its cgroup within the last ten seconds, and no
    /// kill requested by the agent.
    pub is_oom: bool,
    /// OOM kills in the container's cgroup during its lifetime.
    pub oom_kills: u64,
    /// Number of log lines that could not be written.
    pub lost_lines: u64,
}

/// A kind of namespace. The declaration order is the order in which descriptors are sent.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize, Deserialize)]
pub enum Namespace {
    /// User ids and group ids.
    User,
    /// Interfaces, addresses, routes, and firewall rules.
    Network,
    /// System V IPC and POSIX message queues.
    Ipc,
    /// Host name.
    Uts,
}

/// A range of an id mapping of a user namespace.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct IdMap {
    /// First id inside the namespace.
    pub inside: u32,
    /// First id on the host.
    pub outside: u32,
    /// Number of ids.
    pub count: u32,
}

/// Namespaces of a pod (spec 09a §2.4, §2.5).
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct NamespacePlan {
    /// Namespaces to create.
    pub made: Vec<Namespace>,
    /// Mappings of user ids and of group ids, if the pod has a user namespace.
    pub users: Option<(IdMap, IdMap)>,
    /// Host name to set, if a UTS namespace is created.
    pub hostname: String,
    /// Sysctls: file below `/proc/sys` to value.
    pub sysctls: BTreeMap<String, String>,
    /// Whether the containers share a process namespace whose process 1 belongs to the shim.
    pub shares_processes: bool,
    /// Cgroup directories of the shim and the pod's process 1, one per hierarchy.
    pub groups: Vec<PathBuf>,
}

/// Complete description of a container to start.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct LaunchPlan {
    /// Container id.
    pub container: String,
    /// The container's cgroup, created and limited by the agent: one directory per hierarchy (one on cgroup v2).
    pub groups: Vec<PathBuf>,
    /// Whether a cgroup namespace is created (cgroup v2 only).
    pub has_group_namespace: bool,
    /// Process namespace of the container.
    pub processes: PidNamespace,
    /// Root file system.
    pub root: Root,
    /// Mounts below the root, in mount order.
    pub mounts: Vec<Mount>,
    /// Device nodes to create.
    pub devices: Vec<Device>,
    /// Masked paths: unreadable in the container.
    pub masked: Vec<String>,
    /// Paths remounted read-only.
    pub read_only: Vec<String>,
    /// First process of the container.
    pub process: ProcessPlan,
    /// Whether stdin is kept open (CRI `stdin`).
    pub stdin: bool,
    /// Whether stdin closes when the first attached client ends its input (CRI `stdin_once`).
    pub stdin_once: bool,
    /// Log file; with `None`, output is read and discarded.
    pub log: Option<PathBuf>,
    /// Maximum length of a log record, bytes; 0 means no limit.
    pub longest_record: usize,
    /// Deadline of the start, milliseconds.
    pub limit_ms: u64,
    /// Third-party hooks (OCI, NRI) to run during the start, if any.
    #[serde(default)]
    pub hooks: Option<Box<Hooks>>,
}

/// Process namespace of a container.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub enum PidNamespace {
    /// A new one.
    Own,
    /// The one shared by the pod.
    Pod,
    /// The host's.
    Host,
    /// That of another container of the pod, by its id. The shim looks up the process: a PID might have been reused.
    Of(#[serde(deserialize_with = "container_id")] String),
}

/// Container id. Plans of earlier releases carry a process id here, which matches no container.
fn container_id<'de, D: Deserializer<'de>>(from: D) -> Result<String, D::Error> {
    #[derive(Deserialize)]
    #[serde(untagged)]
    enum IdOrNumber {
        Id(String),
        Number(u32),
    }
    Ok(match IdOrNumber::deserialize(from)? {
        IdOrNumber::Id(id) => id,
        IdOrNumber::Number(number) => number.to_string(),
    })
}

/// A container's root file system.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Root {
    /// Mount point for a private tmpfs during the assembly of the root.
    pub stage: PathBuf,
    /// Overlay or plain directory.
    pub kind: RootKind,
    /// Whether the finished root is mounted read-only.
    pub is_read_only: bool,
    /// Whether mounts below the root propagate to the host: `shared` if set, else `slave`.
    pub is_shared: bool,
}

/// Source of a root file system.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub enum RootKind {
    /// An overlayfs of image layers.
    Overlay {
        /// Directory that contains the layers.
        layers: PathBuf,
        /// Lower layers from top to bottom, relative to `layers`: `12/d`.
        lower: Vec<String>,
        /// Upper (writable) directory.
        upper: PathBuf,
        /// The work directory of overlayfs.
        work: PathBuf,
        /// Whether the `userxattr` mount option is set.
        userxattr: bool,
    },
    /// A directory with the complete root file system.
    Directory(PathBuf),
}

/// A mount below the container's root.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Mount {
    /// Mount point, absolute; resolved inside the root.
    pub target: String,
    /// Source of the mount.
    pub source: MountKind,
    /// Read-write, read-only, or recursively read-only.
    pub access: Access,
    /// Mount propagation.
    pub propagation: Propagation,
    /// `nosuid`, `nodev`, and `noexec` as `MS_*` bits.
    pub flags: u64,
    /// Mappings of user ids and of group ids for an idmapped mount.
    pub ids: Option<(IdMap, IdMap)>,
}

/// Source of a mount.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub enum MountKind {
    /// A recursive bind mount of a host path.
    Bind(PathBuf),
    /// A new file system instance: type and options (`mode=755,size=65536k`).
    New {
        /// File system type: `tmpfs`, `proc`, `sysfs`, `devpts`, `mqueue`, `cgroup`.
        kind: String,
        /// Mount options.
        data: String,
    },
    /// Read-only layers of an image (image volume); see [`RootKind::Overlay`].
    Layers {
        /// Directory that contains the layers.
        layers: PathBuf,
        /// Layers from top to bottom.
        lower: Vec<String>,
        /// Directory of the image to mount.
        sub_path: String,
    },
}

/// Write access to a mount.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub enum Access {
    /// Writable.
    ReadWrite,
    /// The mount itself is read-only; submounts keep their own flags.
    ReadOnly,
    /// The mount and all submounts are read-only.
    RecursivelyReadOnly,
}

/// Mount propagation.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub enum Propagation {
    /// None (`private`).
    Private,
    /// From the host to the container (`slave`).
    Slave,
    /// In both directions (`shared`).
    Shared,
}

/// A device node.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Device {
    /// Path in the container.
    pub path: String,
    /// Type: `b` block device, `c` character device, `p` FIFO.
    pub kind: char,
    /// Major and minor number.
    pub numbers: (u32, u32),
    /// Permission bits.
    pub mode: u32,
    /// Owner user id.
    pub uid: u32,
    /// Owner group id.
    pub gid: u32,
}

/// A process to execute.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct ProcessPlan {
    /// The program and its arguments.
    pub args: Vec<String>,
    /// Environment, entries of the form `KEY=value`.
    pub env: Vec<String>,
    /// Working directory, absolute.
    pub cwd: String,
    /// User id.
    pub uid: u32,
    /// Primary group id.
    pub gid: u32,
    /// All group ids, sorted, including the primary one.
    pub groups: Vec<u32>,
    /// Linux capabilities.
    pub capabilities: Capabilities,
    /// Whether `no_new_privs` is set.
    pub no_new_privileges: bool,
    /// Compiled seccomp filter: `sock_filter` records of 8 bytes in native byte order.
    pub seccomp: Option<Vec<u8>>,
    /// Flags of `seccomp(2)` for loading the filter.
    pub seccomp_flags: u32,
    /// AppArmor profile that takes effect at `execve`.
    pub apparmor: Option<String>,
    /// Resource limits: resource, soft limit, hard limit; numbers of `setrlimit(2)`.
    pub limits: Vec<(u32, u64, u64)>,
    /// Value for `/proc/self/oom_score_adj`.
    pub oom_score_adj: Option<i32>,
    /// Initial terminal size (columns, rows); `None` for no terminal.
    pub terminal: Option<(u16, u16)>,
}

/// Capability sets as bit masks.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct Capabilities {
    /// Upper limit of what the process can ever acquire.
    pub bounding: u64,
    /// Capabilities in effect.
    pub effective: u64,
    /// Capabilities that may become effective.
    pub permitted: u64,
    /// Capabilities preserved across `execve` for programs with file capabilities.
    pub inheritable: u64,
    /// Capabilities preserved across `execve` of unprivileged programs.
    pub ambient: u64,
}

/// Description of an exec process.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct ExecPlan {
    /// Container id.
    pub container: String,
    /// Exec id.
    pub exec: String,
    /// Process to execute.
    pub process: ProcessPlan,
    /// Whether the process becomes the subreaper of its descendants, so that all of them are found while it runs.
    /// A shim that does not know this field ignores it.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub keeps_orphans: bool,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn plans_of_earlier_releases_are_read() {
        for (text, expected) in [(r#"{"Of":"a1"}"#, "a1"), (r#"{"Of":7}"#, "7")] {
            let read: PidNamespace = serde_json::from_str(text).expect(text);
            assert_eq!(read, PidNamespace::Of(expected.to_owned()));
            let mut bytes = Vec::new();
            ciborium::into_writer(&read, &mut bytes).expect("in memory");
            assert_eq!(ciborium::from_reader::<PidNamespace, _>(&bytes[..]).expect("as written"), read);
        }
    }
}
