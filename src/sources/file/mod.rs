//! File source: static pod manifests in a directory, or a single manifest file.
//!
//!   list timer ─┐
//!   inotify ────┼─► read (blocking pool) ─► known files ─► full set ─► mux
//!   retry timer ┘
//!
//! One task owns the state of every file. All file access runs on the blocking pool: a file system that
//! hangs blocks this source only. A set is sent when it differs from the last one, and the first one
//! always. Implements spec 02a §1.6.

mod directory_watcher;
mod manifest_reader;

use std::{
    collections::{BTreeMap, BTreeSet},
    path::PathBuf,
    sync::Arc,
    time::Duration,
};

use futures::FutureExt;
use tokio::time::{Instant, MissedTickBehavior, interval, sleep_until};
use tokio_util::sync::CancellationToken;
use tracing::{error, info, warn};

use super::{mux::SourceSender, references::ReferenceRule};
use berth_metrics::SourceMetrics;
use berth_sys::backoff::Backoff;
use berth_types::Pod;
use directory_watcher::{DirectoryChange, Watch};
use manifest_reader::{Files, ManifestReader, ReadError, ReadResult, Rejection};

/// Time after which a hanging read is logged.
const SLOW: Duration = Duration::from_secs(30);
/// Delays before the watch is retried.
const RETRY: Backoff = Backoff::new(Duration::from_secs(1), Duration::from_secs(20));

/// Settings of the file source.
#[derive(Clone, Debug)]
pub struct FileConfig {
    /// Path of the directory or file.
    pub path: PathBuf,
    /// Period of lists.
    pub period: Duration,
    /// Node name: suffix of pod names, `spec.nodeName`, and part of generated UIDs.
    pub node_name: Arc<str>,
    /// Rule for references to API objects.
    pub references: ReferenceRule,
}

/// State of the source's task.
pub struct FileSource {
    reader: ManifestReader,
    period: Duration,
    sender: SourceSender,
    metrics: SourceMetrics,
    files: Files,
    /// Last logged error of each rejected file, to log it once.
    complaints: BTreeMap<PathBuf, String>,
    /// Last logged error of the path itself, to log it once.
    trouble: Option<String>,
    sent: Option<Vec<Arc<Pod>>>,
    watch: Option<Watch>,
    retry_at: Instant,
    backoff: Backoff,
}

impl FileSource {
    /// Creates a source that has not read anything yet.
    pub fn new(config: FileConfig, sender: SourceSender, metrics: SourceMetrics) -> Self {
        Self {
            reader: ManifestReader::new(&config),
            period: config.period,
            sender,
            metrics,
            files: Files::default(),
            complaints: BTreeMap::new(),
            trouble: None,
            sent: None,
            watch: None,
            retry_at: Instant::now(),
            backoff: RETRY,
        }
    }

    /// Runs until cancelled.
    pub async fn run(mut self, stop: CancellationToken) {
        tokio::select! {
            biased;
            () = stop.cancelled() => {}
            () = self.serve() => {}
        }
    }

    async fn serve(&mut self) {
        info!(path = %self.reader.path().display(), "Watching path for pods");
        // Watch before the first list, so that no change in between is missed.
        self.open_watch().await;
        let mut lists = interval(self.period.max(Duration::from_millis(1)));
        lists.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            tokio::select! {
                _ = lists.tick() => self.list().await,
                noticed = next(&mut self.watch), if self.watch.is_some() => self.noticed(noticed).await,
                () = sleep_until(self.retry_at), if self.watch.is_none() => {
                    self.open_watch().await;
                    self.list().await;
                }
            }
        }
    }

    /// Opens the watch, or schedules a retry.
    async fn open_watch(&mut self) {
        let reader = self.reader.clone();
        let prepared = blocking(move || reader.watch()).await.flatten();
        match prepared.map(|prepared| prepared.and_then(Watch::start)) {
            Some(Ok(watch)) => {
                self.watch = Some(watch);
                self.backoff.reset();
            }
            None => self.retry_at = Instant::now() + RETRY.peek(), // the path does not exist: the list logs that
            Some(Err(e)) => {
                warn!(path = %self.reader.path().display(), err = %e, "Unable to read config path");
                self.retry_at = Instant::now() + self.backoff.next_delay();
            }
        }
    }

    async fn list(&mut self) {
        let (reader, known) = (self.reader.clone(), self.files.clone());
        match blocking(move || reader.list(&known)).await {
            Some(Ok(result)) => {
                self.trouble = None;
                if self.watch.as_ref().is_some_and(|watch| Some(watch.directory()) != result.directory) {
                    self.lose_watch();
                }
                if result.missing && self.sent.as_ref().is_none_or(|sent| !sent.is_empty()) {
                    warn!(path = %self.reader.path().display(), "Path does not exist, ignoring");
                }
                let bad: BTreeSet<&PathBuf> = result
                    .rejected
                    .iter()
                    .map(|r| &r.path)
                    .chain(result.skipped.iter().map(|(path, _)| path))
                    .collect();
                self.complaints.retain(|path, _| bad.contains(path));
                self.take(result).await;
            }
            Some(Err(e)) => self.failed(&e),
            None => {}
        }
    }

    fn failed(&mut self, e: &ReadError) {
        let text = e.to_string();
        if self.trouble.as_ref() != Some(&text) {
            error!(path = %self.reader.path().display(), err = %text, "Unable to read config path");
            self.metrics.failures.with_label_values(&["file"]).inc();
            self.trouble = Some(text);
        }
    }

    /// Processes an event of the watch, and all others that are pending.
    async fn noticed(&mut self, first: DirectoryChange) {
        let mut all = vec![first];
        while let Some(Some(more)) = self.watch.as_mut().map(|watch| watch.next().now_or_never()) {
            let ends = matches!(more, DirectoryChange::Lost);
            all.push(more);
            if ends {
                break;
            }
        }
        if all.iter().any(|noticed| matches!(noticed, DirectoryChange::Lost)) {
            self.lose_watch();
            self.open_watch().await;
            return self.list().await;
        }
        if all.iter().any(|noticed| matches!(noticed, DirectoryChange::Everything)) {
            return self.list().await;
        }
        let (reader, known) = (self.reader.clone(), self.files.clone());
        if let Some(result) = blocking(move || reader.changed(known, all)).await {
            self.take(result).await;
        }
    }

    fn lose_watch(&mut self) {
        self.watch = None;
        self.retry_at = Instant::now();
    }

    /// Stores the result of a read, logs new errors, and sends the set if it changed.
    async fn take(&mut self, result: ReadResult) {
        for Rejection { path, reason, text } in result.rejected {
            if self.complaints.get(&path) == Some(&text) {
                continue;
            }
            error!(path = %path.display(), err = %text, "Could not process manifest file");
            self.metrics.rejected.with_label_values(&["file", reason]).inc();
            self.complaints.insert(path, text);
        }
        for (path, why) in result.skipped {
            if self.complaints.get(&path).is_none_or(|last| last != why) {
                info!(path = %path.display(), reason = why, "Skipping manifest path");
                self.complaints.insert(path, why.to_owned());
            }
        }
        self.files = result.files;
        let set: Vec<Arc<Pod>> = self.files.values().map(|file| file.pod.clone()).collect();
        let same = |sent: &Vec<Arc<Pod>>| {
            sent.len() == set.len() && sent.iter().zip(&set).all(|(old, new)| Arc::ptr_eq(old, new))
        };
        if !self.sent.as_ref().is_some_and(same) {
            self.sender.send(set.clone()).await;
            self.sent = Some(set);
        }
    }
}

async fn next(watch: &mut Option<Watch>) -> DirectoryChange {
    match watch {
        Some(watch) => watch.next().await,
        None => std::future::pending().await,
    }
}

/// Runs file access on the blocking pool. Waits however long it takes, because a second attempt would
/// hang like the first; a hang is logged. `None` only if it panicked.
async fn blocking<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> Option<T> {
    let mut task = tokio::task::spawn_blocking(work);
    loop {
        match tokio::time::timeout(SLOW, &mut task).await {
            Ok(done) => return done.inspect_err(|e| error!(err = %e, "Failed to read manifests")).ok(),
            Err(_) => warn!(waited = ?SLOW, "Reading manifests is slow, still waiting for the filesystem"),
        }
    }
}
