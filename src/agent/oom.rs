//! Tells of processes that the kernel killed for want of memory. One task reads the kernel's log.

use std::{path::Path, sync::Arc, time::Duration};

use serde::{Deserialize, Serialize};
use tokio::{
    sync::watch,
    task::yield_now,
    time::{Instant, timeout},
};
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

use super::{build::Base, state_file::DiskStateFile};
use crate::{
    engine::ports::{Event, EventSink, PodObserver, StateFile},
    metrics::OomMetrics,
    node::oom_kills::{Hearing, Kill, Record},
    pod::Pod,
    sys::kernel_log::KernelLog,
};

const BOOT: &str = "/proc/sys/kernel/random/boot_id";
/// Records that are read before others have their turn.
const BATCH: usize = 256;
/// Kills that are told of within a while; of more only their number is.
const TOLD: u32 = 20;
const WHILE: Duration = Duration::from_secs(10);
/// How long the file may take.
const WRITE: Duration = Duration::from_secs(10);

/// How far the log was read in which life of the machine.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Place {
    boot_id: String,
    sequence: u64,
}

/// Which records are old news. Pure.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Old {
    /// All that are there now: who begins to listen does not tell of what was.
    All,
    /// Up to this one.
    UpTo(u64),
    /// None: the machine has started since.
    None,
}

impl Old {
    fn of(saved: Option<&Place>, boot_id: &str) -> Self {
        match saved {
            Some(place) if place.boot_id == boot_id => Self::UpTo(place.sequence),
            Some(_) => Self::None,
            None => Self::All,
        }
    }

    fn holds(self, sequence: u64) -> bool {
        match self {
            Self::All => true,
            Self::UpTo(last) => sequence <= last,
            Self::None => false,
        }
    }
}

/// How much is told. Pure but for `now`.
#[derive(Debug)]
struct Flow {
    since: Instant,
    told: u32,
    untold: u64,
}

impl Flow {
    fn new(now: Instant) -> Self {
        Self { since: now, told: 0, untold: 0 }
    }

    /// Whether one more is told of; how many were not in the while before, at the begin of another.
    fn lets(&mut self, now: Instant) -> (bool, Option<u64>) {
        let mut before = None;
        if now.saturating_duration_since(self.since) >= WHILE {
            before = Some(self.untold).filter(|untold| *untold > 0);
            *self = Self::new(now);
        }
        let lets = self.told < TOLD;
        if lets {
            self.told += 1;
        } else {
            self.untold = self.untold.saturating_add(1);
        }
        (lets, before)
    }
}

/// Who tells, and of whom.
struct Teller {
    pods: watch::Receiver<Arc<Vec<Arc<Pod>>>>,
    observer: Arc<dyn PodObserver>,
    events: Arc<dyn EventSink>,
    metrics: OomMetrics,
    flow: Flow,
}

impl Teller {
    fn tell(&mut self, kill: &Kill) {
        let pods = self.pods.borrow().clone();
        let pod = pods.iter().find(|pod| kill.is_of_pod(pod.uid().as_str()));
        let scope = match pod {
            _ if kill.is_of_system() => "system",
            Some(_) => "pod",
            None => "other",
        };
        self.metrics.killed(scope);
        let (lets, untold) = self.flow.lets(Instant::now());
        if let Some(untold) = untold {
            warn!(count = untold, "More processes were killed for want of memory than are told of");
        }
        if !lets {
            return;
        }
        if kill.is_of_system() {
            self.events.record(Event::node_warning("SystemOOM", kill.message()));
        }
        let Some(pod) = pod.filter(|_| kill.of != "/") else { return };
        let why = if kill.is_of_system() { "the node had no memory left" } else { "a memory limit was reached" };
        let text = format!("Process {} (pid {}) was killed: {why}", kill.process, kill.pid);
        let event = Event::warning(pod.id(), "OOMKilled", text);
        let known = self.observer.known_pod(pod.uid());
        let container = known.as_ref().and_then(|known| {
            let found = known.containers.iter().find(|container| kill.is_of_container(container.id.as_str()))?;
            let (kind, _) = pod.container(&found.name)?;
            Some(kind.field_path(&found.name))
        });
        self.events.record(match container {
            Some(path) => event.at(path),
            None => event,
        });
    }
}

/// Tells from now on. A machine that shows nobody its log runs pods all the same.
pub(super) fn watch(
    base: &Base,
    root: &Path,
    pods: watch::Receiver<Arc<Vec<Arc<Pod>>>>,
    observer: Arc<dyn PodObserver>,
) {
    let teller = Teller {
        pods,
        observer,
        events: base.events.clone(),
        metrics: OomMetrics::new(&base.registry),
        flow: Flow::new(Instant::now()),
    };
    let file = Arc::new(DiskStateFile::new(root.join("kernel_log_state")));
    base.tasks.spawn(listen(teller, file, base.stop.child_token()));
}

async fn listen(mut teller: Teller, file: Arc<dyn StateFile>, stop: CancellationToken) {
    let mut log = match KernelLog::open() {
        Ok(log) => log,
        Err(error) => {
            warn!(err = %error, "The kernel's log cannot be read: nothing is told of processes killed for want of memory");
            return;
        }
    };
    let boot_id = tokio::fs::read_to_string(BOOT).await.unwrap_or_default().trim().to_owned();
    let saved = file.read().await.ok().flatten();
    let saved: Option<Place> = saved.and_then(|content| serde_json::from_slice(&content).ok());
    let mut old = Old::of(saved.as_ref(), &boot_id);
    let (mut hearing, mut last, mut dirty) = (Hearing::default(), 0, saved.is_none());
    loop {
        let mut is_read = false;
        for _ in 0..BATCH {
            let record = match log.take() {
                Ok(Some(bytes)) => Record::parse(bytes),
                Ok(None) => {
                    is_read = true;
                    break;
                }
                Err(error) => {
                    warn!(err = %error, "The kernel's log cannot be read any more");
                    return;
                }
            };
            let Some(record) = record else { continue };
            last = record.sequence;
            if old.holds(last) {
                continue;
            }
            if let Some(kill) = hearing.hear(&record.text) {
                info!(
                    process = kill.process,
                    pid = kill.pid,
                    cgroup = kill.of,
                    limit = kill.short,
                    "Got a record of a process that was killed for want of memory"
                );
                teller.tell(&kill);
                dirty = true;
            }
        }
        if !is_read {
            yield_now().await;
            continue;
        }
        if old == Old::All {
            old = Old::None;
        }
        if std::mem::take(&mut dirty) {
            save(&*file, &Place { boot_id: boot_id.clone(), sequence: last }).await;
        }
        match stop.run_until_cancelled(log.wait()).await {
            Some(Ok(())) => {}
            Some(Err(error)) => {
                warn!(err = %error, "The kernel's log cannot be read any more");
                return;
            }
            None => return,
        }
    }
}

async fn save(file: &dyn StateFile, place: &Place) {
    let content = serde_json::to_vec(place).unwrap_or_default();
    match timeout(WRITE, file.replace(content)).await {
        Ok(Ok(())) => {}
        Ok(Err(error)) => warn!(err = %error, "How far the kernel's log was read cannot be kept"),
        Err(_) => warn!("How far the kernel's log was read cannot be kept: the disk takes too long"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn old_news_is_no_news() {
        let place = Place { boot_id: "a".to_owned(), sequence: 7 };
        for (saved, boot_id, sequence, is_old) in [
            (None, "a", 1, true),
            (Some(&place), "a", 7, true),
            (Some(&place), "a", 8, false),
            (Some(&place), "b", 1, false),
        ] {
            assert_eq!(Old::of(saved, boot_id).holds(sequence), is_old, "{saved:?} {boot_id} {sequence}");
        }
    }

    #[test]
    fn a_flood_is_counted_not_told() {
        let now = Instant::now();
        let mut flow = Flow::new(now);
        let told = (0..1000).filter(|_| flow.lets(now).0).count();
        assert_eq!(told, TOLD as usize);
        assert_eq!(flow.lets(now + WHILE), (true, Some(980)));
        assert_eq!(flow.lets(now + WHILE * 2), (true, None));
    }
}
