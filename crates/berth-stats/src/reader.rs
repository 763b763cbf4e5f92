//! Cgroup reader: the only reader of the agent, shared by all stats pages and by eviction.
//!
//! A pass receives a list of cgroups with a depth for each. Opened files stay open, up to a limit, and are read again
//! with `pread`, which is about twenty times cheaper than opening them again. Each open file costs the kernel a page,
//! so files of cgroups that are no longer listed are closed, and all files once nobody requests passes. A deeper pass
//! soon after another reads only what is missing, because scrapers request the pages one after another. Settings are
//! read again only after they were written. The reader has no task and no timer; a pass runs on request. Every call
//! blocks: use the blocking pool.
//! Implements spec 04b §7.2, §11, 08 §15.

use std::{
    collections::HashMap,
    fs::File,
    os::unix::fs::MetadataExt,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    thread,
};

use super::{
    cgroup::{Cgroup, ReadContext},
    mounts::{Mounts, Tree, container_places},
    reading::{Depth, Reading, WallNs},
    settings_watch::{ChangedCgroups, SettingsWatch},
};
pub use berth_cadvisor::MachineMemory;
use berth_types::PodUid;

/// Maximum age of a reading that a deeper one may complete, in nanoseconds; the deeper one keeps its time.
pub const YOUNG_NS: i64 = 1_000_000_000;
/// Number of cgroups from which on a second thread pays off.
const WORTH_A_THREAD: usize = 64;
/// Settings are read again every so many passes, staggered by cgroup: inotify does not report writes through the mount
/// of another cgroup namespace.
const AGAIN: u64 = 128;
/// Initial size of the read buffer, bytes.
const BUFFER: usize = 16 << 10;

/// Identifies a cgroup.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub enum CgroupKey {
    /// The cgroup at a path, such as `/kubepods`.
    At(Arc<str>),
    /// The cgroup of a pod.
    Pod(PodUid),
    /// The cgroup of a container or sandbox, by its pod and its ID.
    Container(PodUid, Arc<str>),
}

/// Candidate paths of pod cgroups, likeliest first. The reader keeps the path at which a cgroup was found.
pub trait PodCgroupPaths: Send + Sync + 'static {
    /// Parent cgroups of pods: `kubepods` and those of the QoS classes; empty where pods have no cgroups.
    fn above(&self) -> Vec<String>;
    /// Candidate paths of a pod's cgroup.
    fn of_pod(&self, pod: &PodUid) -> Vec<String>;
}

/// A cgroup to read in a pass.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct CgroupRequest {
    /// The cgroup to read.
    pub key: CgroupKey,
    /// Depth of the reading; `None` only keeps the known files open.
    pub depth: Option<Depth>,
}

/// Values of one cgroup, read in one pass.
#[derive(Clone, PartialEq, Debug)]
pub struct CgroupObservation {
    /// Path of the cgroup.
    pub path: Arc<str>,
    /// Values read from its files.
    pub reading: Reading,
}

/// Reads cgroups and caches their open files, settings, and previous counters.
pub struct CgroupReader {
    mounts: Mounts,
    names: Arc<dyn PodCgroupPaths>,
    groups: HashMap<CgroupKey, Box<Cgroup>>,
    watch: SettingsWatch,
    /// Whether the kernel accounts block I/O per cgroup: cgroup v1 does not do so for every device.
    counts_disks: bool,
    buffer: Vec<u8>,
    open: AtomicUsize,
    max_open: usize,
    processors: usize,
    pass: u64,
    found: u64,
}

/// Machine memory and clock of one pass.
struct PassContext<'a> {
    machine: MachineMemory,
    now: &'a (dyn Fn() -> WallNs + Sync),
}

impl<'a> PassContext<'a> {
    fn tools(&self, mounts: &'a Mounts, open: &'a AtomicUsize, max_open: usize, counts_disks: bool) -> ReadContext<'a> {
        ReadContext { mounts, machine: self.machine, now: self.now, counts_disks, open, max_open }
    }
}

/// A cgroup taken out of the map so that it can be read on any thread.
struct DetachedCgroup {
    depth: Depth,
    group: Option<(CgroupKey, Box<Cgroup>)>,
    seen: Option<CgroupObservation>,
}

impl DetachedCgroup {
    fn read(&mut self, tools: &ReadContext<'_>, buffer: &mut Vec<u8>) {
        self.seen = self.group.as_mut().and_then(|(_, group)| group.read(self.depth, tools, buffer));
    }
}

impl CgroupReader {
    /// Creates a reader below these mounts that keeps at most `max_open` files open.
    pub fn new(mounts: Mounts, names: Arc<dyn PodCgroupPaths>, max_open: usize) -> Self {
        Self {
            mounts,
            names,
            groups: HashMap::new(),
            watch: SettingsWatch::default(),
            counts_disks: true,
            buffer: vec![0; BUFFER],
            open: AtomicUsize::new(0),
            max_open,
            processors: thread::available_parallelism().map_or(1, usize::from),
            pass: 0,
            found: 0,
        }
    }

    /// Reads all listed cgroups in order; `None` for one that does not exist. The root comes first, and pods come
    /// before their containers. Cgroups that are not listed are closed and removed.
    pub fn pass(
        &mut self,
        wanted: &[CgroupRequest],
        machine: MachineMemory,
        now: &(dyn Fn() -> WallNs + Sync),
    ) -> Vec<Option<CgroupObservation>> {
        self.pass = self.pass.wrapping_add(1);
        self.forget_settings();
        let around = PassContext { machine, now };
        let seen = match wanted.split_first() {
            Some((root, others)) if others.len() >= WORTH_A_THREAD && self.processors > 1 => {
                // The root reading decides whether block I/O is accounted.
                let root = self.read_or_reopen(root, &around);
                std::iter::once(root).chain(self.read_many(others, &around)).collect()
            }
            _ => wanted.iter().map(|wanted| self.read_or_reopen(wanted, &around)).collect(),
        };
        let pass = self.pass;
        let gone: Vec<Box<Cgroup>> = self.groups.extract_if(|_, group| group.pass != pass).map(|gone| gone.1).collect();
        gone.into_iter().for_each(|group| self.drop_group(*group));
        seen
    }

    /// Reads on two threads: most of the time is spent on memory latency, and a processor can overlap two such waits.
    fn read_many(&mut self, wanted: &[CgroupRequest], around: &PassContext<'_>) -> Vec<Option<CgroupObservation>> {
        let exists: Vec<bool> = wanted.iter().map(|wanted| self.keep(wanted).is_some()).collect();
        let mut take = |wanted: &CgroupRequest| {
            let group = wanted.depth.and_then(|_| self.groups.remove_entry(&wanted.key));
            DetachedCgroup { depth: wanted.depth.unwrap_or_default(), group, seen: None }
        };
        let mut taken: Vec<DetachedCgroup> = wanted.iter().map(&mut take).collect();
        let Self { mounts, open, max_open, counts_disks, buffer, .. } = self;
        let tools = around.tools(mounts, open, *max_open, *counts_disks);
        let (front, back) = taken.split_at_mut(wanted.len() / 2);
        thread::scope(|scope| {
            scope.spawn(|| {
                let mut buffer = vec![0; BUFFER];
                back.iter_mut().for_each(|taken| taken.read(&tools, &mut buffer));
            });
            front.iter_mut().for_each(|taken| taken.read(&tools, buffer));
        });
        self.groups.extend(taken.iter_mut().filter_map(|taken| taken.group.take()));
        let again = |((wanted, exists), taken): ((&CgroupRequest, bool), DetachedCgroup)| match taken.seen {
            // Listed twice, or removed and possibly recreated.
            None if exists => self.read_or_reopen(wanted, around),
            seen => seen,
        };
        wanted.iter().zip(exists).zip(taken).map(again).collect()
    }

    /// Marks a cgroup as listed, and looks it up if it is to be read; `None` if it does not exist.
    fn keep(&mut self, wanted: &CgroupRequest) -> Option<()> {
        if let Some(group) = self.groups.get_mut(&wanted.key) {
            group.pass = self.pass;
            if group.number % AGAIN == self.pass % AGAIN {
                group.settings = None;
            }
            return Some(());
        }
        wanted.depth.and_then(|_| self.admit(&wanted.key))
    }

    /// Drops the cached settings and readings of cgroups whose files were written.
    fn forget_settings(&mut self) {
        let forget = |group: &mut Box<Cgroup>| (group.settings, group.seen) = (None, None);
        match self.watch.written() {
            ChangedCgroups::Any => self.groups.values_mut().for_each(forget),
            ChangedCgroups::Groups(keys) => {
                for key in keys {
                    self.groups.get_mut(&key).into_iter().for_each(forget);
                }
            }
        }
    }

    fn drop_group(&mut self, group: Cgroup) {
        let open = self.open.get_mut();
        *open = open.saturating_sub(group.open_files());
        self.watch.remove(group.watched);
    }

    /// Closes all files; rates start without a previous sample.
    pub fn close(&mut self) {
        self.groups = HashMap::new();
        self.watch = SettingsWatch::default();
        self.open = AtomicUsize::new(0);
    }

    /// Number of known cgroups, and number of open files.
    pub fn size(&self) -> (usize, usize) {
        (self.groups.len(), self.open.load(Ordering::Relaxed))
    }

    /// Whether the kernel provides pressure stall information (PSI) for cgroups.
    pub fn has_pressure(&self) -> bool {
        match &self.mounts {
            Mounts::Unified(root) => File::open(root.join("cpu.pressure")).is_ok(),
            Mounts::Old(_) => false,
        }
    }

    fn read_or_reopen(&mut self, wanted: &CgroupRequest, around: &PassContext<'_>) -> Option<CgroupObservation> {
        self.keep(wanted)?;
        let depth = wanted.depth?;
        let seen = self.read(&wanted.key, depth, around).or_else(|| {
            // Removed, or removed and recreated under the same name.
            self.forget(&wanted.key);
            self.admit(&wanted.key)?;
            self.read(&wanted.key, depth, around)
        });
        if seen.is_none() {
            self.forget(&wanted.key);
        }
        if depth == Depth::Full && matches!(&wanted.key, CgroupKey::At(path) if &**path == "/") {
            // What the root reports holds for all cgroups.
            self.counts_disks = seen.as_ref().is_some_and(|root| !root.reading.devices.is_empty());
        }
        seen
    }

    fn read(&mut self, key: &CgroupKey, depth: Depth, around: &PassContext<'_>) -> Option<CgroupObservation> {
        let Self { mounts, groups, open, max_open, counts_disks, buffer, .. } = self;
        groups.get_mut(key)?.read(depth, &around.tools(mounts, open, *max_open, *counts_disks), buffer)
    }

    /// Looks up a cgroup and watches its settings before any file is read.
    fn admit(&mut self, key: &CgroupKey) -> Option<()> {
        let mut group = Box::new(self.find(key)?);
        (group.pass, group.number) = (self.pass, self.found);
        self.found = self.found.wrapping_add(1);
        group.watched = self.watch.add(key, self.mounts.directories_of_settings(&group.path));
        self.groups.insert(key.clone(), group);
        Some(())
    }

    fn forget(&mut self, key: &CgroupKey) {
        if let Some(group) = self.groups.remove(key) {
            self.drop_group(*group);
        }
    }

    /// Returns the cgroup if it exists.
    fn find(&self, key: &CgroupKey) -> Option<Cgroup> {
        const TREES: [Tree; 3] = [Tree::Memory, Tree::Cpuacct, Tree::Cpu];
        let (places, trees) = match key {
            CgroupKey::At(path) => (vec![path.to_string()], TREES.to_vec()),
            CgroupKey::Pod(uid) => (self.names.of_pod(uid), TREES.to_vec()),
            CgroupKey::Container(uid, id) => {
                // Containers are in the same hierarchy as their pod.
                let pod = self.groups.get(&CgroupKey::Pod(uid.clone()))?;
                (container_places(&pod.path, id).to_vec(), vec![pod.tree])
            }
        };
        places.into_iter().find_map(|path| {
            let made_at = |tree: &Tree| self.mounts.directory(&path, *tree)?.metadata().ok().map(|made| made.ctime());
            let (made_at, tree) = trees.iter().find_map(|tree| Some((made_at(tree)?, *tree)))?;
            Some(Cgroup::new(path.into(), tree, made_at, self.mounts.files().len()))
        })
    }
}

#[cfg(test)]
mod tests;
