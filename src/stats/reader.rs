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
    io,
    os::unix::fs::{FileExt, MetadataExt},
    sync::Arc,
};

use inotify::WatchDescriptor;

use super::{
    cgroup_files as parse,
    mounts::{Content, ControlFile, Mounts, Tree, container_places},
    reading::{Cpu, CpuShare, Depth, Mark, Memory, Reading, WallNs, rate},
    settings::{Settings, Watch, Written},
};
use crate::pod::PodUid;

/// The longest control file that is read: the members of a group with 100,000 processes.
const MAX_FILE: usize = 1 << 20;
/// So long a look is good enough to be completed by a deeper one, which carries its time.
pub const YOUNG_NS: i64 = 1_000_000_000;
/// What a look begins with; a pair of looks closer than this says nothing about rates.
const MIN_WINDOW_NS: i64 = 500_000_000;

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

/// A file of a group.
enum Slot {
    Closed,
    Open(File),
    Absent,
}

struct Group {
    path: Arc<str>,
    /// A hierarchy in which it is.
    tree: Tree,
    made_at: i64,
    /// What the last look saw, unless that was all there is.
    seen: Option<(Depth, Draft)>,
    /// Its settings as of a look so deep, unless they were written since.
    settings: Option<(Depth, Settings)>,
    /// Who hears of that; nobody where the kernel cannot tell.
    watched: Vec<WatchDescriptor>,
    slots: Vec<Slot>,
    last: Option<Mark>,
    rate: Option<u64>,
    pass: u64,
}

/// Facts of the machine that stand in for files the root group does not have.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct MachineMemory {
    /// `MemTotal`, bytes.
    pub total: u64,
    /// `SwapTotal`, bytes.
    pub swap_total: u64,
    /// `SwapFree`, bytes.
    pub swap_free: u64,
}

/// The reader.
pub struct Reader {
    mounts: Mounts,
    names: Arc<dyn PodGroups>,
    groups: HashMap<GroupKey, Group>,
    watch: Watch,
    /// Whether the kernel counts what groups do with their disks: not of each, with the old hierarchies.
    counts_disks: bool,
    buffer: Vec<u8>,
    open: usize,
    max_open: usize,
    pass: u64,
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
            buffer: vec![0; 16 << 10],
            open: 0,
            max_open,
            pass: 0,
        }
    }

    /// Looks at all groups, in order; `None` for one that is not there. Pods stand before their containers. What
    /// is not named is closed and forgotten.
    pub fn pass(&mut self, wanted: &[Wanted], machine: MachineMemory, now: &dyn Fn() -> WallNs) -> Vec<Option<Seen>> {
        self.pass = self.pass.wrapping_add(1);
        self.forget_settings();
        let seen = wanted.iter().map(|wanted| self.look(wanted, machine, now)).collect();
        let pass = self.pass;
        let gone: Vec<Group> = self.groups.extract_if(|_, group| group.pass != pass).map(|(_, group)| group).collect();
        gone.into_iter().for_each(|group| self.drop_group(group));
        seen
    }

    /// Of groups whose files were written.
    fn forget_settings(&mut self) {
        let forget = |group: &mut Group| (group.settings, group.seen) = (None, None);
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
        let open = group.slots.iter().filter(|slot| matches!(slot, Slot::Open(_))).count();
        self.open = self.open.saturating_sub(open);
        self.watch.remove(group.watched);
    }

    /// Closes everything; rates begin anew.
    pub fn close(&mut self) {
        self.groups = HashMap::new();
        self.watch = Watch::default();
        self.open = 0;
    }

    /// How many groups are known, and how many files are open.
    pub fn size(&self) -> (usize, usize) {
        (self.groups.len(), self.open)
    }

    /// Whether the kernel tells of pressure in groups.
    pub fn has_pressure(&self) -> bool {
        match &self.mounts {
            Mounts::Unified(root) => File::open(root.join("cpu.pressure")).is_ok(),
            Mounts::Old(_) => false,
        }
    }

    fn look(&mut self, wanted: &Wanted, machine: MachineMemory, now: &dyn Fn() -> WallNs) -> Option<Seen> {
        if let Some(group) = self.groups.get_mut(&wanted.key) {
            group.pass = self.pass;
        }
        let depth = wanted.depth?;
        if !self.groups.contains_key(&wanted.key) {
            self.admit(&wanted.key)?;
        }
        let seen = self.read(&wanted.key, depth, machine, now).or_else(|| {
            // Gone, or gone and made anew under the same name.
            self.forget(&wanted.key);
            self.admit(&wanted.key)?;
            self.read(&wanted.key, depth, machine, now)
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

    /// Finds a group and hears of writes to its files before any is read.
    fn admit(&mut self, key: &GroupKey) -> Option<()> {
        let mut group = self.find(key)?;
        group.watched = self.watch.add(key, self.mounts.directories_of_settings(&group.path));
        self.groups.insert(key.clone(), group);
        Some(())
    }

    fn forget(&mut self, key: &GroupKey) {
        if let Some(group) = self.groups.remove(key) {
            self.drop_group(group);
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
            let slots = self.mounts.files().iter().map(|_| Slot::Closed).collect();
            let path = path.into();
            let pass = self.pass;
            let (settings, watched) = (None, Vec::new());
            Some(Group { path, tree, made_at, seen: None, settings, watched, slots, last: None, rate: None, pass })
        })
    }

    /// Reads the files of a group; `None` where neither processor nor memory could be read.
    fn read(&mut self, key: &GroupKey, depth: Depth, machine: MachineMemory, now: &dyn Fn() -> WallNs) -> Option<Seen> {
        let Self { mounts, groups, buffer, open, max_open, counts_disks, .. } = self;
        let group = groups.get_mut(key)?;
        let at = now();
        let is_of_use =
            |(seen, draft): &(Depth, Draft)| *seen < depth && (0..=YOUNG_NS).contains(&at.saturating_sub(draft.at));
        let (read, mut draft) = match group.seen.take().filter(is_of_use) {
            Some((depth, draft)) => (Some(depth), draft),
            None => (None, Draft { at, ..Draft::default() }),
        };
        let known = group.settings.map(|(known, settings)| {
            draft.settings = settings;
            known
        });
        let (is_root, is_watched) = (&*group.path == "/", !group.watched.is_empty());
        let is_wanted = |file: &ControlFile| {
            file.depth <= depth
                && read.is_none_or(|read| file.depth > read)
                && !(file.is_setting && known.is_some_and(|known| file.depth <= known))
                && (*counts_disks || is_root || file.tree != Tree::Blkio || file.content == Content::IoPressure)
        };
        for (file, slot) in mounts.files().iter().zip(&mut group.slots).filter(|(file, _)| is_wanted(file)) {
            if file.content == Content::Throttling && draft.settings.quota.is_none() {
                continue;
            }
            let read = match slot {
                Slot::Absent => continue,
                Slot::Open(handle) => read_all(handle, buffer, file.content),
                Slot::Closed => {
                    let Some(path) = mounts.place(&group.path, file) else { continue };
                    let handle = match File::open(path) {
                        Ok(handle) => handle,
                        Err(error) => {
                            // What a kernel does not have does not come while the group lives.
                            if error.kind() == io::ErrorKind::NotFound {
                                *slot = Slot::Absent;
                            }
                            continue;
                        }
                    };
                    let read = read_all(&handle, buffer, file.content);
                    if *open < *max_open && read.is_ok() && !(file.is_setting && is_watched) {
                        *slot = Slot::Open(handle);
                        *open += 1;
                    }
                    read
                }
            };
            if let Some(text) = read.ok().and_then(|length| buffer.get(..length)) {
                draft.take(file.content, text);
            }
        }
        let (cpu, memory) = (draft.cpu(), draft.memory(mounts.is_unified(), is_root.then_some(machine)));
        if cpu.is_none() && memory.is_none() {
            return None;
        }
        let cpu = cpu.map(|cpu| Cpu { rate: group.rate_at(draft.at, cpu.times.usage_ns), ..cpu });
        group.settings = is_watched.then(|| (known.map_or(depth, |known| known.max(depth)), draft.settings));
        group.seen = (depth < Depth::Full).then(|| (depth, draft.clone()));
        Some(Seen { path: group.path.clone(), reading: draft.finish(cpu, memory, group.made_at, depth) })
    }
}

impl Group {
    fn rate_at(&mut self, at: WallNs, usage_ns: u64) -> Option<u64> {
        let mark = Mark { at, usage_ns };
        let too_soon = self.last.is_some_and(|last| (0..MIN_WINDOW_NS).contains(&at.saturating_sub(last.at)));
        if !(too_soon && self.last.is_some_and(|last| last.usage_ns <= usage_ns)) {
            self.rate = self.last.and_then(|last| rate(last, mark));
            self.last = Some(mark);
        }
        self.rate
    }
}

/// Reads a file from its beginning; returns how much of the buffer holds it.
fn read_all(file: &File, buffer: &mut Vec<u8>, content: Content) -> io::Result<usize> {
    let mut length = 0;
    loop {
        let Some(room) = buffer.get_mut(length..).filter(|room| !room.is_empty()) else {
            if buffer.len() >= MAX_FILE {
                return Ok(length);
            }
            buffer.resize(buffer.len() * 2, 0);
            continue;
        };
        let offset = u64::try_from(length).unwrap_or(u64::MAX);
        let free = room.len();
        let read = match file.read_at(room, offset) {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            other => other?,
        };
        length += read.min(free);
        // Only lists come in pieces: everything else is written by the kernel at once.
        if read == 0 || (read < free && content != Content::Processes) {
            return Ok(length);
        }
    }
}

/// What the files said so far.
#[derive(Clone, Default)]
struct Draft {
    at: WallNs,
    settings: Settings,
    unified_cpu: Option<(parse::CpuTimes, parse::Throttling)>,
    cpu_usage: Option<u64>,
    cpu_split: (u64, u64),
    throttling: parse::Throttling,
    memory_usage: Option<u64>,
    memory_stat: Option<parse::MemoryStat>,
    swap_usage: Option<u64>,
    peak: u64,
    oom_kills: u64,
    failures: u64,
    kernel: u64,
    pressure: super::reading::Pressures,
    processes: Option<(u32, Option<u32>)>,
    threads: Option<u64>,
    devices: Vec<parse::DeviceIo>,
    blkio_bytes: Vec<u8>,
}

impl Draft {
    fn take(&mut self, content: Content, text: &[u8]) {
        let number = || parse::number(text);
        match content {
            Content::CpuStat => self.unified_cpu = parse::cpu_stat(text),
            Content::CpuUsage => self.cpu_usage = number(),
            Content::CpuSplit => self.cpu_split = parse::cpuacct_stat(text),
            Content::Throttling => self.throttling = parse::cpu_stat_v1(text),
            Content::CpuMax => self.settings.cpu_max = parse::cpu_max(text),
            Content::CpuWeight => self.settings.shares = number().map(parse::shares_of_weight),
            Content::CpuShares => self.settings.shares = number(),
            Content::CpuQuota => self.settings.quota = parse::signed(text).and_then(|quota| u64::try_from(quota).ok()),
            Content::CpuPeriod => self.settings.period = number(),
            Content::MemoryUsage => self.memory_usage = number(),
            Content::MemoryStat => self.memory_stat = Some(parse::memory_stat(text)),
            Content::OldMemoryStat => self.memory_stat = Some(parse::memory_stat_v1(text)),
            Content::MemoryLimit => self.settings.memory_limit = number(),
            Content::SwapUsage => self.swap_usage = number(),
            Content::SwapLimit => self.settings.swap_limit = number(),
            Content::MemoryAndSwapLimit => self.settings.memory_and_swap_limit = number(),
            Content::MemoryReserved => self.settings.reserved = number().unwrap_or_default(),
            Content::MemoryPeak => self.peak = number().unwrap_or_default(),
            Content::MemoryEvents => self.oom_kills = parse::oom_kills(text).unwrap_or_default(),
            Content::MemoryFailures => self.failures = number().unwrap_or_default(),
            Content::MemoryKernel => self.kernel = number().unwrap_or_default(),
            Content::CpuPressure => self.pressure.cpu = parse::pressure(text),
            Content::MemoryPressure => self.pressure.memory = parse::pressure(text),
            Content::IoPressure => self.pressure.io = parse::pressure(text),
            Content::Processes => {
                let mut members = parse::processes(text);
                let first = members.next();
                let others = u32::try_from(members.count()).unwrap_or(u32::MAX);
                self.processes = Some((others.saturating_add(u32::from(first.is_some())), first));
            }
            Content::Threads => self.threads = number(),
            Content::ThreadsMax => {
                self.settings.threads_max = number().filter(|max| *max != u64::MAX).unwrap_or_default()
            }
            Content::IoStat => self.devices = parse::io_stat(text),
            Content::BlkioBytes => self.blkio_bytes = text.to_vec(),
            Content::BlkioCounts => self.devices = parse::blkio(&self.blkio_bytes, text),
        }
    }

    fn cpu(&self) -> Option<Cpu> {
        if let Some((times, held)) = self.unified_cpu {
            return Some(Cpu { times, rate: None, held });
        }
        let (user_ns, system_ns) = self.cpu_split;
        let times = parse::CpuTimes { usage_ns: self.cpu_usage?, user_ns, system_ns };
        Some(Cpu { times, rate: None, held: self.throttling })
    }

    fn memory(&self, unified: bool, root: Option<MachineMemory>) -> Option<Memory> {
        let stat = self.memory_stat;
        let root_usage = || stat.filter(|_| unified && root.is_some()).map(|stat| stat.anon.saturating_add(stat.file));
        let usage = self.memory_usage.or_else(root_usage)?;
        let stat = stat.unwrap_or_default();
        let mut memory = Memory {
            usage,
            peak: self.peak,
            stat,
            swap: if unified { self.swap_usage.unwrap_or_default() } else { stat.swap },
            failures: self.failures,
            kernel: self.kernel,
            limit: self.settings.memory_limit.unwrap_or(u64::MAX),
            swap_limit: self.swap_limit(unified),
            reserved: self.settings.reserved,
            shown_swap_limit: if unified { self.settings.swap_limit } else { self.settings.memory_and_swap_limit }
                .unwrap_or_default(),
            oom_kills: self.oom_kills,
        };
        if let Some(machine) = root {
            memory.limit = machine.total;
            memory.swap_limit = Some(machine.swap_total);
            memory.shown_swap_limit = machine.swap_total;
            if unified {
                memory.swap = machine.swap_total.saturating_sub(machine.swap_free);
            }
        }
        Some(memory)
    }

    /// The old hierarchy limits memory and swap together.
    fn swap_limit(&self, unified: bool) -> Option<u64> {
        let limit = if unified {
            self.settings.swap_limit?
        } else {
            let both = self.settings.memory_and_swap_limit.filter(|both| *both <= parse::UNLIMITED)?;
            both.saturating_sub(self.settings.memory_limit.filter(|limit| *limit <= parse::UNLIMITED)?)
        };
        (limit <= parse::UNLIMITED).then_some(limit)
    }

    fn finish(self, cpu: Option<Cpu>, memory: Option<Memory>, made_at: i64, depth: Depth) -> Reading {
        let (quota, period) = match self.settings.cpu_max {
            Some((quota, period)) => (quota, period),
            None => (self.settings.quota, self.settings.period.unwrap_or_default()),
        };
        let share = CpuShare { shares: self.settings.shares.unwrap_or_default(), quota, period };
        Reading {
            at: self.at,
            made_at,
            cpu,
            share: (depth == Depth::Full && (self.settings.shares.is_some() || period != 0)).then_some(share),
            memory,
            pressure: self.pressure,
            devices: self.devices,
            processes: self.processes.map(|(count, _)| count),
            first_process: self.processes.and_then(|(_, first)| first),
            threads: self.threads.map(|threads| (threads, self.settings.threads_max)),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::{cell::Cell, fs, path::Path};

    use super::*;

    struct Below(&'static str);

    impl PodGroups for Below {
        fn above(&self) -> Vec<String> {
            vec!["/kubepods".to_owned()]
        }

        fn of_pod(&self, pod: &PodUid) -> Vec<String> {
            vec![format!("/elsewhere/pod{pod}"), format!("{}/pod{pod}", self.0)]
        }
    }

    fn lay(root: &Path, group: &str, files: &[(&str, &str)]) {
        let directory = root.join(group.trim_start_matches('/'));
        fs::create_dir_all(&directory).expect("a directory");
        for (name, content) in files {
            fs::write(directory.join(name), content).expect("written");
        }
    }

    fn reader(mounts: Mounts, max_open: usize) -> Reader {
        Reader::new(mounts, Arc::new(Below("/kubepods")), max_open)
    }

    fn at(path: &str, depth: Depth) -> Wanted {
        Wanted { key: GroupKey::At(path.into()), depth: Some(depth) }
    }

    const MACHINE: MachineMemory = MachineMemory { total: 1000, swap_total: 100, swap_free: 40 };

    #[test]
    fn a_group_of_the_unified_hierarchy() {
        let root = tempfile::tempdir().expect("a directory");
        lay(
            root.path(),
            "/kubepods/podu",
            &[
                ("cpu.stat", "usage_usec 1000000\nuser_usec 600000\nsystem_usec 400000\nnr_periods 5\n"),
                ("memory.current", "100\n"),
                ("memory.stat", "anon 60\nfile 30\ninactive_file 10\npgfault 3\n"),
                ("memory.swap.current", "10\n"),
                ("memory.max", "max\n"),
                ("memory.swap.max", "15\n"),
                ("cpu.max", "50000 100000\n"),
                ("cpu.weight", "39\n"),
                ("cgroup.procs", "17\n18\n"),
                ("pids.current", "4\n"),
                ("pids.max", "max\n"),
                ("memory.pressure", "some avg10=0.00 avg60=0.00 avg300=0.00 total=5\n"),
            ],
        );
        lay(root.path(), "/kubepods/podu/c1", &[("cpu.stat", "usage_usec 7\n")]);
        let mut reader = reader(Mounts::Unified(root.path().to_owned()), 100);
        let uid = PodUid::from("u");
        let wanted = |key, depth| Wanted { key, depth: Some(depth) };
        let all = [
            wanted(GroupKey::Pod(uid.clone()), Depth::Full),
            wanted(GroupKey::Container(uid.clone(), "c1".into()), Depth::Core),
            wanted(GroupKey::Container(uid.clone(), "c2".into()), Depth::Core),
        ];
        let clock = Cell::new(1_000_000_000);
        let seen = reader.pass(&all, MACHINE, &|| clock.get());
        let pod = seen[0].as_ref().expect("there");
        assert_eq!(&*pod.path, "/kubepods/podu");
        let reading = &pod.reading;
        let cpu = reading.cpu.expect("read");
        assert_eq!((cpu.times.usage_ns, cpu.rate, cpu.held.periods), (1_000_000_000, None, 5));
        let memory = reading.memory.expect("read");
        assert_eq!((memory.working_set(), memory.available(), memory.swap_available()), (90, None, Some(5)));
        assert_eq!(reading.share, Some(CpuShare { shares: 998, quota: Some(50_000), period: 100_000 }));
        assert_eq!((reading.processes, reading.first_process, reading.threads), (Some(2), Some(17), Some((4, 0))));
        assert!(reading.pressure.cpu.is_none() && reading.pressure.memory.is_some() && reading.made_at > 0);
        assert_eq!(&*seen[1].as_ref().expect("there").path, "/kubepods/podu/c1");
        assert_eq!(seen[2], None);
        assert_eq!(reader.size(), (2, 8), "settings need not stay open");

        // The second look tells rates, from files that stayed open.
        fs::write(root.path().join("kubepods/podu/cpu.stat"), "usage_usec 1500000\n").expect("written");
        clock.set(2_000_000_000);
        let seen = reader.pass(&all[..1], MACHINE, &|| clock.get());
        let rate = seen[0].as_ref().and_then(|pod| pod.reading.cpu).and_then(|cpu| cpu.rate);
        assert_eq!(rate, Some(500_000_000));
        assert_eq!(reader.size(), (1, 7), "what is not named is closed");
        reader.close();
        assert_eq!(reader.size(), (0, 0));
    }

    #[test]
    fn a_deeper_look_reads_what_the_last_one_has_not() {
        let root = tempfile::tempdir().expect("a directory");
        let files = |usage: &str, processes: &str| {
            // Elsewhere: what the kernel counts is not written by anybody.
            let all = [("cpu.stat", usage), ("cgroup.procs", processes), ("pids.current", "4\n")];
            lay(root.path(), "/kernel", &all);
            lay(root.path(), "/a", &[]);
            for (name, _) in all {
                let _ =
                    std::os::unix::fs::symlink(root.path().join("kernel").join(name), root.path().join("a").join(name)); // once
            }
        };
        files("usage_usec 5\n", "1\n");
        let mut reader = reader(Mounts::Unified(root.path().to_owned()), 10);
        let mut look = |depth, at_ms: i64| {
            let seen = reader.pass(&[at("/a", depth)], MACHINE, &|| at_ms * 1_000_000);
            let reading = seen[0].as_ref().expect("there").reading.clone();
            let usage = reading.cpu.expect("read").times.usage_ns / 1000;
            (reading.at / 1_000_000, usage, reading.processes, reading.threads.map(|t| t.0))
        };
        assert_eq!(look(Depth::Core, 1000), (1000, 5, None, None));
        files("usage_usec 6\n", "1\n2\n");
        assert_eq!(look(Depth::Summary, 1500), (1000, 5, Some(2), None), "completed, and as old as it began");
        files("usage_usec 7\n", "1\n");
        assert_eq!(look(Depth::Full, 2000), (1000, 5, Some(2), Some(4)));
        assert_eq!(look(Depth::Core, 2000), (2000, 7, None, None), "what is complete is not added to");
        assert_eq!(look(Depth::Core, 2001), (2001, 7, None, None), "as deep is as new");
        assert_eq!(look(Depth::Full, 3002), (3002, 7, Some(1), Some(4)), "too old");
    }

    #[test]
    fn settings_are_read_when_they_were_written() {
        let root = tempfile::tempdir().expect("a directory");
        lay(root.path(), "/a", &[("cpu.stat", "usage_usec 5\n"), ("memory.current", "10\n"), ("memory.max", "100\n")]);
        let mut reader = reader(Mounts::Unified(root.path().to_owned()), 10);
        let mut limit = |depth, second: i64| {
            let seen = reader.pass(&[at("/a", depth)], MACHINE, &|| second * 1_000_000_000);
            let reading = seen[0].as_ref().expect("there").reading.clone();
            (reading.memory.map(|memory| memory.limit), reading.share.map(|share| share.shares))
        };
        assert_eq!(limit(Depth::Core, 10), (Some(100), None));
        lay(root.path(), "/a", &[("memory.max", "200\n"), ("cpu.weight", "1\n"), ("cpu.max", "max 100000\n")]);
        assert_eq!(limit(Depth::Full, 20), (Some(200), Some(2)), "written, and deeper");
        assert_eq!(limit(Depth::Core, 30), (Some(200), None));
        lay(root.path(), "/a", &[("cpu.weight", "100\n")]);
        assert_eq!(limit(Depth::Full, 40), (Some(200), Some(2597)));
        assert_eq!(limit(Depth::Full, 50), (Some(200), Some(2597)));
    }

    #[test]
    fn the_root_knows_the_machine() {
        let root = tempfile::tempdir().expect("a directory");
        lay(
            root.path(),
            "/",
            &[("cpu.stat", "usage_usec 5\n"), ("memory.stat", "anon 60\nfile 30\ninactive_file 10\n")],
        );
        let mut reader = reader(Mounts::Unified(root.path().to_owned()), 0);
        let seen = reader.pass(&[at("/", Depth::Core)], MACHINE, &|| 1);
        let memory = seen[0].as_ref().and_then(|s| s.reading.memory).expect("read");
        assert_eq!((memory.usage, memory.limit, memory.swap, memory.swap_limit), (90, 1000, 60, Some(100)));
        assert_eq!(memory.available(), Some(920));
        assert_eq!(reader.size(), (1, 0), "no room to keep anything open");
    }

    #[test]
    fn a_group_of_the_old_hierarchies() {
        let root = tempfile::tempdir().expect("a directory");
        let tree = |name: &str| root.path().join(name);
        lay(&tree("cpu"), "/k", &[("cpu.shares", "1024"), ("cpu.cfs_quota_us", "-1"), ("cpu.cfs_period_us", "100000")]);
        lay(&tree("cpuacct"), "/k", &[("cpuacct.usage", "77\n"), ("cpuacct.stat", "user 1\nsystem 2\n")]);
        lay(
            &tree("memory"),
            "/k",
            &[
                ("memory.usage_in_bytes", "100"),
                ("memory.stat", "total_rss 60\ntotal_inactive_file 10\ntotal_swap 3\n"),
                ("memory.limit_in_bytes", "200"),
                ("memory.memsw.limit_in_bytes", "250"),
                ("memory.failcnt", "4"),
            ],
        );
        lay(
            &tree("blkio"),
            "/k",
            &[
                ("blkio.throttle.io_service_bytes_recursive", "8:0 Read 5\nTotal 5\n"),
                ("blkio.throttle.io_serviced_recursive", "8:0 Read 1\nTotal 1\n"),
            ],
        );
        let mounts = [Some(tree("cpu")), Some(tree("cpuacct")), Some(tree("memory")), None, Some(tree("blkio"))];
        let mut reader = reader(Mounts::Old(mounts), 10);
        let seen = reader.pass(&[at("/k", Depth::Full)], MACHINE, &|| 1);
        let reading = &seen[0].as_ref().expect("there").reading;
        let memory = reading.memory.expect("read");
        assert_eq!((memory.available(), memory.swap_available(), memory.failures), (Some(110), Some(47), 4));
        assert_eq!(memory.shown_swap_limit, 250);
        assert_eq!(reading.cpu.map(|cpu| cpu.times.user_ns), Some(10_000_000));
        assert_eq!(reading.share, Some(CpuShare { shares: 1024, quota: None, period: 100_000 }));
        assert_eq!(reading.devices.first().map(|io| (io.read_bytes, io.reads)), Some((5, 1)));
    }

    #[test]
    fn a_group_that_goes_and_comes_back_is_found_again() {
        let root = tempfile::tempdir().expect("a directory");
        let mut reader = reader(Mounts::Unified(root.path().to_owned()), 10);
        let mut look = || reader.pass(&[at("/a", Depth::Core)], MACHINE, &|| 1)[0].is_some();
        assert!(!look());
        lay(root.path(), "/a", &[("cpu.stat", "usage_usec 5\n")]);
        assert!(look());
    }

    #[test]
    fn looks_in_quick_succession_keep_the_rate_of_the_last_good_pair() {
        let root = tempfile::tempdir().expect("a directory");
        let mut reader = reader(Mounts::Unified(root.path().to_owned()), 10);
        let mut look = |usage: u64, at_ms: i64| {
            lay(root.path(), "/a", &[("cpu.stat", &format!("usage_usec {usage}\n"))]);
            let seen = reader.pass(&[at("/a", Depth::Core)], MACHINE, &|| at_ms * 1_000_000);
            seen[0].as_ref().and_then(|s| s.reading.cpu).and_then(|cpu| cpu.rate)
        };
        assert_eq!(look(0, 1000), None);
        assert_eq!(look(1_000_000, 2000), Some(1_000_000_000));
        assert_eq!(look(1_000_001, 2100), Some(1_000_000_000));
        assert_eq!(look(1_500_000, 3000), Some(500_000_000));
        assert_eq!(look(10, 3100), None, "AC-04b-M8: a counter that was set back has no rate");
    }
}
