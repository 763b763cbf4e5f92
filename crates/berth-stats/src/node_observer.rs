//! Node-level observation of memory, processes, and file systems, for eviction.
//!
//! Callers need it often and at once, so it reads a few kernel files that stay open, and nothing of single pods.
//! Every call blocks; only the one for a file system may hang. Implements spec 05 §3.1.

use std::{
    io,
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
    sync::{Arc, Mutex, PoisonError},
};

use super::{
    disk::FileSystem,
    host::{self, Processes},
    mounts::Mounts,
    reader::{CgroupKey, CgroupObservation, CgroupReader, CgroupRequest, PodCgroupPaths},
    reading::{CgroupMemory, Depth},
    snapshot::wall,
};
use berth_ports::Clock;
use berth_sys::{cgroup::files::MemoryStat, mount_table};

/// Maximum number of open files: those of two cgroups.
const MAX_OPEN: usize = 32;
/// Usage in bytes below which missing details do not matter.
const LITTLE: u64 = 16 << 20;

/// Observes the node.
pub struct NodeObserver {
    reader: Option<Mutex<CgroupReader>>,
    /// Cgroup of all pods.
    pods: Option<Arc<str>>,
    clock: Arc<dyn Clock>,
    root: PathBuf,
    max_pids: fn(&Path) -> u64,
}

/// Memory usage, bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct MemoryObservation {
    /// Capacity, or the limit of a cgroup.
    pub total: u64,
    /// Memory in use, page cache included.
    pub usage: u64,
    /// Memory in use that cannot be reclaimed at once.
    pub working_set: u64,
}

/// Observation of the node; what could not be read is `None`.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct NodeObservation {
    /// Memory of the machine.
    pub memory: Option<MemoryObservation>,
    /// Memory of all pods; `None` without a limit.
    pub pods: Option<MemoryObservation>,
    /// Number of processes.
    pub processes: Option<Processes>,
}

impl NodeObserver {
    /// Creates an observer. `root` is `/`; `max_pids` returns the current maximum number of processes, 0 where
    /// unknown.
    pub fn new(
        groups: Arc<dyn PodCgroupPaths>,
        clock: Arc<dyn Clock>,
        root: PathBuf,
        max_pids: fn(&Path) -> u64,
    ) -> Self {
        let mounts = mount_table::read().ok().and_then(|table| Mounts::find(&table));
        let pods = groups.above().into_iter().next().map(Arc::from);
        let reader = mounts.map(|mounts| Mutex::new(CgroupReader::new(mounts, groups, MAX_OPEN)));
        Self { reader, pods, clock, root, max_pids }
    }

    /// Reads memory and processes.
    pub fn observe(&self) -> NodeObservation {
        let machine = host::memory(&self.root);
        let at = |path: Arc<str>| CgroupRequest { key: CgroupKey::At(path), depth: Some(Depth::Core) };
        let wanted: Vec<CgroupRequest> = [Arc::from("/")].into_iter().chain(self.pods.clone()).map(at).collect();
        let now = || wall(self.clock.now());
        let seen = self.reader.as_ref().map(|reader| {
            let mut reader = reader.lock().unwrap_or_else(PoisonError::into_inner);
            reader.pass(&wanted, machine, &now)
        });
        // Without `memory.stat` the page cache would count as used; such a reading is discarded.
        let has_stat = |memory: &CgroupMemory| memory.stat != MemoryStat::default();
        let mut groups = seen.into_iter().flatten().map(|seen: Option<CgroupObservation>| seen?.reading.memory);
        let root = groups.next().flatten().filter(has_stat).filter(|_| machine.total > 0);
        // The cgroup that no pod has been in yet has an empty `memory.stat`.
        let is_plausible = |memory: &CgroupMemory| has_stat(memory) || memory.usage < LITTLE;
        let pods = groups.next().flatten().filter(is_plausible).filter(|memory| memory.available().is_some());
        let used = |memory: CgroupMemory, total| MemoryObservation {
            total,
            usage: memory.usage,
            working_set: memory.working_set(),
        };
        NodeObservation {
            memory: root.map(|memory| used(memory, machine.total)),
            pods: pods.map(|memory| used(memory, memory.limit)),
            processes: host::processes(&self.root, (self.max_pids)(&self.root)),
        }
    }
}

/// Returns the device number and usage of the file system that contains a path. May hang with the disk.
///
/// # Errors
/// The metadata or the file system of the path cannot be read.
pub fn file_system(path: &Path) -> io::Result<(u64, FileSystem)> {
    Ok((path.metadata()?.dev(), FileSystem::of(path)?))
}

#[cfg(test)]
mod tests {
    use super::*;
    use berth_ports::SystemClock;
    use berth_types::PodUid;

    struct NoGroups;

    impl PodCgroupPaths for NoGroups {
        fn above(&self) -> Vec<String> {
            Vec::new()
        }

        fn of_pod(&self, _pod: &PodUid) -> Vec<String> {
            Vec::new()
        }
    }

    #[test]
    fn this_machine_has_memory_processes_and_a_disk() {
        let observer = NodeObserver::new(Arc::new(NoGroups), Arc::new(SystemClock), "/".into(), |_| 1000);
        for _ in 0..2 {
            let seen = observer.observe();
            assert!(seen.memory.is_some_and(|m| m.total > 0 && m.working_set <= m.usage), "{seen:?}");
            assert!(seen.pods.is_none() && seen.processes.is_some_and(|p| p.now > 0), "{seen:?}");
        }
        let (device, fs) = file_system(Path::new("/")).expect("there");
        assert!(device > 0 && fs.capacity > 0);
        assert!(file_system(Path::new("/no/such/place")).is_err());
    }

    #[test]
    fn the_most_processes_there_may_be_are_those_of_now() {
        fn max(root: &Path) -> u64 {
            let text = std::fs::read_to_string(root.join("proc/max")).unwrap_or_default();
            text.parse().unwrap_or_default()
        }
        let root = tempfile::tempdir().expect("a directory");
        let file = root.path().join("proc/max");
        std::fs::create_dir(root.path().join("proc")).expect("made");
        std::fs::write(root.path().join("proc/loadavg"), "0.1 0.2 0.3 4/56 789\n").expect("written");
        let observer = NodeObserver {
            reader: None,
            pods: None,
            clock: Arc::new(SystemClock),
            root: root.path().to_owned(),
            max_pids: max,
        };
        for (content, expected) in [(Some("1000"), Some(1000)), (Some("500"), Some(500)), (None, None)] {
            match content {
                Some(content) => std::fs::write(&file, content).expect("written"),
                None => std::fs::remove_file(&file).expect("it was there"),
            }
            assert_eq!(observer.observe().processes, Some(Processes { max: expected, now: 56 }), "{content:?}");
        }
    }

    #[test]
    fn files_that_vanish_or_hold_garbage_are_no_observation() {
        let root = tempfile::tempdir().expect("a directory");
        for directory in ["cgroup", "proc"] {
            std::fs::create_dir(root.path().join(directory)).expect("made");
        }
        let whole: [(&str, &[u8]); 4] = [
            ("cgroup/cpu.stat", b"usage_usec 5\n"),
            ("cgroup/memory.stat", b"anon 60\nfile 30\ninactive_file 10\n"),
            ("proc/meminfo", b"MemTotal: 1 kB\nSwapTotal: 0 kB\n"),
            ("proc/loadavg", b"0.1 0.2 0.3 4/56 789\n"),
        ];
        let lay = |(file, content): (&str, &[u8])| std::fs::write(root.path().join(file), content).expect("written");
        let memory = Some(MemoryObservation { total: 1024, usage: 90, working_set: 80 });
        let processes = Some(Processes { max: Some(1000), now: 56 });
        let garbage: [&[u8]; 5] =
            [b"", b"\xff\xfe\0", b"anon: many\nfile -3\n", b"anon 99999999999999999999999\n4/x", b"\n\n\n"];
        for (file, lost_memory, lost_processes) in
            [("cgroup/memory.stat", true, false), ("proc/meminfo", true, false), ("proc/loadavg", false, true)]
        {
            // A cgroup whose file is gone is not reported with its previous values.
            let mounts = Mounts::Unified(root.path().join("cgroup"));
            let observer = NodeObserver {
                reader: Some(Mutex::new(CgroupReader::new(mounts, Arc::new(NoGroups), 0))),
                pods: None,
                clock: Arc::new(SystemClock),
                root: root.path().to_owned(),
                max_pids: |_| 1000,
            };
            let expected = NodeObservation {
                memory: memory.filter(|_| !lost_memory),
                pods: None,
                processes: processes.filter(|_| !lost_processes),
            };
            for content in garbage {
                whole.into_iter().for_each(lay);
                assert_eq!(observer.observe(), NodeObservation { memory, pods: None, processes }, "{file} is whole");
                lay((file, content));
                assert_eq!(observer.observe(), expected, "{file}: {}", content.escape_ascii());
            }
            std::fs::remove_file(root.path().join(file)).expect("it was there");
            assert_eq!(observer.observe(), expected, "{file} is gone");
        }
    }
}
