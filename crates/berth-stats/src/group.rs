//! One group: its open files, and what the last looks saw.
//!
//! Of a group in which nothing ran and whose memory is what it was, nearly everything is what it
//! was: such a group is read whole every few minutes ([`IDLE_NS`]), and in between only its two clocks
//! of processor and memory, and what the kernel counts for it without its doing.

use std::{
    fs::File,
    io,
    os::unix::fs::FileExt,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
};

use inotify::WatchDescriptor;

use super::{
    draft::Draft,
    mounts::{Content, ControlFile, Mounts, Tree},
    reader::{MachineMemory, Seen, YOUNG_NS},
    reading::{Cpu, Depth, Mark, WallNs, rate},
    settings::Settings,
};

/// The longest control file that is read: the members of a group with 100,000 processes.
const MAX_FILE: usize = 1 << 20;
/// A pair of looks closer than this says nothing about rates.
const MIN_WINDOW_NS: i64 = 500_000_000;

/// How long a group in which nothing runs is taken for what it was, at most; in nanoseconds.
const IDLE_NS: i64 = 180_000_000_000;

/// What reading takes beside the group.
pub struct Tools<'a> {
    /// Where groups are.
    pub mounts: &'a Mounts,
    /// What stands in for files that the root does not have.
    pub machine: MachineMemory,
    /// Wall time.
    pub now: &'a (dyn Fn() -> WallNs + Sync),
    /// Whether the kernel counts what groups do with their disks.
    pub counts_disks: bool,
    /// Files of all groups that are open.
    pub open: &'a AtomicUsize,
    /// How many may be.
    pub max_open: usize,
}

impl Tools<'_> {
    /// Whether there is anything to count in a file of a group below the root.
    fn counts(&self, file: &ControlFile) -> bool {
        self.counts_disks || file.tree != Tree::Blkio || file.content == Content::IoPressure
    }

    /// Whether one more file may stay open; it counts from now on.
    fn may_open(&self) -> bool {
        let one_more = |open: usize| (open < self.max_open).then_some(open + 1);
        self.open.fetch_update(Ordering::Relaxed, Ordering::Relaxed, one_more).is_ok()
    }
}

/// A file of a group.
enum Slot {
    Closed,
    Open(File),
    Absent,
}

/// A look at everything down to some depth.
struct Whole {
    depth: Depth,
    draft: Draft,
}

/// A group.
pub struct Group {
    /// Its path.
    pub path: Arc<str>,
    /// A hierarchy in which it is.
    pub tree: Tree,
    made_at: i64,
    /// What the last look saw, unless that was all there is.
    pub seen: Option<(Depth, Draft)>,
    /// Its settings as of a look so deep, unless they were written since.
    pub settings: Option<(Depth, Settings)>,
    whole: Option<Whole>,
    /// How deep the last look was, and when, if it found that nothing had run.
    rested: Option<(Depth, WallNs)>,
    /// Who hears of that; nobody where the kernel cannot tell.
    pub watched: Vec<WatchDescriptor>,
    slots: Vec<Slot>,
    last: Option<Mark>,
    rate: Option<u64>,
    /// The last pass that named it.
    pub pass: u64,
    /// How many were found before it.
    pub number: u64,
}

impl Group {
    /// A group nothing was read of.
    pub fn new(path: Arc<str>, tree: Tree, made_at: i64, files: usize) -> Self {
        Self {
            path,
            tree,
            made_at,
            seen: None,
            settings: None,
            whole: None,
            rested: None,
            watched: Vec::new(),
            slots: (0..files).map(|_| Slot::Closed).collect(),
            last: None,
            rate: None,
            pass: 0,
            number: 0,
        }
    }

    /// How many of its files are open.
    pub fn open_files(&self) -> usize {
        self.slots.iter().filter(|slot| matches!(slot, Slot::Open(_))).count()
    }

    /// Reads its files; `None` where neither processor nor memory could be read.
    pub fn read(&mut self, depth: Depth, tools: &Tools<'_>, buffer: &mut Vec<u8>) -> Option<Seen> {
        let (path, at) = (self.path.clone(), (tools.now)());
        if let Some((read, mut draft)) = self.resting(depth, at) {
            let mut files = Files { path: &path, slots: &mut self.slots, tools, buffer, is_watched: true };
            let is_missing = |file: &ControlFile| file.depth <= depth && file.depth > read;
            files.read(&mut draft, |file| is_missing(file) && file.content.changes_alone() && tools.counts(file));
            return self.told(draft, depth, tools);
        }
        let is_of_use =
            |(seen, draft): &(Depth, Draft)| *seen < depth && (0..=YOUNG_NS).contains(&at.saturating_sub(draft.at));
        let (read, mut draft) = match self.seen.take().filter(is_of_use) {
            Some((depth, draft)) => (Some(depth), draft),
            None => (None, Draft::begun(at)),
        };
        let known = self.settings.map(|(known, settings)| {
            draft.settings = settings;
            known
        });
        let (is_root, is_watched) = (&*path == "/", !self.watched.is_empty());
        let is_wanted = |file: &ControlFile| {
            file.depth <= depth
                && read.is_none_or(|read| file.depth > read)
                && !(file.is_setting && known.is_some_and(|known| file.depth <= known))
                && (is_root || tools.counts(file))
        };
        let settled = read.is_none() && !is_root && known.is_some_and(|known| known >= depth);
        let limit = self.longest_rest();
        // A shallower look leaves that to the next deep one, else all three pages would read the group whole.
        let is_old = |whole: &Whole| {
            at.saturating_sub(whole.draft.at) > if whole.depth > depth { limit.saturating_mul(2) } else { limit }
        };
        drop(self.whole.take_if(|whole| whole.depth < depth || is_old(whole)));
        let before = self.whole.as_ref().filter(|whole| settled && whole.draft.at <= at);
        let mut files = Files { path: &path, slots: &mut self.slots, tools, buffer, is_watched };
        files.read(&mut draft, |file| is_wanted(file) && file.content.is_clock());
        let idle = before.filter(|whole| draft.has_clocks_of(&whole.draft));
        let idle = idle.map(|whole| whole.draft.again(at, draft.settings));
        let is_idle = idle.is_some();
        draft = idle.unwrap_or(draft);
        files.read(&mut draft, |file| {
            is_wanted(file) && !file.content.is_clock() && (!is_idle || file.content.changes_alone())
        });
        self.settings = is_watched.then(|| (known.map_or(depth, |known| known.max(depth)), draft.settings));
        self.rested = is_idle.then_some((depth, at));
        if !is_idle && draft.tells() {
            self.seen = (depth < Depth::Full).then(|| (depth, draft.clone()));
            self.whole = (!is_root && is_watched).then(|| Whole { depth, draft: draft.clone() });
        }
        self.told(draft, depth, tools)
    }

    /// For how long nothing need have run: not all groups are read whole by the same pass.
    fn longest_rest(&self) -> i64 {
        let share = i64::try_from(self.number % 32).unwrap_or_default();
        IDLE_NS - share * (IDLE_NS / 64)
    }

    /// What a group that rested a moment ago is known for, and how deep it was looked at then.
    fn resting(&mut self, depth: Depth, at: WallNs) -> Option<(Depth, Draft)> {
        let (read, since) = self.rested.take()?;
        let whole = self.whole.as_ref().filter(|whole| whole.depth >= depth)?;
        let (_, settings) = self.settings.filter(|(known, _)| *known >= depth)?;
        let is_young = (0..=YOUNG_NS).contains(&at.saturating_sub(since));
        (read < depth && is_young).then(|| {
            self.rested = Some((depth, since));
            (read, whole.draft.again(since, settings))
        })
    }

    fn told(&mut self, draft: Draft, depth: Depth, tools: &Tools<'_>) -> Option<Seen> {
        let is_root = &*self.path == "/";
        let (cpu, memory) = (draft.cpu(), draft.memory(tools.mounts.is_unified(), is_root.then_some(tools.machine)));
        if cpu.is_none() && memory.is_none() {
            return None;
        }
        let cpu = cpu.map(|cpu| Cpu { rate: self.rate_at(draft.at, cpu.times.usage_ns), ..cpu });
        Some(Seen { path: self.path.clone(), reading: draft.finish(cpu, memory, self.made_at, depth) })
    }

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

/// The files of a group, and what it takes to read them.
struct Files<'a> {
    path: &'a str,
    slots: &'a mut [Slot],
    tools: &'a Tools<'a>,
    buffer: &'a mut Vec<u8>,
    is_watched: bool,
}

impl Files<'_> {
    /// Reads those that are wanted.
    fn read(&mut self, draft: &mut Draft, is_wanted: impl Fn(&ControlFile) -> bool) {
        let Self { path, slots, tools, buffer, is_watched } = self;
        for (file, slot) in tools.mounts.files().iter().zip(slots.iter_mut()).filter(|(file, _)| is_wanted(file)) {
            if file.content == Content::Throttling && draft.settings.quota.is_none() {
                continue;
            }
            let read = match slot {
                Slot::Absent => continue,
                Slot::Open(handle) => read_all(handle, buffer, file.content),
                Slot::Closed => {
                    let Some(path) = tools.mounts.place(path, file) else { continue };
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
                    if read.is_ok() && !(file.is_setting && *is_watched) && tools.may_open() {
                        *slot = Slot::Open(handle);
                    }
                    read
                }
            };
            if let Some(text) = read.ok().and_then(|length| buffer.get(..length)) {
                draft.take(file.content, text);
            }
        }
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
