//! Follows the files that say who we are and whom we believe (spec 10 §8.3, 01 §10.2).
//!
//! Directories are watched: certificates are replaced by renaming, and mounted ones by turning a
//! link. What notifications miss is found every five minutes, or when somebody says so.

use std::{
    collections::BTreeSet,
    ffi::OsString,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use futures::StreamExt;
use inotify::{Event, EventMask, EventStream, Inotify, WatchMask};
use tokio::{
    sync::{Notify, watch},
    time::{MissedTickBehavior, interval, sleep, timeout},
};
use tokio_util::sync::CancellationToken;
use tracing::{debug, error, info};

use super::{
    identity::{CertifiedPair, Identity},
    kubeconfig::Source,
    trust::Trust,
};

/// How often files are read although nothing was noticed.
const PERIOD: Duration = Duration::from_secs(300);
/// How long after a change the others are waited for that belong to it.
const SETTLE: Duration = Duration::from_millis(100);
/// Longest read; a file system that hangs must not stop the rest.
const PATIENCE: Duration = Duration::from_secs(10);

/// What is followed.
pub struct Follower {
    /// Client certificate and key, where they are ours to read.
    pub pair: Option<(Source, Source)>,
    /// The authorities.
    pub authorities: Option<Source>,
    /// Where the pair goes.
    pub identity: Identity,
    /// Moves when somebody else is set there.
    pub changes: watch::Receiver<u64>,
    /// Where the authorities go.
    pub trust: Arc<Trust>,
    /// Moves when connections are to be made anew.
    pub epoch: watch::Sender<u64>,
    /// Somebody says that files have changed.
    pub reload: Arc<Notify>,
    /// The authorities that are in use.
    pub believed: Vec<u8>,
}

impl Follower {
    /// Follows until stopped.
    pub async fn run(mut self, stop: CancellationToken) {
        let mut watch = Watch::new(self.files());
        let mut ticks = interval(PERIOD);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut complaint = None;
        loop {
            tokio::select! {
                biased;
                () = stop.cancelled() => return,
                Ok(()) = self.changes.changed() => {
                    info!("Certificate rotation detected, connections to the API server are made anew");
                    self.epoch.send_modify(|epoch| *epoch += 1);
                    continue;
                }
                () = self.reload.notified() => {}
                _ = ticks.tick() => {}
                () = watch.moved() => sleep(SETTLE).await,
            }
            watch.arm();
            let told = self.read().await.err();
            if let Some(cause) = told.as_ref().filter(|_| told != complaint) {
                error!(err = %cause, "Cannot load new TLS files, the old ones stay in use");
            }
            complaint = told;
        }
    }

    fn files(&self) -> Vec<PathBuf> {
        let pair = self.pair.iter().flat_map(|(certificate, key)| [certificate, key]);
        pair.chain(&self.authorities).filter_map(|source| source.file().map(Path::to_owned)).collect()
    }

    /// Reads what lies in files and uses what is new and good.
    async fn read(&mut self) -> Result<(), String> {
        if self.files().is_empty() {
            return Ok(());
        }
        let (pair, authorities) = (self.pair.clone(), self.authorities.clone());
        let reading = tokio::task::spawn_blocking(move || {
            let text = |source: &Source| source.read().map_err(|e| e.to_string());
            let pair = pair.map(|(certificate, key)| Ok::<_, String>((text(&certificate)?, text(&key)?)));
            (pair, authorities.map(|source| text(&source)))
        });
        let late = |_| format!("the files cannot be read within {PATIENCE:?}");
        let (pair, authorities) = timeout(PATIENCE, reading).await.map_err(late)?.map_err(|e| e.to_string())?;
        let pair = pair.map_or(Ok(()), |read| self.show(read));
        let authorities = authorities.map_or(Ok(()), |read| self.believe(read));
        pair.and(authorities)
    }

    fn show(&self, read: Result<(Vec<u8>, Vec<u8>), String>) -> Result<(), String> {
        let (certificate, key) = read?;
        let pair = CertifiedPair::from_pem(&certificate, &key).map_err(|e| format!("client certificate: {e}"))?;
        self.identity.set(Some(pair));
        Ok(())
    }

    fn believe(&mut self, read: Result<Vec<u8>, String>) -> Result<(), String> {
        let bundle = read?;
        if bundle == self.believed {
            return Ok(());
        }
        self.trust.replace(&bundle)?;
        self.believed = bundle;
        info!("Loaded new authorities of the API server");
        self.epoch.send_modify(|epoch| *epoch += 1);
        Ok(())
    }
}

/// Notices that one of the files may have changed.
struct Watch {
    events: Option<EventStream<Vec<u8>>>,
    directories: BTreeSet<PathBuf>,
    names: BTreeSet<OsString>,
}

impl Watch {
    /// Begins; what cannot be watched is tried again with [`Watch::arm`].
    fn new(files: Vec<PathBuf>) -> Self {
        // What a link leads to may be replaced as well as the link.
        let real = files.iter().filter_map(|file| file.canonicalize().ok());
        let all: Vec<PathBuf> = real.chain(files.iter().cloned()).collect();
        let parent = |file: &PathBuf| match file.parent() {
            Some(parent) if !parent.as_os_str().is_empty() => parent.to_owned(),
            _ => PathBuf::from("."),
        };
        let mut watch = Self {
            events: None,
            directories: all.iter().map(parent).collect(),
            names: all.iter().filter_map(|file| file.file_name()).map(OsString::from).collect(),
        };
        watch.arm();
        watch
    }

    /// Watches what exists now: a directory may have come, or have been replaced.
    fn arm(&mut self) {
        if self.directories.is_empty() {
            return;
        }
        if self.events.is_none() {
            let made = Inotify::init().and_then(|inotify| inotify.into_event_stream(vec![0; 4096]));
            self.events = made.map_err(|error| debug!(err = %error, "No file notifications")).ok();
        }
        let Some(events) = &self.events else { return };
        let mask = WatchMask::CREATE
            | WatchMask::CLOSE_WRITE
            | WatchMask::MOVED_TO
            | WatchMask::MOVED_FROM
            | WatchMask::DELETE
            | WatchMask::ONLYDIR;
        let mut watches = events.watches();
        for directory in &self.directories {
            if let Err(error) = watches.add(directory, mask) {
                debug!(path = %directory.display(), err = %error, "Cannot watch a directory");
            }
        }
    }

    /// Returns when something happened to one of the names. Safe to drop while waiting.
    async fn moved(&mut self) {
        loop {
            let Some(events) = &mut self.events else { return std::future::pending().await };
            match events.next().await {
                Some(Ok(event)) if self.counts(&event) => return,
                Some(Ok(_)) => {}
                Some(Err(_)) | None => self.events = None, // made anew by the next `arm`
            }
        }
    }

    fn counts(&self, event: &Event<OsString>) -> bool {
        let lost = EventMask::Q_OVERFLOW | EventMask::IGNORED | EventMask::UNMOUNT;
        event.mask.intersects(lost)
            || event.name.as_ref().is_some_and(|name| {
                self.names.contains(name) || name.to_string_lossy().starts_with("..") // a mounted volume turns
            })
    }
}
