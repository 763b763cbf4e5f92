//! Probe manager: registers pods for probing, and persists probe results.
//!
//! Implements spec 05 §1.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use tokio::{
    sync::mpsc,
    time::{Instant, sleep_until},
};
use tokio_util::sync::CancellationToken;
use tracing::{error, warn};

use super::{
    checkpoint::ResultsCheckpoint,
    history::History,
    kind::declared,
    results::Results,
    scheduler::{ProbeCommand, ProbeDeps, ProbeScheduler},
};
use berth_ports::{ProbeManager, ProbeResults, StateFile};
use berth_types::{ContainerId, Pod, PodUid};

/// Capacity of the queue of triggered probes; further ones are dropped: each only advances a scheduled attempt.
const ASKED: usize = 1024;
/// Debounce interval from the first unsaved result to the write.
const GATHER: Duration = Duration::from_secs(1);
/// Delay before a failed write is retried.
const RETRY: Duration = Duration::from_secs(10);

/// Registration state of a pod.
#[derive(Clone, Copy, PartialEq, Eq)]
enum RegistrationState {
    /// All probes have been started.
    Begun,
    /// Some probes ended because their container did; they have to be started again if it comes back.
    Partly,
    /// Only readiness probes continue.
    Draining,
}

/// Pods whose probes have been started: deduplicates orders to the owner task.
#[derive(Default)]
pub struct RegisteredPods(Mutex<HashMap<PodUid, RegistrationState>>);

impl RegisteredPods {
    /// Notes that a probe of that pod has ended by itself.
    pub fn mark_partly_started(&self, pod: &PodUid) {
        if let Some(stage) = self.lock().get_mut(pod)
            && *stage == RegistrationState::Begun
        {
            *stage = RegistrationState::Partly;
        }
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<PodUid, RegistrationState>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Implementation of [`ProbeManager`].
pub struct ProbeManagerHandle {
    known: Arc<RegisteredPods>,
    /// Unbounded, but at most three orders per life of a pod, and one for each end of a container.
    orders: mpsc::UnboundedSender<ProbeCommand>,
    asked: mpsc::Sender<(PodUid, String)>,
    results: Arc<Results>,
}

/// Reads the results of an earlier agent; returns the manager and the futures of its two tasks: probing, and saving
/// results.
pub async fn open(
    deps: ProbeDeps,
    file: Arc<dyn StateFile>,
    stop: CancellationToken,
) -> (Arc<ProbeManagerHandle>, impl Future<Output = ()> + Send + 'static, impl Future<Output = ()> + Send + 'static) {
    let saved = match file.read().await {
        Ok(Some(content)) => ResultsCheckpoint::decode(&content),
        Ok(None) => Ok(ResultsCheckpoint::default()),
        Err(error) => Err(error.to_string()),
    };
    let saved = saved.unwrap_or_else(|error| {
        warn!(err = %error, path = %file.path().display(), "Failed to restore probe results, probing again");
        ResultsCheckpoint::default()
    });
    let results = Arc::new(Results::new(saved.clone()));
    let known = Arc::<RegisteredPods>::default();
    let (orders, ordered) = mpsc::unbounded_channel();
    let (asked, questions) = mpsc::channel(ASKED);
    let owner = ProbeScheduler::new(deps, results.clone(), known.clone());
    let probing = owner.run(ordered, questions, stop.clone());
    let saving = save(results.clone(), file, saved, stop);
    (Arc::new(ProbeManagerHandle { known, orders, asked, results }), probing, saving)
}

impl ProbeManager for ProbeManagerHandle {
    fn add(&self, pod: &Arc<Pod>) {
        if declared(pod).next().is_none() {
            return;
        }
        let mut known = self.known.lock();
        match known.get(pod.uid()) {
            Some(RegistrationState::Begun | RegistrationState::Draining) => {}
            Some(RegistrationState::Partly) | None => {
                known.insert(pod.uid().clone(), RegistrationState::Begun);
                self.order(ProbeCommand::Add(pod.clone()));
            }
        }
    }

    fn stop_liveness(&self, pod: &PodUid) {
        let mut known = self.known.lock();
        if let Some(stage) = known.get_mut(pod)
            && *stage != RegistrationState::Draining
        {
            *stage = RegistrationState::Draining;
            self.order(ProbeCommand::StopLiveness(pod.clone()));
        }
    }

    fn remove(&self, pod: &PodUid) {
        let mut known = self.known.lock();
        if known.remove(pod).is_some() {
            self.order(ProbeCommand::Remove(pod.clone()));
        }
    }

    fn trigger(&self, pod: &PodUid, container: &str) {
        // If the queue is full, each probe still has its scheduled attempt.
        let _ = self.asked.try_send((pod.clone(), container.to_owned()));
    }

    fn results(&self, container: &ContainerId) -> ProbeResults {
        self.results.of(container)
    }
}

impl ProbeManagerHandle {
    /// Recent probe outcomes of an instance.
    pub fn history(&self, container: &ContainerId) -> Vec<History> {
        self.results.histories.of(container)
    }

    fn order(&self, order: ProbeCommand) {
        let _ = self.orders.send(order); // the task only ends at shutdown
    }
}

/// Writes results to disk, separately from the probing task, and once more at the end.
async fn save(
    results: Arc<Results>,
    file: Arc<dyn StateFile>,
    mut written: ResultsCheckpoint,
    stop: CancellationToken,
) {
    let mut due: Option<Instant> = None;
    loop {
        let at = async {
            match due {
                Some(due) => sleep_until(due).await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            biased;
            () = stop.cancelled() => break,
            () = results.changed() => due = due.or_else(|| Some(Instant::now() + GATHER)),
            () = at => due = write(&results, &*file, &mut written).await.then(|| Instant::now() + RETRY),
        }
    }
    write(&results, &*file, &mut written).await;
}

/// Writes the results if they differ from the written ones; returns whether the write has to be retried.
async fn write(results: &Results, file: &dyn StateFile, written: &mut ResultsCheckpoint) -> bool {
    let now = results.to_save();
    if now == *written {
        return false;
    }
    if let Err(error) = file.replace(now.encode()).await {
        error!(err = %error, path = %file.path().display(), "Failed to store probe results");
        return true;
    }
    *written = now;
    false
}
