//! What PLEG is given: its parts and its numbers.

use std::{sync::Arc, time::Duration};

use tokio::sync::mpsc;

use super::EventHints;
use berth_cri::RuntimeService;
use berth_metrics::PlegMetrics;
use berth_ports::{Clock, TerminationMessages};
use berth_types::{ContainerId, observed::ObservedPod};

/// A container ended (or vanished while it was not known to have ended).
#[derive(Clone, Debug, PartialEq)]
pub struct ContainerDied {
    /// The look that found it.
    pub pod: Arc<ObservedPod>,
    /// The container's name.
    pub container: Arc<str>,
    /// The instance that ended.
    pub id: ContainerId,
}

/// What PLEG works with.
pub struct PlegDeps {
    /// The runtime.
    pub cri: Arc<dyn RuntimeService>,
    /// Sources of hints, the best one first; a source that the runtime does not have is passed over.
    pub hints: Vec<Arc<dyn EventHints>>,
    /// Reads termination messages.
    pub messages: Arc<dyn TerminationMessages>,
    /// Wall time.
    pub clock: Arc<dyn Clock>,
    /// Metrics.
    pub metrics: PlegMetrics,
    /// Told of dead containers so that they can be pruned (spec 03b §6). Bounded and lossy: when
    /// full, the report is dropped and counted; garbage collection finds the container later.
    pub died: Option<mpsc::Sender<ContainerDied>>,
}

/// PLEG's numbers; the defaults are those of spec 03b §6 and §15.
#[derive(Clone, Debug, PartialEq)]
pub struct PlegConfig {
    /// Time from the end of one list to the next while no event stream is live.
    pub relist_period: Duration,
    /// The same while one is live: the audit.
    pub audit_period: Duration,
    /// Age of the last good list beyond which the node is unhealthy.
    pub unhealthy_after: Duration,
    /// Deadline of a list.
    pub list_deadline: Duration,
    /// Deadline of a look at one pod.
    pub look_deadline: Duration,
    /// How many looks may run at once.
    pub parallel_looks: usize,
    /// A look that takes longer gives its place to others and goes on beside them.
    pub look_patience: Duration,
    /// First delay before a failed look is repeated; doubles.
    pub retry_first: Duration,
    /// Longest delay before a failed look is repeated.
    pub retry_max: Duration,
    /// First delay before a broken stream is opened again; doubles.
    pub reconnect_first: Duration,
    /// Longest delay before a broken stream is opened again.
    pub reconnect_max: Duration,
    /// A stream that is neither refused nor answered within this time counts as open: servers
    /// send their headers with the first event.
    pub open_patience: Duration,
}

impl Default for PlegConfig {
    fn default() -> Self {
        Self {
            relist_period: Duration::from_secs(1),
            audit_period: Duration::from_secs(60),
            unhealthy_after: Duration::from_secs(180),
            list_deadline: Duration::from_secs(120),
            look_deadline: Duration::from_secs(120),
            parallel_looks: 16,
            look_patience: Duration::from_secs(1),
            retry_first: Duration::from_secs(1),
            retry_max: Duration::from_secs(10),
            reconnect_first: Duration::from_millis(100),
            reconnect_max: Duration::from_secs(30),
            open_patience: Duration::from_secs(2),
        }
    }
}
