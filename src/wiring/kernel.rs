//! Kernel features that affect containers: SELinux, cgroup version, swap, huge pages.

use std::{
    fs,
    path::{Path, PathBuf},
};

use super::settings::Kernel;
use berth_sys::machine;

/// Reads the current state.
pub(super) fn read() -> Kernel {
    let cgroup_v2 = Path::new("/sys/fs/cgroup/cgroup.controllers").exists();
    let own = fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
    Kernel {
        selinux: machine::selinux_enabled(),
        masked: machine::thermal_throttle_paths(),
        hugepage_sizes: machine::hugepage_sizes(),
        cgroup_v2,
        swap_controllable: swap_limit(cgroup_v2, &own).is_some_and(|file| file.exists()),
    }
}

/// A missing kernel feature that does not make the node unready; appended to the message of its Ready condition
/// (spec 05 §4.6).
pub(super) fn soft_problem() -> Option<String> {
    let is_unified = Path::new("/sys/fs/cgroup/cgroup.controllers").exists();
    let has_quotas = ["cpu.cfs_period_us", "cpu.cfs_quota_us"]
        .iter()
        .all(|file| Path::new("/sys/fs/cgroup/cpu").join(file).exists());
    (!is_unified && !has_quotas).then(|| "CPU hardcapping unsupported".to_owned())
}

/// File that exists if swap can be limited; `own` is the content of `/proc/self/cgroup`. On cgroup v2 it is that of the
/// agent's own cgroup: the root cgroup has none. Spec 06a §10.1.
fn swap_limit(cgroup_v2: bool, own: &str) -> Option<PathBuf> {
    if !cgroup_v2 {
        return Some("/sys/fs/cgroup/memory/memory.memsw.limit_in_bytes".into());
    }
    let group = own.lines().find_map(|line| line.strip_prefix("0::/"))?;
    Some(Path::new("/sys/fs/cgroup").join(group).join("memory.swap.max"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn where_it_is_seen_whether_swap_can_be_limited() {
        for (cgroup_v2, own, expected) in [
            (false, "5:memory:/a\n0::/a\n", Some("/sys/fs/cgroup/memory/memory.memsw.limit_in_bytes")),
            (
                true,
                "0::/system.slice/kubelet.service\n",
                Some("/sys/fs/cgroup/system.slice/kubelet.service/memory.swap.max"),
            ),
            (true, "0::/\n", Some("/sys/fs/cgroup/memory.swap.max")),
            (true, "", None),
        ] {
            assert_eq!(swap_limit(cgroup_v2, own), expected.map(PathBuf::from), "{own}");
        }
    }
}
