//! Reads memory, processes, and file systems of node, images, and writable layers for eviction.

use std::{
    io,
    path::{Path, PathBuf},
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use async_trait::async_trait;
use tokio::{
    sync::watch,
    task::spawn_blocking,
    time::{sleep, timeout},
};
use tokio_util::sync::CancellationToken;

use super::{
    kernel_notifier::ThresholdNotifier,
    ports::NodeStats,
    signals::{Devices, DiskReading, MemoryReading, Readings},
};
use berth_config::eviction::{Signal, Threshold};
use berth_cri::ImageService;
use berth_stats::{MemoryObservation, NodeObserver, disk::FileSystem, file_system};
use berth_sys::blocking_pool::BlockingPool;

/// Deadline for reading a file system, or the kernel's files.
const READ_TIMEOUT: Duration = Duration::from_secs(1);
/// Deadline for the runtime to report the file systems of its images.
const ASK_LIMIT: Duration = Duration::from_secs(5);
/// Interval between `ImageFsInfo` requests: before the runtime has reported a path, and after that.
const ASK_AGAIN: [Duration; 2] = [Duration::from_secs(2), Duration::from_secs(60)];

/// A file system, identified by a path on it. At most one read is in flight: one that hangs blocks further ones.
struct Disk {
    path: PathBuf,
    is_busy: AtomicBool,
    /// Device as of the last successful read.
    device: Mutex<Option<u64>>,
    read: fn(&Path) -> io::Result<(u64, FileSystem)>,
}

impl Disk {
    fn at(path: PathBuf) -> Self {
        Self { path, is_busy: AtomicBool::new(false), device: Mutex::default(), read: file_system }
    }

    fn device(&self) -> Option<u64> {
        *self.device.lock().unwrap_or_else(PoisonError::into_inner)
    }

    async fn observe(self: &Arc<Self>) -> Option<DiskReading> {
        if self.is_busy.swap(true, Ordering::AcqRel) {
            return None;
        }
        let own = self.clone();
        let task = spawn_blocking(move || {
            let seen = (own.read)(&own.path);
            own.is_busy.store(false, Ordering::Release);
            seen
        });
        let (device, fs) = timeout(READ_TIMEOUT, task).await.ok()?.ok()?.ok()?;
        *self.device.lock().unwrap_or_else(PoisonError::into_inner) = Some(device);
        Some(DiskReading {
            device,
            capacity: fs.capacity,
            available: fs.available,
            inodes: fs.inodes,
            inodes_free: fs.inodes_free,
        })
    }
}

/// File systems on which the runtime stores images and writable layers.
#[derive(Default)]
pub struct ImageFileSystems {
    known: Mutex<[Option<Arc<Disk>>; 2]>,
}

impl ImageFileSystems {
    /// Polls the runtime: it may restart with other directories.
    pub async fn follow(
        self: Arc<Self>,
        images: Arc<dyn ImageService>,
        notifier: Arc<ThresholdNotifier>,
        stop: CancellationToken,
    ) {
        loop {
            let asked = tokio::select! {
                biased;
                () = stop.cancelled() => return,
                asked = timeout(ASK_LIMIT, images.image_fs_info()) => asked,
            };
            let [before, after] = ASK_AGAIN;
            let pause = match asked {
                Ok(Ok(info)) => {
                    let first = |all: &[berth_proto::cri::FilesystemUsage]| {
                        let path = all.first()?.fs_id.as_ref().map(|id| id.mountpoint.clone())?;
                        (!path.is_empty()).then_some(path)
                    };
                    match first(&info.image_filesystems) {
                        Some(images) => {
                            if self.set([Some(images), first(&info.container_filesystems)]) {
                                notifier.notify();
                            }
                            after
                        }
                        // The runtime does not know yet; the previous paths stay valid.
                        None => before,
                    }
                }
                Ok(Err(_)) | Err(_) => before,
            };
            tokio::select! {
                biased;
                () = stop.cancelled() => return,
                () = sleep(pause) => {}
            }
        }
    }

    /// Stores the paths and returns whether they changed. A missing path of writable layers leaves the previous one in
    /// place, unless the path of images changed.
    fn set(&self, paths: [Option<String>; 2]) -> bool {
        let mut is_news = false;
        let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        for (disk, path) in known.iter_mut().zip(paths) {
            let path = path.map(PathBuf::from);
            if (path.is_none() && !is_news) || disk.as_ref().map(|disk| &disk.path) == path.as_ref() {
                continue;
            }
            *disk = path.map(|path| Arc::new(Disk::at(path)));
            is_news = true;
        }
        is_news
    }

    fn known(&self) -> [Option<Arc<Disk>>; 2] {
        self.known.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

/// Reads memory, processes, and file systems of this machine.
pub struct NodeReader {
    observer: Arc<NodeObserver>,
    /// One thread: a read of the kernel's files that hangs blocks further ones.
    kernel: BlockingPool,
    node: Arc<Disk>,
    places: Arc<ImageFileSystems>,
    thresholds: Vec<Threshold>,
    /// Memory usage from which on the node is short of memory.
    line: watch::Sender<Option<u64>>,
}

impl NodeReader {
    /// Creates a reader that reads cgroups through `look`, and the file system of the root directory. `usage_limit`
    /// receives the memory usage at which the first of `thresholds` is met.
    pub fn new(
        observer: NodeObserver,
        root_directory: PathBuf,
        places: Arc<ImageFileSystems>,
        thresholds: Vec<Threshold>,
        usage_limit: watch::Sender<Option<u64>>,
    ) -> Self {
        let (observer, kernel, node) =
            (Arc::new(observer), BlockingPool::new("kernel files", 1), Arc::new(Disk::at(root_directory)));
        Self { observer, kernel, node, places, thresholds, line: usage_limit }
    }
}

#[async_trait]
impl NodeStats for NodeReader {
    async fn read(&self) -> Readings {
        async fn disk(disk: Option<Arc<Disk>>) -> Option<DiskReading> {
            disk?.observe().await
        }
        let [images, layers] = self.places.known();
        let observer = self.observer.clone();
        let device = |disk: Option<&Arc<Disk>>| disk.and_then(|disk| disk.device());
        let kernel = self.kernel.run_within(READ_TIMEOUT, move || observer.observe());
        let (seen, node_fs, image_fs, container_fs) =
            tokio::join!(kernel, self.node.observe(), disk(images.clone()), disk(layers.clone()));
        let seen = seen.unwrap_or_default();
        let (node, images, containers) = (self.node.device(), device(images.as_ref()), device(layers.as_ref()));
        self.line.send_replace(seen.memory.and_then(|seen| usage_line(&self.thresholds, seen)));
        let memory = |seen: MemoryObservation| MemoryReading { total: seen.total, working_set: seen.working_set };
        Readings {
            memory: seen.memory.map(memory),
            pods_memory: seen.pods.map(memory),
            node_fs,
            image_fs,
            container_fs,
            processes: seen.processes.and_then(|processes| Some((processes.max?, processes.now))),
            devices: Devices { node, images, containers },
            ..Readings::default()
        }
    }
}

/// Memory usage, page cache included, at which the first threshold is met.
fn usage_line(thresholds: &[Threshold], seen: MemoryObservation) -> Option<u64> {
    let of_memory = thresholds.iter().filter(|threshold| threshold.signal == Signal::Memory);
    let capacity = i64::try_from(seen.total).ok()?;
    let bound = of_memory.map(|threshold| threshold.below.of(capacity).value()).max()?;
    let cache = seen.usage.saturating_sub(seen.working_set);
    Some(seen.total.saturating_sub(u64::try_from(bound).ok()?).saturating_add(cache))
}

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;

    use tokio::time::Instant;

    use super::*;
    use berth_cri::CriResult;
    use berth_proto::cri;

    #[test]
    fn the_line_is_where_the_first_threshold_is_met() {
        let config = |below: &str| {
            let mut config = berth_config::defaults::defaults();
            config.eviction_hard = [("memory.available".to_owned(), below.to_owned())].into();
            berth_config::eviction::thresholds(&config).expect("usable")
        };
        let seen = MemoryObservation { total: 1000, usage: 500, working_set: 300 };
        assert_eq!(usage_line(&config("100"), seen), Some(1100), "200 of page cache do not count");
        assert_eq!(usage_line(&config("10%"), seen), Some(1100));
        assert_eq!(usage_line(&[], seen), None);
    }

    /// Simulates a file system whose server does not answer; only the first read waits for it.
    #[tokio::test]
    async fn a_hanging_disk_delays_one_read_and_no_other_disk() {
        fn dead(_: &Path) -> io::Result<(u64, FileSystem)> {
            let (kept, never) = std::sync::mpsc::channel::<()>();
            let _ = never.recv_timeout(READ_TIMEOUT * 3); // the sender never sends
            drop(kept);
            Err(io::ErrorKind::TimedOut.into())
        }
        let hung = Arc::new(Disk { read: dead, ..Disk::at("/".into()) });
        let well = Arc::new(Disk::at("/".into()));
        assert!(hung.observe().await.is_none());
        // A second read of the same file system would have to wait as long.
        let again = timeout(READ_TIMEOUT / 2, async { (hung.observe().await, well.observe().await) }).await;
        let (hung, well) = again.expect("nobody waits for what hangs");
        assert!(hung.is_none() && well.is_some());
    }

    #[tokio::test]
    async fn a_disk_is_read_and_a_missing_one_is_absent() {
        let dir = tempfile::tempdir().expect("a folder");
        let disk = Arc::new(Disk::at(dir.path().to_owned()));
        assert!(disk.observe().await.is_some_and(|seen| seen.capacity > 0));
        let device = disk.device();
        disk.is_busy.store(true, Ordering::Release);
        assert_eq!(disk.observe().await, None, "a look hangs");
        assert!(device.is_some() && disk.device() == device, "it has not moved");
        assert_eq!(Arc::new(Disk::at("/no/such/place".into())).observe().await, None);
    }

    /// A runtime that reports paths of images and writable layers in this order.
    struct Runtime {
        answers: Mutex<VecDeque<cri::ImageFsInfoResponse>>,
        asked: Mutex<Vec<Instant>>,
    }

    #[async_trait]
    impl ImageService for Runtime {
        async fn list_images(&self) -> CriResult<Vec<cri::Image>> {
            unreachable!("nobody asks")
        }
        async fn image_status(&self, _: cri::ImageSpec) -> CriResult<Option<cri::Image>> {
            unreachable!("nobody asks")
        }
        async fn pull_image(
            &self,
            _: cri::ImageSpec,
            _: Option<cri::AuthConfig>,
            _: Option<cri::PodSandboxConfig>,
        ) -> CriResult<String> {
            unreachable!("nobody asks")
        }
        async fn remove_image(&self, _: cri::ImageSpec) -> CriResult<()> {
            unreachable!("nobody asks")
        }
        async fn image_fs_info(&self) -> CriResult<cri::ImageFsInfoResponse> {
            self.asked.lock().expect("whole").push(Instant::now());
            Ok(self.answers.lock().expect("whole").pop_front().unwrap_or_default())
        }
    }

    fn response((images, layers): (&[&str], &[&str])) -> cri::ImageFsInfoResponse {
        let usage = |path: &&str| {
            let id = cri::FilesystemIdentifier { mountpoint: (*path).to_owned() };
            cri::FilesystemUsage { fs_id: Some(id), ..Default::default() }
        };
        cri::ImageFsInfoResponse {
            image_filesystems: images.iter().map(usage).collect(),
            container_filesystems: layers.iter().map(usage).collect(),
        }
    }

    #[tokio::test(start_paused = true)]
    async fn image_file_systems_are_kept_until_the_runtime_reports_others() {
        let answers = [(&["/a"][..], &["/b"][..]), (&[], &[]), (&["/a"], &[]), (&["/c"], &[])];
        let answers = Mutex::new(answers.map(response).into());
        let runtime = Arc::new(Runtime { answers, asked: Mutex::default() });
        let (places, began, stop) = (Arc::new(ImageFileSystems::default()), Instant::now(), CancellationToken::new());
        let following = tokio::spawn(places.clone().follow(runtime.clone(), Arc::default(), stop.clone()));
        let disks = || places.known().map(|disk| disk.expect("received"));
        sleep(Duration::from_secs(1)).await;
        let [images, layers] = disks();
        assert_eq!((&*images.path, &*layers.path), (Path::new("/a"), Path::new("/b")));
        for (seconds, reported) in [(60, "nothing"), (2, "where images are")] {
            sleep(Duration::from_secs(seconds)).await;
            let [same_images, same_layers] = disks();
            assert!(Arc::ptr_eq(&images, &same_images) && Arc::ptr_eq(&layers, &same_layers), "{reported}");
        }
        sleep(Duration::from_secs(60)).await;
        let [images, layers] = places.known();
        assert_eq!(images.map(|disk| disk.path.clone()), Some("/c".into()));
        assert!(layers.is_none(), "they are not known to be elsewhere");
        let asked = runtime.asked.lock().expect("whole").clone();
        let asked: Vec<u64> = asked.iter().map(|at| at.duration_since(began).as_secs()).collect();
        assert_eq!(asked, [0, 60, 62, 122], "retried soon without a result");
        stop.cancel();
        following.await.expect("ends");
    }
}
