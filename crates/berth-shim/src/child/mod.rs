//! Process creation from a plan: everything between `clone3` and `execve`.
//!
//! ```text
//!  shim ─clone3─► helper: cgroup, limits, detached mounts, root, joins namespaces
//!                   └─clone3(CLONE_PARENT)─► the container's process: attaches mounts, pivots, becomes its user, executes
//! ```
//!
//! The shim never blocks: a hang affects the helper or the container's process, which the shim kills at its deadline
//! ([`ProcessLaunch::kill`]). Their reports arrive over a descriptor to poll. The shim reaps the container's process, which
//! is its own child, and also the helper and the joiner of an exec, which are children unknown to the shim's records.
//! An exit may be observed before [`LaunchProgress::Started`]: keep exits of unknown children until nothing is being started.
//!
//! Children are created without `execve`, which is sound because the shim is single-threaded
//! ([`berth_sys::child_process::SingleThreaded`] refuses otherwise). Only a container's own program is executed, except
//! for the pod's process 1, which is the shim's program with the argument [`POD_INIT`] ([`pod_init`]).
//!
//! Used instead of libcontainer because of spec 09 §4. Implements spec 09a §2.5, §7.5, §8, §10, §11.

mod container_start;
mod devices;
mod error_context;
mod exec;
mod exec_setup;
mod hooks;
mod identity;
mod mount_setup;
mod mounts;
mod namespaces;
mod pod_init;
mod process_launch;
mod process_setup;
mod progress_report;
mod root;
mod terminal;

use std::os::fd::{BorrowedFd, OwnedFd};

pub use container_start::begin_launch;
pub use exec::begin_exec;
pub use hooks::begin_poststop;
pub use namespaces::{CreatedNamespaces, make_namespaces, make_namespaces_with};
pub use pod_init::{POD_INIT, pod_init};
pub use process_launch::{LaunchProgress, ProcessLaunch};

use super::plan::{IdMap, Namespace};

/// The pod's environment that a container starts in.
#[derive(Clone, Copy, Debug)]
pub struct PodContext<'a> {
    /// Namespaces that the shim keeps open.
    pub namespaces: &'a [(Namespace, OwnedFd)],
    /// Pidfd of the process whose PID namespace the container joins, if its plan joins one.
    pub target: Option<BorrowedFd<'a>>,
    /// Id mappings (users, groups) of the user namespace, from the pod's plan.
    pub users: Option<(IdMap, IdMap)>,
}

impl PodContext<'_> {
    /// Descriptor of a namespace of the pod.
    fn namespace(&self, wanted: Namespace) -> Option<&OwnedFd> {
        self.namespaces.iter().find(|(kind, _)| *kind == wanted).map(|(_, fd)| fd)
    }
}

/// Standard streams of a process.
#[derive(Debug)]
pub enum Stdio {
    /// Standard input, output, and error.
    Files([OwnedFd; 3]),
    /// A pty that is created inside the container; [`LaunchProgress::Started`] carries its master.
    Terminal,
}
