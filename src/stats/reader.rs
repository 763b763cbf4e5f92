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
use crate::pod::PodUid;

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
mod tests {
    use std::{fs, path::Path, sync::atomic::AtomicI64};

    use super::{super::reading::CpuShare, *};

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
        let clock = AtomicI64::new(1_000_000_000);
        let seen = reader.pass(&all, MACHINE, &|| clock.load(Ordering::Relaxed));
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
        clock.store(2_000_000_000, Ordering::Relaxed);
        let seen = reader.pass(&all[..1], MACHINE, &|| clock.load(Ordering::Relaxed));
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
    fn an_idle_group_is_read_whole_every_few_minutes() {
        let root = tempfile::tempdir().expect("a directory");
        lay(root.path(), "/a", &[]);
        let file = |name: &str, text: &str| {
            // Elsewhere: what the kernel counts is not written by anybody.
            lay(root.path(), "/kernel", &[(name, text)]);
            let _ = std::os::unix::fs::symlink(root.path().join("kernel").join(name), root.path().join("a").join(name)); // once
        };
        file("cpu.stat", "usage_usec 5\n");
        file("memory.current", "10\n");
        file("memory.peak", "20\n");
        file("memory.pressure", "some avg10=0.00 avg60=0.00 avg300=0.00 total=5\n");
        let mut reader = reader(Mounts::Unified(root.path().to_owned()), 10);
        let mut look = |depth, second: i64| {
            let seen = reader.pass(&[at("/a", depth)], MACHINE, &|| second * 1_000_000_000);
            let reading = seen[0].as_ref().expect("there").reading.clone();
            let stalled = reading.pressure.memory.map(|pressure| pressure.some.total);
            (reading.at / 1_000_000_000, reading.memory.map(|memory| memory.peak), stalled)
        };
        assert_eq!(look(Depth::Full, 100), (100, Some(20), Some(5)));
        file("memory.peak", "30\n");
        file("memory.pressure", "some avg10=0.00 avg60=0.00 avg300=0.00 total=6\n");
        assert_eq!(look(Depth::Full, 115), (115, Some(20), Some(6)), "nothing ran, but something waited");
        file("cpu.stat", "usage_usec 6\n");
        assert_eq!(look(Depth::Full, 130), (130, Some(30), Some(6)), "something ran");
        file("memory.peak", "40\n");
        assert_eq!(look(Depth::Full, 309).1, Some(30));
        assert_eq!(look(Depth::Core, 311).1, Some(30), "the next deep look will tell");
        assert_eq!(look(Depth::Full, 313).1, Some(40), "three minutes are over");
        file("memory.peak", "50\n");
        file("memory.current", "11\n");
        assert_eq!(look(Depth::Full, 315).1, Some(50), "its memory is another");
        assert_eq!(look(Depth::Core, 320).0, 320);
        file("cpu.stat", "usage_usec 7\n");
        file("memory.peak", "60\n");
        file("memory.pressure", "some avg10=0.00 avg60=0.00 avg300=0.00 total=7\n");
        assert_eq!(look(Depth::Full, 321), (320, Some(50), Some(7)), "a look at one that rested is completed");
        assert_eq!(look(Depth::Full, 323), (323, Some(60), Some(7)));
    }

    #[test]
    fn many_groups_are_read_as_few_are() {
        let root = tempfile::tempdir().expect("a directory");
        for n in 0..2 * WORTH_A_THREAD {
            lay(root.path(), &format!("/g{n}"), &[("cpu.stat", &format!("usage_usec {n}\n"))]);
        }
        let mut wanted: Vec<Wanted> = (0..2 * WORTH_A_THREAD).map(|n| at(&format!("/g{n}"), Depth::Core)).collect();
        wanted.extend([at("/absent", Depth::Core), at("/g7", Depth::Core)]);
        let usages = |reader: &mut Reader| -> Vec<Option<u64>> {
            let seen = reader.pass(&wanted, MACHINE, &|| 1);
            let usage = |seen: &Option<Seen>| Some(seen.as_ref()?.reading.cpu?.times.usage_ns / 1000);
            seen.iter().map(usage).collect()
        };
        let mut expected: Vec<Option<u64>> = (0..2 * WORTH_A_THREAD).map(|n| u64::try_from(n).ok()).collect();
        expected.extend([None, Some(7)]);
        let mounts = || Mounts::Unified(root.path().to_owned());
        let mut bounded = reader(mounts(), 100);
        bounded.processors = 2;
        assert_eq!(usages(&mut bounded), expected);
        assert_eq!(bounded.size(), (2 * WORTH_A_THREAD, 100), "no more files are open than may be");

        let mut forgetful = reader(mounts(), 0);
        forgetful.processors = 2;
        assert_eq!(usages(&mut forgetful), expected);
        fs::remove_dir_all(root.path().join("g3")).expect("removed");
        fs::remove_dir_all(root.path().join("g100")).expect("removed");
        lay(root.path(), "/g100", &[("cpu.stat", "usage_usec 1000\n")]);
        (expected[3], expected[100]) = (None, Some(1000));
        assert_eq!(usages(&mut forgetful), expected, "gone, and made anew");
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
