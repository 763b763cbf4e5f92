//! Reclaims page cache of pods before a pod is evicted for memory.
//!
//! File pages that were read more than once (active) count as used, so a node can appear short of memory that the
//! kernel could reclaim at any time. Implements spec 05 §3.10.

use std::{
    fs,
    io::{self, Write},
    path::{Path, PathBuf},
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use tokio::{
    sync::watch,
    task::spawn_blocking,
    time::{Instant, timeout},
};

use super::ports::MemoryShortage;
use berth_stats::{
    PodCgroupPaths,
    cgroup_files::{MemoryStat, memory_stat},
    host,
};
use berth_types::PodUid;

/// Timeout for the kernel's reclaim.
const LIMIT: Duration = Duration::from_secs(2);
/// Bytes reclaimed beyond twice what is missing: the workload continues to fill memory, and the kernel reclaims
/// slightly less than requested.
const MARGIN: u64 = 64 << 20;
/// Period of the reclaim budget. Pages that are read again sooner are needed: reclaiming them repeatedly makes the node
/// thrash.
const WINDOW: Duration = Duration::from_secs(10);

/// Page cache of pods on cgroup v2; cgroup v1 cannot reclaim a given amount.
pub struct PageCache {
    machine: PathBuf,
    unified: PathBuf,
    groups: Arc<dyn PodCgroupPaths>,
    /// A reclaim is in flight: it may take longer than its timeout.
    is_busy: watch::Sender<bool>,
    /// A second caller has already waited for it; no other one waits.
    is_given_up: AtomicBool,
    budget: Arc<Mutex<Budget>>,
}

impl PageCache {
    /// Creates it; `machine` is `/`, `unified` is the mount point of the unified hierarchy.
    pub fn new(machine: PathBuf, unified: PathBuf, groups: Arc<dyn PodCgroupPaths>) -> Self {
        let (is_busy, is_given_up) = (watch::Sender::default(), AtomicBool::default());
        Self { machine, unified, groups, is_busy, is_given_up, budget: Arc::default() }
    }

    /// Implements [`super::ports::Reclaim::page_cache`].
    pub async fn reclaim(&self, worst: &PodUid, missing: MemoryShortage) -> bool {
        let (machine, own) = (self.machine.clone(), self.groups.of_pod(worst));
        let directory = |group: String| self.unified.join(group.trim_start_matches('/'));
        let own = own.into_iter().map(directory).collect::<Vec<_>>();
        let Some(all) = self.groups.above().into_iter().next().map(directory) else { return false };
        if self.is_busy.send_replace(true) {
            if self.is_given_up.swap(true, Ordering::AcqRel) {
                return false;
            }
            // The reclaim in flight may suffice.
            let mut is_busy = self.is_busy.subscribe();
            return timeout(LIMIT, is_busy.wait_for(|is_busy| !is_busy)).await.is_ok_and(|done| done.is_ok());
        }
        self.is_given_up.store(false, Ordering::Release);
        let (is_busy, budget, now) = (self.is_busy.clone(), self.budget.clone(), Instant::now());
        let taking = spawn_blocking(move || {
            let may = |bytes, there| budget.lock().unwrap_or_else(PoisonError::into_inner).grants(now, bytes, there);
            let is_taken = reclaim_blocking(&machine, &own, &all, missing, may);
            is_busy.send_replace(false);
            is_taken
        });
        match timeout(LIMIT, taking).await {
            Ok(taken) => taken.unwrap_or(false),
            // The kernel continues: the next observation shows the effect so far, and no further reclaim starts before
            // it ends.
            Err(_) => true,
        }
    }
}

/// Bytes that may still be reclaimed in a period: as many as there were when it began.
#[derive(Debug, Default)]
struct Budget {
    until: Option<Instant>,
    left: u64,
}

impl Budget {
    /// Returns whether `bytes` may be reclaimed now, of `there` bytes of page cache, and deducts them.
    fn grants(&mut self, now: Instant, bytes: u64, there: u64) -> bool {
        if self.until.is_none_or(|until| until <= now) {
            (self.until, self.left) = (Some(now + WINDOW), there);
        }
        let left = self.left.checked_sub(bytes);
        self.left = left.unwrap_or(self.left);
        left.is_some()
    }
}

/// Reclaims; blocks as long as the kernel needs. Returns whether the kernel attempted it.
fn reclaim_blocking(
    machine: &Path,
    own: &[PathBuf],
    all: &Path,
    missing: MemoryShortage,
    may: impl FnOnce(u64, u64) -> bool,
) -> bool {
    if missing.of_machine && host::memory(machine).available < missing.least {
        return false; // the page cache of the machine is not enough
    }
    let stat = |group: &Path| fs::read(group.join("memory.stat")).ok().map(|text| memory_stat(&text));
    let own = own.iter().find_map(|group| Some((group, stat(group)?)));
    let Some(of_all) = stat(all) else { return false };
    let Some([of_own, rest]) = shares(own.map(|(_, stat)| stat).unwrap_or_default(), of_all, missing.bytes) else {
        return false;
    };
    if !may(missing.bytes, of_all.active_file) {
        return false;
    }
    let from_own = own.filter(|_| of_own > 0).is_some_and(|(group, _)| write_memory_reclaim(group, of_own));
    let from_all = rest > 0 && write_memory_reclaim(all, rest);
    from_own || from_all
}

/// Requests a reclaim; returns whether the kernel attempted it. A partial reclaim (`EAGAIN`) counts: the next
/// observation shows the effect.
fn write_memory_reclaim(group: &Path, bytes: u64) -> bool {
    let file = fs::OpenOptions::new().write(true).open(group.join("memory.reclaim"));
    match file.and_then(|mut file| file.write_all(bytes.to_string().as_bytes())) {
        Ok(()) => true,
        Err(error) => error.kind() == io::ErrorKind::WouldBlock,
    }
}

/// Bytes to reclaim from the cgroup of the worst pod and from that of all pods; `None` if their page cache does not
/// suffice. The kernel reclaims inactive pages first, which do not count as used, so those are added.
fn shares(own: MemoryStat, all: MemoryStat, missing: u64) -> Option<[u64; 2]> {
    let wanted = missing.saturating_mul(2).saturating_add(MARGIN);
    let of_own = wanted.min(own.active_file);
    let rest = wanted.saturating_sub(of_own);
    let elsewhere = all.active_file.saturating_sub(own.active_file);
    if missing.saturating_sub(of_own) > elsewhere {
        return None;
    }
    let with_unused =
        |share: u64, stat: MemoryStat| if share == 0 { 0 } else { share.saturating_add(stat.inactive_file) };
    let unused = MemoryStat { inactive_file: all.inactive_file.saturating_sub(own.inactive_file), ..all };
    Some([with_unused(of_own, own), with_unused(rest.min(elsewhere), unused)])
}

#[cfg(test)]
mod tests {
    use super::*;

    const MI: u64 = 1 << 20;

    fn cache(active: u64, inactive: u64) -> MemoryStat {
        MemoryStat { active_file: active * MI, inactive_file: inactive * MI, ..MemoryStat::default() }
    }

    #[test]
    fn the_worst_pod_is_reclaimed_first_and_none_if_all_is_not_enough() {
        for (case, own, all, missing, expected) in [
            ("the worst has enough", cache(200, 7), cache(300, 20), 10, Some([84 + 7, 0])),
            ("it has what is missing", cache(50, 7), cache(80, 20), 10, Some([50 + 7, 30 + 13])),
            ("just enough", cache(10, 0), cache(10, 0), 10, Some([10, 0])),
            ("others have to help", cache(6, 1), cache(200, 5), 10, Some([6 + 1, 78 + 4])),
            ("the worst has none", cache(0, 9), cache(50, 9), 10, Some([0, 50])),
            ("all have too little", cache(4, 100), cache(9, 200), 10, None),
            ("there is none", cache(0, 0), cache(0, 0), 1, None),
            ("figures of two moments", cache(9, 9), cache(0, 0), 20, None),
        ] {
            let expected = expected.map(|shares| shares.map(|share| share * MI));
            assert_eq!(shares(own, all, missing * MI), expected, "{case}");
        }
    }

    #[test]
    fn what_comes_back_at_once_is_not_taken_again() {
        let (began, mut budget) = (Instant::now(), Budget::default());
        for (case, at, bytes, there, expected) in [
            ("the first", 0, 10, 100, true),
            ("more is short of", 1, 60, 90, true),
            ("they came back", 2, 40, 100, false),
            ("as much as there was", 9, 30, 100, true),
            ("all is taken", 9, 1, 100, false),
            ("a while later", 10, 40, 50, true),
            ("of fewer", 11, 11, 50, false),
        ] {
            assert_eq!(budget.grants(began + Duration::from_secs(at), bytes, there), expected, "{case}");
        }
    }

    struct Names;

    impl PodCgroupPaths for Names {
        fn above(&self) -> Vec<String> {
            vec!["/pods".to_owned()]
        }

        fn of_pod(&self, pod: &PodUid) -> Vec<String> {
            vec!["/elsewhere/p".to_owned(), format!("/pods/{pod}")]
        }
    }

    /// A machine with so many KiB available, whose pods have these pages.
    fn machine(available: u64) -> tempfile::TempDir {
        let root = tempfile::tempdir().expect("a directory");
        let lay = |file: &str, content: String| {
            let path = root.path().join(file);
            fs::create_dir_all(path.parent().expect("it has one")).expect("made");
            fs::write(path, content).expect("written");
        };
        lay("proc/meminfo", format!("MemTotal: 1000000 kB\nMemAvailable: {available} kB\n"));
        for (group, active, inactive) in [("pods", 60 * MI, 9 * MI), ("pods/worst", 20 * MI, 3 * MI)] {
            lay(&format!("cgroup/{group}/memory.stat"), format!("active_file {active}\ninactive_file {inactive}\n"));
            lay(&format!("cgroup/{group}/memory.reclaim"), String::new());
        }
        root
    }

    #[tokio::test]
    async fn groups_are_asked_where_there_is_memory_to_be_had() {
        let missing = |mebibytes, of_machine| MemoryShortage { bytes: mebibytes * MI, least: 100 * MI, of_machine };
        for (case, available, missing, expected) in [
            ("enough in the worst", 200_000, missing(10, true), Some(["23", "46"])),
            ("not in the worst alone", 200_000, missing(30, true), Some(["23", "46"])),
            ("not in all", 200_000, missing(61, true), None),
            ("the machine is really short", 90_000, missing(10, true), None),
            ("pods alone are short", 90_000, missing(10, false), Some(["23", "46"])),
        ] {
            let root = machine(available);
            let unified = root.path().join("cgroup");
            let cache = PageCache::new(root.path().to_owned(), unified.clone(), Arc::new(Names));
            assert_eq!(cache.reclaim(&"worst".into(), missing).await, expected.is_some(), "{case}");
            let asked = ["pods/worst", "pods"].map(|group| {
                let text = fs::read_to_string(unified.join(group).join("memory.reclaim")).expect("it is there");
                text.parse::<u64>().map_or(text, |bytes| (bytes / MI).to_string())
            });
            assert_eq!(asked, expected.unwrap_or_default().map(str::to_owned), "{case}");
            assert!(!*cache.is_busy.borrow(), "{case}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn who_cannot_be_asked_gives_nothing() {
        let root = machine(200_000);
        let cache = PageCache::new(root.path().to_owned(), root.path().join("cgroup/none"), Arc::new(Names));
        let missing = MemoryShortage { bytes: MI, least: MI, of_machine: true };
        assert!(!cache.reclaim(&"worst".into(), missing).await);
        let cache = PageCache::new(root.path().to_owned(), root.path().join("cgroup"), Arc::new(Names));
        cache.is_busy.send_replace(true);
        assert!(!cache.reclaim(&"worst".into(), missing).await, "the kernel is at it and does not end");
        let (worst, began) = ("worst".into(), Instant::now());
        assert!(!cache.reclaim(&worst, missing).await);
        assert_eq!(began.elapsed(), Duration::ZERO, "it was waited for, and still does not end");
        cache.is_given_up.store(false, Ordering::Release);
        let (is_tried, ()) = tokio::join!(cache.reclaim(&worst, missing), async {
            tokio::time::sleep(LIMIT / 2).await;
            cache.is_busy.send_replace(false);
        });
        assert!(is_tried, "it ended meanwhile");
        let asked = fs::read_to_string(root.path().join("cgroup/pods/memory.reclaim")).expect("it is there");
        assert_eq!(asked, "", "another look comes first");
    }
}
