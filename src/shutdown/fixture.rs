//! Test fixture: a node without an engine, whose pods terminate by the clock.

use std::{
    io,
    path::Path,
    sync::{Arc, Mutex as Shared, PoisonError},
    time::Duration,
};

use async_trait::async_trait;
use jiff::Timestamp;
use serde_json::json;
use tokio::time::Instant;

use super::{Drain, DrainDeps, PodTimeLimits, Pods, ShutdownPlan, state_file::ShutdownRecord};
use berth_metrics::{Registry, ShutdownMetrics};
use berth_ports::{Clock, EventRecord, EventSink, StateFile};
use berth_types::{Pod, PodUid};

/// Pods that terminate when their grace period is over, and whose final statuses take a while.
#[derive(Default)]
pub(super) struct FakeNode {
    pods: Vec<Arc<Pod>>,
    words: Duration,
    /// Pods are unknown before this time.
    known_after: Duration,
    log: Shared<Vec<String>>,
    begun: Option<Instant>,
}

impl FakeNode {
    fn note(&self, text: String) {
        let at = self.begun.map_or(0, |begun| begun.elapsed().as_millis());
        self.log.lock().unwrap_or_else(PoisonError::into_inner).push(format!("{at} {text}"));
    }

    /// The log since the last call, with times in ms.
    pub fn log(&self) -> Vec<String> {
        std::mem::take(&mut *self.log.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

#[async_trait]
impl Pods for FakeNode {
    async fn known(&self) {
        if !self.known_after.is_zero() {
            tokio::time::sleep(self.known_after).await;
            self.note("known".to_owned());
        }
    }

    fn active(&self) -> Vec<Arc<Pod>> {
        let is_known = self.begun.is_some_and(|begun| begun.elapsed() >= self.known_after);
        if is_known { self.pods.clone() } else { Vec::new() }
    }

    async fn end(&self, pod: &Arc<Pod>, given: PodTimeLimits) -> Result<(), String> {
        self.note(format!("end {} {}", pod.name(), given.grace));
        let takes = pod.spec().active_deadline_seconds.unwrap_or(given.grace);
        tokio::time::sleep(Duration::from_secs(takes.unsigned_abs())).await;
        Ok(())
    }

    fn report_late(&self, pod: &Pod) {
        self.note(format!("late {}", pod.name()));
    }

    async fn wait_until_published(&self, pods: &[PodUid]) {
        tokio::time::sleep(self.words).await;
        self.note(format!("told {}", pods.len()));
    }

    fn set_shutting_down(&self, is: bool) {
        self.note(format!("down {is}"));
    }
}

impl EventSink for FakeNode {
    fn record(&self, event: EventRecord) {
        self.note(event.message);
    }
}

#[async_trait]
impl StateFile for FakeNode {
    fn path(&self) -> &Path {
        Path::new("state")
    }

    async fn read(&self) -> io::Result<Option<Vec<u8>>> {
        Ok(None)
    }

    async fn replace(&self, content: Vec<u8>) -> io::Result<()> {
        let record = ShutdownRecord::decode(&content).expect("ours");
        self.note(format!("written {} {}", record.start.is_some(), record.end.is_some()));
        Ok(())
    }
}

struct Always;

impl Clock for Always {
    fn now(&self) -> Timestamp {
        Timestamp::UNIX_EPOCH
    }
}

/// A pod that takes `takes` seconds to terminate, whatever its grace period.
pub(super) fn pod(name: &str, priority: i32, takes: i64) -> Arc<Pod> {
    let object = json!({
        "metadata": {"name": name, "namespace": "n", "uid": name},
        "spec": {"containers": [], "priority": priority, "activeDeadlineSeconds": takes},
    });
    Arc::new(Pod::new(serde_json::from_value(object).expect("a pod")).expect("complete"))
}

/// These pods on a node with grace periods of 20 s, and 10 s for critical pods; `words` is the time
/// that final statuses take, in ms.
pub(super) async fn world(pods: Vec<Arc<Pod>>, words: u64) -> (Arc<FakeNode>, Drain) {
    world_known_after(pods, words, 0, "10s").await
}

/// As [`world`], where critical pods get `critical` of 30 s; the pods are unknown before `known_after`
/// ms.
pub(super) async fn world_known_after(
    pods: Vec<Arc<Pod>>,
    words: u64,
    known_after: u64,
    critical: &str,
) -> (Arc<FakeNode>, Drain) {
    let [words, known_after] = [words, known_after].map(Duration::from_millis);
    let world = Arc::new(FakeNode { pods, words, known_after, begun: Some(Instant::now()), ..FakeNode::default() });
    let fields = json!({"shutdownGracePeriod": "30s", "shutdownGracePeriodCriticalPods": critical});
    let plan = ShutdownPlan::of(&serde_json::from_value(fields).expect("fields")).expect("a plan");
    let deps = DrainDeps {
        pods: world.clone(),
        events: world.clone(),
        clock: Arc::new(Always),
        file: world.clone(),
        metrics: ShutdownMetrics::new(&Registry::new()),
    };
    (world, Drain::open(plan, deps).await)
}
