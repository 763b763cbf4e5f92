//! Metrics of the reflectors (list and watch of API objects).
//!
//! ConfigMaps and Secrets have hundreds of watches, so a series is per resource, not per watch: it reports the worst
//! state of its watches, and the newest of their events (spec 10 §10).

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use prometheus::{
    Gauge, GaugeVec, IntCounterVec, IntGaugeVec, Opts,
    core::{Collector, Desc},
    proto::MetricFamily,
};
use tokio::time::Instant;

use super::{Registry, Stability::Alpha};

/// Reflector state of one watch; a resource reports the worst state of its watches.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum WatchState {
    /// Lists the objects.
    Init,
    /// Watches for changes.
    Watching,
    /// Waits after a failure.
    Waiting,
}

/// Metric handles of reflectors.
#[derive(Clone, Debug)]
pub struct ReflectorMetrics {
    relists: IntCounterVec,
    tallies: Tallies,
}

type Tallies = Arc<Mutex<BTreeMap<&'static str, Tally>>>;

#[derive(Debug, Default)]
struct Tally {
    /// Number of watches by state.
    counts: [usize; 3],
    last_event: Option<Instant>,
}

impl Tally {
    fn count(&mut self, state: WatchState) -> &mut usize {
        let [init, watching, waiting] = &mut self.counts;
        match state {
            WatchState::Init => init,
            WatchState::Watching => watching,
            WatchState::Waiting => waiting,
        }
    }

    /// Worst state of the watches; `None` without watches.
    fn state(&self) -> Option<i64> {
        match self.counts {
            [0, 0, 0] => None,
            [0, _, 0] => Some(1),
            [_, _, 0] => Some(0),
            _ => Some(2),
        }
    }
}

fn locked(tallies: &Tallies) -> MutexGuard<'_, BTreeMap<&'static str, Tally>> {
    tallies.lock().unwrap_or_else(PoisonError::into_inner)
}

impl ReflectorMetrics {
    /// Registers the families.
    pub fn new(registry: &Registry) -> Self {
        let tallies = Tallies::default();
        registry.collector(Page::new(tallies.clone()));
        let relists = registry.counters(
            Alpha,
            "berth_reflector_relists_total",
            "Cumulative number of lists in place of resuming a watch",
            &["resource", "reason"],
        );
        Self { relists, tallies }
    }

    /// Adds a watch of the resource and returns its handle.
    pub fn follow(&self, resource: &'static str) -> ReflectorMeter {
        *locked(&self.tallies).entry(resource).or_default().count(WatchState::Init) += 1;
        ReflectorMeter { metrics: self.clone(), resource, state: WatchState::Init }
    }
}

/// Handle of one watch; dropping it removes the watch from the counts.
#[derive(Debug)]
pub struct ReflectorMeter {
    metrics: ReflectorMetrics,
    resource: &'static str,
    state: WatchState,
}

impl ReflectorMeter {
    /// Sets the state of the watch.
    pub fn set(&mut self, state: WatchState) {
        if state != self.state {
            self.leave();
            *locked(&self.metrics.tallies).entry(self.resource).or_default().count(state) += 1;
            self.state = state;
        }
    }

    /// Records an event from the server now.
    pub fn event_received(&self) {
        locked(&self.metrics.tallies).entry(self.resource).or_default().last_event = Some(Instant::now());
    }

    /// Counts a relist, by reason.
    pub fn relisted(&self, reason: &'static str) {
        self.metrics.relists.with_label_values(&[self.resource, reason]).inc();
    }

    fn leave(&self) {
        let mut tallies = locked(&self.metrics.tallies);
        let count = tallies.entry(self.resource).or_default().count(self.state);
        *count = count.saturating_sub(1);
    }
}

impl Drop for ReflectorMeter {
    fn drop(&mut self) {
        self.leave();
    }
}

/// Computes the gauges at each scrape, because ages grow between updates.
struct Page {
    tallies: Tallies,
    states: IntGaugeVec,
    ages: GaugeVec,
}

impl Page {
    fn new(tallies: Tallies) -> Self {
        let opts = |name: &str, help: &str| Opts::new(name, format!("[ALPHA] {help}"));
        let states = opts(
            "berth_reflector_state",
            "State of the reflectors of a resource: 0 listing, 1 watching, 2 backing off",
        );
        let ages = opts(
            "berth_reflector_last_event_age_seconds",
            "Time in seconds since the last event of a watch of the resource",
        );
        let invariant = "family names and labels are constants that the tests check";
        Self {
            tallies,
            states: IntGaugeVec::new(states, &["resource"]).expect(invariant),
            ages: GaugeVec::new(ages, &["resource"]).expect(invariant),
        }
    }
}

impl Collector for Page {
    fn desc(&self) -> Vec<&Desc> {
        self.states.desc().into_iter().chain(self.ages.desc()).collect()
    }

    fn collect(&self) -> Vec<MetricFamily> {
        self.states.reset();
        self.ages.reset();
        for (resource, tally) in &*locked(&self.tallies) {
            let Some(state) = tally.state() else { continue };
            self.states.with_label_values(&[resource]).set(state);
            if let Some(last_event) = tally.last_event {
                let age: Gauge = self.ages.with_label_values(&[resource]);
                age.set(last_event.elapsed().as_secs_f64());
            }
        }
        self.states.collect().into_iter().chain(self.ages.collect()).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    /// Values of all series of a family.
    fn values(registry: &Registry, name: &str) -> Vec<f64> {
        let families = registry.gather();
        let family = families.iter().filter(|family| family.name() == name);
        family
            .flat_map(|family| family.get_metric())
            .map(|metric| metric.get_gauge().get_value() + metric.get_counter().get_value())
            .collect()
    }

    #[tokio::test(start_paused = true)]
    async fn a_resource_shows_the_worst_of_its_watches() {
        let registry = Registry::new();
        let metrics = ReflectorMetrics::new(&registry);
        let state = || values(&registry, "berth_reflector_state");
        assert_eq!(state(), [0.0; 0]);
        let (mut one, mut other) = (metrics.follow("secrets"), metrics.follow("secrets"));
        assert_eq!(state(), [0.0]);
        one.set(WatchState::Watching);
        assert_eq!(state(), [0.0], "the other still reads");
        other.set(WatchState::Waiting);
        assert_eq!(state(), [2.0]);
        drop(other);
        assert_eq!(state(), [1.0]);
        one.event_received();
        one.relisted("failed");
        tokio::time::advance(Duration::from_secs(7)).await;
        assert_eq!(values(&registry, "berth_reflector_last_event_age_seconds"), [7.0]);
        assert_eq!(values(&registry, "berth_reflector_relists_total"), [1.0]);
        drop(one);
        assert_eq!(state(), [0.0; 0]);
    }
}
