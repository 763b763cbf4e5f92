//! Dependencies and time limits of PLEG, and its report of dead containers. The limits are not configurable.

use std::{sync::Arc, time::Duration};

use tokio::sync::mpsc;

use super::EventHints;
use berth_cri::RuntimeService;
use berth_metrics::PlegMetrics;
use berth_ports::{Clock, TerminationMessages};
use berth_types::{ContainerId, observation::ObservedPod};

/// A container exited (or disappeared before it was observed as exited).
#[derive(Clone, Debug, PartialEq)]
pub struct ContainerDied {
    /// The observation that showed it.
    pub pod: Arc<ObservedPod>,
    /// Name of the container.
    pub container: Arc<str>,
    /// ID of the exited instance.
    pub id: ContainerId,
}

/// Dependencies of PLEG.
pub struct PlegDeps {
    /// CRI runtime service.
    pub cri: Arc<dyn RuntimeService>,
    /// Event sources in order of preference; sources that the runtime does not support are skipped.
    pub hints: Vec<Arc<dyn EventHints>>,
    /// Reads termination messages.
    pub messages: Arc<dyn TerminationMessages>,
    /// Wall clock.
    pub clock: Arc<dyn Clock>,
    /// Metrics of relists and event streams.
    pub metrics: PlegMetrics,
    /// Receives dead containers so that they can be pruned (spec 03b §6). Bounded and lossy: when full,
    /// the report is dropped and counted; garbage collection finds the container later.
    pub died: Option<mpsc::Sender<ContainerDied>>,
}

/// Periods and limits of PLEG; the defaults are those of spec 03b §6 and §15.
#[derive(Clone, Debug, PartialEq)]
pub struct PlegConfig {
    /// Delay from the end of one list to the next while no event stream is live.
    pub relist_period: Duration,
    /// The same delay while a stream is live: the list audits the events.
    pub audit_period: Duration,
    /// Age of the last successful list beyond which the node is unhealthy.
    pub unhealthy_after: Duration,
    /// Timeout of a list.
    pub list_deadline: Duration,
    /// Timeout of the query of one pod.
    pub query_timeout: Duration,
    /// Maximum number of concurrent pod queries.
    pub parallel_queries: usize,
    /// A query that takes longer releases its semaphore permit and continues without one.
    pub query_permit_timeout: Duration,
    /// First retry delay after a failed query; doubles.
    pub retry_first: Duration,
    /// Maximum retry delay after a failed query.
    pub retry_max: Duration,
    /// First delay before a broken stream is reopened; doubles.
    pub reconnect_first: Duration,
    /// Maximum delay before a broken stream is reopened.
    pub reconnect_max: Duration,
    /// A stream that is neither refused nor answered within this time counts as open: servers send
    /// their headers with the first event.
    pub open_patience: Duration,
}

impl Default for PlegConfig {
    fn default() -> Self {
        Self {
            relist_period: Duration::from_secs(1),
            audit_period: Duration::from_secs(60),
            unhealthy_after: Duration::from_secs(180),
            list_deadline: Duration::from_secs(120),
            query_timeout: Duration::from_secs(120),
            parallel_queries: 16,
            query_permit_timeout: Duration::from_secs(1),
            retry_first: Duration::from_secs(1),
            retry_max: Duration::from_secs(10),
            reconnect_first: Duration::from_millis(100),
            reconnect_max: Duration::from_secs(30),
            open_patience: Duration::from_secs(2),
        }
    }
}
