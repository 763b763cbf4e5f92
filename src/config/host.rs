//! The few facts about the machine without which a configuration cannot be judged. Read once, at the door.

use std::{collections::BTreeSet, env, fs, path::Path, process};

use super::{validate::cpus, watchdog::WatchdogEnvironment};

/// Facts about the machine.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct HostFacts {
    /// Whether the cgroup hierarchy is of version 1.
    pub cgroup_v1: bool,
    /// CPUs that are online; unknown if they could not be read.
    pub online_cpus: Option<BTreeSet<u32>>,
    /// What the service manager says about its watchdog.
    pub watchdog: WatchdogEnvironment,
}

impl HostFacts {
    /// Looks at this machine.
    pub fn probe() -> Self {
        let online = fs::read_to_string("/sys/devices/system/cpu/online").ok();
        Self {
            cgroup_v1: !Path::new("/sys/fs/cgroup/cgroup.controllers").exists(),
            online_cpus: online.and_then(|list| cpus::parse(list.trim()).ok()),
            watchdog: WatchdogEnvironment {
                microseconds: env::var("WATCHDOG_USEC").ok(),
                pid: env::var("WATCHDOG_PID").ok(),
                own_pid: process::id(),
            },
        }
    }
}
