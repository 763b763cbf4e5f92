//! Seam between the shim's event loop and the creation of namespaces and processes.
//!
//! The loop must never block on one container's start: a start in progress is a [`PendingStart`] that the loop polls by
//! its report descriptor and kills at its deadline. The loop reaps every child itself, including helpers: an
//! implementation waits for no process after `begin_…` returned, and kills by pidfd, because a PID may be reused.

use std::{
    os::fd::{BorrowedFd, OwnedFd},
    path::PathBuf,
};

use super::super::plan::{ExecPlan, Hooks, IdMap, LaunchPlan, Namespace, NamespacePlan, ShimFailure, StartTimings};

/// Result of creating the pod's namespaces.
#[derive(Debug, Default)]
pub struct CreatedNamespaces {
    /// Descriptors of the created namespaces.
    pub namespaces: Vec<(Namespace, OwnedFd)>,
    /// PID of the pod's process 1, a child of the shim.
    pub init: Option<u32>,
}

/// The pod's environment that a container starts in.
#[derive(Clone, Copy, Debug)]
pub struct PodContext<'a> {
    /// Namespaces that the shim keeps open.
    pub namespaces: &'a [(Namespace, OwnedFd)],
    /// Pidfd of the process whose PID namespace the container joins, if its plan joins one.
    pub target: Option<BorrowedFd<'a>>,
    /// Id mappings (users, groups) of the pod's user namespace.
    pub users: Option<(IdMap, IdMap)>,
}

/// Standard streams of a process.
#[derive(Debug)]
pub enum Stdio {
    /// Descriptors 0, 1, and 2.
    Files([OwnedFd; 3]),
    /// A pty that is created inside the container.
    Terminal,
}

/// The container of an exec process.
#[derive(Clone, Copy, Debug)]
pub struct ExecTarget<'a> {
    /// PID of the container's first process.
    pub init: u32,
    /// The container's cgroup directories.
    pub groups: &'a [PathBuf],
}

/// State of a start in progress.
pub enum StartProgress {
    /// Not finished: poll its report descriptor again.
    Pending(Box<dyn PendingStart>),
    /// The program was executed.
    Started {
        /// PID in the host's namespace, of a child of the shim.
        pid: u32,
        /// Start time (field 22 of `/proc/<pid>/stat`).
        start_ticks: u64,
        /// Descriptor of the pty master, if the process has a terminal.
        terminal: Option<OwnedFd>,
        /// Durations of the steps of the start.
        took: StartTimings,
    },
    /// The start failed; only children to reap are left.
    Failed(ShimFailure),
}

/// A start in progress.
pub trait PendingStart {
    /// Descriptor that is readable when [`advance`](Self::advance) has work to do.
    fn report(&self) -> BorrowedFd<'_>;

    /// Kills the processes of the start: its deadline passed.
    fn kill(&self);

    /// Processes pending reports. Never blocks.
    fn advance(self: Box<Self>) -> StartProgress;
}

/// Creates namespaces and processes.
pub trait Launcher {
    /// Creates the pod's namespaces, and its process 1.
    ///
    /// # Errors
    /// What could not be created; nothing is left then.
    fn make_namespaces(&self, plan: &NamespacePlan) -> Result<CreatedNamespaces, ShimFailure>;

    /// Begins the start of a container.
    ///
    /// # Errors
    /// If not even a helper process could be created.
    fn begin_launch(
        &self,
        plan: &LaunchPlan,
        around: PodContext<'_>,
        stdio: Stdio,
    ) -> Result<Box<dyn PendingStart>, ShimFailure>;

    /// Begins the start of an exec process in a container.
    ///
    /// # Errors
    /// If not even a helper process could be created.
    fn begin_exec(
        &self,
        plan: &ExecPlan,
        inside: ExecTarget<'_>,
        stdio: Stdio,
    ) -> Result<Box<dyn PendingStart>, ShimFailure>;

    /// Begins a container's poststop hooks; nobody waits for them.
    ///
    /// # Errors
    /// If not even a helper process could be created.
    fn begin_poststop(&self, container: &str, hooks: &Hooks) -> Result<(), ShimFailure>;
}
