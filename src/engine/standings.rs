//! Where each pod stands, as `why` asks it: a snapshot the sync loop publishes, with the stages its workers keep up to
//! date. Whoever reads it waits for nobody.

use std::sync::Arc;

use tokio::{sync::watch, time::Instant};

use super::lifecycle::Lifecycle;
use berth_ports::{Stage, StageView};
use berth_types::PodRef;

/// Where a pod stands.
#[derive(Clone, Debug)]
pub struct Standing {
    /// Which pod.
    pub id: PodRef,
    /// Where it is in its life.
    pub life: Lifecycle,
    /// What its worker waits for; `None` where it has none.
    pub stage: Option<Stage>,
    /// Why it has none yet, and since when.
    pub line: Option<(Line, Instant)>,
}

/// Why nobody works on a pod that was let in, or will be.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Line {
    /// Another pod of its full name is on its way out.
    Name,
    /// The runtime has not shown whether it holds an earlier pod of that name.
    Runtime,
    /// What is left of it is being removed.
    Removal,
    /// Others are killed to make room for it.
    Preemption,
    /// It selects nodes by labels that the node does not have yet.
    NodeLabels,
}

impl Line {
    /// As a stage.
    pub fn name(self) -> &'static str {
        match self {
            Self::Name => "turn behind another pod of its name",
            Self::Runtime => "runtime to show what it holds",
            Self::Removal => "removal of what is left of it",
            Self::Preemption => "preemption of other pods",
            Self::NodeLabels => "labels of the node",
        }
    }
}

impl Standing {
    /// What it waits for now.
    pub fn view(&self) -> Option<StageView> {
        let in_line = || self.line.map(|(line, since)| StageView { name: line.name().into(), since, until: None });
        self.stage.as_ref().map(Stage::view).or_else(in_line)
    }
}

/// The latest standings, in no order.
pub type Standings = watch::Receiver<Arc<Vec<Standing>>>;
