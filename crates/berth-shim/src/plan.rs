//! What the daemon asks of a pod's shim, and what the shim tells. Pure.
//!
//! Everything is decided by the daemon: the shim does what the plan says, in the order the plan says, and knows nothing
//! of CRI, images or Kubernetes. Open files travel beside a message, in the order in which [`Request`] names them.
//! Behaviour: spec 09a §10-§14.

use std::{collections::BTreeMap, path::PathBuf};

use serde::{Deserialize, Deserializer, Serialize};

pub use hooks::{Hook, Hooks, Moment};

mod hooks;

/// The protocol both speak; a shim speaks exactly one version.
pub const VERSION: u16 = 1;
/// First field of every datagram.
pub const MAGIC: u16 = 0x5348;
/// The longest body of a datagram, bytes.
pub const MAX_BODY: usize = 1 << 20;

/// What is asked.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub enum Request {
    /// Who are you? Answered by [`Reply::Hello`], with the descriptors of the namespaces that are held.
    Hello,
    /// Makes the pod's namespaces; once.
    MakeNamespaces(NamespacePlan),
    /// Starts a container.
    Launch(Box<LaunchPlan>),
    /// Starts another process in a container. Without a terminal three descriptors come with it: stdin, stdout, stderr.
    Exec(Box<ExecPlan>),
    /// Sends a signal.
    Signal {
        /// To whom.
        to: Target,
        /// Which.
        signal: i32,
        /// To that process or to all of them.
        scope: Scope,
    },
    /// Tells the size of a container's terminal, in columns and rows. (That of another process is the daemon's own.)
    Resize {
        /// Whose.
        of: Target,
        /// Columns.
        columns: u16,
        /// Rows.
        rows: u16,
    },
    /// Closes a container's stdin for ever.
    CloseStdin(String),
    /// Opens a container's log anew, after it was renamed.
    ReopenLog(String),
    /// Sends what a container writes from now on also to a client. Descriptors: stdin (where `stdin`), stdout, stderr.
    Attach {
        /// The container.
        container: String,
        /// Whether the client's input goes to it.
        stdin: bool,
    },
    /// Events up to this number need not be told again.
    Acknowledge(u64),
    /// Forgets a container that has ended.
    Forget(String),
    /// Ends, once no container runs; the pod's process 1 is killed.
    Shutdown,
}

/// Whose process.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize, Deserialize)]
pub enum Target {
    /// A container's first.
    Container(String),
    /// One that was started later: its container and its own id.
    Exec(String, String),
    /// The pod's process 1, where it shares its processes.
    Init,
}

/// How far a signal goes.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub enum Scope {
    /// That process.
    Process,
    /// Its process group.
    Group,
    /// Everything in the control group.
    ControlGroup,
}

/// What is answered. The sequence number is that of the question.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub enum Reply {
    /// It is done.
    Done,
    /// To [`Request::Hello`]; descriptors of [`Hello::namespaces`] come with it, in their order.
    Hello(Hello),
    /// The namespaces are there; their descriptors come with it in the order of [`Namespace`].
    Namespaces {
        /// Which were made.
        made: Vec<Namespace>,
        /// The pod's process 1 where it shares its processes.
        init: Option<u32>,
    },
    /// A process runs. With a terminal of an [`Request::Exec`] its master's descriptor comes with it.
    Started(Started),
    /// It could not be done.
    Failed(Failure),
}

/// What a shim is and has.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct Hello {
    /// The protocol it speaks.
    pub version: u16,
    /// Its process.
    pub pid: u32,
    /// Namespaces it holds.
    pub namespaces: Vec<Namespace>,
    /// The pod's process 1.
    pub init: Option<u32>,
    /// Containers it has started and not forgotten.
    pub containers: Vec<Held>,
    /// Containers that are being started for a daemon that has gone: soon they are held, or nothing is left of them.
    #[serde(default)]
    pub starting: Vec<String>,
    /// Events that were not acknowledged.
    pub events: Vec<Event>,
}

/// A container as its shim knows it.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct Held {
    /// Its id.
    pub id: String,
    /// Its first process; also once it has ended.
    pub started: Started,
    /// How it ended.
    pub exit: Option<Exit>,
}

/// A process that was started.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct Started {
    /// In the host's numbering.
    pub pid: u32,
    /// Field 22 of its `stat`: tells it from another process of that number.
    pub start_ticks: u64,
    /// Wall time, nanoseconds since the epoch.
    pub at_ns: i64,
    /// How long steps of its start took.
    #[serde(default)]
    pub took: Took,
}

/// How long steps of a start took, microseconds.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct Took {
    /// Mounts and root.
    pub root: u32,
    /// From then until the process was there.
    pub clone: u32,
}

/// Why something could not be done.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize, thiserror::Error)]
#[error("{text}")]
pub struct Failure {
    /// What kind of failure it is.
    pub kind: FailureKind,
    /// For people: what was attempted on which path, and what the kernel said.
    pub text: String,
}

/// Kinds of failures that callers tell apart.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub enum FailureKind {
    /// Nobody knows the container or process.
    Unknown,
    /// It has that already, or is in another state.
    State,
    /// The program cannot be executed: `exec: "x": executable file not found in $PATH`.
    Program,
    /// It took too long.
    Deadline,
    /// Everything else.
    Other,
}

/// What a shim tells without being asked. Told again until acknowledged.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct Event {
    /// Counts up from 1.
    pub number: u64,
    /// Whose.
    pub of: Target,
    /// How it ended.
    pub exit: Exit,
}

/// How a process ended; also what `exits/<container>` holds.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Exit {
    /// 0 to 255; 128 and more for signals.
    pub code: i32,
    /// Whether a signal ended it.
    pub is_signal: bool,
    /// Wall time, nanoseconds since the epoch.
    pub at_ns: i64,
    /// Whether it ended because the kernel killed something of it for want of memory: code 137, a kill within the last
    /// ten seconds, and no kill of ours.
    pub is_oom: bool,
    /// Processes the kernel killed in it for want of memory during its life.
    pub oom_kills: u64,
    /// Lines of its log that could not be written.
    pub lost_lines: u64,
}

/// A kind of namespace. The order is that in which descriptors are sent.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize, Deserialize)]
pub enum Namespace {
    /// Users.
    User,
    /// Network.
    Network,
    /// System V and POSIX message queues, shared memory.
    Ipc,
    /// Host name.
    Uts,
}

/// A range of ids of a user namespace.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct IdMap {
    /// First id inside.
    pub inside: u32,
    /// First id on the host.
    pub outside: u32,
    /// How many.
    pub count: u32,
}

/// What namespaces a pod has (spec 09a §2.4, §2.5).
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct NamespacePlan {
    /// Those that are made.
    pub made: Vec<Namespace>,
    /// Ids of users and of groups, where there is a user namespace.
    pub users: Option<(IdMap, IdMap)>,
    /// The host name, where that namespace is made.
    pub hostname: String,
    /// Kernel settings, by file below `/proc/sys`.
    pub sysctls: BTreeMap<String, String>,
    /// Whether containers share a process namespace whose process 1 is ours.
    pub shares_processes: bool,
    /// Groups the shim and the pod's process 1 belong to: directories, one for each hierarchy.
    pub groups: Vec<PathBuf>,
}

/// A container to start.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct LaunchPlan {
    /// Its id.
    pub container: String,
    /// Its control group, made and limited: one directory for each hierarchy, one on the unified hierarchy.
    pub groups: Vec<PathBuf>,
    /// Whether a control group namespace is made (only on the unified hierarchy).
    pub has_group_namespace: bool,
    /// Whose processes it sees.
    pub processes: Processes,
    /// Its root.
    pub root: Root,
    /// What is mounted below it, in this order.
    pub mounts: Vec<Mount>,
    /// Device nodes that are made in `/dev`.
    pub devices: Vec<Device>,
    /// Paths nobody may see.
    pub masked: Vec<String>,
    /// Paths nobody may write.
    pub read_only: Vec<String>,
    /// Its first process.
    pub process: Process,
    /// Whether its stdin is open.
    pub stdin: bool,
    /// Whether the first client that attaches and ends its input closes its stdin.
    pub stdin_once: bool,
    /// Its log; none: what it writes is read and dropped.
    pub log: Option<PathBuf>,
    /// Longest record of the log in bytes; 0: no limit.
    pub longest_record: usize,
    /// How long starting may take, milliseconds.
    pub limit_ms: u64,
    /// Programs of others on its way, where somebody wants any.
    #[serde(default)]
    pub hooks: Option<Box<Hooks>>,
}

/// Whose processes a container sees.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub enum Processes {
    /// Its own.
    Own,
    /// The pod's.
    Pod,
    /// The host's.
    Host,
    /// Those of another container of the pod, by its id. The shim finds its process: numbers may be others' by then.
    Of(#[serde(deserialize_with = "container_id")] String),
}

/// A container's id. Plans of earlier releases have a process's number there, which names no container.
fn container_id<'de, D: Deserializer<'de>>(from: D) -> Result<String, D::Error> {
    #[derive(Deserialize)]
    #[serde(untagged)]
    enum Written {
        Id(String),
        Number(u32),
    }
    Ok(match Written::deserialize(from)? {
        Written::Id(id) => id,
        Written::Number(number) => number.to_string(),
    })
}

/// A container's root file system.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Root {
    /// Where a private tmpfs may be mounted while the root is put together.
    pub stage: PathBuf,
    /// How it is made.
    pub kind: RootKind,
    /// Whether it is mounted read-only in the end.
    pub is_read_only: bool,
    /// Whether mounts below it are seen outside: then `shared`, else `slave`.
    pub is_shared: bool,
}

/// How a root is made.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub enum RootKind {
    /// Layers over each other.
    Overlay {
        /// Directory below which `lower` names lie.
        layers: PathBuf,
        /// From top to bottom, relative to `layers`: `12/d`.
        lower: Vec<String>,
        /// What is written.
        upper: PathBuf,
        /// For the kernel.
        work: PathBuf,
        /// Whether attributes are the user's.
        userxattr: bool,
    },
    /// A directory that holds everything.
    Directory(PathBuf),
}

/// A mount below the root.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Mount {
    /// Where, absolute; resolved inside the root.
    pub target: String,
    /// What.
    pub source: Source,
    /// Whether it is read-only.
    pub access: Access,
    /// Which way mounts below it travel.
    pub propagation: Propagation,
    /// `nosuid`, `nodev`, `noexec`, in `MS_*` bits.
    pub flags: u64,
    /// Ids of users and of groups the mount is shown with.
    pub ids: Option<(IdMap, IdMap)>,
}

/// What is mounted.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub enum Source {
    /// A path of the host, with everything mounted below it.
    Bind(PathBuf),
    /// A new file system: its type and options (`mode=755,size=65536k`).
    New {
        /// `tmpfs`, `proc`, `sysfs`, `devpts`, `mqueue`, `cgroup`.
        kind: String,
        /// Options.
        data: String,
    },
    /// Layers of an image, read-only; see [`RootKind::Overlay`].
    Layers {
        /// Directory of the layers.
        layers: PathBuf,
        /// From top to bottom.
        lower: Vec<String>,
        /// A directory inside.
        sub_path: String,
    },
}

/// Who may write.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub enum Access {
    /// Everybody.
    ReadWrite,
    /// Nobody to the mount itself.
    ReadOnly,
    /// Nobody to it and all below it.
    RecursivelyReadOnly,
}

/// Which way mounts travel.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub enum Propagation {
    /// Not at all.
    Private,
    /// From the host.
    Slave,
    /// Both ways.
    Shared,
}

/// A device node.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Device {
    /// In the container.
    pub path: String,
    /// `b` for a block device, `c` for a character device, `p` for a pipe.
    pub kind: char,
    /// Numbers.
    pub numbers: (u32, u32),
    /// Permissions.
    pub mode: u32,
    /// Owner.
    pub uid: u32,
    /// Owning group.
    pub gid: u32,
}

/// A process to execute.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct Process {
    /// The program and its arguments.
    pub args: Vec<String>,
    /// `KEY=value`.
    pub env: Vec<String>,
    /// Working directory, absolute.
    pub cwd: String,
    /// User.
    pub uid: u32,
    /// Primary group.
    pub gid: u32,
    /// All groups, sorted, the primary one among them.
    pub groups: Vec<u32>,
    /// What it may do.
    pub capabilities: Capabilities,
    /// Whether it can never gain more.
    pub no_new_privileges: bool,
    /// A compiled filter: `sock_filter` records of 8 bytes in the machine's byte order.
    pub seccomp: Option<Vec<u8>>,
    /// Flags of `seccomp(2)` the filter is set with.
    pub seccomp_flags: u32,
    /// Profile it changes to when it is executed.
    pub apparmor: Option<String>,
    /// Resource, soft and hard limit; numbers of `setrlimit(2)`.
    pub limits: Vec<(u32, u64, u64)>,
    /// How readily it is killed for want of memory.
    pub oom_score_adj: Option<i32>,
    /// Whether it has a terminal, and how large that is at first: columns, rows.
    pub terminal: Option<(u16, u16)>,
}

/// Sets of capabilities, a bit for each.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct Capabilities {
    /// What can ever be had.
    pub bounding: u64,
    /// What is in force.
    pub effective: u64,
    /// What may be put in force.
    pub permitted: u64,
    /// What survives `execve` into programs that inherit.
    pub inheritable: u64,
    /// What survives `execve` without privilege.
    pub ambient: u64,
}

/// Another process of a container.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct ExecPlan {
    /// The container.
    pub container: String,
    /// The process's own id.
    pub exec: String,
    /// What is executed.
    pub process: Process,
    /// Whether whoever loses its parent below it becomes its child, so that while it runs all that it started is found.
    /// A shim that knows nothing of this keeps none.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub keeps_orphans: bool,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn plans_of_earlier_releases_are_read() {
        for (text, expected) in [(r#"{"Of":"a1"}"#, "a1"), (r#"{"Of":7}"#, "7")] {
            let read: Processes = serde_json::from_str(text).expect(text);
            assert_eq!(read, Processes::Of(expected.to_owned()));
            let mut bytes = Vec::new();
            ciborium::into_writer(&read, &mut bytes).expect("in memory");
            assert_eq!(ciborium::from_reader::<Processes, _>(&bytes[..]).expect("as written"), read);
        }
    }
}
