//! Background task that measures disk usage on request: files, directory trees, and volumes behind claims.
//!
//! Large trees have a task of their own, so that log files do not wait for them. A request names directories and
//! returns the known measurements; the task then measures those older than their period. A walk that exceeds its
//! limit is abandoned and counts as hung until it returns: a hung disk costs fields, not pages.
//! Implements spec 04b §7.2.

use std::{
    collections::{HashMap, HashSet, VecDeque},
    io,
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    time::Duration,
};

use futures::stream::{self, StreamExt};
use jiff::Timestamp;
use tokio::{
    sync::{mpsc, watch},
    time::Instant,
};
use tokio_util::sync::CancellationToken;
use tracing::debug;

use super::disk::{self, FileSystem, Usage};
use berth_metrics::StatsMetrics;
use berth_ports::{ClaimedVolumes, Clock, VolumeStats};

/// Time limit of the walk of one directory.
const WALK_LIMIT: Duration = Duration::from_secs(60);
/// Maximum number of concurrent queries for volumes behind claims.
const ASKED: usize = 8;
/// Maximum number of hung walks; beyond it nothing is measured until one returns.
const MAX_WEDGED: usize = 4;

/// What is walked or queried to measure a target.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum MeasurementMethod {
    /// Sum of the files directly in the directory.
    Files,
    /// One file.
    File,
    /// The whole tree, and the file system that contains it.
    Tree,
    /// No walk: the volume's driver reports its usage.
    Claimed,
}

/// A directory or file to measure.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct MeasurementTarget {
    /// Path of the directory or file.
    pub path: PathBuf,
    /// Method of the measurement.
    pub how: MeasurementMethod,
    /// Maximum age of a measurement.
    pub period: Duration,
}

/// Result of a measurement.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Measurement {
    /// Start of the walk or query.
    pub at: Timestamp,
    /// Bytes and inodes used.
    pub usage: Usage,
    /// File system that contains the target; only of trees and claims.
    pub filesystem: Option<FileSystem>,
    /// Whether the volume's condition is abnormal; `None` where its driver reports none.
    pub is_abnormal: Option<bool>,
}

/// Known measurements by path; a target that could not be measured is absent.
pub type Measurements = Arc<HashMap<PathBuf, Measurement>>;

/// Requests measurements and returns the known results.
pub struct MeasurementHandle {
    targets: watch::Sender<Arc<Vec<MeasurementTarget>>>,
    found: watch::Receiver<Measurements>,
}

/// Background task that performs the measurements.
pub struct MeasurementTask {
    targets: watch::Receiver<Arc<Vec<MeasurementTarget>>>,
    found: watch::Sender<Measurements>,
    clock: Arc<dyn Clock>,
    metrics: StatsMetrics,
    tried: HashMap<PathBuf, Instant>,
    wedged: Arc<AtomicUsize>,
    claimed: Option<Arc<dyn ClaimedVolumes>>,
    /// Time limit of the walk of one directory.
    limit: Duration,
}

impl MeasurementHandle {
    /// Creates a survey and the task to run; walks over trees are recorded in `metrics`.
    pub fn new(clock: Arc<dyn Clock>, metrics: StatsMetrics) -> (Self, MeasurementTask) {
        let (targets, wanted) = watch::channel(Arc::default());
        let (found, known) = watch::channel(Measurements::default());
        let (tried, wedged) = (HashMap::new(), Arc::default());
        let surveyor =
            MeasurementTask { targets: wanted, found, clock, metrics, tried, wedged, claimed: None, limit: WALK_LIMIT };
        (Self { targets, found: known }, surveyor)
    }

    /// Returns the known measurements without waiting; outdated ones of these targets are renewed in the background.
    pub fn ask(&self, targets: Vec<MeasurementTarget>) -> Measurements {
        self.targets.send_replace(Arc::new(targets));
        self.found.borrow().clone()
    }

    /// Returns the known measurements; outdated ones of these targets are renewed in the background. Waits up to
    /// `patience` if a target is neither known nor part of the previous request.
    pub async fn known(&self, targets: Vec<MeasurementTarget>, patience: Duration) -> Measurements {
        let mut found = self.found.clone();
        let is_new = {
            let known = &*found.borrow_and_update();
            let before = self.targets.borrow();
            let asked = |target: &MeasurementTarget| known.contains_key(&target.path) || before.contains(target);
            !targets.iter().all(asked)
        };
        self.targets.send_replace(Arc::new(targets));
        if is_new {
            let _ = tokio::time::timeout(patience, found.changed()).await; // returns what is known by then
        }
        found.borrow().clone()
    }

    /// Renews outdated measurements of these targets and waits up to `patience` for them.
    pub async fn renew(&self, targets: Vec<MeasurementTarget>, patience: Duration) {
        let mut found = self.found.clone();
        found.mark_unchanged();
        self.targets.send_replace(Arc::new(targets));
        let _ = tokio::time::timeout(patience, found.changed()).await; // results are read later
    }
}

/// The tasks of all surveys.
pub struct MeasurementTasks(pub Vec<MeasurementTask>);

impl MeasurementTasks {
    /// Runs all tasks until `stop` is canceled.
    pub async fn run(self, stop: CancellationToken) {
        futures::future::join_all(self.0.into_iter().map(|surveyor| surveyor.run(stop.clone()))).await;
    }
}

impl MeasurementTask {
    /// Sets the source that reports the usage of volumes behind claims.
    #[must_use]
    pub fn with_claimed_volumes(self, claimed: Option<Arc<dyn ClaimedVolumes>>) -> Self {
        Self { claimed, ..self }
    }

    /// Serves measurement requests until `stop` is canceled.
    pub async fn run(mut self, stop: CancellationToken) {
        let work = async {
            while self.targets.changed().await.is_ok() {
                let targets = self.targets.borrow_and_update().clone();
                self.round(&targets).await;
            }
        };
        tokio::select! {
            () = stop.cancelled() => {}
            () = work => {}
        }
    }

    async fn round(&mut self, targets: &[MeasurementTarget]) {
        let now = Instant::now();
        let wanted: HashSet<&Path> = targets.iter().map(|target| &*target.path).collect();
        self.tried.retain(|path, _| wanted.contains(&**path));
        let is_due = |target: &&MeasurementTarget| {
            self.tried.get(&target.path).is_none_or(|tried| now - *tried >= target.period)
        };
        let due: Vec<MeasurementTarget> = targets.iter().filter(is_due).cloned().collect();
        let mut known: HashMap<PathBuf, Measurement> = (**self.found.borrow()).clone();
        known.retain(|path, _| wanted.contains(&**path));
        let (claimed, due): (Vec<MeasurementTarget>, Vec<MeasurementTarget>) =
            due.into_iter().partition(|target| target.how == MeasurementMethod::Claimed);
        self.ask(claimed, &mut known).await;
        let (trees, quick): (Vec<MeasurementTarget>, Vec<MeasurementTarget>) =
            due.into_iter().partition(|target| target.how == MeasurementMethod::Tree);
        self.measure(quick, &mut known).await;
        self.walk(trees, &mut known).await;
        self.found.send_replace(Arc::new(known));
    }

    /// Queries the usage of these volumes, up to [`ASKED`] concurrently. Publishes each answer at once, so that a
    /// driver that does not answer does not delay other volumes.
    async fn ask(&mut self, targets: Vec<MeasurementTarget>, known: &mut HashMap<PathBuf, Measurement>) {
        let Some(volumes) = self.claimed.clone() else { return };
        let now = Instant::now();
        self.tried.extend(targets.iter().map(|target| (target.path.clone(), now)));
        let mut answers = stream::iter(targets)
            .map(|target| {
                let (volumes, clock, limit) = (volumes.clone(), self.clock.clone(), self.limit);
                async move {
                    let (at, began) = (clock.now(), Instant::now());
                    let result = tokio::time::timeout(limit, volumes.usage(&target.path)).await;
                    let result = result.unwrap_or_else(|_| Err("timed out".to_owned()));
                    (target.path, at, began.elapsed(), result)
                }
            })
            .buffer_unordered(ASKED);
        while let Some((path, at, elapsed, result)) = answers.next().await {
            match result {
                Ok(full) => {
                    self.metrics.volume_queried(&full.source, elapsed);
                    known.insert(path, of_volume(at, &full));
                }
                Err(error) => {
                    debug!(path = %path.display(), err = %error, "Failed to get volume stats");
                    known.remove(&path);
                }
            }
            self.found.send_replace(Arc::new(known.clone()));
        }
    }

    /// Measures the targets in one blocking task, all within one limit.
    async fn measure(&mut self, targets: Vec<MeasurementTarget>, known: &mut HashMap<PathBuf, Measurement>) {
        if targets.is_empty() || self.wedged.load(Ordering::Relaxed) >= MAX_WEDGED {
            return;
        }
        let stop = Arc::new(AtomicBool::new(false));
        let (now, clock) = (Instant::now(), self.clock.clone());
        for target in &targets {
            self.tried.insert(target.path.clone(), now);
        }
        let (stopped, wedged) = (stop.clone(), RunningWalk::raise(&self.wedged));
        let walk = tokio::task::spawn_blocking(move || {
            let _wedged = wedged;
            let measure = |target: MeasurementTarget| (measured(&target, &clock, &stopped), target.path);
            targets.into_iter().map(measure).collect::<Vec<_>>()
        });
        match tokio::time::timeout(self.limit, walk).await {
            Ok(Ok(results)) => results.into_iter().for_each(|(result, path)| keep(known, path, result)),
            // The task counts as hung until it notices `stop`.
            Ok(Err(_)) | Err(_) => stop.store(true, Ordering::Relaxed),
        }
    }

    /// Measures trees, each within the limit. One thread walks them all, because most are small and a thread per tree
    /// costs more than the walk. A walk that hangs keeps its thread; the remaining trees continue on another one.
    async fn walk(&mut self, trees: Vec<MeasurementTarget>, known: &mut HashMap<PathBuf, Measurement>) {
        let mut left = VecDeque::from(trees);
        while !left.is_empty() && self.wedged.load(Ordering::Relaxed) < MAX_WEDGED {
            let (sender, mut receiver) = mpsc::unbounded_channel();
            let stop = Arc::new(AtomicBool::new(false));
            let walk = Walk {
                trees: left.iter().cloned().collect(),
                clock: self.clock.clone(),
                metrics: self.metrics.clone(),
                stop: stop.clone(),
                wedged: RunningWalk::raise(&self.wedged),
            };
            tokio::task::spawn_blocking(move || walk.run(|result| sender.send(result).is_ok()));
            loop {
                if let Some(tree) = left.front() {
                    self.tried.insert(tree.path.clone(), Instant::now());
                }
                let result = tokio::time::timeout(self.limit, receiver.recv()).await;
                match (left.pop_front(), result) {
                    (Some(tree), Ok(Some(result))) => keep(known, tree.path, result),
                    // The thread ended or panicked; otherwise it counts as hung until it notices `stop`.
                    (None, _) | (_, Ok(None) | Err(_)) => {
                        stop.store(true, Ordering::Relaxed);
                        break;
                    }
                }
            }
        }
    }
}

fn keep(known: &mut HashMap<PathBuf, Measurement>, path: PathBuf, result: io::Result<Measurement>) {
    match result {
        Ok(measured) => drop(known.insert(path, measured)),
        Err(error) => {
            debug!(path = %path.display(), err = %error, "Unable to fetch disk usage");
            known.remove(&path);
        }
    }
}

/// Trees that one thread walks.
struct Walk {
    trees: Vec<MeasurementTarget>,
    clock: Arc<dyn Clock>,
    metrics: StatsMetrics,
    stop: Arc<AtomicBool>,
    wedged: RunningWalk,
}

impl Walk {
    /// Sends each result until the receiver is closed. The hung count is released before the sender is dropped.
    fn run(self, send: impl Fn(io::Result<Measurement>) -> bool) {
        let Self { trees, clock, metrics, stop, wedged: _wedged } = self;
        for tree in trees {
            let began = Instant::now();
            let result = measured(&tree, &clock, &stop);
            metrics.walked(began.elapsed());
            if !send(result) || stop.load(Ordering::Relaxed) {
                return;
            }
        }
    }
}

/// Counts a walk as running or hung until it returns or panics.
struct RunningWalk(Arc<AtomicUsize>);

impl RunningWalk {
    fn raise(count: &Arc<AtomicUsize>) -> Self {
        count.fetch_add(1, Ordering::Relaxed);
        Self(count.clone())
    }
}

impl Drop for RunningWalk {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

fn of_volume(at: Timestamp, full: &VolumeStats) -> Measurement {
    let filesystem = FileSystem {
        capacity: full.capacity,
        free: full.capacity.saturating_sub(full.used),
        available: full.available,
        inodes: full.inodes,
        inodes_free: full.inodes_free,
    };
    let usage = Usage { bytes: full.used, inodes: full.inodes_used };
    Measurement { at, usage, filesystem: Some(filesystem), is_abnormal: full.condition.as_ref().map(|c| c.is_abnormal) }
}

fn measured(target: &MeasurementTarget, clock: &Arc<dyn Clock>, stop: &AtomicBool) -> io::Result<Measurement> {
    let at = clock.now();
    let path: &Path = &target.path;
    let (usage, filesystem) = match target.how {
        MeasurementMethod::Files => (disk::files_in(path, stop)?, None),
        MeasurementMethod::File => (disk::file(path)?, None),
        MeasurementMethod::Tree => (disk::tree(path, stop)?, Some(FileSystem::of(path)?)),
        MeasurementMethod::Claimed => return Err(io::ErrorKind::Unsupported.into()),
    };
    Ok(Measurement { at, usage, filesystem, is_abnormal: None })
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;
    use berth_metrics::Registry;
    use berth_ports::SystemClock;

    fn target(path: &Path, how: MeasurementMethod, period: Duration) -> MeasurementTarget {
        MeasurementTarget { path: path.to_owned(), how, period }
    }

    struct Volumes;

    #[async_trait::async_trait]
    impl ClaimedVolumes for Volumes {
        fn of(&self, _: &berth_types::PodUid) -> Vec<berth_ports::ClaimedVolume> {
            Vec::new()
        }

        async fn usage(&self, path: &Path) -> Result<VolumeStats, String> {
            match path.to_str() {
                Some("/hangs") => std::future::pending().await,
                Some("/fails") => Err("no".to_owned()),
                _ => Ok(VolumeStats {
                    source: "d".to_owned(),
                    capacity: 100,
                    used: 7,
                    inodes_used: 3,
                    ..VolumeStats::default()
                }),
            }
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_volume_that_does_not_answer_keeps_no_other_back() {
        let registry = Registry::new();
        let (survey, task) = MeasurementHandle::new(Arc::new(SystemClock), StatsMetrics::new(&registry));
        let stop = CancellationToken::new();
        let running = tokio::spawn(task.with_claimed_volumes(Some(Arc::new(Volumes))).run(stop.clone()));
        let targets = ["/hangs", "/fails", "/full"]
            .map(|path| target(Path::new(path), MeasurementMethod::Claimed, Duration::ZERO));
        let mut found = survey.found.clone();
        let began = Instant::now();
        survey.ask(targets.to_vec());
        found.wait_for(|found| !found.is_empty()).await.expect("it lives");
        assert_eq!(began.elapsed(), Duration::ZERO);
        let known = found.borrow().get(Path::new("/full")).copied().expect("known");
        assert_eq!((known.usage, known.filesystem.map(|fs| fs.capacity)), (Usage { bytes: 7, inodes: 3 }, Some(100)));
        assert_eq!(found.borrow().len(), 1);
        stop.cancel();
        running.await.expect("no panic");
    }

    /// Blocks on some paths until it is released.
    struct Hangs {
        left: AtomicUsize,
        release: std::sync::Mutex<std::sync::mpsc::Receiver<()>>,
    }

    impl Clock for Hangs {
        fn now(&self) -> Timestamp {
            if self.left.fetch_update(Ordering::SeqCst, Ordering::SeqCst, |left| left.checked_sub(1)).is_ok() {
                let _released = self.release.lock().expect("no panic").recv();
            }
            SystemClock.now()
        }
    }

    #[tokio::test]
    async fn a_tree_that_hangs_keeps_no_other_back() {
        let root = tempfile::tempdir().expect("a directory");
        let trees: Vec<MeasurementTarget> = ["a", "b", "c"]
            .map(|name| {
                let path = root.path().join(name);
                fs::create_dir(&path).expect("made");
                target(&path, MeasurementMethod::Tree, Duration::from_secs(3600))
            })
            .into();
        let (release, released) = std::sync::mpsc::channel();
        let clock = Arc::new(Hangs { left: AtomicUsize::new(1), release: std::sync::Mutex::new(released) });
        let (survey, mut task) = MeasurementHandle::new(clock, StatsMetrics::new(&Registry::new()));
        task.limit = Duration::from_secs(3);
        let (stop, wedged) = (CancellationToken::new(), task.wedged.clone());
        let running = tokio::spawn(task.run(stop.clone()));
        let mut found = survey.found.clone();
        survey.ask(trees.clone());
        found.changed().await.expect("it lives");
        let known: HashSet<PathBuf> = found.borrow().keys().cloned().collect();
        assert_eq!(known, HashSet::from([trees[1].path.clone(), trees[2].path.clone()]), "the first hangs");
        assert_eq!(wedged.load(Ordering::Relaxed), 1, "and keeps its thread");
        release.send(()).expect("it hangs");
        let deadline = Instant::now() + Duration::from_secs(60);
        while wedged.load(Ordering::Relaxed) > 0 {
            assert!(Instant::now() < deadline, "it never comes back");
            tokio::task::yield_now().await;
        }
        stop.cancel();
        running.await.expect("no panic");
    }

    #[tokio::test]
    async fn directories_are_measured_while_requested() {
        let root = tempfile::tempdir().expect("a directory");
        fs::write(root.path().join("log"), vec![1; 10_000]).expect("written");
        let (survey, task) = MeasurementHandle::new(Arc::new(SystemClock), StatsMetrics::new(&Registry::new()));
        let stop = CancellationToken::new();
        let running = tokio::spawn(task.run(stop.clone()));
        let patience = Duration::from_secs(30);
        let targets = || {
            vec![
                target(root.path(), MeasurementMethod::Files, Duration::ZERO),
                target(&root.path().join("log"), MeasurementMethod::File, Duration::from_secs(3600)),
                target(&root.path().join("absent"), MeasurementMethod::Files, Duration::ZERO),
            ]
        };
        let known = survey.known(targets(), patience).await;
        let of = |known: &Measurements, name: &str| known.get(&root.path().join(name)).map(|m| m.usage);
        assert!(of(&known, "").is_some() && of(&known, "") == of(&known, "log"), "{known:?}");
        assert_eq!(of(&known, "absent"), None);

        // A recent measurement is not repeated; a target that is no longer requested is removed.
        fs::write(root.path().join("more"), vec![1; 10_000]).expect("written");
        let mut found = survey.found.clone();
        found.borrow_and_update();
        survey.known(targets()[..2].to_vec(), patience).await;
        let grown = |known: &Measurements| of(known, "") != of(known, "log");
        assert!(tokio::time::timeout(patience, found.wait_for(grown)).await.is_ok());
        survey.known(vec![target(root.path(), MeasurementMethod::Tree, Duration::ZERO)], patience).await;
        let only = |known: &Measurements| known.len() == 1 && known.values().all(|m| m.filesystem.is_some());
        assert!(tokio::time::timeout(patience, found.wait_for(only)).await.is_ok());
        // A caller that needs fresh values waits for them.
        let old = || vec![target(root.path(), MeasurementMethod::Tree, Duration::from_millis(1))];
        survey.renew(old(), patience).await;
        let before = survey.known(old(), patience).await.get(root.path()).map(|m| m.usage.bytes);
        fs::write(root.path().join("much"), vec![1; 1_000_000]).expect("written");
        tokio::time::sleep(Duration::from_millis(2)).await;
        survey.renew(old(), patience).await;
        assert!(survey.found.borrow().get(root.path()).map(|m| m.usage.bytes) > before);
        stop.cancel();
        running.await.expect("no panic");
    }
}
