//! Pod worker status for `berth why`: a snapshot published by the sync loop.
//!
//! Workers keep their progress in it up to date; readers never block.

use tokio::time::Instant;

use super::lifecycle::Lifecycle;
use berth_ports::{PodProgress, StepView};
use berth_types::PodRef;

/// Status of one pod and its worker.
#[derive(Clone, Debug)]
pub struct PodWorkerStatus {
    /// The pod.
    pub id: PodRef,
    /// Lifecycle state of the pod.
    pub life: Lifecycle,
    /// Progress of its worker; `None` without a worker.
    pub progress: Option<PodProgress>,
    /// Why it has no worker yet, and since when.
    pub line: Option<(StartWait, Instant)>,
}

/// Why a pod that is admitted, or to be admitted, has no worker.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum StartWait {
    /// Another pod of the same full name is terminating.
    Name,
    /// The runtime has not listed its pods yet, so an earlier pod of that name may still run.
    Runtime,
    /// Leftovers of the pod are being removed.
    Removal,
    /// Victims are being preempted for it.
    Preemption,
    /// It selects nodes by labels that the node does not have yet.
    NodeLabels,
    /// Its devices are being allocated, or their plugin has not registered yet.
    Devices,
}

impl StartWait {
    /// Name of the wait as a step.
    pub fn name(self) -> &'static str {
        match self {
            Self::Name => "termination of another pod of the same name",
            Self::Runtime => "runtime pod list",
            Self::Removal => "removal of leftovers of the pod",
            Self::Preemption => "preemption of other pods",
            Self::NodeLabels => "node labels",
            Self::Devices => "devices of device plugins",
        }
    }
}

impl PodWorkerStatus {
    /// Step of the worker, or the wait for one; `None` if it waits for nothing.
    pub fn view(&self) -> Option<StepView> {
        let in_line = || self.line.map(|(line, since)| StepView { name: line.name().into(), since, until: None });
        self.progress.as_ref().map(PodProgress::view).or_else(in_line)
    }
}
