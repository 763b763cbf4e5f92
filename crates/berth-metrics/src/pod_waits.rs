//! Metric of waiting pods, computed at each scrape.

use std::{collections::BTreeMap, time::Duration};

use prometheus::{
    GaugeVec, Opts,
    core::{Collector, Desc},
    proto::MetricFamily,
};

use super::Registry;

type WaitSource = Box<dyn Fn() -> Vec<(&'static str, Duration)> + Send + Sync>;

/// Longest wait of any pod by reason; the label has a closed set of values.
pub struct PodWaits {
    family: GaugeVec,
    read: WaitSource,
}

impl PodWaits {
    /// Registers the family; `read` returns all current waits.
    pub fn register(registry: &Registry, read: impl Fn() -> Vec<(&'static str, Duration)> + Send + Sync + 'static) {
        let help = "[ALPHA] Duration in seconds of the longest current wait of a pod, by reason";
        let family = GaugeVec::new(Opts::new("berth_pod_waiting_seconds", help), &["reason"]);
        registry.collector(Self { family: family.expect("a constant name"), read: Box::new(read) });
    }
}

impl Collector for PodWaits {
    fn desc(&self) -> Vec<&Desc> {
        self.family.desc()
    }

    fn collect(&self) -> Vec<MetricFamily> {
        let mut longest: BTreeMap<&str, Duration> = BTreeMap::new();
        for (reason, wait) in (self.read)() {
            let known = longest.entry(reason).or_default();
            *known = wait.max(*known);
        }
        self.family.reset();
        for (reason, wait) in longest {
            self.family.with_label_values(&[reason]).set(wait.as_secs_f64());
        }
        self.family.collect().into_iter().filter(|family| !family.get_metric().is_empty()).collect()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, Mutex};

    use super::*;

    #[test]
    fn the_longest_wait_counts_and_none_is_kept() {
        let (registry, waits) = (Registry::new(), Arc::new(Mutex::new(Vec::new())));
        let source = waits.clone();
        PodWaits::register(&registry, move || source.lock().expect("whole").clone());
        assert!(registry.gather().is_empty());
        let second = Duration::from_secs(1);
        *waits.lock().expect("whole") = vec![("image", second), ("image", second * 3), ("volumes", second)];
        let families = registry.gather();
        let series: Vec<f64> = families[0].get_metric().iter().map(|m| m.get_gauge().get_value()).collect();
        assert_eq!((families[0].name(), series), ("berth_pod_waiting_seconds", vec![3.0, 1.0]));
        waits.lock().expect("whole").clear();
        assert!(registry.gather().is_empty());
    }
}
