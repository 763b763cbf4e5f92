//! Reads what containers are given of the kernel.

use std::path::Path;

use super::settings::Kernel;
use crate::sys::machine;

/// As it is now.
pub(super) fn read() -> Kernel {
    let cgroup_v2 = Path::new("/sys/fs/cgroup/cgroup.controllers").exists();
    Kernel {
        selinux: machine::selinux_enabled(),
        masked: machine::thermal_throttle_paths(),
        hugepage_sizes: machine::hugepage_sizes(),
        cgroup_v2,
        swap_controllable: !cgroup_v2 && Path::new("/sys/fs/cgroup/memory/memory.memsw.limit_in_bytes").exists(),
    }
}
