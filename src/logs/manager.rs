//! Container log manager: links, removal, rotation, termination messages.
//!
//! Implements the traits of `berth_ports` for logs and starts the rotation task.

use std::{
    collections::HashSet,
    io,
    path::{Path, PathBuf},
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use async_trait::async_trait;
use tokio::{
    sync::mpsc,
    task::{JoinHandle, spawn_blocking},
};
use tokio_util::sync::CancellationToken;
use tracing::{debug, error, warn};

use super::{
    dirs, links,
    log_locks::LogLocks,
    log_reader::LogReader,
    log_rotation::{Rotator, RunningLog, RunningLogs, packing},
    retention, termination,
};
use berth_cri::RuntimeService;
use berth_ports::{Clock, ContainerExit, ContainerLogFile, ContainerLogs, RemovalPredicate, TerminationMessages};
use berth_sys::tree_removal::remove_tree;
use berth_types::{ContainerId, PodRef};

/// Paths and limits of the log manager.
#[derive(Clone, Debug, PartialEq)]
pub struct LogsConfig {
    /// `podLogsDir`.
    pub pod_logs_dir: PathBuf,
    /// `/var/log/containers`.
    pub links_dir: PathBuf,
    /// `containerLogMaxSize` in bytes; `None` (negative) disables rotation. 0 would rotate each file in
    /// each interval and is rejected: rotation stays disabled.
    pub max_size: Option<u64>,
    /// `containerLogMaxFiles`, above 1.
    pub max_files: usize,
    /// `containerLogMaxWorkers`, at least 1.
    pub max_workers: usize,
    /// `containerLogMonitorInterval`, at least 3 s.
    pub monitor_interval: Duration,
}

impl Default for LogsConfig {
    fn default() -> Self {
        Self {
            pod_logs_dir: "/var/log/pods".into(),
            links_dir: "/var/log/containers".into(),
            max_size: Some(10 << 20),
            max_files: 5,
            max_workers: 1,
            monitor_interval: Duration::from_secs(10),
        }
    }
}

/// Dependencies of the log manager.
pub struct LogsDeps {
    /// CRI runtime service.
    pub cri: Arc<dyn RuntimeService>,
    /// Wall clock, for the names of rotated files.
    pub clock: Arc<dyn Clock>,
}

/// Log manager; see the module documentation.
pub struct LogManager {
    deps: Arc<LogsDeps>,
    config: Arc<LogsConfig>,
    busy: LogLocks,
    /// Notifies the rotation task of a started container.
    started: mpsc::Sender<RunningLog>,
    /// Receiver of started containers, until the rotation task takes it.
    started_receiver: Mutex<Option<mpsc::Receiver<RunningLog>>>,
}

/// Capacity for started containers; the next round finds the others.
const STARTED: usize = 256;

impl LogManager {
    /// Creates the manager without accessing any file.
    pub fn new(deps: LogsDeps, config: LogsConfig) -> Arc<Self> {
        let (started, started_receiver) = mpsc::channel(STARTED);
        let (deps, config, started_receiver) = (Arc::new(deps), Arc::new(config), Mutex::new(Some(started_receiver)));
        Arc::new(Self { deps, config, busy: LogLocks::default(), started, started_receiver })
    }

    /// Creates `podLogsDir` (0750) and the directory of links (0755).
    ///
    /// # Errors
    /// One of them cannot be created.
    pub async fn create_directories(&self) -> io::Result<()> {
        let config = self.config.clone();
        let made = spawn_blocking(move || {
            dirs::create(&config.pod_logs_dir, 0o750)?;
            dirs::create(&config.links_dir, 0o755)
        });
        made.await.map_err(io::Error::other)?
    }

    /// Starts rotation; `None` if it is disabled or already running. The task ends with `cancel`.
    pub fn start_rotation(&self, running: RunningLogs, cancel: CancellationToken) -> Option<JoinHandle<()>> {
        let max = self.config.max_size.filter(|size| *size > 0)?;
        let (deps, config) = (self.deps.clone(), self.config.clone());
        let started = self.started_receiver.lock().unwrap_or_else(PoisonError::into_inner).take()?;
        let rotator = Rotator { deps, config, busy: self.busy.clone(), running, started, max };
        Some(tokio::spawn(rotator.run(cancel)))
    }

    /// Creates a log reader.
    pub fn reader(&self) -> LogReader {
        LogReader::new(self.deps.cri.clone(), &self.config.pod_logs_dir)
    }

    /// A log and its rotated files, oldest first: input of disk accounting.
    pub async fn files(&self, log: &Path) -> Vec<PathBuf> {
        let log = log.to_owned();
        let found = spawn_blocking(move || {
            let names = retention::oldest_first(dirs::beside(&log, ".").unwrap_or_default());
            let mut files: Vec<PathBuf> = names.into_iter().map(|name| log.with_file_name(name)).collect();
            files.extend(log.exists().then_some(log));
            files
        });
        found.await.unwrap_or_default()
    }

    fn link_of(&self, file: &ContainerLogFile) -> Option<PathBuf> {
        let name = links::name(&file.pod, &file.container, &file.id);
        // Names were validated before; a link must not leave its directory in any case.
        (!name.contains('/')).then(|| self.config.links_dir.join(name))
    }
}

#[async_trait]
impl ContainerLogs for LogManager {
    async fn link(&self, file: ContainerLogFile) {
        let _ = self.started.try_send(RunningLog { container: file.id.clone(), path: file.path.clone() }); // see STARTED
        let Some(link) = self.link_of(&file) else { return };
        let (shown, log) = (link.clone(), file.path.clone());
        let made =
            spawn_blocking(move || links::link(&file.path, &link)).await.unwrap_or_else(|e| Err(io::Error::other(e)));
        if let Err(error) = made {
            error!(err = %error, path = %log.display(), link = %shown.display(), "Failed to create legacy symbolic link");
        }
    }

    async fn remove(&self, file: ContainerLogFile) -> Result<(), String> {
        let locks = [self.busy.hold(&file.path).await, self.busy.hold(&packing(&file.path)).await];
        let link = self.link_of(&file);
        let removed = spawn_blocking(move || {
            let _locks = locks;
            if !file.path.as_os_str().is_empty() {
                dirs::remove_log(&file.path).map_err(|e| e.to_string())?;
            }
            let Some(link) = link else { return Ok(()) };
            dirs::remove(&link)
                .map_err(|e| format!("failed to remove container {:?} log symlink {}: {e}", file.id, link.display()))
        });
        removed.await.unwrap_or_else(|e| Err(e.to_string()))
    }

    async fn remove_directory(&self, pod: PodRef) -> Result<(), String> {
        let root = self.config.pod_logs_dir.clone();
        let removed = spawn_blocking(move || {
            dirs::remove_of_pod(&root, &pod).map_err(|e| format!("failed to remove the logs of pod {}: {e}", pod.uid))
        });
        removed.await.unwrap_or_else(|e| Err(e.to_string()))
    }

    async fn remove_directories(&self, may_go: RemovalPredicate) {
        let root = self.config.pod_logs_dir.clone();
        let done = spawn_blocking(move || {
            for (_, path) in dirs::pod_directories(&root)?.into_iter().filter(|(uid, _)| may_go(uid)) {
                match remove_tree(&path) {
                    Err(error) => error!(err = %error, path = %path.display(), "Failed to remove pod logs directory"),
                    Ok(()) => debug!(path = %path.display(), "Removed pod logs directory"),
                }
            }
            io::Result::Ok(())
        });
        report(done.await, "Failed to read pod logs directories");
    }

    async fn remove_dangling_links(&self, alive: HashSet<ContainerId>) {
        let root = self.config.links_dir.clone();
        let done = spawn_blocking(move || {
            for path in links::dangling(&root, &alive)? {
                if let Err(error) = dirs::remove(&path) {
                    error!(err = %error, path = %path.display(), "Failed to remove legacy container log dead symlink");
                }
            }
            io::Result::Ok(())
        });
        report(done.await, "Failed to read container log links");
    }
}

fn report(done: Result<io::Result<()>, tokio::task::JoinError>, what: &'static str) {
    if let Err(error) = done.unwrap_or_else(|e| Err(io::Error::other(e))) {
        warn!(err = %error, "{what}");
    }
}

#[async_trait]
impl TerminationMessages for LogManager {
    async fn message(&self, exit: ContainerExit) -> String {
        let (fallback, root) = (exit.message.clone(), self.config.pod_logs_dir.clone());
        spawn_blocking(move || termination::message(&exit, &root)).await.unwrap_or(fallback)
    }
}
