//! Facts about the machine that validation requires; read once at startup.

use std::{env, fs, path::Path, process};

use super::watchdog::WatchdogEnvironment;
use berth_types::CpuSet;

/// Facts about the machine.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct HostFacts {
    /// Whether the machine uses cgroup v1.
    pub cgroup_v1: bool,
    /// Whether swap is on.
    pub has_swap: bool,
    /// Online CPUs; `None` if they could not be read.
    pub online_cpus: Option<CpuSet>,
    /// systemd watchdog variables of the environment.
    pub watchdog: WatchdogEnvironment,
}

impl HostFacts {
    /// Reads the facts of this machine.
    pub fn probe() -> Self {
        let online = fs::read_to_string("/sys/devices/system/cpu/online").ok();
        Self {
            cgroup_v1: !Path::new("/sys/fs/cgroup/cgroup.controllers").exists(),
            has_swap: has_swap(),
            online_cpus: online.and_then(|list| CpuSet::parse(list.trim()).ok()),
            watchdog: WatchdogEnvironment {
                microseconds: env::var("WATCHDOG_USEC").ok(),
                pid: env::var("WATCHDOG_PID").ok(),
                own_pid: process::id(),
            },
        }
    }
}

/// Whether swap is on: `/proc/swaps` has an entry after its heading.
pub fn has_swap() -> bool {
    fs::read_to_string("/proc/swaps").is_ok_and(|table| is_swap_on(&table))
}

fn is_swap_on(table: &str) -> bool {
    table.lines().skip(1).any(|line| !line.trim().is_empty())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_heading_is_no_swap() {
        let heading = "Filename\t\t\tType\t\tSize\t\tUsed\t\tPriority\n";
        assert!(!is_swap_on("") && !is_swap_on(heading));
        assert!(is_swap_on(&format!("{heading}/dev/sda2 partition\t1000\t0\t-2\n")));
    }
}
