//! Reads resource usage from the files of a cgroup, v1 and v2. Blocking.
//! Implements spec 04b §7.2.

use super::{
    group_files::{self, UNLIMITED, number},
    reading::{Cpu, Depth, MemoryReading, Reading, Share},
};
use crate::runtime::now_ns;
use berth_sys::cgroup::{Controller, GroupPath, Hierarchy};

/// Takes one reading of a cgroup; unreadable values are absent, possibly all of them.
pub fn read(hierarchy: &Hierarchy, group: &GroupPath, depth: Depth) -> Reading {
    let files = CgroupFiles { hierarchy, group };
    let mut reading = Reading { at_ns: now_ns(), ..Reading::default() };
    if hierarchy.version() == 2 {
        files.unified(&mut reading)
    } else {
        files.old(&mut reading)
    }
    reading.tasks = files.number(Controller::Pids, "pids.current");
    if depth == Depth::Metrics {
        files.more(&mut reading);
    }
    reading
}

/// The files of a cgroup.
struct CgroupFiles<'a> {
    hierarchy: &'a Hierarchy,
    group: &'a GroupPath,
}

impl CgroupFiles<'_> {
    fn text(&self, controller: Controller, file: &str) -> Option<Vec<u8>> {
        self.hierarchy.read(self.group, controller, file).ok().map(String::into_bytes)
    }

    fn number(&self, controller: Controller, file: &str) -> Option<u64> {
        number(&self.text(controller, file)?)
    }

    fn unified(&self, reading: &mut Reading) {
        if let Some(text) = self.text(Controller::Cpu, "cpu.stat") {
            let of = |times: group_files::CpuTimes, throttling| Cpu {
                usage_ns: times.usage_ns,
                user_ns: times.user_ns,
                system_ns: times.system_ns,
                throttling,
            };
            reading.cpu = group_files::cpu_stat(&text).map(|(times, throttling)| of(times, throttling));
        }
        let stalls = |file: &str| group_files::pressure(&self.text(Controller::Cpu, file)?);
        reading.cpu_stalls = stalls("cpu.pressure");
        reading.memory_stalls = stalls("memory.pressure");
        reading.io_stalls = stalls("io.pressure");
        let memory = |file: &str| self.number(Controller::Memory, file);
        let Some(usage) = memory("memory.current") else { return };
        let stat = self.text(Controller::Memory, "memory.stat").unwrap_or_default();
        let of = |key: &str| value(&stat, key);
        let (faults, major_faults) = faults(&stat, 2);
        reading.memory = Some(MemoryReading {
            usage,
            anon: of("anon"),
            file: of("file"),
            mapped_file: of("file_mapped"),
            inactive_file: of("inactive_file"),
            kernel: of("kernel"),
            faults,
            major_faults,
            limit: memory("memory.max").unwrap_or(u64::MAX),
            swap: memory("memory.swap.current"),
            swap_limit: memory("memory.swap.max"),
            ..MemoryReading::default()
        });
    }

    fn old(&self, reading: &mut Reading) {
        if let Some(usage_ns) = self.number(Controller::Cpuacct, "cpuacct.usage") {
            let text = self.text(Controller::Cpuacct, "cpuacct.stat").unwrap_or_default();
            let (user_ns, system_ns) = group_files::cpuacct_stat(&text);
            let throttling = group_files::cpu_stat_v1(&self.text(Controller::Cpu, "cpu.stat").unwrap_or_default());
            reading.cpu = Some(Cpu { usage_ns, user_ns, system_ns, throttling });
        }
        let memory = |file: &str| self.number(Controller::Memory, file);
        let Some(usage) = memory("memory.usage_in_bytes") else { return };
        let stat = self.text(Controller::Memory, "memory.stat").unwrap_or_default();
        let of = |key: &str| value(&stat, key);
        let (faults, major_faults) = faults(&stat, 1);
        let limit = memory("memory.limit_in_bytes").unwrap_or(u64::MAX);
        // The limit of memory and swap together; the excess over the memory limit is the swap limit.
        let both = memory("memory.memsw.limit_in_bytes");
        reading.memory = Some(MemoryReading {
            usage,
            anon: of("total_rss"),
            file: of("total_cache"),
            mapped_file: of("total_mapped_file"),
            inactive_file: of("total_inactive_file"),
            faults,
            major_faults,
            limit,
            swap: both.map(|_| of("total_swap")),
            swap_limit: both.map(|both| if both > UNLIMITED { u64::MAX } else { both.saturating_sub(limit) }),
            ..MemoryReading::default()
        });
    }

    fn more(&self, reading: &mut Reading) {
        let is_unified = self.hierarchy.version() == 2;
        // 0 means no limit.
        let limit = self.number(Controller::Pids, "pids.max").filter(|limit| *limit != u64::MAX);
        reading.tasks_limit = limit.unwrap_or_default();
        reading.share = if is_unified { self.unified_share() } else { self.old_share() };
        reading.devices = match is_unified {
            true => self.text(Controller::Cpu, "io.stat").map(|text| group_files::io_stat(&text)).unwrap_or_default(),
            false => Vec::new(),
        };
        let members = [Controller::Pids, Controller::Cpu, Controller::Memory];
        let members = members.into_iter().find_map(|controller| self.text(controller, "cgroup.procs"));
        reading.processes = group_files::processes(&members.unwrap_or_default()).collect();
        let Some(memory) = &mut reading.memory else { return };
        let more = |file: &str| self.number(Controller::Memory, file).unwrap_or_default();
        let kills = |file: &str| value(&self.text(Controller::Memory, file).unwrap_or_default(), "oom_kill");
        if is_unified {
            memory.peak = more("memory.peak").max(memory.usage);
            memory.reserved = more("memory.min");
            memory.oom_kills = kills("memory.events");
        } else {
            memory.peak = more("memory.max_usage_in_bytes");
            memory.reserved = more("memory.soft_limit_in_bytes");
            memory.kernel = more("memory.kmem.usage_in_bytes");
            memory.failures = more("memory.failcnt");
            memory.oom_kills = kills("memory.oom_control");
        }
    }

    fn unified_share(&self) -> Option<Share> {
        let (quota, period) = group_files::cpu_max(&self.text(Controller::Cpu, "cpu.max")?)?;
        let weight = self.number(Controller::Cpu, "cpu.weight").unwrap_or_default();
        Some(Share { shares: group_files::shares_of_weight(weight), quota, period })
    }

    fn old_share(&self) -> Option<Share> {
        let period = self.number(Controller::Cpu, "cpu.cfs_period_us")?;
        // -1 means no quota and does not parse as a number.
        let quota = self.number(Controller::Cpu, "cpu.cfs_quota_us");
        Some(Share { shares: self.number(Controller::Cpu, "cpu.shares").unwrap_or_default(), quota, period })
    }
}

/// Page faults and major page faults of a `memory.stat`. On cgroup v1, the values without `total_` exclude descendant
/// cgroups.
fn faults(stat: &[u8], version: u8) -> (u64, u64) {
    match version {
        1 => (value(stat, "total_pgfault"), value(stat, "total_pgmajfault")),
        _ => (value(stat, "pgfault"), value(stat, "pgmajfault")),
    }
}

/// The value of a key, as in `memory.stat`; 0 if absent.
fn value(text: &[u8], key: &str) -> u64 {
    group_files::value(text, key.as_bytes()).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// critest 8
    #[test]
    fn page_faults_are_those_of_the_whole_group() {
        let old = b"pgfault 1\npgmajfault 2\ntotal_pgfault 30\ntotal_pgmajfault 40\n";
        let unified = b"anon 7\npgfault 50\npgmajfault 60\n";
        assert_eq!(faults(old, 1), (30, 40));
        assert_eq!(faults(unified, 2), (50, 60));
    }
}
