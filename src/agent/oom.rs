//! Tells of processes that the kernel killed for want of memory. One task reads the kernel's log and listens to the groups
//! of containers: what the log does not tell (nobody may read it, or it was overrun) their counters do.

mod groups;

use std::{path::Path, sync::Arc, time::Duration};

use serde::{Deserialize, Serialize};
use tokio::{
    sync::watch,
    task::yield_now,
    time::{Instant, sleep_until},
};
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

use self::groups::Groups;
use super::{
    build::Base,
    state_file::{DiskStateFile, OneWrite},
};
use crate::{
    engine::ports::{Event, EventSink, PodObserver, StateFile},
    metrics::OomMetrics,
    node::oom_kills::{Hearing, Kill, Record},
    pod::Pod,
    stats::PodGroups,
    sys::kernel_log::KernelLog,
};

const BOOT: &str = "/proc/sys/kernel/random/boot_id";
/// Records that are read before others have their turn.
const BATCH: usize = 256;
/// Kills that are told of within a while; of more only their number is.
const TOLD: u32 = 20;
const WHILE: Duration = Duration::from_secs(10);
/// Kills of one container that are counted at once, at most.
const COUNTED: u64 = 1000;
/// Least time between two looks at what runs.
const SPACING: Duration = Duration::from_millis(200);
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
    /// Tells of a kill that the log names; in which container it was, where its group says so: it may have begun so lately
    /// that nobody has seen it yet.
    fn tell(&mut self, kill: &Kill) -> Option<String> {
        let pods = self.pods.borrow().clone();
        let pod = pods.iter().find(|pod| kill.is_of_pod(pod.uid().as_str()));
        let scope = match pod {
            _ if kill.is_of_system() => "system",
            Some(_) => "pod",
            None => "other",
        };
        self.metrics.killed(scope);
        let pod = pod.filter(|_| kill.of != "/");
        let container = pod.and_then(|pod| {
            let known = self.observer.known_pod(pod.uid())?;
            let found = known.containers.iter().find(|container| kill.is_of_container(container.id.as_str()))?;
            Some((found.id.as_str().to_owned(), found.name.clone()))
        });
        if self.may_tell() {
            if kill.is_of_system() {
                self.events.record(Event::node_warning("SystemOOM", kill.message()));
            }
            if let Some(pod) = pod {
                let why =
                    if kill.is_of_system() { "the node had no memory left" } else { "a memory limit was reached" };
                let text = format!("Process {} (pid {}) was killed: {why}", kill.process, kill.pid);
                self.record(pod, container.as_ref().map(|(_, name)| &**name), text);
            }
        }
        container.map(|(id, _)| id).or_else(|| Some(kill.container_of(pod?.uid().as_str())?.to_owned()))
    }

    /// Tells of kills in a container that nothing but its counter tells of.
    fn tell_counted(&mut self, id: &str, count: u64) {
        (0..count.min(COUNTED)).for_each(|_| self.metrics.killed("pod"));
        let known = self.observer.known().unwrap_or_default();
        let found = known.pods.iter().find_map(|(uid, pod)| {
            let container = pod.containers.iter().find(|container| container.id.as_str() == id)?;
            Some((uid.clone(), container.name.clone()))
        });
        let pods = self.pods.borrow().clone();
        let Some((uid, name)) = found else { return };
        info!(containerID = id, containerName = %name, podUID = %uid, count, "Processes of a container were killed for want of memory");
        let Some(pod) = pods.iter().find(|pod| *pod.uid() == uid).filter(|_| self.may_tell()) else { return };
        let who = if count == 1 { "A process was".to_owned() } else { format!("{count} processes were") };
        self.record(pod, Some(&name), format!("{who} killed for want of memory"));
    }

    fn record(&self, pod: &Pod, container: Option<&str>, text: String) {
        let event = Event::warning(pod.id(), "OOMKilled", text);
        let path = container.and_then(|name| Some(pod.container(name)?.0.field_path(name)));
        self.events.record(match path {
            Some(path) => event.at(path),
            None => event,
        });
    }

    fn may_tell(&mut self) -> bool {
        let (lets, untold) = self.flow.lets(Instant::now());
        if let Some(untold) = untold {
            warn!(count = untold, "More processes were killed for want of memory than are told of");
        }
        lets
    }
}

/// What is listened to.
pub(super) struct OomParts {
    /// Pods that are to run.
    pub(super) pods: watch::Receiver<Arc<Vec<Arc<Pod>>>>,
    /// What runs.
    pub(super) observer: Arc<dyn PodObserver>,
    /// Names of control groups.
    pub(super) groups: Arc<dyn PodGroups>,
    /// Moves whenever another container runs.
    pub(super) changes: watch::Receiver<u64>,
}

/// Tells from now on. A machine that shows nobody its log runs pods all the same.
pub(super) fn watch(base: &Base, root: &Path, parts: OomParts) {
    let teller = Teller {
        pods: parts.pods,
        observer: parts.observer.clone(),
        events: base.events.clone(),
        metrics: OomMetrics::new(&base.registry),
        flow: Flow::new(Instant::now()),
    };
    let groups = Groups::open(parts.groups, parts.observer, base.clock.now());
    let file = Arc::new(DiskStateFile::new(root.join("kernel_log_state")));
    let file = OneWrite::new(file, WRITE);
    let listener = Listener { teller, groups, changes: parts.changes, file };
    base.tasks.spawn(listener.run(base.stop.child_token()));
}

/// Who listens.
struct Listener {
    teller: Teller,
    /// `None` where the kernel has none.
    groups: Option<Groups>,
    changes: watch::Receiver<u64>,
    file: OneWrite,
}

impl Listener {
    async fn run(mut self, stop: CancellationToken) {
        let mut journal = Journal::open(self.file.file()).await;
        let mut looked = Instant::now();
        let (mut look_at, mut has_changes) = (Some(looked), true);
        loop {
            if let Some(open) = &mut journal {
                match open.read(&mut self.teller, self.groups.as_mut()) {
                    Ok(true) => open.save(&mut self.file).await,
                    Ok(false) => {
                        yield_now().await;
                        continue;
                    }
                    Err(error) => {
                        warn!(err = %error, "The kernel's log cannot be read any more");
                        journal = None;
                    }
                }
            }
            if let Some(groups) = &mut self.groups {
                for (id, count) in groups.settle() {
                    self.teller.tell_counted(&id, count);
                }
            }
            let told = async {
                match &journal {
                    Some(journal) => journal.log.wait().await,
                    None => std::future::pending().await,
                }
            };
            let killed = async {
                match &mut self.groups {
                    Some(groups) => groups.next().await,
                    None => std::future::pending().await,
                }
            };
            let looks = async {
                match look_at {
                    Some(at) => sleep_until(at).await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                biased;
                () = stop.cancelled() => return,
                told = told => if let Err(error) = told {
                    warn!(err = %error, "The kernel's log cannot be read any more");
                    journal = None;
                },
                () = killed => {}
                () = looks => {
                    looked = Instant::now();
                    look_at = None;
                    if let Some(groups) = &mut self.groups {
                        groups.follow().await;
                    }
                }
                moved = self.changes.changed(), if look_at.is_none() && has_changes => {
                    has_changes = moved.is_ok();
                    look_at = Some(looked + SPACING);
                }
            }
        }
    }
}

/// Gives records, one after the other.
trait Records {
    /// The next one; `None` where there is none yet.
    fn take(&mut self) -> std::io::Result<Option<&[u8]>>;
}

impl Records for KernelLog {
    fn take(&mut self) -> std::io::Result<Option<&[u8]>> {
        Self::take(self)
    }
}

/// The kernel's log, and how far it was read.
struct Journal<L = KernelLog> {
    log: L,
    boot_id: String,
    old: Old,
    hearing: Hearing,
    last: u64,
    is_dirty: bool,
}

impl Journal {
    /// `None` where we may not read it.
    async fn open(file: &dyn StateFile) -> Option<Self> {
        let log = match KernelLog::open() {
            Ok(log) => log,
            Err(error) => {
                warn!(err = %error, "The kernel's log cannot be read: of processes killed for want of memory only counters tell");
                return None;
            }
        };
        let boot_id = tokio::fs::read_to_string(BOOT).await.unwrap_or_default().trim().to_owned();
        let saved = file.read().await.ok().flatten();
        let saved: Option<Place> = saved.and_then(|content| serde_json::from_slice(&content).ok());
        let old = Old::of(saved.as_ref(), &boot_id);
        Some(Self { log, boot_id, old, hearing: Hearing::default(), last: 0, is_dirty: saved.is_none() })
    }
}

impl<L: Records> Journal<L> {
    /// Reads some of what there is and tells of it; says whether that was all.
    fn read(&mut self, teller: &mut Teller, mut groups: Option<&mut Groups>) -> std::io::Result<bool> {
        for _ in 0..BATCH {
            let Some(bytes) = self.log.take()? else {
                if self.old == Old::All {
                    self.old = Old::None;
                }
                return Ok(true);
            };
            let Some(record) = Record::parse(bytes) else { continue };
            self.last = record.sequence;
            if self.old.holds(self.last) {
                continue;
            }
            if let Some(kill) = self.hearing.hear(&record.text) {
                info!(
                    process = kill.process,
                    pid = kill.pid,
                    cgroup = kill.of,
                    limit = kill.short,
                    "Got a record of a process that was killed for want of memory"
                );
                let container = teller.tell(&kill);
                if let (Some(groups), Some(id)) = (groups.as_deref_mut(), container) {
                    groups.heard(&id);
                }
                self.is_dirty = true;
            }
        }
        Ok(false)
    }

    /// Keeps how far it was read, where there was something to tell.
    async fn save(&mut self, file: &mut OneWrite) {
        if std::mem::take(&mut self.is_dirty) {
            save(file, &Place { boot_id: self.boot_id.clone(), sequence: self.last }).await;
        }
    }
}

async fn save(file: &mut OneWrite, place: &Place) {
    let content = serde_json::to_vec(place).unwrap_or_default();
    if let Err(error) = file.replace(content).await {
        warn!(err = %error, "How far the kernel's log was read cannot be kept");
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        engine::ports::{PodView, RuntimePods},
        metrics::Registry,
        pod::{PodRef, PodUid, observed::Generation},
    };

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

    /// A log of which more comes, whatever is read of it: first a long story, then kills of the whole machine, and records
    /// that were cut off.
    struct Flood {
        sequence: u64,
        story: u64,
        kills: u64,
        record: Vec<u8>,
    }

    impl Records for Flood {
        fn take(&mut self) -> std::io::Result<Option<&[u8]>> {
            let at = self.sequence;
            if at == self.story + 3 * self.kills {
                return Ok(None);
            }
            self.sequence += 1;
            let text = match at.checked_sub(self.story).map(|at| at % 3) {
                None => "a".repeat(8000),
                Some(0) => "stress invoked oom-killer: gfp_mask=0x100cca(GFP_HIGHUSER_MOVABLE), order=0".to_owned(),
                Some(1) => "oom-kill:constraint=CONSTR".to_owned(),
                Some(_) => "Out of memory: Killed process 2003 (stress) total-vm:1kB".to_owned(),
            };
            self.record = format!("6,{at},{at},-;{text}\n").into_bytes();
            Ok(Some(&self.record))
        }
    }

    struct Nobody;

    #[async_trait::async_trait]
    impl PodObserver for Nobody {
        fn view(&self, _: &PodRef) -> PodView {
            unreachable!("nobody runs")
        }
        fn acted(&self, _: &PodUid) -> Generation {
            Generation::default()
        }
        fn known(&self) -> Option<RuntimePods> {
            None
        }
        async fn list(&self) -> Result<RuntimePods, String> {
            Err("nobody runs".to_owned())
        }
        fn health(&self) -> Option<String> {
            None
        }
    }

    #[derive(Default)]
    struct Told(std::sync::Mutex<Vec<String>>);

    impl EventSink for Told {
        fn record(&self, event: Event) {
            self.0.lock().expect("whole").push(format!("{}: {}", event.reason, event.message));
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_flood_of_records_leaves_others_their_turn_and_is_told_in_short() {
        let (events, registry) = (Arc::new(Told::default()), Registry::new());
        let mut teller = Teller {
            pods: watch::channel(Arc::default()).1,
            observer: Arc::new(Nobody),
            events: events.clone(),
            metrics: OomMetrics::new(&registry),
            flow: Flow::new(Instant::now()),
        };
        let (story, kills) = (10_000, 1000);
        let log = Flood { sequence: 0, story, kills, record: Vec::new() };
        let boot_id = "this".to_owned();
        let mut journal =
            Journal { log, boot_id, old: Old::None, hearing: Hearing::default(), last: 0, is_dirty: false };
        let mut breaks = 0;
        while !journal.read(&mut teller, None).expect("readable") {
            breaks += 1;
        }
        assert_eq!(breaks, (story + 3 * kills) / BATCH as u64, "others have their turn in between");
        let told = events.0.lock().expect("whole");
        assert_eq!(told.len(), TOLD as usize, "{:?}", told.first());
        assert!(told.iter().all(|told| told.contains("victim process: stress, pid: 2003")), "{:?}", told.first());
        assert_eq!((journal.last, journal.is_dirty), (story + 3 * kills - 1, true), "and read to its end");
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
