//! From a plan to a running program: everything between `clone3` and `execve`.
//!
//! ```text
//!  shim ─clone3─► helper: control group, limits, mounts as descriptors, root, joins namespaces
//!                   └─clone3(CLONE_PARENT)─► the container's process: attaches mounts, pivots, becomes its user, executes
//! ```
//!
//! The shim never waits: what hangs, hangs in the helper or in the process, which the shim kills at its deadline
//! ([`Launching::kill`]). What they tell arrives over a descriptor to poll. The container's process is the shim's own
//! child, so its end is the shim's to reap; so is the helper's, and the joiner's of an exec: a child the shim does not
//! know. An end may be seen before [`Progress::Started`] is: keep ends of unknown children until nothing is launching.
//!
//! Children are made without `execve`, which is sound as the shim has one thread ([`berth_sys::spawn::Alone`] refuses
//! otherwise). A program is executed only as a container's own, except for the pod's process 1, which is the shim's
//! program with the argument [`POD_INIT`] ([`pod_init`]).
//!
//! Ours instead of libcontainer's for spec 09 §4. Behaviour: spec 09a §2.5, §7.5, §8, §10, §11.

mod attach;
mod devices;
mod exec;
mod finalise;
mod hooks;
mod identity;
mod join;
mod launch;
mod launching;
mod mounts;
mod namespaces;
mod pod_init;
mod report;
mod root;
mod terminal;
mod told;

use std::os::fd::{BorrowedFd, OwnedFd};

pub use exec::begin_exec;
pub use hooks::begin_poststop;
pub use launch::begin_launch;
pub use launching::{Launching, Progress};
pub use namespaces::{Made, make_namespaces, make_namespaces_with};
pub use pod_init::{POD_INIT, pod_init};

use super::plan::{IdMap, Namespace};

/// What of the pod a container is started in.
#[derive(Clone, Copy, Debug)]
pub struct Around<'a> {
    /// The namespaces the shim holds.
    pub namespaces: &'a [(Namespace, OwnedFd)],
    /// A descriptor of the process whose process namespace the container joins, where the plan says that it joins one.
    pub target: Option<BorrowedFd<'a>>,
    /// How ids of its user namespace are mapped, as the pod's plan says.
    pub users: Option<(IdMap, IdMap)>,
}

impl Around<'_> {
    /// A namespace's descriptor.
    fn namespace(&self, wanted: Namespace) -> Option<&OwnedFd> {
        self.namespaces.iter().find(|(kind, _)| *kind == wanted).map(|(_, fd)| fd)
    }
}

/// What a process reads from and writes to.
#[derive(Debug)]
pub enum Stdio {
    /// Standard input, output and error.
    Files([OwnedFd; 3]),
    /// A terminal, made inside the container; its master comes with [`Progress::Started`].
    Terminal,
}
