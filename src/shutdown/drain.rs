//! Graceful shutdown of all pods, one class after the other. Implements spec 05 §7.3-7.6.

use std::{
    collections::BTreeSet,
    sync::{
        Arc, Mutex as Shared, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
    time::Duration,
};

use futures::future::join_all;
use tokio::{
    sync::Mutex,
    time::{Instant, timeout},
};
use tracing::{error, info, warn};

use super::{
    classes::{ShutdownClass, ShutdownPlan},
    ports::Pods,
    state_file::ShutdownRecord,
};
use berth_metrics::ShutdownMetrics;
use berth_ports::{Clock, EventRecord, EventSink, StateFile};
use berth_types::Pod;

/// Timeout for publishing the final statuses of a class.
const STATUS_TIMEOUT: Duration = Duration::from_secs(5);
/// Addition to the total of all classes, so that final statuses are not cut off.
const SPARE: Duration = Duration::from_millis(800);
/// Maximum overrun of a class, if other classes left that much time.
const LATE: Duration = Duration::from_secs(2);
/// How long after its start an agent waits for its sources to deliver their pods.
const KNOWN: Duration = Duration::from_secs(10);
/// Timeout for writing the state file: the shutdown continues without it.
const WRITE: Duration = Duration::from_secs(2);

/// Cause of a shutdown of pods.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum DrainCause {
    /// The machine shuts down.
    Machine,
    /// The agent was terminated with the configuration to terminate its pods.
    Terminated,
    /// An administrator requested it.
    Requested,
}

/// Dependencies of the shutdown.
pub struct DrainDeps {
    /// Pods of the engine.
    pub pods: Arc<dyn Pods>,
    /// Recorder of events.
    pub events: Arc<dyn EventSink>,
    /// Wall clock.
    pub clock: Arc<dyn Clock>,
    /// State file with the times of the last shutdown.
    pub file: Arc<dyn StateFile>,
    /// Metrics of the shutdown.
    pub metrics: ShutdownMetrics,
}

/// Graceful pod shutdown; see the module documentation.
pub struct Drain {
    plan: ShutdownPlan,
    deps: DrainDeps,
    opened: Instant,
    /// Active causes; each is cancelled separately. The mutex is never held across an await.
    causes: Shared<BTreeSet<DrainCause>>,
    /// Whether pods were terminated. Locked during the shutdown, so that it runs only once.
    gone: Mutex<bool>,
}

impl Drain {
    /// Reads the times of the last shutdown.
    pub async fn open(plan: ShutdownPlan, deps: DrainDeps) -> Self {
        let record = match deps.file.read().await {
            Ok(Some(content)) => ShutdownRecord::decode(&content),
            Ok(None) => Ok(ShutdownRecord::default()),
            Err(error) => Err(error.to_string()),
        };
        match record {
            Ok(record) => deps.metrics.set(record.start, record.end),
            Err(error) => {
                warn!(err = %error, path = %deps.file.path().display(), "Failed to read graceful shutdown state");
            }
        }
        Self { plan, deps, opened: Instant::now(), causes: Shared::default(), gone: Mutex::default() }
    }

    /// Total of all grace periods.
    pub fn total(&self) -> Duration {
        self.plan.total()
    }

    /// Whether a shutdown is running.
    pub fn goes_on(&self) -> bool {
        self.gone.try_lock().is_err()
    }

    fn causes(&self) -> MutexGuard<'_, BTreeSet<DrainCause>> {
        self.causes.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Terminates all pods, and admits none from now on. A second caller waits for the running
    /// shutdown.
    pub async fn begin(&self, cause: DrainCause) {
        self.causes().insert(cause);
        let mut gone = self.gone.lock().await;
        if *gone || !self.causes().contains(&cause) {
            return;
        }
        *gone = true;
        info!(?cause, "Shutdown manager detected new shutdown event, isNodeShuttingDownNow");
        self.deps.events.record(EventRecord::node_normal("Shutdown", "Shutdown manager detected shutdown event"));
        self.deps.pods.set_shutting_down(true);
        let start = Some(self.deps.clock.now());
        self.write(ShutdownRecord { start, end: None }).await;
        let ends = Instant::now() + self.plan.total() + SPARE;
        let waited = self.wait_until_known().await;
        let mut groups = self.plan.groups(&self.deps.pods.active());
        let used: Duration = groups.iter().map(|(class, _)| class.period).sum();
        // The time of classes without pods is spare; what exceeds it is taken from the classes that are
        // first.
        let mut over = waited.saturating_sub(self.plan.total().saturating_sub(used));
        for (class, _) in &mut groups {
            let cut = over.min(class.period);
            class.period -= cut;
            over -= cut;
        }
        for (at, (class, pods)) in groups.iter().enumerate() {
            let rest: Duration = groups.iter().skip(at).map(|(class, _)| class.period).sum();
            let spare = ends.saturating_duration_since(Instant::now() + rest);
            let others = u32::try_from(groups.len() - at).unwrap_or(u32::MAX);
            self.terminate_class(*class, pods, spare / others).await;
        }
        self.write(ShutdownRecord { start, end: Some(self.deps.clock.now()) }).await;
        info!("Shutdown manager completed processing shutdown event, node will shutdown shortly");
    }

    /// Cancels a cause: without another one pods are admitted again. Terminated pods stay terminated.
    /// Waits for a running shutdown.
    ///
    /// # Errors
    /// Another active cause.
    pub async fn cancel(&self, cause: DrainCause) -> Result<(), DrainCause> {
        self.causes().remove(&cause);
        self.no_cause()?;
        let mut gone = self.gone.lock().await;
        self.no_cause()?;
        if !std::mem::take(&mut *gone) {
            return Ok(());
        }
        info!("Shutdown manager detected shutdown cancellation");
        self.deps
            .events
            .record(EventRecord::node_normal("Shutdown", "Shutdown manager detected shutdown cancellation"));
        self.deps.pods.set_shutting_down(false);
        Ok(())
    }

    fn no_cause(&self) -> Result<(), DrainCause> {
        self.causes().first().map_or(Ok(()), |cause| Err(*cause))
    }

    /// Waits until all pods are known, but for at most a part of their time; returns the whole seconds
    /// spent.
    async fn wait_until_known(&self) -> Duration {
        let (begun, until) = (Instant::now(), self.opened + KNOWN);
        let limit = until.saturating_duration_since(begun).min(self.plan.shortest() / 2);
        if timeout(limit, self.deps.pods.known()).await.is_err() {
            warn!(?limit, "Not all pod sources are ready, stopping known pods only");
        }
        Duration::from_secs(begun.elapsed().as_secs())
    }

    /// Terminates the pods of a class within its period, then waits until their final statuses are
    /// published, before the next class. `spare` is the maximum overrun of the period.
    async fn terminate_class(&self, class: ShutdownClass, pods: &[Arc<Pod>], spare: Duration) {
        let (begun, period) = (Instant::now(), class.period);
        let uids: Vec<_> = pods.iter().map(|pod| pod.uid().clone()).collect();
        info!(pods = pods.len(), ?period, "Shutdown manager killing pods of priority group");
        let (ends, done) = (&self.deps.pods, pods.iter().map(|_| AtomicBool::new(false)).collect::<Vec<_>>());
        let ending = pods.iter().zip(&done).map(|(pod, done)| async move {
            let given = class.given(pod, pods.len());
            info!(pod = %pod.object_name(), podUID = %pod.uid(), gracePeriod = given.grace, "Shutdown manager killing pod with gracePeriod");
            if let Err(error) = ends.end(pod, given).await {
                error!(pod = %pod.object_name(), podUID = %pod.uid(), err = %error, "Shutdown manager failed killing pod");
            }
            done.store(true, Relaxed);
        });
        if timeout(period + LATE.min(spare / 2), join_all(ending)).await.is_err() {
            info!(?period, "Shutdown manager pod killing time out");
            pods.iter().zip(&done).filter(|(_, done)| !done.load(Relaxed)).for_each(|(pod, _)| ends.report_late(pod));
        }
        let left = (period + spare).saturating_sub(begun.elapsed()).min(STATUS_TIMEOUT);
        if timeout(left, self.deps.pods.wait_until_published(&uids)).await.is_err() {
            warn!(pods = uids.len(), "Timed out sending final pod statuses to the API server, continuing shutdown");
        }
    }

    async fn write(&self, record: ShutdownRecord) {
        self.deps.metrics.set(record.start, record.end);
        let path = self.deps.file.path().display();
        match timeout(WRITE, self.deps.file.replace(record.encode())).await {
            Ok(Ok(())) => {}
            Ok(Err(error)) => error!(err = %error, %path, "Failed to store graceful shutdown state"),
            Err(_) => error!(limit = ?WRITE, %path, "Timed out storing graceful shutdown state"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::shutdown::fixture::{pod, world, world_known_after};

    #[tokio::test(start_paused = true)]
    async fn critical_pods_go_when_the_last_words_of_the_others_are_out() {
        // AC-05-29
        let (world, drain) = world(vec![pod("c", 2_000_000_000, 3), pod("a", 0, 5), pod("b", 0, 60)], 100).await;
        drain.begin(DrainCause::Machine).await;
        let expected = [
            "0 Shutdown manager detected shutdown event",
            "0 down true",
            "0 written true false",
            "0 end a 20",
            "0 end b 20",
            "20200 late b",
            "20300 told 2",
            "20300 end c 10",
            "23400 told 1",
            "23400 written true true",
        ];
        assert_eq!(world.log(), expected);
        drain.begin(DrainCause::Machine).await;
        assert_eq!(world.log(), [""; 0], "no pod is terminated twice");
        // AC-05-30
        assert_eq!(drain.cancel(DrainCause::Requested).await, Err(DrainCause::Machine), "it is not theirs");
        assert_eq!(world.log(), [""; 0]);
        assert_eq!(drain.cancel(DrainCause::Machine).await, Ok(()));
        assert_eq!(world.log(), ["23400 Shutdown manager detected shutdown cancellation", "23400 down false"]);
        assert_eq!(drain.cancel(DrainCause::Machine).await, Ok(()), "nothing to be cancelled");
        assert_eq!(world.log(), [""; 0]);
    }

    #[tokio::test(start_paused = true)]
    async fn an_agent_that_has_just_started_waits_until_it_knows_its_pods() {
        // Spec 05 §7.3: the wait is taken from the pods that are terminated first, limited to their
        // spare time.
        let pods = || vec![pod("c", 2_000_000_000, 10), pod("a", 0, 60)];
        for (known_after, expected) in [
            (300, &["300 known", "300 end a 20", "20425 end c 10"][..]),
            (3500, &["3500 known", "3500 end a 17", "20575 end c 10"]),
            (5001, &[]),
        ] {
            let (world, drain) = world_known_after(pods(), 0, known_after, "10s").await;
            let begun = Instant::now();
            drain.begin(DrainCause::Machine).await;
            let log = world.log();
            assert!(log[1].ends_with("down true"), "nobody comes meanwhile: {log:?}");
            let lines: Vec<&str> =
                log.iter().map(String::as_str).filter(|l| l.contains("known") || l.contains(" end ")).collect();
            assert_eq!(lines, expected, "{known_after}");
            assert!(begun.elapsed() <= Duration::from_secs(31), "{known_after}: {:?}", begun.elapsed());
        }
        // An agent that has run for long does not wait for its sources.
        let (world, drain) = world_known_after(pods(), 0, 60_000, "10s").await;
        tokio::time::sleep(Duration::from_secs(15)).await;
        drain.begin(DrainCause::Machine).await;
        assert_eq!(world.log().last().map(String::as_str), Some("15000 written true true"));
    }

    #[tokio::test(start_paused = true)]
    async fn waiting_for_sources_takes_spare_time() {
        let critical = || pod("c", 2_000_000_000, 60);
        for (name, pods, period, expected) in [
            ("a class without pods", vec![critical()], "10s", &["3500 end c 10"][..]),
            ("a class without time", vec![critical(), pod("a", 0, 60)], "30s", &["3500 end a 0", "3575 end c 27"]),
        ] {
            let (world, drain) = world_known_after(pods, 0, 3500, period).await;
            let begun = Instant::now();
            drain.begin(DrainCause::Machine).await;
            let mut ends = world.log();
            ends.retain(|line| line.contains(" end "));
            assert_eq!(ends, expected, "{name}");
            assert!(begun.elapsed() <= Duration::from_secs(31), "{name}: {:?}", begun.elapsed());
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_pod_that_exceeds_its_time_is_reported() {
        let (world, drain) = world(vec![pod("late", 0, 60), pod("a", 0, 5), pod("c", 2_000_000_000, 3)], 0).await;
        drain.begin(DrainCause::Machine).await;
        let mut late = world.log();
        late.retain(|line| line.ends_with(" late late"));
        assert_eq!(late, ["20200 late late"]);
    }

    #[tokio::test(start_paused = true)]
    async fn pods_are_admitted_again_when_no_cause_is_left() {
        use DrainCause::{Machine, Requested, Terminated};
        /// Cause to cancel, and the expected result.
        type CancelCase = (DrainCause, Result<(), DrainCause>);
        let table: [(&[DrainCause], &[CancelCase]); 5] = [
            (&[Requested], &[(Machine, Err(Requested)), (Machine, Err(Requested)), (Requested, Ok(()))]),
            (&[Requested, Machine], &[(Machine, Err(Requested)), (Requested, Ok(()))]),
            (&[Requested, Machine], &[(Requested, Err(Machine)), (Requested, Err(Machine)), (Machine, Ok(()))]),
            (&[Machine, Requested], &[(Machine, Err(Requested)), (Requested, Ok(()))]),
            (&[Requested, Terminated], &[(Requested, Err(Terminated)), (Machine, Err(Terminated))]),
        ];
        for (begun, cancelled) in table {
            let (world, drain) = world(vec![pod("a", 0, 5)], 0).await;
            for cause in begun {
                drain.begin(*cause).await;
            }
            world.log();
            for (cause, expected) in cancelled {
                assert_eq!(drain.cancel(*cause).await, *expected, "{begun:?} {cause:?}");
                assert_eq!(world.log().len(), if expected.is_ok() { 2 } else { 0 }, "{begun:?} {cause:?}");
            }
        }
    }

    #[tokio::test(start_paused = true)]
    async fn cancelling_one_of_two_causes_fails_at_once_during_a_drain() {
        let (world, drain) = world(vec![pod("a", 0, 5)], 0).await;
        let (drain, begun) = (Arc::new(drain), Instant::now());
        let goes = tokio::spawn({
            let drain = drain.clone();
            async move { drain.begin(DrainCause::Requested).await }
        });
        tokio::time::sleep(Duration::from_secs(1)).await;
        assert!(drain.goes_on());
        assert_eq!(drain.cancel(DrainCause::Machine).await, Err(DrainCause::Requested));
        assert_eq!(begun.elapsed(), Duration::from_secs(1), "a lock is to be had again at once");
        goes.await.expect("ended");
        assert!(!drain.goes_on());
        assert_eq!(drain.cancel(DrainCause::Requested).await, Ok(()));
        assert_eq!(world.log().last().map(String::as_str), Some("5000 down false"));
    }

    #[tokio::test(start_paused = true)]
    async fn final_statuses_are_published_before_the_next_class_terminates() {
        let (world, drain) = world(vec![pod("c", 2_000_000_000, 10), pod("a", 0, 20)], 350).await;
        drain.begin(DrainCause::Machine).await;
        let log = world.log();
        let ends: Vec<&str> = log
            .iter()
            .map(String::as_str)
            .filter(|line| [" end ", " told "].iter().any(|what| line.contains(what)))
            .collect();
        assert_eq!(ends, ["0 end a 20", "20350 told 1", "20350 end c 10", "30700 told 1"]);
    }

    #[tokio::test(start_paused = true)]
    async fn what_one_class_leaves_is_for_the_last_words_of_the_others() {
        let (world, drain) = world(vec![pod("c", 2_000_000_000, 10), pod("a", 0, 1)], 3000).await;
        drain.begin(DrainCause::Machine).await;
        let log = world.log();
        assert!(log.contains(&"4000 end c 10".to_owned()) && log.contains(&"17000 told 1".to_owned()), "{log:?}");
    }

    #[tokio::test(start_paused = true)]
    async fn unpublished_statuses_delay_the_drain_only_briefly() {
        let begun = Instant::now();
        let (world, drain) = world(vec![pod("c", 2_000_000_000, 60), pod("a", 0, 60)], 600_000).await;
        drain.begin(DrainCause::Machine).await;
        assert!(begun.elapsed() <= Duration::from_secs(31), "configured and a second: {:?}", begun.elapsed());
        assert!(world.log().contains(&"20400 end c 10".to_owned()), "half of what may be spared");
    }
}
