//! Process settings: oom_score_adj, limit of open files, and lock file (spec 01 §8).

use std::{
    fs::{self, File, OpenOptions},
    os::unix::fs::OpenOptionsExt,
    path::Path,
    time::Duration,
};

use nix::{
    fcntl::{Flock, FlockArg},
    sys::{
        inotify::{AddWatchFlags, InitFlags, Inotify},
        resource::{Resource, setrlimit},
    },
};
use tracing::{info, warn};

use berth_config::LoadedConfig;

/// Sets oom_score_adj (retried once, without delaying the start) and RLIMIT_NOFILE; logs what the kernel refuses.
/// Requires a tokio runtime.
pub fn tune(loaded: &LoadedConfig) {
    let score = loaded.config.oom_score_adj;
    if set_oom_score(score).is_err() {
        tokio::spawn(async move {
            tokio::time::sleep(Duration::from_millis(100)).await;
            if let Err(error) = set_oom_score(score) {
                warn!(err = %error, oomScoreAdj = score, "Failed to apply oom_score_adj");
            }
        });
    }
    let files = u64::try_from(loaded.config.max_open_files).unwrap_or_default();
    if let Err(error) = setrlimit(Resource::RLIMIT_NOFILE, files, files) {
        warn!(err = %error, maxOpenFiles = files, "Failed to set rlimit on max file handles");
    }
}

fn set_oom_score(score: i32) -> std::io::Result<()> {
    fs::write("/proc/self/oom_score_adj", score.to_string())
}

/// Locks the lock file if configured, blocking until it is free; the lock lives as long as the returned value.
///
/// # Errors
/// The file cannot be opened or locked.
pub async fn lock_file(loaded: &LoadedConfig) -> Result<Option<Flock<File>>, String> {
    let path = loaded.flags.lock_file.clone();
    if path.is_empty() {
        if loaded.flags.exit_on_lock_contention {
            return Err("cannot exit on lock file contention: no lock file specified".to_owned());
        }
        return Ok(None);
    }
    info!(path, "Acquiring file lock");
    let wanted = path.clone();
    let locking = tokio::task::spawn_blocking(move || lock(Path::new(&wanted)));
    let lock = locking
        .await
        .map_err(|error| error.to_string())?
        .map_err(|error| format!("unable to acquire file lock on \"{path}\": {error}"))?;
    if loaded.flags.exit_on_lock_contention {
        exit_on_contention(&path).map_err(|error| format!("unable to watch lockfile: {error}"))?;
    }
    Ok(Some(lock))
}

fn lock(path: &Path) -> Result<Flock<File>, std::io::Error> {
    let file = OpenOptions::new().create(true).truncate(false).read(true).write(true).mode(0o600).open(path)?;
    Flock::lock(file, FlockArg::LockExclusive).map_err(|(_, errno)| errno.into())
}

/// Exits with 0 when another process opens or deletes the lock file, which then takes over.
fn exit_on_contention(path: &str) -> nix::Result<()> {
    let inotify = Inotify::init(InitFlags::IN_CLOEXEC)?;
    inotify.add_watch(path, AddWatchFlags::IN_OPEN | AddWatchFlags::IN_DELETE_SELF)?;
    std::thread::Builder::new()
        .name("lock-file".to_owned())
        .spawn(move || {
            let seen = inotify.read_events();
            info!(found = seen.is_ok(), "Detected lock file contention, exiting");
            std::process::exit(0);
        })
        .map(drop)
        .map_err(|_| nix::errno::Errno::EAGAIN)
}
