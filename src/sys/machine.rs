//! Facts of this machine that do not change while it runs. Read once at start; a fact that
//! cannot be read counts as absent.

use std::{fs, path::Path};

/// Huge page sizes in bytes, ascending (spec 06a §12).
pub fn hugepage_sizes() -> Vec<u64> {
    let names = names_in(Path::new("/sys/kernel/mm/hugepages"));
    let size = |name: &String| -> Option<u64> {
        name.strip_prefix("hugepages-")?.strip_suffix("kB")?.parse::<u64>().ok()?.checked_mul(1024)
    };
    let mut sizes: Vec<u64> = names.iter().filter_map(size).collect();
    sizes.sort_unstable();
    sizes
}

/// Whether SELinux is enabled.
pub fn selinux_enabled() -> bool {
    Path::new("/sys/fs/selinux/enforce").exists()
}

/// Paths that tell of thermal throttling: a side channel that containers do not see (spec 03a §6.4).
pub fn thermal_throttle_paths() -> Vec<String> {
    let root = "/sys/devices/system/cpu";
    let is_cpu = |name: &String| {
        name.strip_prefix("cpu").is_some_and(|n| !n.is_empty() && n.bytes().all(|b| b.is_ascii_digit()))
    };
    let cpus = names_in(Path::new(root)).into_iter().filter(is_cpu);
    let mut paths: Vec<String> = cpus.map(|cpu| format!("{root}/{cpu}/thermal_throttle")).collect();
    paths.retain(|path| Path::new(path).exists());
    paths.sort();
    paths
}

fn names_in(directory: &Path) -> Vec<String> {
    let entries = fs::read_dir(directory).into_iter().flatten().flatten();
    entries.filter_map(|entry| entry.file_name().into_string().ok()).collect()
}
