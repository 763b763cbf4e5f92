//! Fixture: an image manager with scripted dependencies.

use std::{
    io,
    path::Path,
    sync::{Arc, Mutex},
    time::Duration,
};

use base64::Engine;
use berth::images::{
    DiskSpace, DockerFolders, GcPolicy, ImageManager, ImagesConfig, ImagesDeps, Parallelism, PluginFlags, PullMoment,
    VerificationPolicy,
};
use berth_metrics::Registry;
use berth_ports::{
    Clock, EnsureImage, EventKind, EventRecord, EventSink, EventTarget, ImageError, ImageProvider, ObjectSource,
    PodProgress, PullPolicy, PullSecret, ResolvedImage,
};
use berth_types::Pod;
use tempfile::TempDir;
use tonic::Code;

use berth_testkit::{
    clock::TokioClock,
    pods,
    scripted_cri::{Fault, ScriptedCri},
};

#[derive(Default)]
pub struct Recorder(Mutex<Vec<EventRecord>>);

impl EventSink for Recorder {
    fn record(&self, event: EventRecord) {
        self.0.lock().expect("lock").push(event);
    }
}

pub struct ImageManagerFixture {
    pub cri: Arc<ScriptedCri>,
    pub manager: Arc<ImageManager>,
    pub registry: Registry,
    pub pulls: Arc<Mutex<Vec<PullMoment>>>,
    pub space: Arc<Mutex<DiskSpace>>,
    pub clock: Arc<dyn Clock>,
    events: Arc<Recorder>,
    pub dir: Arc<TempDir>,
}

/// Options of the fixture.
#[derive(Clone)]
pub struct FixtureOptions {
    pub parallelism: Parallelism,
    pub qps: (u32, u32),
    pub verification: Option<VerificationPolicy>,
    pub gc: GcPolicy,
    pub plugins: Option<PluginFlags>,
    pub accounts: Option<Arc<dyn ObjectSource>>,
}

impl Default for FixtureOptions {
    fn default() -> Self {
        Self {
            parallelism: Parallelism::Unlimited,
            qps: (5, 10),
            verification: Some(VerificationPolicy::default()),
            gc: GcPolicy::default(),
            plugins: None,
            accounts: None,
        }
    }
}

impl ImageManagerFixture {
    pub async fn new() -> Self {
        Self::with(FixtureOptions::default()).await
    }

    pub async fn with(choice: FixtureOptions) -> Self {
        let clock: Arc<dyn Clock> = Arc::new(TokioClock::new());
        let dir = Arc::new(tempfile::tempdir().expect("a directory"));
        Self::at(ScriptedCri::new(clock.clone()), clock, dir, choice).await
    }

    /// The same machine after a restart of the agent.
    pub async fn restarted(&self) -> Self {
        Self::at(self.cri.clone(), self.clock.clone(), self.dir.clone(), FixtureOptions::default()).await
    }

    pub async fn at(cri: Arc<ScriptedCri>, clock: Arc<dyn Clock>, dir: Arc<TempDir>, choice: FixtureOptions) -> Self {
        let (registry, events, pulls) = (Registry::new(), Arc::<Recorder>::default(), Arc::<Mutex<Vec<_>>>::default());
        let space = Arc::new(Mutex::new(DiskSpace { capacity: 1000, available: 1000 }));
        let (moments, shared_space) = (pulls.clone(), space.clone());
        let deps = ImagesDeps {
            images: cri.clone(),
            runtime: cri.clone(),
            events: events.clone(),
            clock: clock.clone(),
            registry: registry.clone(),
            room: Arc::new(move |_: &Path| -> io::Result<DiskSpace> { Ok(*shared_space.lock().expect("lock")) }),
            on_pull: Arc::new(move |_, moment| moments.lock().expect("lock").push(moment)),
            accounts: choice.accounts.clone(),
        };
        let config = ImagesConfig {
            root: dir.path().to_path_buf(),
            max_pods: 110,
            registry_qps: choice.qps.0,
            registry_burst: choice.qps.1,
            parallelism: choice.parallelism,
            verification: choice.verification,
            handler_in_calls: false,
            docker: DockerFolders { root: dir.path().to_path_buf(), working: None, home: None },
            plugins: choice.plugins,
            gc: choice.gc,
        };
        let manager = ImageManager::new(deps, config).await.expect("opens");
        Self { cri, manager, registry, pulls, space, clock, events, dir }
    }

    pub async fn ensure(&self, request: EnsureImage) -> Result<ResolvedImage, ImageError> {
        self.manager.ensure(request).await
    }

    /// Takes the events so far, as `Normal Pulling …` or `Warning Failed …`.
    pub fn events(&self) -> Vec<String> {
        let events = std::mem::take(&mut *self.events.0.lock().expect("lock"));
        events
            .into_iter()
            .map(|event| {
                let kind = if event.kind == EventKind::Normal { "Normal" } else { "Warning" };
                let target = match event.target {
                    EventTarget::Node => "node ",
                    EventTarget::Storage { .. } => "storage ",
                    EventTarget::Pod { field_path: Some(_), .. } => "",
                    EventTarget::Pod { field_path: None, .. } => "pod ",
                };
                format!("{target}{kind} {}: {}", event.reason, event.message)
            })
            .collect()
    }

    pub fn pulls_fail(&self, image: &str, times: Option<u32>) {
        let fault = Fault::Error(Code::NotFound, format!("failed to pull {image}"));
        self.cri.fault("pull_image", image, fault, times);
    }

    /// User names of the `PullImage` calls so far.
    pub fn pulled_as(&self) -> Vec<String> {
        self.cri.calls().into_iter().filter(|call| call.op == "pull_image").map(|call| call.detail).collect()
    }

    pub fn counter(&self, family: &str, labels: &[(&str, &str)]) -> f64 {
        let families = self.registry.gather();
        let family = families.iter().find(|f| f.name() == family);
        let metrics = family.map(|f| f.get_metric()).unwrap_or_default();
        metrics
            .iter()
            .filter(|m| labels.iter().all(|(k, v)| m.get_label().iter().any(|l| l.name() == *k && l.value() == *v)))
            .map(|m| m.get_counter().get_value())
            .sum()
    }

    /// Waits by the real clock: the test's is paused, and work on the blocking pool takes real time.
    pub async fn until(&self, what: &str, mut holds: impl FnMut(&Self) -> bool) {
        let began = std::time::Instant::now();
        while !holds(self) {
            assert!(began.elapsed() < Duration::from_secs(30), "not reached: {what}");
            let pause = tokio::task::spawn_blocking(|| std::thread::sleep(Duration::from_millis(1)));
            pause.await.expect("no panic");
        }
    }

    pub fn files(&self, folder: &str) -> usize {
        std::fs::read_dir(self.dir.path().join("image_manager").join(folder)).map_or(0, Iterator::count)
    }
}

pub fn request(pod: &Arc<Pod>, image: &str) -> EnsureImage {
    EnsureImage {
        pod: pod.clone(),
        image: image.to_owned(),
        policy: PullPolicy::IfNotPresent,
        secrets: Arc::from([]),
        sandbox: None,
        handler: String::new(),
        field_path: Some("spec.containers{main}".to_owned()),
        progress: PodProgress::new(),
    }
}

pub fn simple(image: &str) -> EnsureImage {
    request(&pods::simple("web"), image)
}

/// A pull secret of that name with the credentials of one registry.
pub fn secret(name: &str, registry: &str, user: &str) -> PullSecret {
    let auth = base64::engine::general_purpose::STANDARD.encode(format!("{user}:password of {user}"));
    PullSecret {
        coordinates: ("default".to_owned(), name.to_owned(), format!("uid-{name}")),
        kind: "kubernetes.io/dockerconfigjson".to_owned(),
        data: format!("{{\"auths\":{{\"{registry}\":{{\"auth\":\"{auth}\"}}}}}}").into_bytes(),
    }
}

pub fn secs(n: u64) -> Duration {
    Duration::from_secs(n)
}
