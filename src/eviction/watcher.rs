//! Looks at the node and says how it stands. One task owns what is remembered of thresholds.
//! Behaviour: spec 05 §3.4 steps 1-7, §3.10.

use std::{collections::BTreeSet, sync::Arc, time::Duration};

use tokio::{
    sync::watch,
    time::{Instant, sleep, timeout},
};
use tokio_util::sync::CancellationToken;
use tracing::{debug, info};

use super::{
    EvictionConfig,
    ports::{Alarm, Gauges, Pressures},
    pressure::{Pressure, pause},
    signals::{Condition, Layout, Moment, Observations, Readings, in_force},
};
use berth_config::eviction::Threshold;
use berth_metrics::EvictionMetrics;
use berth_ports::Pulse;

/// A look that takes longer shows nothing.
const LOOK_LIMIT: Duration = Duration::from_secs(10);

/// Least time between two looks: an alarm may ring without end.
const SPACING: Duration = Duration::from_millis(100);

/// How the node stands, as of one look.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct Picture {
    /// When the look began.
    pub at: Moment,
    /// What was seen.
    pub seen: Observations,
    /// Which file systems lie where.
    pub layout: Layout,
    /// Thresholds in force, sorted.
    pub thresholds: Arc<[Threshold]>,
    /// Those for which something has to go, the first first, and since when they call for it.
    pub due: Vec<(Threshold, Moment)>,
    /// Pressures that are reported, and until when unless a threshold is met again.
    pub pressures: Vec<(Condition, Moment)>,
}

/// What the watcher needs of others.
pub struct WatcherDeps {
    /// Looks.
    pub gauges: Arc<dyn Gauges>,
    /// Says when to look before it is time.
    pub alarm: Arc<dyn Alarm>,
    /// Hears which pressures there are.
    pub pressures: Pressures,
    /// What is counted.
    pub metrics: EvictionMetrics,
    /// Pressures that an earlier agent reported, and for how long it still would have.
    pub restored: Vec<(Condition, Duration)>,
    /// Tells that the task lives.
    pub pulse: Pulse,
}

/// Looks at the node; see the module's documentation.
pub struct Watcher {
    config: Arc<EvictionConfig>,
    deps: WatcherDeps,
    began: Instant,
    pressure: Pressure,
    /// What is reported, and what of it only an earlier agent has seen.
    told: [BTreeSet<Condition>; 2],
    pictures: watch::Sender<Option<Arc<Picture>>>,
}

impl Watcher {
    /// A watcher to run, and how the node stands; `None` before the first look.
    pub fn new(
        config: Arc<EvictionConfig>,
        deps: WatcherDeps,
        began: Instant,
    ) -> (Self, watch::Receiver<Option<Arc<Picture>>>) {
        let (pictures, seen) = watch::channel(None);
        let pressure = Pressure::restored(deps.restored.iter().copied(), config.transition);
        let watcher = Self { config, deps, began, pressure, told: Default::default(), pictures };
        (watcher, seen)
    }

    /// Looks until stopped.
    pub async fn run(mut self, stop: CancellationToken) {
        loop {
            self.deps.pulse.works();
            let pause = tokio::select! {
                biased;
                () = stop.cancelled() => return,
                pause = self.look() => pause,
            };
            let called = async {
                sleep(SPACING).await;
                self.deps.alarm.rung().await;
            };
            tokio::select! {
                biased;
                () = stop.cancelled() => return,
                () = sleep(pause) => {}
                () = called => {}
            }
        }
    }

    /// One look; says how long to wait for the next.
    async fn look(&mut self) -> Duration {
        let at = self.began.elapsed();
        let readings = match timeout(LOOK_LIMIT, self.deps.gauges.look()).await {
            Ok(readings) => Readings { at, ..readings },
            Err(_) => {
                debug!("Eviction manager: the node could not be looked at in time");
                Readings { at, ..Readings::default() }
            }
        };
        let (seen, layout) = (readings.observations(), readings.layout());
        let thresholds = in_force(&self.config.thresholds, layout);
        let now = self.began.elapsed();
        let turn = self.pressure.turn(&thresholds, &seen, now, self.config.transition);
        self.count(&thresholds, &seen);
        let [reported, restored] = &self.told;
        if turn.conditions != *reported || turn.restored != *restored {
            info!(nodeCondition = ?turn.conditions, "Eviction manager: node conditions - observed");
            (self.deps.pressures)(&turn.conditions, &turn.restored);
            self.told = [turn.conditions.clone(), turn.restored.clone()];
        }
        let pause = pause(&thresholds, &seen, &turn);
        let picture = Picture { at, seen, layout, thresholds: thresholds.into(), due: turn.due, pressures: turn.until };
        self.pictures.send_replace(Some(Arc::new(picture)));
        pause
    }

    /// Where a signal has several thresholds the last one counts: the least, as a rule.
    fn count(&self, thresholds: &[Threshold], seen: &Observations) {
        for threshold in thresholds.iter().rev() {
            let Some(seen) = seen.get(&threshold.signal) else { continue };
            let bound = threshold.below.of(seen.capacity).value();
            self.deps.metrics.seen(threshold.signal.as_str(), seen.available.value(), bound);
        }
    }
}
