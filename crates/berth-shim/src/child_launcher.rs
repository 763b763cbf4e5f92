//! Production implementation of the event loop's `Launcher`, on top of [`child`].

use std::os::fd::{AsFd, BorrowedFd};

use super::{
    child,
    plan::{ExecPlan, Hooks, LaunchPlan, NamespacePlan, ShimFailure},
    worker::launcher::{CreatedNamespaces, ExecTarget, Launcher, PendingStart, PodContext, StartProgress, Stdio},
};

/// Creates namespaces and starts processes by [`child`].
#[derive(Clone, Copy, Debug)]
pub struct ChildLauncher;

impl Launcher for ChildLauncher {
    fn make_namespaces(&self, plan: &NamespacePlan) -> Result<CreatedNamespaces, ShimFailure> {
        let child::CreatedNamespaces { namespaces, init } = child::make_namespaces(plan)?;
        Ok(CreatedNamespaces { namespaces, init })
    }

    fn begin_launch(
        &self,
        plan: &LaunchPlan,
        around: PodContext<'_>,
        stdio: Stdio,
    ) -> Result<Box<dyn PendingStart>, ShimFailure> {
        let PodContext { namespaces, target, users } = around;
        let around = child::PodContext { namespaces, target, users };
        Ok(Box::new(Child(child::begin_launch(plan, &around, stdio.into())?)))
    }

    fn begin_exec(
        &self,
        plan: &ExecPlan,
        inside: ExecTarget<'_>,
        stdio: Stdio,
    ) -> Result<Box<dyn PendingStart>, ShimFailure> {
        Ok(Box::new(Child(child::begin_exec(plan, inside.init, inside.groups, stdio.into())?)))
    }

    fn begin_poststop(&self, container: &str, hooks: &Hooks) -> Result<(), ShimFailure> {
        child::begin_poststop(container, hooks)
    }
}

struct Child(child::ProcessLaunch);

impl PendingStart for Child {
    fn report(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }

    fn kill(&self) {
        self.0.kill();
    }

    fn advance(self: Box<Self>) -> StartProgress {
        match self.0.advance() {
            child::LaunchProgress::Pending(launching) => StartProgress::Pending(Box::new(Self(launching))),
            child::LaunchProgress::Started { pid, start_ticks, terminal, took } => {
                StartProgress::Started { pid, start_ticks, terminal, took }
            }
            child::LaunchProgress::Failed(failure) => StartProgress::Failed(failure),
        }
    }
}

impl From<Stdio> for child::Stdio {
    fn from(stdio: Stdio) -> Self {
        match stdio {
            Stdio::Files(files) => Self::Files(files),
            Stdio::Terminal => Self::Terminal,
        }
    }
}
