//! Eviction watcher: observes the node, evaluates thresholds, and publishes snapshots (evictor) and pressures (node
//! facts).
//!
//! One task owns the state of thresholds. Implements spec 05 §3.4 steps 1-7, §3.10.

use std::{collections::BTreeSet, sync::Arc, time::Duration};

use tokio::{
    sync::watch,
    time::{Instant, sleep, timeout},
};
use tokio_util::sync::CancellationToken;
use tracing::{debug, info};

use super::{
    EvictionConfig,
    ports::{NodeStats, PressureCallback, ThresholdNotifications},
    pressure::{PressureState, next_interval},
    signals::{Layout, Observations, PressureCondition, Readings, Uptime, in_force},
};
use berth_config::eviction::Threshold;
use berth_metrics::EvictionMetrics;
use berth_ports::TaskLiveness;

/// Deadline of an observation; a slower one has no readings.
const OBSERVATION_TIMEOUT: Duration = Duration::from_secs(10);

/// Minimum interval between observations: kernel notifications may arrive continuously.
const SPACING: Duration = Duration::from_millis(100);

/// Snapshot of the node's state, from one observation.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct NodeSnapshot {
    /// Time at which the observation began.
    pub at: Uptime,
    /// Observations by signal.
    pub seen: Observations,
    /// Layout of the file systems.
    pub layout: Layout,
    /// Thresholds in force, sorted.
    pub thresholds: Arc<[Threshold]>,
    /// Thresholds that require action, the first one first, each with the time since when it is due.
    pub due: Vec<(Threshold, Uptime)>,
    /// Reported pressures, each with the time until which it is reported unless a threshold is met again.
    pub pressures: Vec<(PressureCondition, Uptime)>,
}

/// Dependencies of the watcher.
pub struct WatcherDeps {
    /// Reads statistics of the node.
    pub node_stats: Arc<dyn NodeStats>,
    /// Kernel notifications.
    pub notifications: Arc<dyn ThresholdNotifications>,
    /// Callback for changed pressures.
    pub pressures: PressureCallback,
    /// Eviction metrics.
    pub metrics: EvictionMetrics,
    /// Pressures that an earlier agent reported, and for how long it would still report them.
    pub restored: Vec<(PressureCondition, Duration)>,
    /// Reports that the task is alive.
    pub liveness: TaskLiveness,
}

/// Watcher of this node; see the module's documentation.
pub struct Watcher {
    config: Arc<EvictionConfig>,
    deps: WatcherDeps,
    began: Instant,
    pressure: PressureState,
    /// Last reported conditions, and those of them that only an earlier agent observed.
    reported: [BTreeSet<PressureCondition>; 2],
    pictures: watch::Sender<Option<Arc<NodeSnapshot>>>,
}

impl Watcher {
    /// Creates a watcher to run, and the receiver of its snapshots; `None` before the first one.
    pub fn new(
        config: Arc<EvictionConfig>,
        deps: WatcherDeps,
        began: Instant,
    ) -> (Self, watch::Receiver<Option<Arc<NodeSnapshot>>>) {
        let (pictures, seen) = watch::channel(None);
        let pressure = PressureState::restored(deps.restored.iter().copied(), config.transition);
        let watcher = Self { config, deps, began, pressure, reported: Default::default(), pictures };
        (watcher, seen)
    }

    /// Observes until `stop` is cancelled.
    pub async fn run(mut self, stop: CancellationToken) {
        loop {
            self.deps.liveness.report_progress();
            let pause = tokio::select! {
                biased;
                () = stop.cancelled() => return,
                pause = self.observe() => pause,
            };
            let called = async {
                sleep(SPACING).await;
                self.deps.notifications.notified().await;
            };
            tokio::select! {
                biased;
                () = stop.cancelled() => return,
                () = sleep(pause) => {}
                () = called => {}
            }
        }
    }

    /// Observes once; returns the delay until the next observation.
    async fn observe(&mut self) -> Duration {
        let at = self.began.elapsed();
        let readings = match timeout(OBSERVATION_TIMEOUT, self.deps.node_stats.read()).await {
            Ok(readings) => Readings { at, ..readings },
            Err(_) => {
                debug!("Eviction manager: timed out reading node stats");
                Readings { at, ..Readings::default() }
            }
        };
        let (seen, layout) = (readings.observations(), readings.layout());
        let thresholds = in_force(&self.config.thresholds, layout);
        let now = self.began.elapsed();
        let turn = self.pressure.evaluate(&thresholds, &seen, now, self.config.transition);
        self.count(&thresholds, &seen);
        let [reported, restored] = &self.reported;
        if turn.conditions != *reported || turn.restored != *restored {
            info!(nodeCondition = ?turn.conditions, "Eviction manager: node conditions - observed");
            (self.deps.pressures)(&turn.conditions, &turn.restored);
            self.reported = [turn.conditions.clone(), turn.restored.clone()];
        }
        let pause = next_interval(&thresholds, &seen, &turn);
        let picture =
            NodeSnapshot { at, seen, layout, thresholds: thresholds.into(), due: turn.due, pressures: turn.until };
        self.pictures.send_replace(Some(Arc::new(picture)));
        pause
    }

    /// Exports metrics. If a signal has several thresholds, the first one of the list is exported, usually the lowest.
    fn count(&self, thresholds: &[Threshold], seen: &Observations) {
        for threshold in thresholds.iter().rev() {
            let Some(seen) = seen.get(&threshold.signal) else { continue };
            let bound = threshold.below.of(seen.capacity).value();
            self.deps.metrics.observed(threshold.signal.as_str(), seen.available.value(), bound);
        }
    }
}
