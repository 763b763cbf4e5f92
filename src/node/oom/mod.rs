//! OOM watcher: reports processes killed by the kernel's OOM killer, from `/dev/kmsg` and cgroups.
//!
//! One task reads the kernel log and watches the cgroups of containers. Kills that the log does not report (it is not
//! readable, or was overrun) are taken from the cgroups' counters.

mod cgroup_watcher;
pub mod kill_counters;
pub mod kill_parser;
#[cfg(test)]
mod tests;

use std::{io, sync::Arc, time::Duration};

use serde::{Deserialize, Serialize};
use tokio::{
    sync::watch,
    task::yield_now,
    time::{Instant, sleep_until, timeout},
};
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

use self::{
    cgroup_watcher::CgroupWatcher,
    kill_parser::{Kill, KillAssembler, KmsgRecord},
};
use crate::engine::PodReader;
use berth_metrics::OomMetrics;
use berth_ports::{Clock, EventRecord, EventSink, OneWrite, PodObserver, StateFile};
use berth_stats::PodCgroupPaths;
use berth_sys::kernel_log::KernelLog;
use berth_types::Pod;

const BOOT: &str = "/proc/sys/kernel/random/boot_id";
/// Maximum log records read before other events are handled.
const BATCH: usize = 256;
/// Maximum kills reported per window ([`WHILE`]); further ones are only counted.
const MAX_REPORTED: u32 = 20;
const WHILE: Duration = Duration::from_secs(10);
/// Maximum kills of one container that are added to the metric at once.
const COUNTED: u64 = 1000;
/// Minimum time between two reads of the running containers.
const SPACING: Duration = Duration::from_millis(200);
/// Timeout for reading or writing the state file.
const WRITE: Duration = Duration::from_secs(10);
/// Minimum time between two writes of the state file.
const KEEP: Duration = Duration::from_secs(1);
/// Minimum time until the next write after a failed one.
const KEEP_AGAIN: Duration = Duration::from_secs(30);

/// Checkpoint: last processed log record and the boot it belongs to.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
struct LogCheckpoint {
    boot_id: String,
    sequence: u64,
}

/// Which records were already processed, or precede the first start. Pure.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum SkippedRecords {
    /// All that exist at the first start: earlier kills are not reported.
    All,
    /// Up to and including this sequence number.
    UpTo(u64),
    /// None: the machine has rebooted since the checkpoint.
    None,
}

impl SkippedRecords {
    fn of(saved: Option<&LogCheckpoint>, boot_id: &str) -> Self {
        match saved {
            Some(place) if place.boot_id == boot_id => Self::UpTo(place.sequence),
            Some(_) => Self::None,
            None => Self::All,
        }
    }

    fn contains(self, sequence: u64) -> bool {
        match self {
            Self::All => true,
            Self::UpTo(last) => sequence <= last,
            Self::None => false,
        }
    }
}

/// Rate limiter for reported kills: [`MAX_REPORTED`] per [`WHILE`]. Pure but for `now`.
#[derive(Debug)]
struct ReportLimiter {
    since: Instant,
    reported: u32,
    dropped: u64,
}

impl ReportLimiter {
    fn new(now: Instant) -> Self {
        Self { since: now, reported: 0, dropped: 0 }
    }

    /// Whether one more kill may be reported; at the start of a new window, also how many the previous one dropped.
    fn try_acquire(&mut self, now: Instant) -> (bool, Option<u64>) {
        let mut before = None;
        if now.saturating_duration_since(self.since) >= WHILE {
            before = Some(self.dropped).filter(|dropped| *dropped > 0);
            *self = Self::new(now);
        }
        let is_allowed = self.reported < MAX_REPORTED;
        if is_allowed {
            self.reported += 1;
        } else {
            self.dropped = self.dropped.saturating_add(1);
        }
        (is_allowed, before)
    }
}

/// Reports kills: metrics, events, and logs.
struct KillReporter {
    pods: PodReader,
    observer: Arc<dyn PodObserver>,
    events: Arc<dyn EventSink>,
    metrics: OomMetrics,
    flow: ReportLimiter,
}

impl KillReporter {
    /// Reports a kill from the log and returns the container's id. The id is taken from the cgroup path where the
    /// container was not observed yet: it may have started just before the kill.
    fn report(&mut self, kill: &Kill) -> Option<String> {
        let pods = self.pods.desired();
        let pod = pods.iter().find(|pod| kill.is_of_pod(pod.uid().as_str()));
        let scope = match pod {
            _ if kill.is_of_system() => "system",
            Some(_) => "pod",
            None => "other",
        };
        self.metrics.killed(scope);
        let pod = pod.filter(|_| kill.cgroup != "/");
        let container = pod.and_then(|pod| {
            let known = self.observer.known_pod(pod.uid())?;
            let found = known.containers.iter().find(|container| kill.is_of_container(container.id.as_str()))?;
            Some((found.id.as_str().to_owned(), found.name.clone()))
        });
        if self.may_report() {
            if kill.is_of_system() {
                self.events.record(EventRecord::node_warning("SystemOOM", kill.message()));
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

    /// Reports kills of a container that only its cgroup's counter shows.
    fn report_counted(&mut self, id: &str, count: u64) {
        (0..count.min(COUNTED)).for_each(|_| self.metrics.killed("pod"));
        let known = self.observer.known().unwrap_or_default();
        let found = known.pods.iter().find_map(|(uid, pod)| {
            let container = pod.containers.iter().find(|container| container.id.as_str() == id)?;
            Some((uid.clone(), container.name.clone()))
        });
        let pods = self.pods.desired();
        let Some((uid, name)) = found else { return };
        info!(containerID = id, containerName = %name, podUID = %uid, count, "OOM killer terminated processes of a container");
        let Some(pod) = pods.iter().find(|pod| *pod.uid() == uid).filter(|_| self.may_report()) else { return };
        let who = if count == 1 { "A process was".to_owned() } else { format!("{count} processes were") };
        self.record(pod, Some(&name), format!("{who} killed by the OOM killer"));
    }

    fn record(&self, pod: &Pod, container: Option<&str>, text: String) {
        let event = EventRecord::warning(pod.id(), "OOMKilled", text);
        let path = container.and_then(|name| Some(pod.container(name)?.0.field_path(name)));
        self.events.record(match path {
            Some(path) => event.at(path),
            None => event,
        });
    }

    fn may_report(&mut self) -> bool {
        let (is_allowed, dropped) = self.flow.try_acquire(Instant::now());
        if let Some(dropped) = dropped {
            warn!(count = dropped, "OOM kill reports suppressed by the rate limit");
        }
        is_allowed
    }
}

/// Dependencies of the OOM watcher.
pub struct OomDeps {
    /// The desired pods.
    pub pods: PodReader,
    /// Observed pods.
    pub observer: Arc<dyn PodObserver>,
    /// Paths of the pods' cgroups.
    pub groups: Arc<dyn PodCgroupPaths>,
    /// Changes whenever a container has started or exited.
    pub changes: watch::Receiver<u64>,
    /// Receives the events.
    pub events: Arc<dyn EventSink>,
    /// Counts kills.
    pub metrics: OomMetrics,
    /// Wall time.
    pub clock: Arc<dyn Clock>,
    /// Checkpoint file: last processed record of the kernel log.
    pub file: Arc<dyn StateFile>,
}

/// Reports processes that the kernel's OOM killer has killed.
pub struct OomWatcher(OomLoop);

impl OomWatcher {
    /// Returns a watcher; nothing is read before [`OomWatcher::run`].
    pub fn new(deps: OomDeps) -> Self {
        let reporter = KillReporter {
            pods: deps.pods,
            observer: deps.observer.clone(),
            events: deps.events,
            metrics: deps.metrics,
            flow: ReportLimiter::new(Instant::now()),
        };
        let groups = CgroupWatcher::open(deps.groups, deps.observer, deps.clock.now());
        Self(OomLoop { reporter, groups, changes: deps.changes, file: OneWrite::new(deps.file, WRITE) })
    }

    /// Runs until stopped. Where the kernel's log cannot be read, the cgroups' counters are used alone.
    pub async fn run(self, stop: CancellationToken) {
        let opened = stop.run_until_cancelled(LogReader::open(self.0.file.file())).await;
        if let Some(journal) = opened {
            self.0.run(journal, stop).await;
        }
    }
}

/// Loop of the watcher.
struct OomLoop {
    reporter: KillReporter,
    /// Watched cgroups; `None` where the kernel offers no OOM notification for cgroups.
    groups: Option<CgroupWatcher>,
    changes: watch::Receiver<u64>,
    file: OneWrite,
}

impl OomLoop {
    /// Runs until stopped; reads the log as long as it is readable. Yields between batches, however many records there
    /// are.
    async fn run<L: RecordSource>(mut self, mut journal: Option<LogReader<L>>, stop: CancellationToken) {
        let mut last_sync = Instant::now();
        let (mut sync_at, mut has_changes) = (Some(last_sync), true);
        loop {
            let mut has_more = false;
            if let Some(open) = &mut journal {
                match open.read(&mut self.reporter, self.groups.as_mut()) {
                    Ok(is_all) => has_more = !is_all,
                    Err(error) => {
                        warn!(err = %error, "The kernel's log cannot be read any more");
                        journal = None;
                    }
                }
            }
            if let Some(open) = &mut journal {
                open.save(&mut self.file).await;
            }
            if let Some(groups) = &mut self.groups {
                for (id, count) in groups.settle() {
                    self.reporter.report_counted(&id, count);
                }
            }
            let log_readable = async {
                match &journal {
                    Some(journal) if !has_more => journal.wait().await,
                    _ => std::future::pending().await,
                }
            };
            let killed = async {
                match &mut self.groups {
                    Some(groups) => groups.next().await,
                    None => std::future::pending().await,
                }
            };
            let sync_due = async {
                match sync_at {
                    Some(at) => sleep_until(at).await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                biased;
                () = stop.cancelled() => break,
                () = sync_due => {
                    last_sync = Instant::now();
                    sync_at = None;
                    if let Some(groups) = &mut self.groups {
                        groups.sync_containers().await;
                    }
                }
                moved = self.changes.changed(), if sync_at.is_none() && has_changes => {
                    has_changes = moved.is_ok();
                    sync_at = Some(last_sync + SPACING);
                }
                () = killed => {}
                result = log_readable => if let Err(error) = result {
                    warn!(err = %error, "The kernel's log cannot be read any more");
                    journal = None;
                },
                () = yield_now(), if has_more => {}
            }
        }
        if let Some(open) = &mut journal {
            open.save_at_last(&mut self.file).await;
        }
    }
}

/// Source of log records, read one after the other.
trait RecordSource: Send + Sync {
    /// Returns the next record; `None` if there is none yet.
    fn take(&mut self) -> io::Result<Option<&[u8]>>;

    /// Waits until a record may be available. Cancel-safe.
    fn wait(&self) -> impl Future<Output = io::Result<()>> + Send;
}

impl RecordSource for KernelLog {
    fn take(&mut self) -> io::Result<Option<&[u8]>> {
        Self::next_record(self)
    }

    async fn wait(&self) -> io::Result<()> {
        Self::wait(self).await
    }
}

/// The kernel log and the read position.
struct LogReader<L = KernelLog> {
    log: L,
    boot_id: String,
    old: SkippedRecords,
    assembler: KillAssembler,
    last: u64,
    /// Whether the read position has to be written.
    is_dirty: bool,
    /// Earliest time of the next write, and whether the last write failed.
    pause: Option<(Instant, bool)>,
}

impl LogReader {
    /// Opens the kernel log; `None` without permission to read it.
    async fn open(file: &dyn StateFile) -> Option<Self> {
        let log = match KernelLog::open() {
            Ok(log) => log,
            Err(error) => {
                warn!(err = %error, "Failed to open the kernel log, reporting OOM kills from cgroup counters only");
                return None;
            }
        };
        let boot_id = tokio::fs::read_to_string(BOOT).await.unwrap_or_default().trim().to_owned();
        Some(Self::of(log, boot_id, file).await)
    }
}

impl<L: RecordSource> LogReader<L> {
    /// Resumes from the checkpoint of an earlier agent process.
    async fn of(log: L, boot_id: String, file: &dyn StateFile) -> Self {
        let saved = timeout(WRITE, file.read()).await.unwrap_or_else(|_| {
            warn!(path = %file.path().display(), "Timed out reading the kernel log checkpoint");
            Ok(None)
        });
        let saved = saved.ok().flatten();
        let saved: Option<LogCheckpoint> = saved.and_then(|content| serde_json::from_slice(&content).ok());
        let old = SkippedRecords::of(saved.as_ref(), &boot_id);
        let is_dirty = saved.is_none();
        Self { log, boot_id, old, assembler: KillAssembler::default(), last: 0, is_dirty, pause: None }
    }

    /// Reads and reports up to [`BATCH`] records; returns whether the log was drained.
    fn read(&mut self, reporter: &mut KillReporter, mut groups: Option<&mut CgroupWatcher>) -> io::Result<bool> {
        for _ in 0..BATCH {
            let Some(bytes) = self.log.take()? else {
                if self.old == SkippedRecords::All {
                    self.old = SkippedRecords::None;
                }
                return Ok(true);
            };
            let Some(record) = KmsgRecord::parse(bytes) else { continue };
            self.last = record.sequence;
            if self.old.contains(self.last) {
                continue;
            }
            if let Some(kill) = self.assembler.push(&record) {
                info!(
                    process = kill.process,
                    pid = kill.pid,
                    cgroup = kill.cgroup,
                    limit = kill.exhausted_cgroup,
                    "Got a record of a process that was killed for want of memory"
                );
                let container = reporter.report(&kill);
                if let (Some(groups), Some(id)) = (groups.as_deref_mut(), container) {
                    groups.record_logged_kill(&id);
                }
                self.is_dirty = true;
            }
        }
        Ok(false)
    }

    /// Waits until a record may be available or the checkpoint may be written. Cancel-safe.
    async fn wait(&self) -> io::Result<()> {
        let keeps = async {
            match self.pause.filter(|_| self.is_dirty) {
                Some((until, _)) => sleep_until(until).await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            result = self.log.wait() => result,
            () = keeps => Ok(()),
        }
    }

    /// Writes the checkpoint if a kill was reported since or no checkpoint existed: at most once per [`KEEP`], or per
    /// [`KEEP_AGAIN`] after a failed write.
    async fn save(&mut self, file: &mut OneWrite) {
        let may_be = self.pause.is_none_or(|(until, _)| until <= Instant::now());
        // While skipping old records, the end of the log has to be reached first: after a restart, the skipped rest
        // would be reported as new.
        if self.is_dirty && may_be && self.old != SkippedRecords::All {
            self.write(file).await;
        }
    }

    /// Writes the checkpoint at shutdown; skipped if the last write failed.
    async fn save_at_last(&mut self, file: &mut OneWrite) {
        let has_failed = self.pause.is_some_and(|(_, has_failed)| has_failed);
        if self.is_dirty && !has_failed && self.old != SkippedRecords::All {
            self.write(file).await;
        }
    }

    async fn write(&mut self, file: &mut OneWrite) {
        // A kill of which only a part was read is read again as a whole by the next agent process.
        let sequence = self.assembler.pending_since().map_or(self.last, |begun| begun.saturating_sub(1));
        let place = LogCheckpoint { boot_id: self.boot_id.clone(), sequence };
        let written = file.replace(serde_json::to_vec(&place).unwrap_or_default()).await;
        self.is_dirty = written.is_err();
        let pause = if self.is_dirty { KEEP_AGAIN } else { KEEP };
        self.pause = Some((Instant::now() + pause, self.is_dirty));
        if let Err(error) = written {
            warn!(err = %error, "How far the kernel's log was read cannot be kept yet");
        }
    }
}
