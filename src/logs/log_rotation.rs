//! Container log rotation: scheduling, rename and reopen, compression (spec 03b §11).
//!
//! Each interval the log of every running container is checked once; running containers and their log
//! paths are known from PLEG. In between, logs that are being written are checked before they can reach
//! the limit (`rotation_schedule.rs`, pure); inotify reports the first write to idle logs (`first_write_watch.rs`). Rotation
//! does not wait for compression: a log is renamed first, and older files are compressed afterwards
//! (`compression.rs`); nor for a runtime that does not respond for one container: its worker takes another
//! log.

use std::{
    collections::{HashMap, HashSet},
    fs, io,
    path::{Path, PathBuf},
    pin::pin,
    sync::Arc,
    time::Duration,
};

use inotify::WatchDescriptor;
use jiff::{civil::DateTime, tz::TimeZone};
use rustix::fs::RenameFlags;
use tokio::{
    sync::{OwnedSemaphorePermit, Semaphore, mpsc},
    task::{JoinSet, spawn_blocking},
    time::{Instant, MissedTickBehavior, interval_at, sleep_until, timeout},
};
use tokio_util::sync::CancellationToken;
use tracing::{error, warn};

use super::{
    compression::{pack, tidy, with_suffix},
    dirs,
    first_write_watch::{FirstWriteWatcher, WatchAdder},
    log_locks::{LogLock, LogLocks},
    manager::{LogsConfig, LogsDeps},
    retention,
    rotation_schedule::{BEGUN, CheckResult, GrowthRate},
};
use berth_cri::CriError;
use berth_types::ContainerId;

/// Checks that are due within this time are batched.
const TOGETHER: Duration = Duration::from_millis(20);
/// A rotation that takes longer counts as hanging and does not block others.
const SLOW: Duration = Duration::from_secs(1);
/// Maximum number of hanging rotations beside the active ones.
const HANGING: usize = 32;

/// Why a log was not rotated.
#[derive(Debug, thiserror::Error)]
pub(super) enum RotateError {
    #[error(transparent)]
    Runtime(#[from] CriError),
    #[error("{action} {}: {source}", path.display())]
    File { action: &'static str, path: PathBuf, source: io::Error },
    #[error("failed to reopen container log: {0}")]
    Reopen(#[source] CriError),
}

/// Maps the error of a file operation.
pub(super) fn failed<'a>(action: &'static str, path: &'a Path) -> impl FnOnce(io::Error) -> RotateError + 'a {
    move |source| RotateError::File { action, path: path.to_owned(), source }
}

/// The log of a running container.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct RunningLog {
    /// ID of the container.
    pub container: ContainerId,
    /// Path of the log, as the runtime reports it.
    pub path: PathBuf,
}

/// Callback for the logs of all running containers, without a call to the runtime.
pub type RunningLogs = Box<dyn Fn() -> Vec<RunningLog> + Send + Sync>;

/// Rotates the logs of running containers.
pub(super) struct Rotator {
    pub deps: Arc<LogsDeps>,
    pub config: Arc<LogsConfig>,
    pub busy: LogLocks,
    pub running: RunningLogs,
    /// Logs of containers that were just started.
    pub started: mpsc::Receiver<RunningLog>,
    /// Maximum size of a log in bytes.
    pub max: u64,
}

/// Growth and rotation state of one container log, kept per log path.
struct LogState {
    container: ContainerId,
    pace: GrowthRate,
    /// Time of the next check, if the log is being written.
    due: Option<Duration>,
    /// Whether an inotify watch reports the next write.
    is_armed: bool,
    /// Whether its rotation is running or queued.
    is_rotating: bool,
}

/// Result of a size check.
struct SizeCheck {
    log: RunningLog,
    size: io::Result<u64>,
    watch: Option<WatchDescriptor>,
}

/// State of the rotation task.
struct RotationTask {
    rotator: Arc<Rotator>,
    began: Instant,
    known: HashMap<PathBuf, LogState>,
    wakes: FirstWriteWatcher,
    rotating: JoinSet<(RunningLog, bool)>,
    rotators: Arc<Semaphore>,
    hanging: Arc<Semaphore>,
    packing: JoinSet<()>,
    packers: Arc<Semaphore>,
    /// Logs queued for compression.
    waiting: LogLocks,
}

impl Rotator {
    /// Runs until cancelled.
    pub async fn run(mut self, cancel: CancellationToken) {
        let (_, nothing) = mpsc::channel(1);
        let mut started = std::mem::replace(&mut self.started, nothing);
        let period = self.config.monitor_interval;
        let mut ticks = interval_at(Instant::now() + period, period);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let workers = || Arc::new(Semaphore::new(self.config.max_workers.max(1)));
        let (rotators, packers) = (workers(), workers());
        let mut turns = RotationTask {
            rotator: Arc::new(self),
            began: Instant::now(),
            known: HashMap::new(),
            wakes: FirstWriteWatcher::new(),
            rotating: JoinSet::new(),
            rotators,
            hanging: Arc::new(Semaphore::new(HANGING)),
            packing: JoinSet::new(),
            packers,
            waiting: LogLocks::default(),
        };
        // The first round determines the logs to watch.
        turns.update_running().await;
        loop {
            let idle = turns.known.values().filter(|known| !known.is_rotating);
            let due = idle.filter_map(|known| known.due).min().map(|due| turns.began + due);
            let comes = async {
                match due {
                    Some(due) => sleep_until(due).await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                biased;
                () = cancel.cancelled() => return turns.end().await,
                _ = ticks.tick() => {
                    turns.update_running().await;
                    let all = turns.logs(|_| true);
                    turns.round(all).await;
                }
                () = comes => {
                    let until = turns.now().saturating_add(TOGETHER);
                    let due = turns.logs(|known| known.due.is_some_and(|due| due <= until));
                    turns.round(due).await;
                }
                log = turns.wakes.next() => {
                    let due = turns.now().saturating_add(BEGUN);
                    if let Some(known) = turns.known.get_mut(&log) {
                        (known.due, known.is_armed) = (Some(due), false);
                    }
                }
                Some(log) = started.recv() => turns.begin(vec![log]).await,
                Some(ended) = turns.rotating.join_next(), if !turns.rotating.is_empty() => {
                    if let Ok((log, is_rotated)) = ended {
                        turns.rotated(&log, is_rotated);
                    }
                }
                Some(_) = turns.packing.join_next(), if !turns.packing.is_empty() => {}
            }
        }
    }
}

impl RotationTask {
    fn now(&self) -> Duration {
        self.began.elapsed()
    }

    fn logs(&self, which: impl Fn(&LogState) -> bool) -> Vec<RunningLog> {
        let wanted = self.known.iter().filter(|(_, known)| which(known));
        wanted.map(|(path, known)| RunningLog { container: known.container.clone(), path: path.clone() }).collect()
    }

    /// Updates the set of running containers, and watches new logs.
    async fn update_running(&mut self) {
        let running = (self.rotator.running)();
        let paths: HashSet<&PathBuf> = running.iter().map(|log| &log.path).collect();
        self.known.retain(|path, _| paths.contains(path));
        self.begin(running).await;
    }

    /// Watches those of these logs that are new.
    async fn begin(&mut self, logs: Vec<RunningLog>) {
        let is_new = |log: &RunningLog| self.known.get(&log.path).is_none_or(|known| known.container != log.container);
        let new: Vec<_> = logs.into_iter().filter(is_new).map(|log| (log, None)).collect();
        if new.is_empty() {
            return;
        }
        for check in check_sizes(self.wakes.armer(), new).await {
            let (is_armed, now) = (check.watch.is_some(), self.now());
            if let Some(watch) = check.watch {
                self.wakes.armed(watch, check.log.path.clone());
            }
            let size = check.size.unwrap_or_default();
            // It may have reached the limit under an earlier agent.
            let due = (size >= self.rotator.max).then_some(now);
            let known = LogState {
                container: check.log.container,
                pace: GrowthRate::new(size, now),
                due,
                is_armed,
                is_rotating: false,
            };
            self.known.insert(check.log.path, known);
        }
    }

    /// Checks these logs and starts rotations of those that reached the limit.
    async fn round(&mut self, mut logs: Vec<RunningLog>) {
        logs.retain(|log| self.known.get(&log.path).is_some_and(|known| !known.is_rotating));
        // One job for all: most logs need no rotation, and a job per log would wake a thread each.
        let logs = logs.into_iter().map(|log| {
            let last = self.known.get(&log.path).filter(|known| !known.is_armed).map(|known| known.pace.size());
            (log, Some(last.unwrap_or(u64::MAX)))
        });
        for check in check_sizes(self.wakes.armer(), logs.collect()).await {
            let Some((log, size)) = self.take(check) else { continue };
            if let Some(known) = self.known.get_mut(&log.path) {
                known.is_rotating = true;
            }
            let (rotator, rotators, hanging) = (self.rotator.clone(), self.rotators.clone(), self.hanging.clone());
            self.rotating.spawn(async move {
                let Ok(place) = rotators.acquire_owned().await else { return (log, false) };
                // The final output of a container that has exited in the meantime is not rotated.
                let runs = (rotator.running)().iter().any(|running| running.container == log.container);
                let is_rotated = runs && run_with_permit(place, &hanging, rotator.rotate_if_due(&log, size)).await;
                (log, is_rotated)
            });
        }
    }

    /// Handles the end of a rotation.
    fn rotated(&mut self, log: &RunningLog, is_rotated: bool) {
        let now = self.now();
        if let Some(known) = self.known.get_mut(&log.path).filter(|known| known.container == log.container) {
            known.is_rotating = false;
            if is_rotated {
                known.pace.rotate(now);
                // The watched file is the one that was renamed.
                (known.due, known.is_armed) = (Some(now.saturating_add(BEGUN)), false);
            }
        }
        if is_rotated {
            self.pack(&log.path);
        }
    }

    /// Starts no more rotations, and waits for running ones: none is interrupted between rename and
    /// reopen.
    async fn end(mut self) {
        self.rotators.close();
        while self.rotating.join_next().await.is_some() {}
    }

    /// Processes the result of a check; returns the log if it needs a rotation or its check failed.
    fn take(&mut self, check: SizeCheck) -> Option<(RunningLog, io::Result<u64>)> {
        let now = self.now();
        let known = self.known.get_mut(&check.log.path)?;
        if let Some(watch) = check.watch {
            known.is_armed = true;
            self.wakes.armed(watch, check.log.path.clone());
        }
        known.due = None;
        let size = match check.size {
            Ok(size) => size,
            Err(error) => return Some((check.log, Err(error))),
        };
        match known.pace.record_check(size, self.rotator.max, now) {
            CheckResult::Rotate => return Some((check.log, Ok(size))),
            CheckResult::Again(due) => (known.due, known.is_armed) = (Some(due), false),
            CheckResult::Idle => {}
        }
        None
    }

    /// Queues the compression of rotated files other than the newest; nothing waits for it. A log is
    /// queued at most once, and not locked while it is queued.
    fn pack(&mut self, log: &Path) {
        let Some(waits) = self.waiting.try_hold(log) else { return };
        let (log, max_files, packers) = (log.to_owned(), self.rotator.config.max_files, self.packers.clone());
        let busy = self.rotator.busy.clone();
        self.packing.spawn(async move {
            let Ok(_place) = packers.acquire().await else { return };
            drop(waits);
            let Some(lock) = busy.try_hold(&packing(&log)) else { return };
            let job = spawn_blocking(move || {
                let _lock: LogLock = lock;
                if let Err(error) = pack(&log, max_files) {
                    error!(err = %error, path = %log.display(), "Failed to compress rotated logs");
                }
            });
            let _ = job.await; // a panic is reported by its thread
        });
    }
}

/// Runs the work with a permit; hanging work releases it, unless too many others hang.
async fn run_with_permit<T>(place: OwnedSemaphorePermit, hanging: &Semaphore, work: impl Future<Output = T>) -> T {
    let mut work = pin!(work);
    if let Ok(done) = timeout(SLOW, &mut work).await {
        return done;
    }
    tokio::select! {
        done = &mut work => done,
        Ok(_hangs) = hanging.acquire() => {
            drop(place);
            work.await
        }
    }
}

/// Path that is locked while files of a log are compressed.
pub(super) fn packing(log: &Path) -> PathBuf {
    with_suffix(log, ".tmp")
}

/// Checks the sizes of logs. A log that still has its last size, or had none, gets an inotify watch for
/// the next write: added before its size is read again, so that no write is missed.
async fn check_sizes(mut armer: WatchAdder, logs: Vec<(RunningLog, Option<u64>)>) -> Vec<SizeCheck> {
    let checks = spawn_blocking(move || {
        let size = |path: &Path| fs::metadata(path).map(|meta| meta.len());
        let check = |(log, last): (RunningLog, Option<u64>)| {
            let mut found = size(&log.path);
            let is_idle = found.is_ok() && last.is_none_or(|last| found.as_ref().is_ok_and(|found| *found == last));
            let watch = if is_idle { armer.arm(&log.path) } else { None };
            if watch.is_some() {
                found = size(&log.path);
            }
            SizeCheck { log, size: found, watch }
        };
        logs.into_iter().map(check).collect()
    });
    checks.await.unwrap_or_default()
}

impl Rotator {
    /// Rotates one log if it reached the limit; returns whether it was rotated.
    async fn rotate_if_due(&self, log: &RunningLog, size: io::Result<u64>) -> bool {
        let (id, path) = (&log.container, &log.path);
        // A log that is being removed needs no rotation.
        let Some(_lock) = self.busy.try_hold(path) else { return false };
        let max = self.max;
        let size = match self.size(id, path, size).await {
            Ok(size) if size < max => return false,
            Ok(size) => size,
            Err(error) => {
                error!(err = %error, containerID = %id, path = %path.display(), "Failed to stat container log");
                return false;
            }
        };
        if let Err(error) = self.rotate(id.as_str(), path).await {
            error!(err = %error, containerID = %id, path = %path.display(), currentSize = size, maxSize = max,
                "Failed to rotate log for container");
            return false;
        }
        if let Err(error) = self.tidy(path).await {
            error!(err = %error, containerID = %id, path = %path.display(), "Failed to remove old logs");
        }
        true
    }

    /// If the log does not exist, the runtime reopens it first.
    async fn size(&self, id: &ContainerId, path: &Path, found: io::Result<u64>) -> Result<u64, RotateError> {
        match found {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                self.deps.cri.reopen_container_log(id.as_str()).await.map_err(RotateError::Reopen)?;
                tokio::fs::metadata(path).await.map(|m| m.len()).map_err(failed("stat", path))
            }
            other => other.map_err(failed("stat", path)),
        }
    }

    async fn rotate(&self, id: &str, path: &Path) -> Result<(), RotateError> {
        let (log, now) = (path.to_owned(), self.deps.clock.now());
        let moved = spawn_blocking(move || {
            let target = target(&log, now.to_zoned(TimeZone::system()).datetime());
            fs::rename(&log, &target).map_err(failed("rename", &log))?;
            Ok(target)
        });
        let target = moved.await.unwrap_or_else(|e| Err(failed("rotate", path)(io::Error::other(e))))?;
        match self.deps.cri.reopen_container_log(id).await {
            Ok(()) => Ok(()),
            Err(error) => undo(path, &target, error),
        }
    }

    /// Removes old files after a successful rotation: if nothing can be rotated, nothing is removed.
    async fn tidy(&self, path: &Path) -> Result<(), RotateError> {
        let (log, max_files) = (path.to_owned(), self.config.max_files);
        let packs = self.busy.try_hold(&packing(path));
        let tidied = spawn_blocking(move || tidy(&log, max_files, packs.is_none()));
        tidied.await.unwrap_or_else(|e| Err(failed("tidy", path)(io::Error::other(e))))
    }
}

/// `<log>.<YYYYMMDD-HHMMSS>` in local time, or later than all existing names; on a collision one second
/// later.
fn target(log: &Path, now: DateTime) -> PathBuf {
    let names = dirs::beside(log, ".").unwrap_or_default();
    let name = log.file_name().unwrap_or_default().to_string_lossy();
    let mut at = retention::moment(&name, &names, now);
    loop {
        let target = with_suffix(log, &format!(".{}", at.strftime(retention::MOMENT)));
        if !target.exists() && !with_suffix(&target, ".gz").exists() {
            return target;
        }
        at = at.saturating_add(jiff::SignedDuration::from_secs(1));
    }
}

/// Renames the log back, so that the next round retries; unless the runtime has opened a new file after
/// all (its response was late), which must not be lost.
fn undo(path: &Path, target: &Path, error: CriError) -> Result<(), RotateError> {
    use rustix::fs::{CWD, renameat_with};
    match renameat_with(CWD, target, CWD, path, RenameFlags::NOREPLACE) {
        Err(rustix::io::Errno::EXIST) => {
            warn!(err = %error, path = %path.display(), "Runtime reopened the container log but returned an error");
            Ok(())
        }
        Err(undo) => {
            error!(err = %undo, path = %target.display(), "Failed to rename rotated log back");
            Err(RotateError::Reopen(error))
        }
        Ok(()) => Err(RotateError::Reopen(error)),
    }
}
