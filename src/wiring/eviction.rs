//! Wires eviction to the modules that it reads and acts through.

use std::{collections::BTreeSet, sync::Arc};

use tokio::{
    sync::watch,
    time::{Instant, timeout},
};

use super::{
    composition_root::{Base, BuildError, SETTLE},
    settings,
};
use crate::{
    engine::{EngineHandle, allocation::Allocations},
    eviction::{
        EvictionConfig, Evictor, EvictorDeps, NodeSnapshot, Watcher, WatcherDeps,
        actions::{EnginePods, NodeReclaimer},
        kernel_notifier::{ThresholdNotifier, UNIFIED, watch_memcg_usage, watch_memory_events, watch_psi},
        node_reader::{ImageFileSystems, NodeReader},
        page_cache::PageCache,
        ports::PressureCallback,
        pressure_state,
        signals::PressureCondition,
    },
    images,
    node::{MachineInfo, max_pids},
    runtime::RuntimeManager,
    serving::stats::StatsPages,
};
use berth_config::LoadedConfig;
use berth_cri::ImageService;
use berth_metrics::EvictionMetrics;
use berth_ports::{DiskStateFile, NodeFacts};
use berth_stats::{NodeObserver, PodCgroupPaths};

/// Dependencies of the watcher.
pub(super) struct WatchParts<'a> {
    /// Facts of the machine.
    pub(super) machine: &'a MachineInfo,
    /// Image service of the runtime.
    pub(super) images: Arc<dyn ImageService>,
    /// Names of control groups.
    pub(super) groups: Arc<dyn PodCgroupPaths>,
    /// Receives pressures.
    pub(super) node: watch::Sender<Arc<NodeFacts>>,
}

/// The running watcher's snapshots, and what the evictor shares with it.
pub(super) struct RunningWatcher {
    config: Arc<EvictionConfig>,
    metrics: EvictionMetrics,
    pictures: watch::Receiver<Option<Arc<NodeSnapshot>>>,
    began: Instant,
    groups: Arc<dyn PodCgroupPaths>,
}

/// Starts the watcher; returns after the first observation, or after a timeout, so that no pod is admitted to a node
/// under pressure.
///
/// # Errors
/// Invalid thresholds.
pub(super) async fn watch(
    loaded: &LoadedConfig,
    base: &Base,
    parts: WatchParts<'_>,
) -> Result<RunningWatcher, BuildError> {
    let config = Arc::new(settings::eviction(loaded)?);
    let (metrics, began) = (EvictionMetrics::new(&base.registry), Instant::now());
    let (places, notifier) = (Arc::new(ImageFileSystems::default()), Arc::new(ThresholdNotifier::default()));
    base.tasks.spawn(places.clone().follow(parts.images, notifier.clone(), base.stop.child_token()));
    let (line, lines) = watch::channel(None);
    if loaded.config.kernel_memcg_notification {
        base.tasks.spawn(watch_memcg_usage(lines, notifier.clone(), base.stop.child_token()));
    }
    if let Some(pods) = parts.groups.above().into_iter().next() {
        base.tasks.spawn(watch_memory_events(pods, notifier.clone(), base.stop.child_token()));
    }
    base.tasks.spawn(watch_psi(notifier.clone(), base.stop.child_token()));
    let observer = NodeObserver::new(parts.groups.clone(), base.clock.clone(), "/".into(), max_pids);
    let gauges = NodeReader::new(observer, loaded.root_directory(), places, config.thresholds.clone(), line);
    let file = Arc::new(DiskStateFile::new(loaded.root_directory().join("eviction_state")));
    let boot_id = &parts.machine.kernel_boot_id;
    let restored = pressure_state::restored(&*file, boot_id, base.clock.now()).await;
    let deps = WatcherDeps {
        node_stats: Arc::new(gauges),
        notifications: notifier,
        pressures: pressure_publisher(parts.node),
        metrics: metrics.clone(),
        restored,
        liveness: base.liveness.of("eviction-watcher"),
    };
    let (watcher, mut pictures) = Watcher::new(config.clone(), deps, began);
    let state_file =
        pressure_state::PressureStateFile { file, boot_id: boot_id.clone(), clock: base.clock.clone(), began };
    base.tasks.spawn(state_file.run(pictures.clone(), base.stop.child_token()));
    base.tasks.spawn(watcher.run(base.stop.child_token()));
    let _ = timeout(SETTLE, pictures.wait_for(Option::is_some)).await;
    Ok(RunningWatcher { config, metrics, pictures, began, groups: parts.groups })
}

/// Dependencies of the evictor.
pub(super) struct ActParts<'a> {
    /// Source of the node's pods, and receiver of kill commands.
    pub(super) engine: &'a EngineHandle,
    /// Allocated resources of pods.
    pub(super) allocations: Allocations,
    /// Resource usage of pods.
    pub(super) statistics: &'a StatsPages,
    /// Removes dead containers.
    pub(super) runtime: Arc<RuntimeManager>,
    /// Removes images.
    pub(super) images: Arc<images::ImageManager>,
}

/// Builds the evictor from the engine, runtime, and images, and spawns its supervised task.
pub(super) fn start_evictor(base: &Base, watched: RunningWatcher, parts: ActParts<'_>) {
    let RunningWatcher { config, metrics, pictures, began, groups } = watched;
    let engine = parts.engine;
    let pods = EnginePods {
        pods: engine.pods.clone(),
        commands: engine.commands.clone(),
        allocations: parts.allocations,
        statistics: parts.statistics.provider(),
    };
    let reclaim = NodeReclaimer {
        runtime: parts.runtime,
        images: parts.images,
        pod_states: Arc::new(engine.pods.clone()),
        page_cache: PageCache::new("/".into(), UNIFIED.into(), groups),
    };
    let deps = EvictorDeps {
        pods: Arc::new(pods),
        reclaim: Arc::new(reclaim),
        events: base.events.clone(),
        metrics,
        liveness: base.liveness.of("eviction"),
    };
    base.tasks.spawn(Evictor::new(config, deps, pictures, began).run(base.stop.child_token()));
}

/// Publishes pressures in the facts of the node, for admission and the node's status. Pressures that only an earlier
/// agent observed are for the status alone: running pods are admitted again at the start, and none of them may fail for
/// a past pressure.
fn pressure_publisher(node: watch::Sender<Arc<NodeFacts>>) -> PressureCallback {
    Arc::new(move |conditions: &BTreeSet<PressureCondition>, restored: &BTreeSet<PressureCondition>| {
        let names = |conditions: Vec<&PressureCondition>| conditions.iter().map(|c| c.as_str().to_owned()).collect();
        let met: Vec<String> = names(conditions.difference(restored).collect());
        let restored: Vec<String> = names(conditions.intersection(restored).collect());
        node.send_if_modified(|facts| {
            let is_news = facts.pressures != met || facts.restored_pressures != restored;
            if is_news {
                let facts = Arc::make_mut(facts);
                (facts.pressures, facts.restored_pressures) = (met, restored);
            }
            is_news
        });
    })
}

#[cfg(test)]
mod tests {
    use std::{collections::HashSet, time::Duration};

    use async_trait::async_trait;
    use serde_json::json;
    use tokio_util::sync::CancellationToken;

    use super::*;
    use crate::{
        engine::admission::{AdmissionRules, AdmitInput, Purpose, admit},
        eviction::{EvictionConfig, ports::NodeStats, signals::Readings},
    };
    use berth_metrics::Registry;
    use berth_ports::TaskLiveness;
    use berth_types::Pod;

    #[test]
    fn pressures_are_facts_of_the_node() {
        let (node, mut facts) = watch::channel(Arc::<NodeFacts>::default());
        let publish = pressure_publisher(node);
        let none = BTreeSet::new();
        publish(&none, &none);
        assert!(!facts.has_changed().expect("open"), "no news");
        publish(&[PressureCondition::Disk, PressureCondition::Memory].into(), &none);
        assert_eq!(facts.borrow_and_update().pressures, ["MemoryPressure", "DiskPressure"]);
        publish(&[PressureCondition::Disk, PressureCondition::Memory].into(), &none);
        assert!(!facts.has_changed().expect("open"));
        publish(&[PressureCondition::Disk, PressureCondition::Memory].into(), &[PressureCondition::Disk].into());
        let seen = facts.borrow_and_update().clone();
        assert_eq!(
            (&*seen.pressures, &*seen.restored_pressures),
            (&["MemoryPressure".to_owned()][..], &["DiskPressure".to_owned()][..])
        );
        publish(&none, &none);
        assert!(facts.borrow().pressures.is_empty() && facts.borrow().restored_pressures.is_empty());
    }

    /// An observation without pressure.
    struct Well;

    #[async_trait]
    impl NodeStats for Well {
        async fn read(&self) -> Readings {
            Readings::default()
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_pod_survives_a_restart_under_a_pressure_that_is_over() {
        let (node, mut facts) = watch::channel(Arc::<NodeFacts>::default());
        let config = EvictionConfig {
            thresholds: Vec::new(),
            transition: Duration::from_secs(300),
            max_pod_grace: 0,
            local_storage: true,
        };
        let deps = WatcherDeps {
            node_stats: Arc::new(Well),
            notifications: Arc::new(ThresholdNotifier::default()),
            pressures: pressure_publisher(node),
            metrics: EvictionMetrics::new(&Registry::new()),
            restored: vec![(PressureCondition::Disk, Duration::from_secs(60))],
            liveness: TaskLiveness::default(),
        };
        let (watcher, _pictures) = Watcher::new(Arc::new(config), deps, Instant::now());
        let stop = CancellationToken::new();
        let watching = tokio::spawn(watcher.run(stop.clone()));
        let reported = facts.wait_for(|facts| facts.restored_pressures == ["DiskPressure"]).await;
        let seen = reported.expect("it is reported").clone();
        let object = json!({"metadata": {"name": "web", "namespace": "n", "uid": "u"}, "spec": {"containers": []}});
        let pod = Arc::new(Pod::new(serde_json::from_value(object).expect("a pod")).expect("complete"));
        for purpose in [Purpose::New, Purpose::Restored] {
            let (rejected, rules) = (HashSet::new(), AdmissionRules::default());
            let input = AdmitInput { pod: &pod, purpose, active: &[], rejected: &rejected, node: &seen, rules: &rules };
            let refusal = admit(&input).err();
            assert!(refusal.as_ref().is_none_or(|refusal| refusal.reason != "Evicted"), "{refusal:?}");
        }
        stop.cancel();
        watching.await.expect("ends");
    }
}
