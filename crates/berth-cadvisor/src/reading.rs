//! Resource usage of one cgroup at one time, for cgroup v1 and v2. Pure.
//!
//! Implements spec 04b §7.2.

use berth_sys::cgroup::files::{CpuTimes, DeviceIo, MemoryStat, PressureStats, Throttling, UNLIMITED};

/// Minimum time between two samples for a meaningful rate, nanoseconds.
const MIN_WINDOW_NS: i64 = 500_000_000;

/// Wall time in nanoseconds since the epoch.
pub type WallNs = i64;

/// How much is read of a cgroup; each depth includes the ones before it.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Default)]
pub enum Depth {
    /// CPU, memory, and swap.
    #[default]
    Core,
    /// Core plus pressure (PSI) and the number of processes.
    Summary,
    /// All control files.
    Full,
}

/// CPU usage of a cgroup.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Cpu {
    /// Cumulative CPU time.
    pub times: CpuTimes,
    /// CPU usage between the previous and this reading, in nanocores; `None` without a usable previous reading.
    pub rate: Option<u64>,
    /// CFS throttling counters; zeros below [`Depth::Full`].
    pub throttling: Throttling,
}

/// Memory usage of a cgroup, in bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct CgroupMemory {
    /// Current usage, page cache included.
    pub usage: u64,
    /// Peak usage.
    pub peak: u64,
    /// Counters of `memory.stat`.
    pub stat: MemoryStat,
    /// Swap usage.
    pub swap: u64,
    /// Number of times the limit was hit; cgroup v1 only.
    pub failures: u64,
    /// Kernel memory; on the page only of cgroup v1.
    pub kernel: u64,
    /// Memory limit; values above [`UNLIMITED`] mean no limit.
    pub limit: u64,
    /// Limit of swap alone; `None` if unlimited or unknown.
    pub swap_limit: Option<u64>,
    /// Memory protection: `memory.min` or `memory.soft_limit_in_bytes`.
    pub reserved: u64,
    /// Limit as metrics report it: swap on cgroup v2; on cgroup v1 the page has memory and swap together, CRI swap
    /// alone.
    pub shown_swap_limit: u64,
    /// Number of processes the OOM killer terminated.
    pub oom_kills: u64,
}

impl CgroupMemory {
    /// Working set: usage without inactive page cache, which the kernel can reclaim at once.
    pub fn working_set(&self) -> u64 {
        self.usage.saturating_sub(self.stat.inactive_file)
    }

    /// Memory left below the limit; `None` without a limit.
    pub fn available(&self) -> Option<u64> {
        (self.limit <= UNLIMITED).then(|| self.limit.saturating_sub(self.working_set()))
    }

    /// Swap left below the limit; `None` without a limit.
    pub fn swap_available(&self) -> Option<u64> {
        self.swap_limit.filter(|limit| *limit <= UNLIMITED).map(|limit| limit.saturating_sub(self.swap))
    }
}

/// CPU weight and quota of a cgroup.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct CpuShare {
    /// CPU weight in cgroup v1 shares.
    pub shares: u64,
    /// CFS quota in microseconds per period; `None` without a quota.
    pub quota: Option<u64>,
    /// CFS period in microseconds.
    pub period: u64,
}

/// Pressure stall information (PSI); each field is `None` if the kernel does not report it.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub struct Pressures {
    /// CPU pressure.
    pub cpu: Option<PressureStats>,
    /// Memory pressure.
    pub memory: Option<PressureStats>,
    /// I/O pressure.
    pub io: Option<PressureStats>,
}

/// Resource usage of one cgroup at one time.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct Reading {
    /// Time of the reading.
    pub at: WallNs,
    /// Creation time of the cgroup in whole seconds since the epoch; 0 if unknown.
    pub created_at: i64,
    /// CPU usage; `None` if the controller is absent.
    pub cpu: Option<Cpu>,
    /// CPU weight and quota; only at [`Depth::Full`].
    pub share: Option<CpuShare>,
    /// Memory usage; `None` if the controller is absent.
    pub memory: Option<CgroupMemory>,
    /// Pressure (PSI).
    pub pressure: Pressures,
    /// Block device I/O; only at [`Depth::Full`].
    pub devices: Vec<DeviceIo>,
    /// Number of processes in the cgroup itself, without child cgroups; not at [`Depth::Core`].
    pub processes: Option<u32>,
    /// First and last PID of the cgroup. After a PID wrap-around the first one may belong to a short-lived process.
    pub outer_processes: Option<(u32, u32)>,
    /// Number of threads and their limit (0: no limit); only at [`Depth::Full`].
    pub threads: Option<(u64, u64)>,
}

impl Reading {
    /// CPU and memory usage of two readings, added. Drops pressure, which cannot be added, and limits.
    #[must_use]
    pub fn with(self, other: &Self) -> Self {
        let sum = |a: u64, b: u64| a.saturating_add(b);
        let cpu = match (self.cpu, other.cpu) {
            (Some(Cpu { times: a, .. }), Some(Cpu { times: b, .. })) => {
                let times = CpuTimes {
                    usage_ns: sum(a.usage_ns, b.usage_ns),
                    user_ns: sum(a.user_ns, b.user_ns),
                    system_ns: sum(a.system_ns, b.system_ns),
                };
                Some(Cpu { times, ..Cpu::default() })
            }
            (a, b) => a.or(b),
        };
        let memory = match (self.memory, other.memory) {
            (Some(CgroupMemory { stat: a, usage, swap, .. }), Some(other)) => {
                let b = other.stat;
                let stat = MemoryStat {
                    anon: sum(a.anon, b.anon),
                    file: sum(a.file, b.file),
                    inactive_file: sum(a.inactive_file, b.inactive_file),
                    pgfault: sum(a.pgfault, b.pgfault),
                    pgmajfault: sum(a.pgmajfault, b.pgmajfault),
                    ..MemoryStat::default()
                };
                let (usage, swap) = (sum(usage, other.usage), sum(swap, other.swap));
                Some(CgroupMemory { usage, stat, swap, limit: u64::MAX, ..CgroupMemory::default() })
            }
            (a, b) => a.or(b).map(|one| CgroupMemory { limit: u64::MAX, swap_limit: None, ..one }),
        };
        Self { at: self.at.max(other.at), cpu, memory, ..Self::default() }
    }
}

/// Sample of a CPU counter, compared with the next sample.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct CpuSample {
    /// Time of the sample.
    pub at: WallNs,
    /// Cumulative CPU time in nanoseconds.
    pub usage_ns: u64,
}

/// CPU usage rate of a cgroup; keeps the previous sample and the last rate.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct RateMeter {
    last: Option<CpuSample>,
    rate: Option<u64>,
}

impl RateMeter {
    /// Returns the usage in nanocores since the previous sample; `None` for the first sample, and if the clock or the
    /// counter went backwards. A sample within half a second of the previous one returns the last rate.
    pub fn update(&mut self, now: CpuSample) -> Option<u64> {
        let is_close = |last: CpuSample| {
            (0..MIN_WINDOW_NS).contains(&now.at.saturating_sub(last.at)) && last.usage_ns <= now.usage_ns
        };
        if !self.last.is_some_and(is_close) {
            self.rate = self.last.and_then(|last| rate(last, now));
            self.last = Some(now);
        }
        self.rate
    }
}

/// CPU usage in nanocores between two samples, truncated; `None` if the clock did not advance or the counter decreased.
fn rate(before: CpuSample, now: CpuSample) -> Option<u64> {
    let elapsed = now.at.checked_sub(before.at).filter(|ns| *ns > 0)?;
    let used = now.usage_ns.checked_sub(before.usage_ns)?;
    #[allow(
        clippy::cast_precision_loss,
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "the reference calculates in floating point and truncates; the result is finite and positive"
    )]
    let rate = (used as f64 / elapsed as f64 * 1e9) as u64;
    Some(rate)
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: i64 = 1_000_000_000;

    #[test]
    fn rates_of_two_samples() {
        let at = |seconds: i64, usage_ns| CpuSample { at: seconds * SECOND, usage_ns };
        for (case, before, now, expected) in [
            ("AC-04b-M7", at(0, 67_983_588_375_722), at(1, 68_172_016_162_105), Some(188_427_786_383)),
            ("AC-04b-M8", at(0, 5_000), at(1, 0), None),
            ("time went back", at(2, 0), at(1, 10), None),
            ("no time passed", at(1, 0), at(1, 10), None),
            ("idle", at(0, 7), at(10, 7), Some(0)),
            ("half a core", at(0, 0), at(10, 5_000_000_000), Some(500_000_000)),
            ("extreme", at(0, 0), CpuSample { at: 1, usage_ns: u64::MAX }, Some(u64::MAX)),
        ] {
            assert_eq!(rate(before, now), expected, "{case}");
        }
    }

    #[test]
    fn memory_that_is_left() {
        let stat = MemoryStat { inactive_file: 150, ..MemoryStat::default() };
        let memory = CgroupMemory { usage: 100, stat, limit: u64::MAX, ..CgroupMemory::default() };
        assert_eq!(memory.working_set(), 0, "AC-04b-M5");
        assert_eq!(memory.available(), None, "AC-04b-M6");
        let limited = |limit| CgroupMemory { usage: 100, limit, ..CgroupMemory::default() }.available();
        // A limit below the usage, or 0, does not wrap around.
        assert_eq!((limited(300), limited(40), limited(0)), (Some(200), Some(0), Some(0)));
        assert_eq!((limited(UNLIMITED), limited(UNLIMITED + 1)), (Some(UNLIMITED - 100), None));
        let swap = |swap_limit| CgroupMemory { swap: 10, swap_limit, ..CgroupMemory::default() }.swap_available();
        assert_eq!((swap(None), swap(Some(15)), swap(Some(0)), swap(Some(u64::MAX))), (None, Some(5), Some(0), None));
    }

    #[test]
    fn groups_add_up() {
        let one = |usage_ns: u64, usage: u64, limit| Reading {
            cpu: Some(Cpu { times: CpuTimes { usage_ns, ..CpuTimes::default() }, ..Cpu::default() }),
            memory: Some(CgroupMemory { usage, limit, swap: 1, ..CgroupMemory::default() }),
            ..Reading::default()
        };
        let both = one(5, 7, 100).with(&one(6, u64::MAX, 100));
        assert_eq!(both.cpu.map(|cpu| cpu.times.usage_ns), Some(11));
        let memory = both.memory.expect("both have");
        assert_eq!((memory.usage, memory.swap, memory.available()), (u64::MAX, 2, None));
        assert_eq!(Reading::default().with(&one(1, 2, 3)).memory.and_then(|memory| memory.available()), None);
    }
}
