//! Desired and actual state of world of file-based volumes, kept for the metrics only.
//!
//! The authoritative state is on disk. Implements spec 08 §4.9.

use std::{
    collections::{BTreeSet, HashMap},
    sync::{Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use tokio::time::Instant;

use berth_metrics::{StorageOperation, VolumeMetrics, World};
use berth_types::PodUid;

/// Full plugin name, such as `kubernetes.io/empty-dir`.
pub type PluginName = &'static str;

/// Result of setting up one volume.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct SetUpResult {
    /// Name of the volume in the pod.
    pub volume: String,
    /// Plugin of the volume.
    pub plugin: PluginName,
    /// Whether the volume is set up.
    pub succeeded: bool,
    /// Duration of the attempt.
    pub elapsed: Duration,
}

/// Desired and actual volumes of all pods.
pub struct StateOfWorld {
    metrics: VolumeMetrics,
    pods: Mutex<HashMap<PodUid, Volumes>>,
}

/// Volumes in the order in which they became known: a pod has few, and there are hundreds of pods.
#[derive(Default)]
struct Volumes(Vec<VolumeEntry>);

struct VolumeEntry {
    name: Box<str>,
    /// Plugin of the desired volume; `None` where it is not desired.
    desired: Option<PluginName>,
    /// When the volume was first requested, until it is set up.
    requested_at: Option<Instant>,
    /// Plugin of the actual volume; `None` where it is not set up.
    actual: Option<PluginName>,
    /// An earlier agent left the volume, and this one has not verified it yet.
    is_unverified: bool,
}

impl Volumes {
    fn known(&mut self, name: &str) -> &mut VolumeEntry {
        let known = self.0.iter().position(|known| &*known.name == name);
        let at = known.unwrap_or_else(|| {
            self.0.reserve_exact(1);
            self.0.push(VolumeEntry {
                name: name.into(),
                desired: None,
                requested_at: None,
                actual: None,
                is_unverified: false,
            });
            self.0.len() - 1
        });
        &mut self.0[at]
    }
}

impl StateOfWorld {
    /// Creates an instance without volumes.
    pub fn new(metrics: VolumeMetrics) -> Self {
        Self { metrics, pods: Mutex::default() }
    }

    fn pods(&self) -> MutexGuard<'_, HashMap<PodUid, Volumes>> {
        self.pods.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds the desired volumes of a pod; returns the names of those that are already set up.
    pub fn desire(&self, pod: &PodUid, volumes: impl IntoIterator<Item = (String, PluginName)>) -> BTreeSet<String> {
        let mut pods = self.pods();
        let own = pods.entry(pod.clone()).or_default();
        for (volume, plugin) in volumes {
            let known = own.known(&volume);
            if known.desired.is_none() {
                (known.desired, known.requested_at) = (Some(plugin), Some(Instant::now()));
                self.metrics.changed(plugin, World::Desired, 1);
            }
        }
        let are_there = own.0.iter().filter(|known| known.actual.is_some() && !known.is_unverified);
        are_there.map(|known| known.name.to_string()).collect()
    }

    /// Returns the volumes that an earlier agent left complete and that this one has not verified yet.
    pub fn unverified(&self, pod: &PodUid) -> BTreeSet<String> {
        let pods = self.pods();
        let own = pods.get(pod).into_iter().flat_map(|own| &own.0);
        own.filter(|known| known.is_unverified).map(|known| known.name.to_string()).collect()
    }

    /// Adds volumes that an earlier agent left complete.
    pub fn adopt_complete(&self, pod: &PodUid, volumes: Vec<(String, PluginName)>) {
        let mut pods = self.pods();
        let own = pods.entry(pod.clone()).or_default();
        for (volume, plugin) in volumes {
            let known = own.known(&volume);
            if known.actual.is_none() {
                (known.actual, known.is_unverified) = (Some(plugin), true);
                self.metrics.changed(plugin, World::Actual, 1);
            }
        }
    }

    /// Removes a pod unknown to the agent, of which nothing is left.
    pub fn removed(&self, pod: &PodUid) {
        let Some(own) = self.pods().remove(pod) else { return };
        let desired = own.0.iter().filter_map(|known| known.desired);
        desired.for_each(|plugin| self.metrics.changed(plugin, World::Desired, -1));
        let actual = own.0.iter().filter_map(|known| known.actual);
        actual.for_each(|plugin| self.metrics.changed(plugin, World::Actual, -1));
    }

    /// Records results of setting up volumes.
    pub fn set_up(&self, pod: &PodUid, ends: Vec<SetUpResult>) {
        let mut pods = self.pods();
        let own = pods.entry(pod.clone()).or_default();
        for end in ends {
            self.metrics.ended(end.plugin, StorageOperation::Mount, end.succeeded, end.elapsed);
            if !end.succeeded {
                continue;
            }
            let known = own.known(&end.volume);
            if let Some(asked) = known.requested_at.take() {
                self.metrics.mounted(end.plugin, asked.elapsed());
            }
            known.is_unverified = false;
            if known.actual.replace(end.plugin).is_none() {
                self.metrics.changed(end.plugin, World::Actual, 1);
            }
        }
    }

    /// Records the teardown of a pod's volumes, which succeeds or fails as a whole.
    pub fn record_teardown(&self, pod: &PodUid, succeeded: bool, elapsed: Duration) {
        let mut pods = self.pods();
        let Some(own) = pods.get_mut(pod) else { return };
        for known in &mut own.0 {
            known.requested_at = None;
            if let Some(plugin) = known.desired.take() {
                self.metrics.changed(plugin, World::Desired, -1);
            }
            if let Some(plugin) = known.actual.filter(|_| !known.is_unverified) {
                self.metrics.ended(plugin, StorageOperation::Unmount, succeeded, elapsed);
            }
        }
        if succeeded {
            let actual = own.0.iter().filter_map(|known| known.actual);
            actual.for_each(|plugin| self.metrics.changed(plugin, World::Actual, -1));
            pods.remove(pod);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use berth_metrics::Registry;

    #[tokio::test(start_paused = true)]
    async fn what_was_left_is_there_once() {
        let registry = Registry::new();
        let worlds = StateOfWorld::new(VolumeMetrics::new(&registry));
        let there = || -> f64 {
            let all = series(&registry, "volume_manager_total_volumes").into_iter();
            all.filter(|(labels, _)| labels.contains("actual")).map(|(_, count)| count).sum()
        };
        let pod = PodUid::from("u");
        worlds.adopt_complete(&pod, vec![("a".to_owned(), EMPTY), ("b".to_owned(), EMPTY)]);
        assert_eq!(there(), 2.0);
        assert_eq!(worlds.desire(&pod, [("a".to_owned(), EMPTY)]).len(), 0, "nobody has looked at it");
        assert_eq!(worlds.unverified(&pod), BTreeSet::from(["a".to_owned(), "b".to_owned()]));
        worlds.set_up(&pod, vec![end("a", true)]);
        assert_eq!(worlds.unverified(&pod), BTreeSet::from(["b".to_owned()]));
        worlds.adopt_complete(&pod, vec![("a".to_owned(), EMPTY)]);
        assert_eq!((there(), worlds.desire(&pod, []).len()), (2.0, 1));
        worlds.record_teardown(&pod, true, Duration::ZERO);
        assert_eq!(there(), 0.0);
        worlds.adopt_complete(&pod, vec![("a".to_owned(), EMPTY)]);
        worlds.removed(&pod);
        assert_eq!(there(), 0.0);
    }

    const EMPTY: PluginName = "kubernetes.io/empty-dir";

    fn end(volume: &str, succeeded: bool) -> SetUpResult {
        SetUpResult { volume: volume.to_owned(), plugin: EMPTY, succeeded, elapsed: Duration::from_millis(3) }
    }

    /// Label values of a family's series with their values; for a histogram, its sample count.
    fn series(registry: &Registry, family: &str) -> Vec<(String, f64)> {
        let families = registry.gather();
        let family = families.iter().find(|f| f.name() == family).map(|f| f.get_metric()).unwrap_or_default();
        let labels = |m: &prometheus::proto::Metric| {
            m.get_label().iter().map(|label| label.value().to_owned()).collect::<Vec<_>>().join(" ")
        };
        let value =
            |m: &prometheus::proto::Metric| m.get_gauge().get_value() + m.get_histogram().get_sample_count() as f64;
        family.iter().map(|m| (labels(m), value(m))).collect()
    }

    #[test]
    fn volumes_come_and_go() {
        let registry = Registry::new();
        let worlds = StateOfWorld::new(VolumeMetrics::new(&registry));
        let pod = PodUid::from("u");
        let both = || [("a".to_owned(), EMPTY), ("b".to_owned(), EMPTY)];
        let totals = || series(&registry, "volume_manager_total_volumes").into_iter().map(|s| s.1).collect::<Vec<_>>();
        assert!(worlds.desire(&pod, both()).is_empty());
        worlds.set_up(&pod, vec![end("a", true), end("b", false)]);
        assert_eq!(worlds.desire(&pod, both()), BTreeSet::from(["a".to_owned()]), "asked again with the next turn");
        assert_eq!(totals(), [1.0, 2.0], "actual, desired");
        worlds.set_up(&pod, vec![end("b", true)]);
        assert_eq!(totals(), [2.0, 2.0]);
        assert_eq!(series(&registry, "volume_operation_total_seconds")[0].1, 2.0);
        worlds.record_teardown(&pod, false, Duration::ZERO);
        assert_eq!(totals(), [2.0, 0.0], "what cannot be taken down is still there");
        worlds.record_teardown(&pod, true, Duration::ZERO);
        worlds.record_teardown(&pod, true, Duration::ZERO);
        assert_eq!(totals(), [0.0, 0.0]);
        let operations = series(&registry, "storage_operation_duration_seconds");
        assert_eq!(
            operations,
            [
                ("false volume_mount fail-unknown kubernetes.io/empty-dir".to_owned(), 1.0),
                ("false volume_mount success kubernetes.io/empty-dir".to_owned(), 2.0),
                ("false volume_unmount fail-unknown kubernetes.io/empty-dir".to_owned(), 2.0),
                ("false volume_unmount success kubernetes.io/empty-dir".to_owned(), 2.0),
            ]
        );
        assert!(worlds.pods().is_empty());
    }
}
