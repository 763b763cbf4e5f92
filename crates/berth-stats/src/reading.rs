//! One look at one control group, whatever the hierarchy. Pure. Behaviour: spec 04b §7.2.

use super::cgroup_files::{CpuTimes, DeviceIo, MemoryStat, Stalls, Throttling, UNLIMITED};

/// Wall time in nanoseconds since the epoch.
pub type WallNs = i64;

/// How much is read of a group; each kind holds what the ones before it hold.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Default)]
pub enum Depth {
    /// Processor, memory and swap.
    #[default]
    Core,
    /// And pressure and the number of processes.
    Summary,
    /// Everything.
    Full,
}

/// Processor.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Cpu {
    /// Time used so far.
    pub times: CpuTimes,
    /// Used per second between this look and the one before, in billionths of a core.
    pub rate: Option<u64>,
    /// Held back by the quota; zeros unless the look was full.
    pub held: Throttling,
}

/// Memory, in bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Memory {
    /// In use, page cache included.
    pub usage: u64,
    /// The most that was in use.
    pub peak: u64,
    /// The kernel's account.
    pub stat: MemoryStat,
    /// Swap in use.
    pub swap: u64,
    /// How often the limit was hit; only the old hierarchy counts.
    pub failures: u64,
    /// Kernel memory; only the old hierarchy tells.
    pub kernel: u64,
    /// Limit; none above [`UNLIMITED`].
    pub limit: u64,
    /// Limit of swap alone; `None` where it is not limited or not known.
    pub swap_limit: Option<u64>,
    /// What is kept for the group: `memory.min`, `memory.soft_limit_in_bytes`.
    pub reserved: u64,
    /// Limit as the page of metrics shows it: of swap on the unified hierarchy, of memory and swap on the old one.
    pub shown_swap_limit: u64,
    /// Processes the kernel killed for want of memory.
    pub oom_kills: u64,
}

impl Memory {
    /// What cannot be taken back at once: use without page cache that lies idle.
    pub fn working_set(&self) -> u64 {
        self.usage.saturating_sub(self.stat.inactive_file)
    }

    /// What is left below the limit; `None` without one.
    pub fn available(&self) -> Option<u64> {
        (self.limit <= UNLIMITED).then(|| self.limit.saturating_sub(self.working_set()))
    }

    /// What is left of swap; `None` where it is not limited.
    pub fn swap_available(&self) -> Option<u64> {
        self.swap_limit.map(|limit| limit.saturating_sub(self.swap))
    }
}

/// How the processor is shared out.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct CpuShare {
    /// Weight in shares.
    pub shares: u64,
    /// Microseconds per period; `None` without a quota.
    pub quota: Option<u64>,
    /// Microseconds.
    pub period: u64,
}

/// Pressure; each `None` where the kernel tells nothing.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub struct Pressures {
    /// Processor.
    pub cpu: Option<Stalls>,
    /// Memory.
    pub memory: Option<Stalls>,
    /// Input and output.
    pub io: Option<Stalls>,
}

/// One look at one group.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct Reading {
    /// When.
    pub at: WallNs,
    /// When the group was made, in whole seconds; 0 where that cannot be told.
    pub made_at: i64,
    /// Processor; `None` where the controller is absent.
    pub cpu: Option<Cpu>,
    /// How it is shared out; only in a full look.
    pub share: Option<CpuShare>,
    /// Memory; `None` where the controller is absent.
    pub memory: Option<Memory>,
    /// Pressure.
    pub pressure: Pressures,
    /// Devices; only in a full look.
    pub devices: Vec<DeviceIo>,
    /// Processes in the group itself; not in a core look.
    pub processes: Option<u32>,
    /// The first and the last of them: where the numbers of processes began anew, the first may live for a moment only.
    pub outer_processes: Option<(u32, u32)>,
    /// Threads, and the most there may be (0: no limit); only in a full look.
    pub threads: Option<(u64, u64)>,
}

/// A counter at a time, to be compared with the next look.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Mark {
    /// When.
    pub at: WallNs,
    /// The counter, in nanoseconds.
    pub usage_ns: u64,
}

/// Billionths of a core used between two looks, truncated; `None` where time or counter went back or stood still.
pub fn rate(before: Mark, now: Mark) -> Option<u64> {
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
    fn rates_of_two_looks() {
        let at = |seconds: i64, usage_ns| Mark { at: seconds * SECOND, usage_ns };
        for (case, before, now, expected) in [
            ("AC-04b-M7", at(0, 67_983_588_375_722), at(1, 68_172_016_162_105), Some(188_427_786_383)),
            ("AC-04b-M8", at(0, 5_000), at(1, 0), None),
            ("time went back", at(2, 0), at(1, 10), None),
            ("no time passed", at(1, 0), at(1, 10), None),
            ("idle", at(0, 7), at(10, 7), Some(0)),
            ("half a core", at(0, 0), at(10, 5_000_000_000), Some(500_000_000)),
            ("extreme", at(0, 0), Mark { at: 1, usage_ns: u64::MAX }, Some(u64::MAX)),
        ] {
            assert_eq!(rate(before, now), expected, "{case}");
        }
    }

    #[test]
    fn memory_that_is_left() {
        let stat = MemoryStat { inactive_file: 150, ..MemoryStat::default() };
        let memory = Memory { usage: 100, stat, limit: u64::MAX, ..Memory::default() };
        assert_eq!(memory.working_set(), 0, "AC-04b-M5");
        assert_eq!(memory.available(), None, "AC-04b-M6");
        let limited = |limit| Memory { usage: 100, limit, ..Memory::default() }.available();
        // A limit below the use, or 0, does not wrap around.
        assert_eq!((limited(300), limited(40), limited(0)), (Some(200), Some(0), Some(0)));
        assert_eq!((limited(UNLIMITED), limited(UNLIMITED + 1)), (Some(UNLIMITED - 100), None));
        let swap = |swap_limit| Memory { swap: 10, swap_limit, ..Memory::default() }.swap_available();
        assert_eq!((swap(None), swap(Some(15)), swap(Some(0))), (None, Some(5), Some(0)));
    }
}
