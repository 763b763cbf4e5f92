//! Resource usage snapshot of a cgroup, independent of the cgroup version. Pure.
//! Implements spec 04b §7.2.

use super::{DeviceIo, PressureStats, Throttling, group_files::UNLIMITED};

/// How much of a cgroup is read.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Depth {
    /// The values of CRI statistics.
    Statistics,
    /// Also the values of metrics.
    Metrics,
}

/// CPU usage.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Cpu {
    /// Cumulative CPU time, nanoseconds.
    pub usage_ns: u64,
    /// CPU time in user mode, nanoseconds.
    pub user_ns: u64,
    /// CPU time in kernel mode, nanoseconds.
    pub system_ns: u64,
    /// Throttling by the CPU quota.
    pub throttling: Throttling,
}

/// CPU shares and quota.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Share {
    /// Weight in CPU shares.
    pub shares: u64,
    /// Quota in microseconds per period; `None`: no quota.
    pub quota: Option<u64>,
    /// Period in microseconds.
    pub period: u64,
}

/// Memory usage, bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct MemoryReading {
    /// Current usage, including page cache.
    pub usage: u64,
    /// Peak usage.
    pub peak: u64,
    /// Anonymous memory.
    pub anon: u64,
    /// Page cache.
    pub file: u64,
    /// Part of the page cache that processes have mapped.
    pub mapped_file: u64,
    /// Inactive page cache.
    pub inactive_file: u64,
    /// Kernel memory.
    pub kernel: u64,
    /// Number of page faults.
    pub faults: u64,
    /// Number of major page faults (with I/O).
    pub major_faults: u64,
    /// Limit; see [`MemoryReading::known_limit`].
    pub limit: u64,
    /// Reservation.
    pub reserved: u64,
    /// Swap usage; `None` where swap is not accounted.
    pub swap: Option<u64>,
    /// Limit of swap alone; `None` where the kernel reports none.
    pub swap_limit: Option<u64>,
    /// Number of times the limit was hit.
    pub failures: u64,
    /// Number of OOM kills.
    pub oom_kills: u64,
}

impl MemoryReading {
    /// Working set: usage without inactive page cache.
    pub fn working_set(&self) -> u64 {
        self.usage.saturating_sub(self.inactive_file)
    }

    /// The limit; `None` if unlimited.
    pub fn known_limit(&self) -> Option<u64> {
        (self.limit <= UNLIMITED).then_some(self.limit)
    }

    /// Memory below the limit; `None` if unlimited.
    pub fn available(&self) -> Option<u64> {
        self.known_limit().map(|limit| limit.saturating_sub(self.working_set()))
    }

    /// Swap below the limit; `None` if unlimited.
    pub fn swap_available(&self) -> Option<u64> {
        let limit = self.swap_limit.filter(|limit| *limit <= UNLIMITED)?;
        Some(limit.saturating_sub(self.swap.unwrap_or_default()))
    }
}

/// One reading of a cgroup. Values that the kernel does not report are absent.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct Reading {
    /// Time of the reading, nanoseconds since the epoch.
    pub at_ns: i64,
    /// CPU usage.
    pub cpu: Option<Cpu>,
    /// CPU shares and quota; only with [`Depth::Metrics`].
    pub share: Option<Share>,
    /// Memory usage.
    pub memory: Option<MemoryReading>,
    /// CPU pressure (PSI).
    pub cpu_stalls: Option<PressureStats>,
    /// Memory pressure (PSI).
    pub memory_stalls: Option<PressureStats>,
    /// I/O pressure (PSI).
    pub io_stalls: Option<PressureStats>,
    /// Number of processes and threads.
    pub tasks: Option<u64>,
    /// Limit of processes and threads, 0: no limit; only with [`Depth::Metrics`].
    pub tasks_limit: u64,
    /// I/O per block device; only with [`Depth::Metrics`].
    pub devices: Vec<DeviceIo>,
    /// Process ids in the cgroup; only with [`Depth::Metrics`].
    pub processes: Vec<u32>,
}

impl Reading {
    /// CPU and memory usage of two readings, added. Drops pressure, which cannot be added, and limits.
    #[must_use]
    pub fn with(self, other: &Self) -> Self {
        let sum = |a: u64, b: u64| a.saturating_add(b);
        let cpu = match (self.cpu, other.cpu) {
            (Some(a), Some(b)) => Some(Cpu {
                usage_ns: sum(a.usage_ns, b.usage_ns),
                user_ns: sum(a.user_ns, b.user_ns),
                system_ns: sum(a.system_ns, b.system_ns),
                throttling: Throttling::default(),
            }),
            (a, b) => a.or(b),
        };
        let memory = match (self.memory, other.memory) {
            (Some(a), Some(b)) => Some(MemoryReading {
                usage: sum(a.usage, b.usage),
                anon: sum(a.anon, b.anon),
                file: sum(a.file, b.file),
                inactive_file: sum(a.inactive_file, b.inactive_file),
                faults: sum(a.faults, b.faults),
                major_faults: sum(a.major_faults, b.major_faults),
                limit: u64::MAX,
                swap: a.swap.map(|swap| sum(swap, b.swap.unwrap_or_default())).or(b.swap),
                ..MemoryReading::default()
            }),
            (a, b) => a.or(b).map(|one| MemoryReading { limit: u64::MAX, swap_limit: None, ..one }),
        };
        Self { at_ns: self.at_ns.max(other.at_ns), cpu, memory, ..Self::default() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_that_is_left() {
        let memory = MemoryReading { usage: 100, inactive_file: 150, limit: u64::MAX, ..MemoryReading::default() };
        assert_eq!((memory.working_set(), memory.available()), (0, None));
        let limited = |limit| MemoryReading { usage: 100, limit, ..MemoryReading::default() }.available();
        assert_eq!((limited(300), limited(40), limited(0)), (Some(200), Some(0), Some(0)));
        let swap =
            |swap_limit| MemoryReading { swap: Some(10), swap_limit, ..MemoryReading::default() }.swap_available();
        assert_eq!((swap(None), swap(Some(15)), swap(Some(0)), swap(Some(u64::MAX))), (None, Some(5), Some(0), None));
    }

    #[test]
    fn groups_add_up() {
        let one = |ns: u64, usage: u64, limit| Reading {
            cpu: Some(Cpu { usage_ns: ns, ..Cpu::default() }),
            memory: Some(MemoryReading { usage, limit, swap: Some(1), ..MemoryReading::default() }),
            ..Reading::default()
        };
        let both = one(5, 7, 100).with(&one(6, u64::MAX, 100));
        assert_eq!(both.cpu.map(|cpu| cpu.usage_ns), Some(11));
        let memory = both.memory.expect("both have");
        assert_eq!((memory.usage, memory.swap, memory.available()), (u64::MAX, Some(2), None));
        assert_eq!(Reading::default().with(&one(1, 2, 3)).memory.and_then(|memory| memory.available()), None);
    }
}
