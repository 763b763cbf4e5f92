//! Log rotation: one task, a few workers, exact names (spec 03b §11).
//!
//! Each interval the log of every running container is looked at once; which run, and where they
//! log, is known from PLEG. Files are compressed as streams on the blocking pool.

use std::{
    fs::{self, File},
    io,
    os::unix::fs::{OpenOptionsExt, PermissionsExt},
    path::{Path, PathBuf},
    sync::Arc,
};

use flate2::{Compression, write::GzEncoder};
use futures::{StreamExt, stream};
use jiff::{Zoned, tz::TimeZone};
use rustix::fs::RenameFlags;
use tokio::time::{MissedTickBehavior, interval_at};
use tokio_util::sync::CancellationToken;
use tracing::{error, warn};

use super::{
    busy::Busy,
    dirs,
    manager::{LogsConfig, LogsDeps},
    rotated,
};
use crate::{cri::CriError, pod::ContainerId};

/// Why a log was not rotated.
#[derive(Debug, thiserror::Error)]
enum RotateError {
    #[error(transparent)]
    Runtime(#[from] CriError),
    #[error("{action} {}: {source}", path.display())]
    File { action: &'static str, path: PathBuf, source: io::Error },
    #[error("failed to reopen container log: {0}")]
    Reopen(#[source] CriError),
}

fn failed<'a>(action: &'static str, path: &'a Path) -> impl FnOnce(io::Error) -> RotateError + 'a {
    move |source| RotateError::File { action, path: path.to_owned(), source }
}

/// The log of a container that runs.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct RunningLog {
    /// Whose it is.
    pub container: ContainerId,
    /// Its file, as the runtime reports it.
    pub path: PathBuf,
}

/// Tells which containers run now, without asking the runtime.
pub type RunningLogs = Box<dyn Fn() -> Vec<RunningLog> + Send + Sync>;

/// Rotates the logs of running containers.
pub(super) struct Rotator {
    pub deps: Arc<LogsDeps>,
    pub config: Arc<LogsConfig>,
    pub busy: Busy,
    pub running: RunningLogs,
    /// In bytes.
    pub max: u64,
}

impl Rotator {
    /// Runs until cancelled.
    pub async fn run(self, cancel: CancellationToken) {
        let period = self.config.monitor_interval;
        let mut ticks = interval_at(tokio::time::Instant::now() + period, period);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            tokio::select! {
                biased;
                () = cancel.cancelled() => return,
                _ = ticks.tick() => {}
            }
            // Not cut short between rename and reopen: containers end the round instead.
            self.round(&cancel).await;
        }
    }

    /// Looks at every running container once.
    async fn round(&self, cancel: &CancellationToken) {
        let (running, max) = ((self.running)(), self.max);
        // One job for all: most logs need nothing, and a job each would wake a thread each.
        let looked = tokio::task::spawn_blocking(move || {
            let due = |log: RunningLog| match fs::metadata(&log.path) {
                Ok(meta) if meta.len() < max => None,
                size => Some((log, size.map(|meta| meta.len()))),
            };
            running.into_iter().filter_map(due).collect()
        });
        let due: Vec<(RunningLog, io::Result<u64>)> = looked.await.unwrap_or_default();
        stream::iter(due)
            .take_until(Box::pin(cancel.cancelled()))
            .for_each_concurrent(self.config.max_workers.max(1), |(log, size)| self.look_after(log, size))
            .await;
    }

    /// Rotates one log where that is due.
    async fn look_after(&self, log: RunningLog, size: io::Result<u64>) {
        let RunningLog { container: id, path } = log;
        // A log that is being removed needs no rotation.
        let Some(_held) = self.busy.try_hold(&path) else { return };
        let max = self.max;
        let size = match self.size(&id, &path, size).await {
            Ok(size) if size < max => return,
            Ok(size) => size,
            Err(error) => {
                error!(err = %error, containerID = %id, path = %path.display(), "Failed to stat container log");
                return;
            }
        };
        if let Err(error) = self.rotate(id.as_str(), &path).await {
            error!(err = %error, containerID = %id, path = %path.display(), currentSize = size, maxSize = max,
                "Failed to rotate log for container");
        }
    }

    /// A log that is not there is opened anew by the runtime first.
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
        let (log, max_files, now) = (path.to_owned(), self.config.max_files, self.deps.clock.now());
        let moved = tokio::task::spawn_blocking(move || {
            tidy(&log, max_files)?;
            let target = target(&log, now.to_zoned(TimeZone::system()));
            fs::rename(&log, &target).map_err(failed("rename", &log))?;
            Ok(target)
        });
        let target = moved.await.unwrap_or_else(|e| Err(failed("rotate", path)(io::Error::other(e))))?;
        match self.deps.cri.reopen_container_log(id).await {
            Ok(()) => Ok(()),
            Err(error) => undo(path, &target, error),
        }
    }
}

/// `<log>.<YYYYMMDD-HHMMSS>` in local time; a name that is taken moves on by a second.
fn target(log: &Path, mut at: Zoned) -> PathBuf {
    loop {
        let target = with_suffix(log, &at.strftime(".%Y%m%d-%H%M%S").to_string());
        if !target.exists() && !with_suffix(&target, ".gz").exists() {
            return target;
        }
        at = at.saturating_add(jiff::SignedDuration::from_secs(1));
    }
}

fn with_suffix(path: &Path, suffix: &str) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(suffix);
    PathBuf::from(name)
}

/// The name comes back, so that the next round tries again; unless the runtime has opened a
/// new file after all (its answer was late), which must not be lost.
fn undo(path: &Path, target: &Path, error: CriError) -> Result<(), RotateError> {
    use rustix::fs::{CWD, renameat_with};
    match renameat_with(CWD, target, CWD, path, RenameFlags::NOREPLACE) {
        Err(rustix::io::Errno::EXIST) => {
            warn!(err = %error, path = %path.display(), "The container log was reopened although that was reported as failed");
            Ok(())
        }
        Err(undo) => {
            error!(err = %undo, path = %target.display(), "Failed to rename rotated log back");
            Err(RotateError::Reopen(error))
        }
        Ok(()) => Err(RotateError::Reopen(error)),
    }
}

/// Makes room for one more rotated file.
fn tidy(log: &Path, max_files: usize) -> Result<(), RotateError> {
    let names = dirs::beside(log, ".").map_err(failed("list", log))?;
    let plan = rotated::plan(names, max_files);
    for name in plan.remove {
        let path = log.with_file_name(name);
        dirs::remove(&path).map_err(failed("remove", &path))?;
    }
    for name in plan.compress {
        let path = log.with_file_name(name);
        compress(&path).map_err(failed("compress", &path))?;
    }
    Ok(())
}

/// `<f>` → `<f>.tmp` → `<f>.gz`, then `<f>` goes; the mode stays.
fn compress(path: &Path) -> io::Result<()> {
    let (tmp, packed) = (with_suffix(path, ".tmp"), with_suffix(path, ".gz"));
    // A container may have its hands on the directory: links are not followed.
    let no_links = rustix::fs::OFlags::NOFOLLOW.bits().cast_signed();
    let mut source = File::options().read(true).custom_flags(no_links).open(path)?;
    let mode = source.metadata()?.permissions().mode();
    let written = (|| {
        let target = File::options().write(true).create(true).truncate(true).custom_flags(no_links).open(&tmp)?;
        target.set_permissions(fs::Permissions::from_mode(mode))?;
        let mut encoder = GzEncoder::new(io::BufWriter::with_capacity(64 * 1024, target), Compression::default());
        io::copy(&mut source, &mut encoder)?;
        encoder.finish()?.into_inner().map_err(io::IntoInnerError::into_error)?;
        fs::rename(&tmp, &packed)
    })();
    if written.is_err() {
        // The error that is reported is the first one; the next round removes leftovers too.
        let _ = fs::remove_file(&tmp);
    }
    written?;
    dirs::remove(path)
}
