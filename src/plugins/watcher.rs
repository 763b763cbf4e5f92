//! Watcher of the plugin registration directory. Spec 06c §2, 07 §12.1.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    fs::DirBuilder,
    io,
    os::unix::fs::DirBuilderExt,
    path::PathBuf,
    sync::Arc,
    time::Duration,
};

use futures::StreamExt;
use inotify::{Event, EventMask, EventStream, Inotify, WatchDescriptor};
use std::ffi::OsString;
use tokio::{
    sync::watch,
    task::spawn_blocking,
    time::{sleep, timeout},
};
use tokio_util::{sync::CancellationToken, task::TaskTracker};
use tracing::{debug, warn};

use super::{
    directory_walk::{MOST, SocketIdentity, WalkResult, walk},
    registration_task::Socket,
};
use berth_metrics::PluginMetrics;
use berth_ports::PluginHandler;

/// Period of walks without events.
const RESYNC: Duration = Duration::from_secs(30);
/// Minimum delay between two walks, however many events arrive.
const REST: Duration = Duration::from_millis(20);
/// Timeout of a walk.
const WALK_LIMIT: Duration = Duration::from_secs(10);

/// Handlers by plugin type.
pub type Handlers = Arc<BTreeMap<&'static str, Arc<dyn PluginHandler>>>;

/// Dependencies of the watcher.
pub struct WatcherDeps {
    /// `<root>/plugins_registry`.
    pub directory: PathBuf,
    /// Handlers by plugin type.
    pub handlers: Handlers,
    /// Metrics of the plugin manager.
    pub metrics: PluginMetrics,
    /// Tracks the tasks of sockets.
    pub tasks: TaskTracker,
}

/// Task of a socket, and the socket's identity at the last walk.
struct KnownSocket {
    identity: SocketIdentity,
    wanted: watch::Sender<Option<u64>>,
}

/// Watches the directory and runs a task per socket.
pub struct Watcher {
    deps: WatcherDeps,
    events: Option<EventStream<Vec<u8>>>,
    directories: HashMap<WatchDescriptor, PathBuf>,
    known: BTreeMap<PathBuf, KnownSocket>,
    /// Sockets created since the last walk.
    came: BTreeSet<PathBuf>,
    /// Number of the last socket.
    last: u64,
    is_cut: bool,
}

impl Watcher {
    /// Creates a watcher without known sockets.
    pub fn new(deps: WatcherDeps) -> Self {
        Self {
            deps,
            events: None,
            directories: HashMap::new(),
            known: BTreeMap::new(),
            came: BTreeSet::new(),
            last: 0,
            is_cut: false,
        }
    }

    /// Runs until stopped.
    pub async fn run(mut self, stop: CancellationToken) {
        let _stopped = stop.run_until_cancelled(self.live()).await;
    }

    async fn live(&mut self) {
        loop {
            match self.walk_directory().await {
                Ok(walked) => self.apply_walk(walked),
                Err(error) => {
                    warn!(path = %self.deps.directory.display(), err = %error, "Failed to walk plugin directory");
                }
            }
            sleep(REST).await;
            // The next walk finds missed changes.
            let _missed = timeout(RESYNC, self.moved()).await;
        }
    }

    async fn walk_directory(&mut self) -> io::Result<WalkResult> {
        if self.events.is_none() {
            self.events = Some(Inotify::init()?.into_event_stream(vec![0; 4096])?);
        }
        let Some(events) = &self.events else { return Err(io::ErrorKind::NotConnected.into()) };
        let (watches, directory) = (events.watches(), self.deps.directory.clone());
        let walking = spawn_blocking(move || {
            DirBuilder::new().recursive(true).mode(0o750).create(&directory)?;
            Ok(walk(&directory, watches))
        });
        timeout(WALK_LIMIT, walking).await.map_err(|_| io::ErrorKind::TimedOut)?.map_err(io::Error::other)?
    }

    fn apply_walk(&mut self, walked: WalkResult) {
        if walked.is_cut && !self.is_cut {
            warn!(path = %self.deps.directory.display(), limit = MOST, "Too many plugin sockets, ignoring the rest");
        }
        self.is_cut = walked.is_cut;
        self.directories = walked.directories.into_iter().map(|(path, wd)| (wd, path)).collect();
        let came = std::mem::take(&mut self.came);
        for (path, known) in &self.known {
            if !walked.sockets.contains_key(path) {
                known.wanted.send_if_modified(|wanted| wanted.take().is_some());
            }
        }
        // A task ends once nothing is left to do: until then a new socket of that path waits for it.
        self.known.retain(|_, known| !known.wanted.is_closed());
        for (path, identity) in walked.sockets {
            self.found(path, identity, &came);
        }
    }

    fn found(&mut self, path: PathBuf, identity: SocketIdentity, came: &BTreeSet<PathBuf>) {
        let is_another = match self.known.get(&path) {
            None => true,
            Some(known) => {
                known.identity != identity
                    || known.wanted.borrow().is_none()
                    || (!identity.is_certain() && came.contains(&path))
            }
        };
        if !is_another {
            return;
        }
        self.last = self.last.wrapping_add(1);
        if let Some(known) = self.known.get_mut(&path) {
            known.identity = identity;
            known.wanted.send_replace(Some(self.last));
            return;
        }
        let (wanted, follow) = watch::channel(Some(self.last));
        let socket =
            Socket { path: path.clone(), handlers: self.deps.handlers.clone(), metrics: self.deps.metrics.clone() };
        self.deps.tasks.spawn(socket.run(follow));
        self.known.insert(path, KnownSocket { identity, wanted });
    }

    /// Returns on a relevant event. Cancel-safe.
    async fn moved(&mut self) {
        loop {
            let Some(events) = &mut self.events else { return std::future::pending().await };
            match events.next().await {
                Some(Ok(event)) => {
                    if self.counts(event) {
                        return;
                    }
                }
                Some(Err(error)) => {
                    debug!(err = %error, "Watch of plugin directories failed, restarting it");
                    self.events = None;
                }
                None => self.events = None,
            }
        }
    }

    fn counts(&mut self, event: Event<OsString>) -> bool {
        let (Some(directory), Some(name)) = (self.directories.get(&event.wd), event.name) else { return true };
        if name.as_encoded_bytes().starts_with(b".") {
            return false;
        }
        if event.mask.intersects(EventMask::CREATE | EventMask::MOVED_TO) {
            self.came.insert(directory.join(name));
        }
        true
    }
}
