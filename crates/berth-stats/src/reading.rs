//! Resource usage of one cgroup at one time, for cgroup v1 and v2. Pure.
//!
//! Implements spec 04b §7.2.

use super::cgroup_files::{CpuTimes, DeviceIo, MemoryStat, PressureStats, Throttling, UNLIMITED};

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
    /// Kernel memory; cgroup v1 only.
    pub kernel: u64,
    /// Memory limit; values above [`UNLIMITED`] mean no limit.
    pub limit: u64,
    /// Limit of swap alone; `None` if unlimited or unknown.
    pub swap_limit: Option<u64>,
    /// Memory protection: `memory.min` or `memory.soft_limit_in_bytes`.
    pub reserved: u64,
    /// Limit as the metrics page reports it: swap on cgroup v2, memory and swap together on cgroup v1.
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
        self.swap_limit.map(|limit| limit.saturating_sub(self.swap))
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

/// Sample of a CPU counter, compared with the next sample.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct CpuSample {
    /// Time of the sample.
    pub at: WallNs,
    /// Cumulative CPU time in nanoseconds.
    pub usage_ns: u64,
}

/// CPU usage in nanocores between two samples, truncated; `None` if the clock did not advance or the counter decreased.
pub fn rate(before: CpuSample, now: CpuSample) -> Option<u64> {
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
        assert_eq!((swap(None), swap(Some(15)), swap(Some(0))), (None, Some(5), Some(0)));
    }
}
