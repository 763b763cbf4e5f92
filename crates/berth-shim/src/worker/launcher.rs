//! The seam between the shim's loop and whoever makes namespaces and processes.
//!
//! The loop must never block on one container's start: what is begun is a [`Launching`] that the loop polls by its
//! report descriptor and kills when the time is up. It reaps every child itself, helpers too: an implementation waits
//! for no process after `begin_…` has returned, and kills by descriptors of processes, as numbers may be others' by then.

use std::{
    os::fd::{BorrowedFd, OwnedFd},
    path::PathBuf,
};

use super::super::plan::{ExecPlan, Failure, Hooks, IdMap, LaunchPlan, Namespace, NamespacePlan, Took};

/// Namespaces that were made.
#[derive(Debug, Default)]
pub struct Made {
    /// Their descriptors.
    pub namespaces: Vec<(Namespace, OwnedFd)>,
    /// The pod's process 1, a child of the shim.
    pub init: Option<u32>,
}

/// What a container is started into.
#[derive(Clone, Copy, Debug)]
pub struct Around<'a> {
    /// Namespaces the shim holds.
    pub namespaces: &'a [(Namespace, OwnedFd)],
    /// A descriptor of the process whose process namespace the container joins, where the plan says that it joins one.
    pub target: Option<BorrowedFd<'a>>,
    /// How ids of the pod's user namespace are mapped.
    pub users: Option<(IdMap, IdMap)>,
}

/// What a process reads and writes.
#[derive(Debug)]
pub enum Stdio {
    /// Descriptors 0, 1 and 2.
    Files([OwnedFd; 3]),
    /// A terminal that is made inside the container.
    Terminal,
}

/// The container another process is started in.
#[derive(Clone, Copy, Debug)]
pub struct Inside<'a> {
    /// Its first process.
    pub init: u32,
    /// The plan's control groups.
    pub groups: &'a [PathBuf],
}

/// How far a start has come.
pub enum Progress {
    /// Not yet: poll its report again.
    Pending(Box<dyn Launching>),
    /// The program was executed.
    Started {
        /// A child of the shim, in the host's numbering.
        pid: u32,
        /// Field 22 of its `stat`.
        start_ticks: u64,
        /// The terminal's master.
        terminal: Option<OwnedFd>,
        /// How long steps of it took.
        took: Took,
    },
    /// It will not run; nothing of it is left but children to reap.
    Failed(Failure),
}

/// A start that is under way.
pub trait Launching {
    /// Readable when [`advance`](Self::advance) has something to do.
    fn report(&self) -> BorrowedFd<'_>;

    /// Kills what works on it: it has taken too long.
    fn kill(&self);

    /// Takes what was reported. Never blocks.
    fn advance(self: Box<Self>) -> Progress;
}

/// Makes namespaces and processes.
pub trait Launcher {
    /// Makes the pod's namespaces, and its process 1.
    ///
    /// # Errors
    /// What could not be made; nothing is left then.
    fn make_namespaces(&self, plan: &NamespacePlan) -> Result<Made, Failure>;

    /// Begins to start a container.
    ///
    /// # Errors
    /// Where not even a helper could be made.
    fn begin_launch(&self, plan: &LaunchPlan, around: Around<'_>, stdio: Stdio) -> Result<Box<dyn Launching>, Failure>;

    /// Begins to start another process in a container.
    ///
    /// # Errors
    /// Where not even a helper could be made.
    fn begin_exec(&self, plan: &ExecPlan, inside: Inside<'_>, stdio: Stdio) -> Result<Box<dyn Launching>, Failure>;

    /// Begins to execute what comes after a container; nobody waits for it.
    ///
    /// # Errors
    /// Where not even a helper could be made.
    fn begin_poststop(&self, container: &str, hooks: &Hooks) -> Result<(), Failure>;
}
