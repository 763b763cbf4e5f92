//! Probes as the rest of the house sees them. Behaviour: spec 05 §1.

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
    history::History,
    kind::declared,
    owner::{Deps, Order, Owner},
    results::Results,
    saved::Saved,
};
use berth_ports::{ProbeManager, ProbeResults, StateFile};
use berth_types::{ContainerId, Pod, PodUid};

/// Questions out of turn that may wait; more are dropped: each only brings a moment forward.
const ASKED: usize = 1024;
/// From the first result that is not on disk to the write.
const GATHER: Duration = Duration::from_secs(1);
/// After a write that failed.
const RETRY: Duration = Duration::from_secs(10);

/// How far the probes of a pod have been begun.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Stage {
    /// All of them.
    Begun,
    /// Some ended, because their container did; should it come back, so must they.
    Partly,
    /// Only whether it is ready is still asked.
    Draining,
}

/// The pods whose probes have been begun: what need not be said again.
#[derive(Default)]
pub struct Known(Mutex<HashMap<PodUid, Stage>>);

impl Known {
    /// A probe of that pod has ended by itself.
    pub fn may_begin_again(&self, pod: &PodUid) {
        if let Some(stage) = self.lock().get_mut(pod)
            && *stage == Stage::Begun
        {
            *stage = Stage::Partly;
        }
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<PodUid, Stage>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The player of [`ProbeManager`].
pub struct Manager {
    known: Arc<Known>,
    /// At most three for each life of a pod, and one for each end of a container.
    orders: mpsc::UnboundedSender<Order>,
    asked: mpsc::Sender<(PodUid, String)>,
    results: Arc<Results>,
}

/// Reads what an earlier agent learnt, and makes the manager and its two tasks: the probes, and the file.
pub async fn open(
    deps: Deps,
    file: Arc<dyn StateFile>,
    stop: CancellationToken,
) -> (Arc<Manager>, impl Future<Output = ()> + Send + 'static, impl Future<Output = ()> + Send + 'static) {
    let saved = match file.read().await {
        Ok(Some(content)) => Saved::decode(&content),
        Ok(None) => Ok(Saved::default()),
        Err(error) => Err(error.to_string()),
    };
    let saved = saved.unwrap_or_else(|error| {
        warn!(err = %error, path = %file.path().display(), "Results of probes are not known any more, asking anew");
        Saved::default()
    });
    let results = Arc::new(Results::new(saved.clone()));
    let known = Arc::<Known>::default();
    let (orders, ordered) = mpsc::unbounded_channel();
    let (asked, questions) = mpsc::channel(ASKED);
    let owner = Owner::new(deps, results.clone(), known.clone());
    let probing = owner.run(ordered, questions, stop.clone());
    let saving = save(results.clone(), file, saved, stop);
    (Arc::new(Manager { known, orders, asked, results }), probing, saving)
}

impl ProbeManager for Manager {
    fn add(&self, pod: &Arc<Pod>) {
        if declared(pod).next().is_none() {
            return;
        }
        let mut known = self.known.lock();
        match known.get(pod.uid()) {
            Some(Stage::Begun | Stage::Draining) => {}
            Some(Stage::Partly) | None => {
                known.insert(pod.uid().clone(), Stage::Begun);
                self.order(Order::Add(pod.clone()));
            }
        }
    }

    fn stop_liveness(&self, pod: &PodUid) {
        let mut known = self.known.lock();
        if let Some(stage) = known.get_mut(pod)
            && *stage != Stage::Draining
        {
            *stage = Stage::Draining;
            self.order(Order::StopLiveness(pod.clone()));
        }
    }

    fn remove(&self, pod: &PodUid) {
        let mut known = self.known.lock();
        if known.remove(pod).is_some() {
            self.order(Order::Remove(pod.clone()));
        }
    }

    fn trigger(&self, pod: &PodUid, container: &str) {
        // Where very many ask, each has its next moment anyway.
        let _ = self.asked.try_send((pod.clone(), container.to_owned()));
    }

    fn results(&self, container: &ContainerId) -> ProbeResults {
        self.results.of(container)
    }
}

impl Manager {
    /// What the probes of an instance came to lately.
    pub fn history(&self, container: &ContainerId) -> Vec<History> {
        self.results.histories.of(container)
    }

    fn order(&self, order: Order) {
        let _ = self.orders.send(order); // the task is gone at shutdown only
    }
}

/// Brings results to disk beside the probes, and once more at the end.
async fn save(results: Arc<Results>, file: Arc<dyn StateFile>, mut written: Saved, stop: CancellationToken) {
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

/// Writes what differs from what was written; tells whether that must be tried again.
async fn write(results: &Results, file: &dyn StateFile, written: &mut Saved) -> bool {
    let now = results.to_save();
    if now == *written {
        return false;
    }
    if let Err(error) = file.replace(now.encode()).await {
        error!(err = %error, path = %file.path().display(), "Failed to store results of probes");
        return true;
    }
    *written = now;
    false
}
