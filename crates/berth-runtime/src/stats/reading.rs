//! One look at a control group, whatever the hierarchy. Pure. Behaviour: spec 04b §7.2.

use super::{DeviceIo, Stalls, Throttling, group_files::UNLIMITED};

/// How much is read of a group.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Depth {
    /// What statistics tell.
    Statistics,
    /// And what metrics tell besides.
    Metrics,
}

/// Processor.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Cpu {
    /// Time used so far, nanoseconds.
    pub usage_ns: u64,
    /// In user mode.
    pub user_ns: u64,
    /// In the kernel.
    pub system_ns: u64,
    /// How the group was held back by its quota.
    pub held: Throttling,
}

/// How the processor is shared out.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Share {
    /// Weight in shares.
    pub shares: u64,
    /// Microseconds in a period; none: no quota.
    pub quota: Option<u64>,
    /// Microseconds.
    pub period: u64,
}

/// Memory, bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Memory {
    /// In use, page cache included.
    pub usage: u64,
    /// The most that was in use.
    pub peak: u64,
    /// Anonymous.
    pub anon: u64,
    /// Page cache.
    pub file: u64,
    /// Its mapped part.
    pub mapped_file: u64,
    /// Page cache that lies idle.
    pub inactive_file: u64,
    /// Of the kernel.
    pub kernel: u64,
    /// Page faults.
    pub faults: u64,
    /// Those that had to read.
    pub major_faults: u64,
    /// Limit; see [`Memory::available`].
    pub limit: u64,
    /// What is kept for the group.
    pub reserved: u64,
    /// Swap in use; none: nobody counts it.
    pub swap: Option<u64>,
    /// Limit of swap alone; none: there is none.
    pub swap_limit: Option<u64>,
    /// How often the limit was hit.
    pub failures: u64,
    /// Processes killed for want of memory.
    pub oom_kills: u64,
}

impl Memory {
    /// What cannot be taken back at once: use without page cache that lies idle.
    pub fn working_set(&self) -> u64 {
        self.usage.saturating_sub(self.inactive_file)
    }

    /// The limit; none: there is none.
    pub fn known_limit(&self) -> Option<u64> {
        (self.limit <= UNLIMITED).then_some(self.limit)
    }

    /// What is left below the limit; none without one.
    pub fn available(&self) -> Option<u64> {
        self.known_limit().map(|limit| limit.saturating_sub(self.working_set()))
    }

    /// What is left of swap; none without a limit.
    pub fn swap_available(&self) -> Option<u64> {
        let limit = self.swap_limit.filter(|limit| *limit <= UNLIMITED)?;
        Some(limit.saturating_sub(self.swap.unwrap_or_default()))
    }
}

/// One look at a group. What the kernel does not tell is absent.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct Reading {
    /// When, nanoseconds since the epoch.
    pub at_ns: i64,
    /// Processor.
    pub cpu: Option<Cpu>,
    /// How it is shared out; only for metrics.
    pub share: Option<Share>,
    /// Memory.
    pub memory: Option<Memory>,
    /// Pressure of the processor.
    pub cpu_stalls: Option<Stalls>,
    /// Of memory.
    pub memory_stalls: Option<Stalls>,
    /// Of input and output.
    pub io_stalls: Option<Stalls>,
    /// Processes and threads.
    pub tasks: Option<u64>,
    /// The most there may be; 0: no limit; only for metrics.
    pub tasks_limit: u64,
    /// Devices; only for metrics.
    pub devices: Vec<DeviceIo>,
    /// Processes of the group; only for metrics.
    pub processes: Vec<u32>,
}

impl Reading {
    /// Two groups as one; without pressure, which cannot be added up.
    #[must_use]
    pub fn with(self, other: &Self) -> Self {
        let sum = |a: u64, b: u64| a.saturating_add(b);
        let cpu = match (self.cpu, other.cpu) {
            (Some(a), Some(b)) => Some(Cpu {
                usage_ns: sum(a.usage_ns, b.usage_ns),
                user_ns: sum(a.user_ns, b.user_ns),
                system_ns: sum(a.system_ns, b.system_ns),
                held: Throttling::default(),
            }),
            (a, b) => a.or(b),
        };
        let memory = match (self.memory, other.memory) {
            (Some(a), Some(b)) => Some(Memory {
                usage: sum(a.usage, b.usage),
                anon: sum(a.anon, b.anon),
                file: sum(a.file, b.file),
                inactive_file: sum(a.inactive_file, b.inactive_file),
                faults: sum(a.faults, b.faults),
                major_faults: sum(a.major_faults, b.major_faults),
                limit: u64::MAX,
                swap: a.swap.map(|swap| sum(swap, b.swap.unwrap_or_default())).or(b.swap),
                ..Memory::default()
            }),
            (a, b) => a.or(b).map(|one| Memory { limit: u64::MAX, swap_limit: None, ..one }),
        };
        Self { at_ns: self.at_ns.max(other.at_ns), cpu, memory, ..Self::default() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_that_is_left() {
        let memory = Memory { usage: 100, inactive_file: 150, limit: u64::MAX, ..Memory::default() };
        assert_eq!((memory.working_set(), memory.available()), (0, None));
        let limited = |limit| Memory { usage: 100, limit, ..Memory::default() }.available();
        assert_eq!((limited(300), limited(40), limited(0)), (Some(200), Some(0), Some(0)));
        let swap = |swap_limit| Memory { swap: Some(10), swap_limit, ..Memory::default() }.swap_available();
        assert_eq!((swap(None), swap(Some(15)), swap(Some(0)), swap(Some(u64::MAX))), (None, Some(5), Some(0), None));
    }

    #[test]
    fn groups_add_up() {
        let one = |ns: u64, usage: u64, limit| Reading {
            cpu: Some(Cpu { usage_ns: ns, ..Cpu::default() }),
            memory: Some(Memory { usage, limit, swap: Some(1), ..Memory::default() }),
            ..Reading::default()
        };
        let both = one(5, 7, 100).with(&one(6, u64::MAX, 100));
        assert_eq!(both.cpu.map(|cpu| cpu.usage_ns), Some(11));
        let memory = both.memory.expect("both have");
        assert_eq!((memory.usage, memory.swap, memory.available()), (u64::MAX, Some(2), None));
        assert_eq!(Reading::default().with(&one(1, 2, 3)).memory.and_then(|memory| memory.available()), None);
    }
}
