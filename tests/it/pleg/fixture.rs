//! Fixture: a PLEG over the scripted CRI, and helpers of its tests.

use std::{collections::HashMap, sync::Arc, time::Duration};

use async_trait::async_trait;
use berth::pleg::{
    self, ContainerDied, CriEvents, EventHints, Hint, HintError, HintStream, Pleg, PlegConfig, PlegDeps,
};
use berth_cri::RuntimeService;
use berth_metrics::{PlegMetrics, Registry};
use berth_ports::{ContainerExit, LatestObservation, PodObserver, PodView, TerminationMessages};
use berth_proto::cri;
use berth_types::PodRef;
use futures::StreamExt;
use tokio::{
    sync::{Mutex, mpsc},
    task::JoinHandle,
};
use tokio_stream::wrappers::UnboundedReceiverStream;
use tokio_util::sync::{CancellationToken, DropGuard};

use berth_testkit::{clock::TokioClock, scripted_cri::ScriptedCri};

/// Returns the runtime's own termination message.
pub struct NoMessages;

#[async_trait]
impl TerminationMessages for NoMessages {
    async fn message(&self, exit: ContainerExit) -> String {
        exit.message
    }
}

/// An event source that the test feeds.
pub struct FakeEventSource(Mutex<Option<mpsc::UnboundedReceiver<Result<Hint, HintError>>>>);

#[async_trait]
impl EventHints for FakeEventSource {
    fn name(&self) -> &'static str {
        "test"
    }

    async fn open(&self) -> Result<HintStream, HintError> {
        let receiver = self.0.lock().await.take().ok_or_else(|| HintError::Unsupported("used up".into()))?;
        Ok(UnboundedReceiverStream::new(receiver).boxed())
    }
}

/// An event source, and the sender that feeds it.
pub fn event_source() -> (Arc<dyn EventHints>, mpsc::UnboundedSender<Result<Hint, HintError>>) {
    let (sender, receiver) = mpsc::unbounded_channel();
    (Arc::new(FakeEventSource(Mutex::new(Some(receiver)))), sender)
}

/// A PLEG and the runtime below it.
pub struct Fixture {
    pub cri: Arc<ScriptedCri>,
    pub pleg: Arc<Pleg>,
    pub died: mpsc::Receiver<ContainerDied>,
    pub registry: Registry,
    pub task: JoinHandle<()>,
    pub stop: DropGuard,
}

/// Identity of a test pod.
pub fn who(name: &str) -> PodRef {
    PodRef { uid: format!("uid-{name}").into(), name: name.into(), namespace: "default".into() }
}

/// Labels of a pod's sandboxes and containers.
pub fn labels(name: &str) -> HashMap<String, String> {
    [("uid", format!("uid-{name}")), ("name", name.to_owned()), ("namespace", "default".to_owned())]
        .map(|(key, value)| (format!("io.kubernetes.pod.{key}"), value))
        .into()
}

fn sandbox_config(name: &str, attempt: u32) -> cri::PodSandboxConfig {
    let metadata =
        cri::PodSandboxMetadata { name: name.into(), namespace: "default".into(), uid: format!("uid-{name}"), attempt };
    cri::PodSandboxConfig { metadata: Some(metadata), labels: labels(name), ..Default::default() }
}

impl Fixture {
    /// A PLEG that follows the CRI's events.
    pub fn new() -> Self {
        let cri = Self::runtime();
        let hints: Arc<dyn EventHints> = Arc::new(CriEvents::new(cri.clone()));
        Self::over(cri, vec![hints], PlegConfig::default())
    }

    /// A PLEG without events: it lists once a second.
    pub fn without_events() -> Self {
        Self::over(Self::runtime(), Vec::new(), PlegConfig::default())
    }

    pub fn runtime() -> Arc<ScriptedCri> {
        ScriptedCri::new(Arc::new(TokioClock::new()))
    }

    pub fn over(cri: Arc<ScriptedCri>, hints: Vec<Arc<dyn EventHints>>, config: PlegConfig) -> Self {
        let registry = Registry::new();
        let (died_to, died) = mpsc::channel(50);
        let deps = PlegDeps {
            cri: cri.clone(),
            hints,
            messages: Arc::new(NoMessages),
            clock: Arc::new(TokioClock::new()),
            metrics: PlegMetrics::new(&registry),
            died: Some(died_to),
        };
        let stop = CancellationToken::new();
        let (pleg, task) = pleg::start(deps, config, stop.clone());
        Self { cri, pleg, died, registry, task, stop: stop.drop_guard() }
    }

    /// Runs a sandbox; returns its id.
    pub async fn sandbox(&self, pod: &str, attempt: u32) -> String {
        sandbox(&self.cri, pod, attempt).await
    }

    /// Creates and starts a container; returns its id.
    pub async fn container(&self, sandbox: &str, pod: &str, name: &str, attempt: u32) -> String {
        container(&self.cri, sandbox, pod, name, attempt).await
    }

    /// A pod with one running container `main`, made as a pod worker would: its id, and a view whose observation
    /// includes it.
    pub async fn running(&self, pod: &str) -> (String, PodView) {
        let mut view = self.pleg.view(&who(pod));
        let sandbox = self.sandbox(pod, 0).await;
        let id = self.container(&sandbox, pod, "main", 0).await;
        let seen = view.fresh(self.pleg.action_completed(&who(pod).uid)).await;
        assert_eq!((seen.error.as_deref(), seen.pod.running().count()), (None, 1), "{seen:?}");
        (id, view)
    }

    /// Value of a series such as `kubelet_running_containers{exited}`.
    pub fn metric(&self, name: &str, label: &str) -> f64 {
        let families = self.registry.gather();
        let family = families.iter().find(|f| f.name() == name).expect("a family");
        let is_it =
            |m: &&prometheus::proto::Metric| label.is_empty() || m.get_label().iter().any(|l| l.value() == label);
        let metric = family.get_metric().iter().find(is_it).expect("a series");
        metric.get_gauge().get_value() + metric.get_counter().get_value()
    }
}

/// Runs a sandbox; returns its id.
pub async fn sandbox(cri: &ScriptedCri, pod: &str, attempt: u32) -> String {
    cri.run_pod_sandbox(sandbox_config(pod, attempt), "").await.expect("a sandbox")
}

/// Creates and starts a container; returns its id.
pub async fn container(cri: &ScriptedCri, sandbox: &str, pod: &str, name: &str, attempt: u32) -> String {
    let config = cri::ContainerConfig {
        metadata: Some(cri::ContainerMetadata { name: name.into(), attempt }),
        image: Some(cri::ImageSpec { image: "busybox:1".into(), ..Default::default() }),
        labels: labels(pod),
        ..Default::default()
    };
    let id = cri.create_container(sandbox, config, sandbox_config(pod, 0)).await.expect("a container");
    cri.start_container(&id).await.expect("started");
    id
}

/// Waits until an observation satisfies a condition; panics after `limit` of tokio's time.
pub async fn until(
    view: &mut PodView,
    what: &str,
    limit: Duration,
    test: impl Fn(&LatestObservation) -> bool,
) -> LatestObservation {
    let wait = async {
        loop {
            if let Some(seen) = view.latest().filter(&test) {
                return seen;
            }
            view.changed().await;
        }
    };
    match tokio::time::timeout(limit, wait).await {
        Ok(seen) => seen,
        Err(_) => panic!("not within {limit:?}: {what}; last: {:?}", view.latest()),
    }
}

/// Whether an observation shows no running container.
pub fn ended(seen: &LatestObservation) -> bool {
    seen.error.is_none() && seen.pod.running().count() == 0
}

/// Yields to all ready tasks, for 5 ms of tokio's time.
pub async fn settle() {
    tokio::time::sleep(Duration::from_millis(5)).await;
}
