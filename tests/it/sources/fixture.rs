//! Fixture: running pod sources, and their operations.

use std::{
    path::Path,
    sync::{Arc, Mutex},
    time::Duration,
};

use berth::sources::{
    RunningSources, SourcesConfig, SourcesDeps,
    ports::{PodSourceFeed, SourceEvents},
    start,
};
use berth_metrics::{Registry, SourceMetrics};
use berth_types::{Operation, Pod, PodChange, PodRef, PodSource};
use jiff::Timestamp;
use tokio_util::sync::CancellationToken;

/// Timeout of a step.
const PATIENCE: Duration = Duration::from_secs(60);
/// A period longer than any test.
pub const NEVER: Duration = Duration::from_secs(3600);

#[derive(Default)]
pub struct Events(Mutex<Vec<String>>);

impl Events {
    pub fn all(&self) -> Vec<String> {
        self.0.lock().expect("not poisoned").clone()
    }
}

impl SourceEvents for Events {
    fn warning(&self, pod: &PodRef, reason: &'static str, message: String) {
        self.0.lock().expect("not poisoned").push(format!("{} {reason}: {message}", pod.name));
    }

    fn observed(&self, _: &Arc<Pod>) {}
}

pub struct Fixture {
    running: RunningSources,
    stop: CancellationToken,
    pub events: Arc<Events>,
    pub metrics: SourceMetrics,
}

impl Fixture {
    pub fn start(config: SourcesConfig, feed: Option<Box<dyn PodSourceFeed>>) -> Self {
        let (events, metrics) = (Arc::new(Events::default()), SourceMetrics::new(&Registry::new()));
        let stop = CancellationToken::new();
        let deps = SourcesDeps {
            feed,
            events: events.clone(),
            metrics: metrics.clone(),
            now: Arc::new(|| Timestamp::UNIX_EPOCH),
        };
        Self { running: start(config, deps, &stop), stop, events, metrics }
    }

    pub fn of_path(path: &Path, period: Duration) -> Self {
        Self::start(
            SourcesConfig { static_pod_path: Some(path.to_owned()), file_check_frequency: period, ..none() },
            None,
        )
    }

    pub fn of_url(url: &str) -> Self {
        let period = Duration::from_millis(10);
        Self::start(
            SourcesConfig { static_pod_url: Some(url.to_owned()), http_check_frequency: period, ..none() },
            None,
        )
    }

    pub fn registered(&self) -> &[PodSource] {
        &self.running.registered
    }

    /// The next operation.
    pub async fn change(&mut self) -> PodChange {
        tokio::time::timeout(PATIENCE, self.running.changes.recv()).await.expect("an operation in time").expect("open")
    }

    /// The next operation as `Add web-node`, several pods in order.
    pub async fn next_operation(&mut self) -> String {
        let change = self.change().await;
        let names: Vec<&str> = change.pods.iter().map(|pod| pod.name()).collect();
        format!("{:?} {}", change.operation, names.join(" ")).trim().to_owned()
    }

    /// The pods of the next operation, which must be of that kind.
    pub async fn pods(&mut self, operation: Operation) -> Vec<Arc<Pod>> {
        let change = self.change().await;
        assert_eq!(change.operation, operation, "{change:?}");
        change.pods
    }

    /// Waits until a counter has at least that value.
    pub async fn counted(&self, what: &str, value: impl Fn(&SourceMetrics) -> u64, at_least: u64) {
        let waits = async {
            while value(&self.metrics) < at_least {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        tokio::time::timeout(PATIENCE, waits).await.unwrap_or_else(|_| panic!("{what} in time"));
    }

    /// Stops all sources; asserts that their tasks end.
    pub async fn stop(self) {
        self.stop.cancel();
        for task in self.running.tasks {
            tokio::time::timeout(PATIENCE, task).await.expect("in time").expect("no panic");
        }
    }
}

/// A configuration without any source.
pub fn none() -> SourcesConfig {
    SourcesConfig {
        node_name: "Node-A".to_owned(),
        static_pod_path: None,
        file_check_frequency: NEVER,
        static_pod_url: None,
        static_pod_url_headers: Vec::new(),
        http_check_frequency: NEVER,
        prevent_api_references: true,
    }
}

/// A pod manifest.
pub fn manifest(name: &str) -> String {
    format!(
        "apiVersion: v1\nkind: Pod\nmetadata:\n  name: {name}\nspec:\n  containers:\n  - name: c\n    image: busybox\n"
    )
}
