//! Values parsed so far of one cgroup reading, independent of the cgroup version. Pure.

use super::{
    control_files::ControlFileKind,
    reading::{CgroupMemory, Cpu, CpuShare, Depth, Pressures, Reading, WallNs},
};
use berth_sys::cgroup::files as parse;

/// Memory of the machine, used in place of the files that the root cgroup lacks.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct MachineMemory {
    /// `MemTotal`, bytes.
    pub total: u64,
    /// `MemAvailable`, bytes: the kernel's estimate of the memory available without swapping.
    pub available: u64,
    /// `SwapTotal`, bytes.
    pub swap_total: u64,
    /// `SwapFree`, bytes.
    pub swap_free: u64,
}

/// Values of the settings of a cgroup.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct CgroupSettings {
    /// `cpu.max`: quota (`None` for no limit) and period, microseconds.
    pub cpu_max: Option<(Option<u64>, u64)>,
    /// CPU weight in shares.
    pub shares: Option<u64>,
    /// `cpu.cfs_period_us`.
    pub period: Option<u64>,
    /// `cpu.cfs_quota_us`; `None` without a quota.
    pub quota: Option<u64>,
    /// Memory limit, bytes.
    pub memory_limit: Option<u64>,
    /// Swap limit, bytes.
    pub swap_limit: Option<u64>,
    /// Limit of memory and swap together, bytes.
    pub memory_and_swap_limit: Option<u64>,
    /// Memory reserved for the cgroup, bytes.
    pub reserved: u64,
    /// Maximum number of threads; 0 for no limit.
    pub threads_max: u64,
}

/// Values parsed so far from the files of a cgroup.
#[derive(Clone, Default)]
pub struct PartialReading {
    /// Start of the reading.
    pub at: WallNs,
    /// Limits and weights of the cgroup, cached between readings.
    pub settings: CgroupSettings,
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
    pressure: Pressures,
    processes: Option<(u32, Option<(u32, u32)>)>,
    threads: Option<u64>,
    devices: Vec<parse::DeviceIo>,
    blkio_bytes: Vec<u8>,
}

impl PartialReading {
    /// Empty draft of a reading that begins at that time.
    pub fn new(at: WallNs) -> Self {
        Self { at, ..Self::default() }
    }

    /// True if CPU time and memory usage equal those of `other`; false if one of them is unknown.
    pub fn has_clocks_of(&self, other: &Self) -> bool {
        let clocks = |draft: &Self| Some((draft.cpu()?.times.usage_ns, draft.memory_usage?));
        clocks(self).is_some_and(|now| clocks(other) == Some(now))
    }

    /// Copy with another time and the settings of that time.
    pub fn again(&self, at: WallNs, settings: CgroupSettings) -> Self {
        Self { at, settings, ..self.clone() }
    }

    /// True if a file reported CPU or memory usage.
    pub fn has_usage(&self) -> bool {
        self.cpu().is_some() || self.memory_usage.is_some() || self.memory_stat.is_some()
    }

    /// Parses the content of a file.
    pub fn parse_file(&mut self, content: ControlFileKind, text: &[u8]) {
        let number = || parse::number(text);
        match content {
            ControlFileKind::CpuStat => self.unified_cpu = parse::cpu_stat(text),
            ControlFileKind::CpuUsage => self.cpu_usage = number(),
            ControlFileKind::CpuSplit => self.cpu_split = parse::cpuacct_stat(text),
            ControlFileKind::Throttling => self.throttling = parse::cpu_stat_v1(text),
            ControlFileKind::CpuMax => self.settings.cpu_max = parse::cpu_max(text),
            ControlFileKind::CpuWeight => self.settings.shares = number().map(parse::shares_of_weight),
            ControlFileKind::CpuShares => self.settings.shares = number(),
            ControlFileKind::CpuQuota => {
                self.settings.quota = parse::signed(text).and_then(|quota| u64::try_from(quota).ok())
            }
            ControlFileKind::CpuPeriod => self.settings.period = number(),
            ControlFileKind::MemoryUsage => self.memory_usage = number(),
            ControlFileKind::MemoryStat => self.memory_stat = Some(parse::memory_stat(text)),
            ControlFileKind::OldMemoryStat => self.memory_stat = Some(parse::memory_stat_v1(text)),
            ControlFileKind::MemoryLimit => self.settings.memory_limit = number(),
            ControlFileKind::SwapUsage => self.swap_usage = number(),
            ControlFileKind::SwapLimit => self.settings.swap_limit = number(),
            ControlFileKind::MemoryAndSwapLimit => self.settings.memory_and_swap_limit = number(),
            ControlFileKind::MemoryReserved => self.settings.reserved = number().unwrap_or_default(),
            ControlFileKind::MemoryPeak => self.peak = number().unwrap_or_default(),
            ControlFileKind::MemoryEvents => self.oom_kills = parse::oom_kills(text).unwrap_or_default(),
            ControlFileKind::MemoryFailures => self.failures = number().unwrap_or_default(),
            ControlFileKind::MemoryKernel => self.kernel = number().unwrap_or_default(),
            ControlFileKind::CpuPressure => self.pressure.cpu = parse::pressure(text),
            ControlFileKind::MemoryPressure => self.pressure.memory = parse::pressure(text),
            ControlFileKind::IoPressure => self.pressure.io = parse::pressure(text),
            ControlFileKind::Processes => {
                let (mut count, mut outer) = (0_u32, None);
                for pid in parse::processes(text) {
                    count = count.saturating_add(1);
                    outer = Some((outer.map_or(pid, |(first, _)| first), pid));
                }
                self.processes = Some((count, outer));
            }
            ControlFileKind::Threads => self.threads = number(),
            ControlFileKind::ThreadsMax => {
                self.settings.threads_max = number().filter(|max| *max != u64::MAX).unwrap_or_default()
            }
            ControlFileKind::IoStat => self.devices = parse::io_stat(text),
            ControlFileKind::BlkioBytes => self.blkio_bytes = text.to_vec(),
            ControlFileKind::BlkioCounts => self.devices = parse::blkio(&self.blkio_bytes, text),
        }
    }

    /// CPU usage; `None` if no file reported it.
    pub fn cpu(&self) -> Option<Cpu> {
        if let Some((times, throttling)) = self.unified_cpu {
            return Some(Cpu { times, rate: None, throttling });
        }
        let (user_ns, system_ns) = self.cpu_split;
        let times = parse::CpuTimes { usage_ns: self.cpu_usage?, user_ns, system_ns };
        Some(Cpu { times, rate: None, throttling: self.throttling })
    }

    /// Memory usage; `None` if no file reported it. For the root cgroup, limits and swap come from the machine.
    pub fn memory(&self, unified: bool, root: Option<MachineMemory>) -> Option<CgroupMemory> {
        let stat = self.memory_stat;
        let root_usage = || stat.filter(|_| unified && root.is_some()).map(|stat| stat.anon.saturating_add(stat.file));
        let usage = self.memory_usage.or_else(root_usage)?;
        let stat = stat.unwrap_or_default();
        let mut memory = CgroupMemory {
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

    /// Limit of swap alone. cgroup v1 limits memory and swap together, so the memory limit is subtracted.
    fn swap_limit(&self, unified: bool) -> Option<u64> {
        let limit = if unified {
            self.settings.swap_limit?
        } else {
            let both = self.settings.memory_and_swap_limit.filter(|both| *both <= parse::UNLIMITED)?;
            both.saturating_sub(self.settings.memory_limit.filter(|limit| *limit <= parse::UNLIMITED)?)
        };
        (limit <= parse::UNLIMITED).then_some(limit)
    }

    /// Completes the reading.
    pub fn finish(self, cpu: Option<Cpu>, memory: Option<CgroupMemory>, made_at: i64, depth: Depth) -> Reading {
        let (quota, period) = match self.settings.cpu_max {
            Some((quota, period)) => (quota, period),
            None => (self.settings.quota, self.settings.period.unwrap_or_default()),
        };
        let share = CpuShare { shares: self.settings.shares.unwrap_or_default(), quota, period };
        Reading {
            at: self.at,
            created_at: made_at,
            cpu,
            share: (depth == Depth::Full && (self.settings.shares.is_some() || period != 0)).then_some(share),
            memory,
            pressure: self.pressure,
            devices: self.devices,
            processes: self.processes.map(|(count, _)| count),
            outer_processes: self.processes.and_then(|(_, outer)| outer),
            threads: self.threads.map(|threads| (threads, self.settings.threads_max)),
        }
    }
}
