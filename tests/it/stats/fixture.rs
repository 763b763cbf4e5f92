//! Fixture: a statistics provider over the scripted runtime, and a fake pod store.

use std::{
    collections::HashMap,
    path::PathBuf,
    sync::{Arc, Mutex},
};

use async_trait::async_trait;
use berth_metrics::{Registry, StatsMetrics, StatsSource};
use berth_ports::{PodObserver, PodView, RuntimePods, SystemClock};
use berth_stats::{PodCgroupPaths, PodDirectories, PodPaths, StatsConfig, StatsDeps, StatsProvider};
use berth_types::{
    PodRef, PodUid,
    observation::{
        ContainerState, Generation, NetworkMode, ObservedContainer, ObservedPod, ObservedSandbox, SandboxState,
    },
};
use jiff::Timestamp;
use tokio::sync::watch;

use berth_testkit::scripted_cri::ScriptedCri;

/// A pod store with the given pods.
#[derive(Default)]
pub struct FakePodStore(pub Mutex<Option<RuntimePods>>);

#[async_trait]
impl PodObserver for FakePodStore {
    fn view(&self, _: &PodRef) -> PodView {
        PodView::new(watch::channel(None).1, Generation(0))
    }

    fn action_completed(&self, _: &PodUid) -> Generation {
        Generation(0)
    }

    fn known(&self) -> Option<RuntimePods> {
        self.0.lock().expect("whole").clone()
    }

    async fn list(&self) -> Result<RuntimePods, String> {
        Err("the runtime is down".to_owned())
    }

    fn health(&self) -> Option<String> {
        None
    }
}

/// Cgroups below one of the test; `None` if pods have no cgroups.
pub struct Groups(pub Option<String>);

impl PodCgroupPaths for Groups {
    fn above(&self) -> Vec<String> {
        self.0.iter().cloned().collect()
    }

    fn of_pod(&self, pod: &PodUid) -> Vec<String> {
        self.0.iter().map(|above| format!("{above}/pod{pod}")).collect()
    }
}

/// Pod directories below one of the test.
pub struct Directories(pub PathBuf);

impl PodDirectories for Directories {
    fn of(&self, _: &PodRef) -> PodPaths {
        PodPaths { logs: self.0.clone(), ..PodPaths::default() }
    }
}

/// A statistics provider and the fakes behind it.
pub struct Fixture {
    pub provider: StatsProvider,
    pub cri: Arc<ScriptedCri>,
    pub shown: Arc<FakePodStore>,
    pub registry: Registry,
    pub disk: tempfile::TempDir,
}

impl Fixture {
    /// A provider with these pods; their cgroups are below `groups`.
    pub fn new(pods: Vec<ObservedPod>, groups: Option<String>) -> Self {
        Self::with(pods, groups, StatsSource::Groups)
    }

    /// Like [`Fixture::new`], with pod statistics from that source.
    pub fn with(pods: Vec<ObservedPod>, groups: Option<String>, source: StatsSource) -> Self {
        let (clock, registry) = (Arc::new(SystemClock), Registry::new());
        let cri = ScriptedCri::new(clock.clone());
        let pods: HashMap<PodUid, Arc<ObservedPod>> =
            pods.into_iter().map(|pod| (pod.id.uid.clone(), Arc::new(pod))).collect();
        let shown = Arc::new(FakePodStore(Mutex::new(Some(RuntimePods { pods }))));
        let disk = tempfile::tempdir().expect("a directory");
        let config = StatsConfig {
            node_name: "node-1".to_owned(),
            root: "/".into(),
            root_directory: disk.path().to_owned(),
            max_open: 256,
            reports_filesystems: true,
            source,
            ..StatsConfig::default()
        };
        let deps = StatsDeps {
            observer: shown.clone(),
            runtime: cri.clone(),
            images: cri.clone(),
            groups: Arc::new(Groups(groups)),
            directories: Arc::new(Directories(disk.path().to_owned())),
            claimed: None,
            clock,
            metrics: StatsMetrics::new(&registry),
        };
        let (provider, surveyors) = StatsProvider::new(config, deps);
        tokio::spawn(surveyors.run(tokio_util::sync::CancellationToken::new()));
        Self { provider, cri, shown, registry, disk }
    }

    /// Number of collections so far.
    pub fn readings(&self) -> u64 {
        let families = self.registry.gather();
        let family = families.iter().find(|family| family.name() == "berth_stats_collection_seconds");
        family.map_or(0, |family| family.get_metric()[0].get_histogram().get_sample_count())
    }
}

/// A pod with a ready sandbox `sandbox` and one running container `c1` named `main`.
pub fn pod(uid: &str, name: &str) -> ObservedPod {
    let now = Timestamp::now();
    let id = PodRef { uid: uid.into(), name: name.into(), namespace: "default".into() };
    let mut pod = ObservedPod::empty(id, Generation(0), now);
    pod.sandboxes = vec![ObservedSandbox {
        id: "sandbox".into(),
        attempt: 0,
        state: SandboxState::Ready,
        created_at: now,
        network_mode: NetworkMode::Pod,
        has_network: true,
        ips: Vec::new(),
        runtime_handler: String::new(),
    }];
    pod.containers = vec![ObservedContainer {
        id: "c1".into(),
        name: "main".into(),
        sandbox: "sandbox".into(),
        state: ContainerState::Running,
        created_at: now,
        started_at: Some(now),
        finished_at: None,
        exit_code: 0,
        reason: String::new(),
        message: String::new(),
        image: "registry.example/app:1".to_owned(),
        image_ref: String::new(),
        image_id: String::new(),
        hash: None,
        restart_count: 0,
        log_path: String::new(),
        resources: None,
        user: None,
    }];
    pod
}
