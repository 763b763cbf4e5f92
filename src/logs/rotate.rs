//! Log rotation: one task, a few workers, exact names (spec 03b §11).
//!
//! Each interval every running container is looked at once. Its log path never changes, so it is
//! asked for once. Files are compressed as streams on the blocking pool.

use std::{
    collections::HashMap,
    fs::{self, File},
    io,
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
    sync::Arc,
};

use flate2::{Compression, write::GzEncoder};
use futures::{StreamExt, stream};
use jiff::{Zoned, tz::TimeZone};
use rustix::fs::RenameFlags;
use tokio::time::{MissedTickBehavior, interval_at};
use tokio_util::sync::CancellationToken;
use tracing::{debug, error, warn};

use super::{
    busy::Busy,
    dirs,
    manager::{LogsConfig, LogsDeps},
    rotated,
};
use crate::{cri::CriError, proto::cri};

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

/// Rotates the logs of running containers.
pub(super) struct Rotator {
    pub deps: Arc<LogsDeps>,
    pub config: Arc<LogsConfig>,
    pub busy: Busy,
}

impl Rotator {
    /// Runs until cancelled.
    pub async fn run(self, cancel: CancellationToken) {
        let period = self.config.monitor_interval;
        let mut ticks = interval_at(tokio::time::Instant::now() + period, period);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut paths = HashMap::new();
        loop {
            tokio::select! {
                biased;
                () = cancel.cancelled() => return,
                _ = ticks.tick() => {}
            }
            // Not cut short between rename and reopen: containers end the round instead.
            self.round(&mut paths, &cancel).await;
        }
    }

    /// Looks at every running container once.
    async fn round(&self, paths: &mut HashMap<String, PathBuf>, cancel: &CancellationToken) {
        let running = cri::ContainerStateValue { state: cri::ContainerState::ContainerRunning as i32 };
        let filter = cri::ContainerFilter { state: Some(running), ..Default::default() };
        let ids: Vec<String> = match self.deps.cri.list_containers(Some(filter)).await {
            Ok(listed) => listed.into_iter().map(|c| c.id).collect(),
            Err(error) => {
                warn!(err = %error, "Failed to list containers for log rotation");
                return;
            }
        };
        paths.retain(|id, _| ids.contains(id));
        let mut work = stream::iter(ids)
            .take_until(Box::pin(cancel.cancelled()))
            .map(|id| {
                let known = paths.get(&id).cloned();
                async move { (self.look_after(&id, known).await, id) }
            })
            .buffer_unordered(self.config.max_workers.max(1));
        let mut found = Vec::new();
        while let Some((path, id)) = work.next().await {
            found.extend(path.map(|path| (id, path)));
        }
        drop(work);
        paths.extend(found);
    }

    /// Rotates one log where that is due; returns its path.
    async fn look_after(&self, id: &str, known: Option<PathBuf>) -> Option<PathBuf> {
        let path = match known {
            Some(path) => path,
            None => match self.deps.cri.container_status(id).await {
                Ok(status) if !status.log_path.is_empty() => PathBuf::from(status.log_path),
                Ok(_) => return None,
                Err(error) => {
                    debug!(containerID = id, err = %error, "Failed to get container status");
                    return None;
                }
            },
        };
        // A log that is being removed needs no rotation.
        let Some(_held) = self.busy.try_hold(&path) else { return Some(path) };
        let max = self.config.max_size?;
        let size = match self.size(id, &path).await {
            Ok(size) if size < max => return Some(path),
            Ok(size) => size,
            Err(error) => {
                error!(err = %error, containerID = id, path = %path.display(), "Failed to stat container log");
                return Some(path);
            }
        };
        if let Err(error) = self.rotate(id, &path).await {
            error!(err = %error, containerID = id, path = %path.display(), currentSize = size, maxSize = max,
                "Failed to rotate log for container");
        }
        Some(path)
    }

    /// A log that is not there is opened anew by the runtime first.
    async fn size(&self, id: &str, path: &Path) -> Result<u64, RotateError> {
        match tokio::fs::metadata(path).await {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                self.deps.cri.reopen_container_log(id).await.map_err(RotateError::Reopen)?;
                tokio::fs::metadata(path).await.map(|m| m.len()).map_err(failed("stat", path))
            }
            other => other.map(|m| m.len()).map_err(failed("stat", path)),
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
    let mut source = File::open(path)?;
    let mode = source.metadata()?.permissions().mode();
    let written = (|| {
        let target = File::create(&tmp)?;
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
