//! Cached state of one cgroup: its open files and the previous readings.
//!
//! A cgroup whose CPU and memory counters have not changed is idle, and nearly all its other values are unchanged too.
//! Such a cgroup is read completely only every few minutes ([`IDLE_NS`]); in between, only these two counters are
//! read, and the files that the kernel may change without activity in the cgroup.

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
    mounts::{Mounts, Tree},
    reader::{CgroupObservation, MachineMemory, YOUNG_NS},
    reading::{Cpu, CpuSample, Depth, RateMeter, WallNs},
};
use berth_cadvisor::{
    CgroupSettings, PartialReading,
    control_files::{ControlFile, ControlFileKind},
};

/// Maximum size of a cgroup file, bytes: the members of a cgroup with 100,000 processes.
const MAX_FILE: usize = 1 << 20;

/// Maximum time for which an idle cgroup's values are reused, nanoseconds.
const IDLE_NS: i64 = 180_000_000_000;

/// Inputs of a reading beside the cgroup.
pub struct ReadContext<'a> {
    /// Mounts of the cgroup hierarchies.
    pub mounts: &'a Mounts,
    /// Memory of the machine, in place of the files that the root cgroup lacks.
    pub machine: MachineMemory,
    /// Wall clock.
    pub now: &'a (dyn Fn() -> WallNs + Sync),
    /// Whether the kernel accounts block I/O per cgroup.
    pub counts_disks: bool,
    /// Number of open files of all cgroups.
    pub open: &'a AtomicUsize,
    /// Maximum number of open files.
    pub max_open: usize,
}

impl ReadContext<'_> {
    /// Whether a file of a cgroup below the root can contain data.
    fn counts(&self, file: &ControlFile) -> bool {
        self.counts_disks || file.tree != Tree::Blkio || file.content == ControlFileKind::IoPressure
    }

    /// Reserves one more open file; false if the limit is reached.
    fn may_open(&self) -> bool {
        let one_more = |open: usize| (open < self.max_open).then_some(open + 1);
        self.open.fetch_update(Ordering::Relaxed, Ordering::Relaxed, one_more).is_ok()
    }
}

/// Cached handle of a cgroup file.
enum CachedFile {
    Closed,
    Open(File),
    Absent,
}

/// A complete reading down to some depth.
struct CompleteReading {
    depth: Depth,
    draft: PartialReading,
}

/// A cgroup, its open files, and its previous readings.
pub struct Cgroup {
    /// Path of the cgroup.
    pub path: Arc<str>,
    /// A hierarchy that contains the cgroup.
    pub tree: Tree,
    made_at: i64,
    /// Last reading and its depth, unless it was of full depth.
    pub seen: Option<(Depth, PartialReading)>,
    /// Settings and the depth of their reading; `None` after they were written.
    pub settings: Option<(Depth, CgroupSettings)>,
    whole: Option<CompleteReading>,
    /// Depth and time of the last reading that found the cgroup idle.
    idle_since: Option<(Depth, WallNs)>,
    /// Watches of its settings; empty where the kernel cannot watch them.
    pub watched: Vec<WatchDescriptor>,
    slots: Vec<CachedFile>,
    rate: RateMeter,
    /// Last pass that listed this cgroup.
    pub pass: u64,
    /// Number of cgroups that were found before this one.
    pub number: u64,
}

impl Cgroup {
    /// A cgroup that has not been read yet.
    pub fn new(path: Arc<str>, tree: Tree, made_at: i64, files: usize) -> Self {
        Self {
            path,
            tree,
            made_at,
            seen: None,
            settings: None,
            whole: None,
            idle_since: None,
            watched: Vec::new(),
            slots: (0..files).map(|_| CachedFile::Closed).collect(),
            rate: RateMeter::default(),
            pass: 0,
            number: 0,
        }
    }

    /// Number of open files of this cgroup.
    pub fn open_files(&self) -> usize {
        self.slots.iter().filter(|slot| matches!(slot, CachedFile::Open(_))).count()
    }

    /// Reads the cgroup; `None` if neither CPU nor memory could be read.
    pub fn read(&mut self, depth: Depth, tools: &ReadContext<'_>, buffer: &mut Vec<u8>) -> Option<CgroupObservation> {
        let (path, at) = (self.path.clone(), (tools.now)());
        if let Some((read, mut draft)) = self.idle_values(depth, at) {
            let mut files = CgroupFiles { path: &path, slots: &mut self.slots, tools, buffer, is_watched: true };
            let is_missing = |file: &ControlFile| file.depth <= depth && file.depth > read;
            files.read(&mut draft, |file| is_missing(file) && file.content.changes_alone() && tools.counts(file));
            return self.finish_observation(draft, depth, tools);
        }
        let is_of_use = |(seen, draft): &(Depth, PartialReading)| {
            *seen < depth && (0..=YOUNG_NS).contains(&at.saturating_sub(draft.at))
        };
        let (read, mut draft) = match self.seen.take().filter(is_of_use) {
            Some((depth, draft)) => (Some(depth), draft),
            None => (None, PartialReading::new(at)),
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
        // A shallower reading leaves that to the next deep one; otherwise each of the three pages would read the whole
        // cgroup.
        let is_old = |whole: &CompleteReading| {
            at.saturating_sub(whole.draft.at) > if whole.depth > depth { limit.saturating_mul(2) } else { limit }
        };
        drop(self.whole.take_if(|whole| whole.depth < depth || is_old(whole)));
        let before = self.whole.as_ref().filter(|whole| settled && whole.draft.at <= at);
        let mut files = CgroupFiles { path: &path, slots: &mut self.slots, tools, buffer, is_watched };
        files.read(&mut draft, |file| is_wanted(file) && file.content.is_clock());
        let idle = before.filter(|whole| draft.has_clocks_of(&whole.draft));
        let idle = idle.map(|whole| whole.draft.again(at, draft.settings));
        let is_idle = idle.is_some();
        draft = idle.unwrap_or(draft);
        files.read(&mut draft, |file| {
            is_wanted(file) && !file.content.is_clock() && (!is_idle || file.content.changes_alone())
        });
        self.settings = is_watched.then(|| (known.map_or(depth, |known| known.max(depth)), draft.settings));
        self.idle_since = is_idle.then_some((depth, at));
        if !is_idle && draft.has_usage() {
            self.seen = (depth < Depth::Full).then(|| (depth, draft.clone()));
            self.whole = (!is_root && is_watched).then(|| CompleteReading { depth, draft: draft.clone() });
        }
        self.finish_observation(draft, depth, tools)
    }

    /// Time for which this cgroup's values are reused while it is idle; staggered, so that not all are read in one
    /// pass.
    fn longest_rest(&self) -> i64 {
        let share = i64::try_from(self.number % 32).unwrap_or_default();
        IDLE_NS - share * (IDLE_NS / 64)
    }

    /// Values of a cgroup that was found idle a moment ago, and the depth of that reading.
    fn idle_values(&mut self, depth: Depth, at: WallNs) -> Option<(Depth, PartialReading)> {
        let (read, since) = self.idle_since.take()?;
        let whole = self.whole.as_ref().filter(|whole| whole.depth >= depth)?;
        let (_, settings) = self.settings.filter(|(known, _)| *known >= depth)?;
        let is_young = (0..=YOUNG_NS).contains(&at.saturating_sub(since));
        (read < depth && is_young).then(|| {
            self.idle_since = Some((depth, since));
            (read, whole.draft.again(since, settings))
        })
    }

    fn finish_observation(
        &mut self,
        draft: PartialReading,
        depth: Depth,
        tools: &ReadContext<'_>,
    ) -> Option<CgroupObservation> {
        let is_root = &*self.path == "/";
        let (cpu, memory) = (draft.cpu(), draft.memory(tools.mounts.is_unified(), is_root.then_some(tools.machine)));
        if cpu.is_none() && memory.is_none() {
            return None;
        }
        let sample = |cpu: &Cpu| CpuSample { at: draft.at, usage_ns: cpu.times.usage_ns };
        let cpu = cpu.map(|cpu| Cpu { rate: self.rate.update(sample(&cpu)), ..cpu });
        Some(CgroupObservation { path: self.path.clone(), reading: draft.finish(cpu, memory, self.made_at, depth) })
    }
}

/// The files of a cgroup, with what reading them requires.
struct CgroupFiles<'a> {
    path: &'a str,
    slots: &'a mut [CachedFile],
    tools: &'a ReadContext<'a>,
    buffer: &'a mut Vec<u8>,
    is_watched: bool,
}

impl CgroupFiles<'_> {
    /// Reads the selected files into the draft.
    fn read(&mut self, draft: &mut PartialReading, is_wanted: impl Fn(&ControlFile) -> bool) {
        let Self { path, slots, tools, buffer, is_watched } = self;
        for (file, slot) in tools.mounts.files().iter().zip(slots.iter_mut()).filter(|(file, _)| is_wanted(file)) {
            if file.content == ControlFileKind::Throttling && draft.settings.quota.is_none() {
                continue;
            }
            let read = match slot {
                CachedFile::Absent => continue,
                CachedFile::Open(handle) => read_all(handle, buffer, file.content),
                CachedFile::Closed => {
                    let Some(path) = tools.mounts.place(path, file) else { continue };
                    let handle = match File::open(path) {
                        Ok(handle) => handle,
                        Err(error) => {
                            // A file that this kernel lacks does not appear during the lifetime of the cgroup.
                            if error.kind() == io::ErrorKind::NotFound {
                                *slot = CachedFile::Absent;
                            }
                            continue;
                        }
                    };
                    let read = read_all(&handle, buffer, file.content);
                    if read.is_ok() && !(file.is_setting && *is_watched) && tools.may_open() {
                        *slot = CachedFile::Open(handle);
                    }
                    read
                }
            };
            if let Some(text) = read.ok().and_then(|length| buffer.get(..length)) {
                draft.parse_file(file.content, text);
            }
        }
    }
}

/// Reads a file from its beginning; returns the number of bytes read into the buffer.
fn read_all(file: &File, buffer: &mut Vec<u8>, content: ControlFileKind) -> io::Result<usize> {
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
        // Only lists may be read in pieces; the kernel returns all other files in one read.
        if read == 0 || (read < free && content != ControlFileKind::Processes) {
            return Ok(length);
        }
    }
}
