//! Reads control groups: the one reader of the agent, for every page and, later, for eviction.
//!
//! A pass is told which groups there are and how deep to look at each. What it has opened stays
//! open (up to a bound) and is read again with `pread`, which is some twenty times cheaper than to
//! open it again; but each open file costs the kernel a page, so what is not named any more is
//! closed, and everything once nobody asks. A deeper look soon after another reads only what that
//! one has not: scrapers ask for one page after the other. Settings are read when they have been
//! written. No task, no timer: a pass happens when somebody asks. Every call blocks: use the
//! blocking pool.
//! Behaviour: spec 04b §7.2, §11, 08 §15.

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
    group::{Group, Tools},
    mounts::{Mounts, Tree, container_places},
    reading::{Depth, Reading, WallNs},
    settings::{Watch, Written},
};
use berth_types::PodUid;

/// So long a look is good enough to be completed by a deeper one, which carries its time.
pub const YOUNG_NS: i64 = 1_000_000_000;
/// So many groups are worth another thread.
const WORTH_A_THREAD: usize = 64;
/// With every so many passes settings are read again all the same, each pass those of some groups: what is written
/// through the mount of another cgroup namespace nobody tells.
const AGAIN: u64 = 128;
/// What a look begins with.
const BUFFER: usize = 16 << 10;

/// Which group.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub enum GroupKey {
    /// At a path, `/kubepods`.
    At(Arc<str>),
    /// A pod's.
    Pod(PodUid),
    /// A container's or sandbox's, by its pod and its id.
    Container(PodUid, Arc<str>),
}

/// Where pods' groups may be, likeliest first. The answer is kept once a group was found there.
pub trait PodGroups: Send + Sync + 'static {
    /// The groups above pods: `kubepods` and those of classes; none where pods have no groups.
    fn above(&self) -> Vec<String>;
    /// Paths of a pod's group.
    fn of_pod(&self, pod: &PodUid) -> Vec<String>;
}

/// One group to look at.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Wanted {
    /// Which.
    pub key: GroupKey,
    /// How deep; `None` only keeps what is open.
    pub depth: Option<Depth>,
}

/// What was seen of a group.
#[derive(Clone, PartialEq, Debug)]
pub struct Seen {
    /// Its path.
    pub path: Arc<str>,
    /// The look.
    pub reading: Reading,
}

/// Facts of the machine that stand in for files the root group does not have.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct MachineMemory {
    /// `MemTotal`, bytes.
    pub total: u64,
    /// `MemAvailable`, bytes: what can be had without swapping, by the kernel's own estimate.
    pub available: u64,
    /// `SwapTotal`, bytes.
    pub swap_total: u64,
    /// `SwapFree`, bytes.
    pub swap_free: u64,
}

/// The reader.
pub struct Reader {
    mounts: Mounts,
    names: Arc<dyn PodGroups>,
    groups: HashMap<GroupKey, Box<Group>>,
    watch: Watch,
    /// Whether the kernel counts what groups do with their disks: not of each, with the old hierarchies.
    counts_disks: bool,
    buffer: Vec<u8>,
    open: AtomicUsize,
    max_open: usize,
    processors: usize,
    pass: u64,
    found: u64,
}

/// The machine and the time, as of one pass.
struct Around<'a> {
    machine: MachineMemory,
    now: &'a (dyn Fn() -> WallNs + Sync),
}

impl<'a> Around<'a> {
    fn tools(&self, mounts: &'a Mounts, open: &'a AtomicUsize, max_open: usize, counts_disks: bool) -> Tools<'a> {
        Tools { mounts, machine: self.machine, now: self.now, counts_disks, open, max_open }
    }
}

/// A group that is read apart from the others.
struct Taken {
    depth: Depth,
    group: Option<(GroupKey, Box<Group>)>,
    seen: Option<Seen>,
}

impl Taken {
    fn read(&mut self, tools: &Tools<'_>, buffer: &mut Vec<u8>) {
        self.seen = self.group.as_mut().and_then(|(_, group)| group.read(self.depth, tools, buffer));
    }
}

impl Reader {
    /// Reads below these mounts and keeps at most `max_open` files open.
    pub fn new(mounts: Mounts, names: Arc<dyn PodGroups>, max_open: usize) -> Self {
        Self {
            mounts,
            names,
            groups: HashMap::new(),
            watch: Watch::default(),
            counts_disks: true,
            buffer: vec![0; BUFFER],
            open: AtomicUsize::new(0),
            max_open,
            processors: thread::available_parallelism().map_or(1, usize::from),
            pass: 0,
            found: 0,
        }
    }

    /// Looks at all groups, in order, the root first; `None` for one that is not there. Pods stand before their
    /// containers. What is not named is closed and forgotten.
    pub fn pass(
        &mut self,
        wanted: &[Wanted],
        machine: MachineMemory,
        now: &(dyn Fn() -> WallNs + Sync),
    ) -> Vec<Option<Seen>> {
        self.pass = self.pass.wrapping_add(1);
        self.forget_settings();
        let around = Around { machine, now };
        let seen = match wanted.split_first() {
            Some((root, others)) if others.len() >= WORTH_A_THREAD && self.processors > 1 => {
                // It tells whether disks are counted.
                let root = self.look(root, &around);
                std::iter::once(root).chain(self.look_at_many(others, &around)).collect()
            }
            _ => wanted.iter().map(|wanted| self.look(wanted, &around)).collect(),
        };
        let pass = self.pass;
        let gone: Vec<Box<Group>> = self.groups.extract_if(|_, group| group.pass != pass).map(|gone| gone.1).collect();
        gone.into_iter().for_each(|group| self.drop_group(*group));
        seen
    }

    /// Two threads read: most of the time goes into waiting for memory, of which a processor can do two at a time.
    fn look_at_many(&mut self, wanted: &[Wanted], around: &Around<'_>) -> Vec<Option<Seen>> {
        let exists: Vec<bool> = wanted.iter().map(|wanted| self.keep(wanted).is_some()).collect();
        let mut take = |wanted: &Wanted| {
            let group = wanted.depth.and_then(|_| self.groups.remove_entry(&wanted.key));
            Taken { depth: wanted.depth.unwrap_or_default(), group, seen: None }
        };
        let mut taken: Vec<Taken> = wanted.iter().map(&mut take).collect();
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
        let again = |((wanted, exists), taken): ((&Wanted, bool), Taken)| match taken.seen {
            // Named twice, or gone and maybe made anew.
            None if exists => self.look(wanted, around),
            seen => seen,
        };
        wanted.iter().zip(exists).zip(taken).map(again).collect()
    }

    /// Notes that a group was named, and finds it where it has to be read; `None` for one that is not there.
    fn keep(&mut self, wanted: &Wanted) -> Option<()> {
        if let Some(group) = self.groups.get_mut(&wanted.key) {
            group.pass = self.pass;
            if group.number % AGAIN == self.pass % AGAIN {
                group.settings = None;
            }
            return Some(());
        }
        wanted.depth.and_then(|_| self.admit(&wanted.key))
    }

    /// Of groups whose files were written.
    fn forget_settings(&mut self) {
        let forget = |group: &mut Box<Group>| (group.settings, group.seen) = (None, None);
        match self.watch.written() {
            Written::Any => self.groups.values_mut().for_each(forget),
            Written::Groups(keys) => {
                for key in keys {
                    self.groups.get_mut(&key).into_iter().for_each(forget);
                }
            }
        }
    }

    fn drop_group(&mut self, group: Group) {
        let open = self.open.get_mut();
        *open = open.saturating_sub(group.open_files());
        self.watch.remove(group.watched);
    }

    /// Closes everything; rates begin anew.
    pub fn close(&mut self) {
        self.groups = HashMap::new();
        self.watch = Watch::default();
        self.open = AtomicUsize::new(0);
    }

    /// How many groups are known, and how many files are open.
    pub fn size(&self) -> (usize, usize) {
        (self.groups.len(), self.open.load(Ordering::Relaxed))
    }

    /// Whether the kernel tells of pressure in groups.
    pub fn has_pressure(&self) -> bool {
        match &self.mounts {
            Mounts::Unified(root) => File::open(root.join("cpu.pressure")).is_ok(),
            Mounts::Old(_) => false,
        }
    }

    fn look(&mut self, wanted: &Wanted, around: &Around<'_>) -> Option<Seen> {
        self.keep(wanted)?;
        let depth = wanted.depth?;
        let seen = self.read(&wanted.key, depth, around).or_else(|| {
            // Gone, or gone and made anew under the same name.
            self.forget(&wanted.key);
            self.admit(&wanted.key)?;
            self.read(&wanted.key, depth, around)
        });
        if seen.is_none() {
            self.forget(&wanted.key);
        }
        if depth == Depth::Full && matches!(&wanted.key, GroupKey::At(path) if &**path == "/") {
            // The root counts for all.
            self.counts_disks = seen.as_ref().is_some_and(|root| !root.reading.devices.is_empty());
        }
        seen
    }

    fn read(&mut self, key: &GroupKey, depth: Depth, around: &Around<'_>) -> Option<Seen> {
        let Self { mounts, groups, open, max_open, counts_disks, buffer, .. } = self;
        groups.get_mut(key)?.read(depth, &around.tools(mounts, open, *max_open, *counts_disks), buffer)
    }

    /// Finds a group and hears of writes to its files before any is read.
    fn admit(&mut self, key: &GroupKey) -> Option<()> {
        let mut group = Box::new(self.find(key)?);
        (group.pass, group.number) = (self.pass, self.found);
        self.found = self.found.wrapping_add(1);
        group.watched = self.watch.add(key, self.mounts.directories_of_settings(&group.path));
        self.groups.insert(key.clone(), group);
        Some(())
    }

    fn forget(&mut self, key: &GroupKey) {
        if let Some(group) = self.groups.remove(key) {
            self.drop_group(*group);
        }
    }

    /// The group where it exists.
    fn find(&self, key: &GroupKey) -> Option<Group> {
        const TREES: [Tree; 3] = [Tree::Memory, Tree::Cpuacct, Tree::Cpu];
        let (places, trees) = match key {
            GroupKey::At(path) => (vec![path.to_string()], TREES.to_vec()),
            GroupKey::Pod(uid) => (self.names.of_pod(uid), TREES.to_vec()),
            GroupKey::Container(uid, id) => {
                // Where the pod is, its containers are.
                let pod = self.groups.get(&GroupKey::Pod(uid.clone()))?;
                (container_places(&pod.path, id).to_vec(), vec![pod.tree])
            }
        };
        places.into_iter().find_map(|path| {
            let made_at = |tree: &Tree| self.mounts.directory(&path, *tree)?.metadata().ok().map(|made| made.ctime());
            let (made_at, tree) = trees.iter().find_map(|tree| Some((made_at(tree)?, *tree)))?;
            Some(Group::new(path.into(), tree, made_at, self.mounts.files().len()))
        })
    }
}

#[cfg(test)]
mod tests;
