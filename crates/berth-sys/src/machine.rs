//! Hardware and kernel facts that are constant while the machine runs.
//!
//! Read once at startup; a fact that cannot be read counts as absent.

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

/// Page size in bytes.
pub fn page_bytes() -> u64 {
    let size = nix::unistd::sysconf(nix::unistd::SysconfVar::PAGE_SIZE).ok().flatten();
    size.and_then(|size| u64::try_from(size).ok()).unwrap_or(4096)
}

/// Whether SELinux is enabled.
pub fn selinux_enabled() -> bool {
    Path::new("/sys/fs/selinux/enforce").exists()
}

/// Paths of thermal throttling counters: a side channel that is masked in containers (spec 03a §6.4).
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

/// Whether this process is in a user namespace other than the initial one: not all ids map to themselves.
pub fn in_user_namespace() -> bool {
    // Without the file the kernel has no user namespaces.
    fs::read_to_string("/proc/self/uid_map").is_ok_and(|map| !maps_all_ids(&map))
}

fn maps_all_ids(map: &str) -> bool {
    map.split_whitespace().eq(["0", "0", "4294967295"])
}

fn names_in(directory: &Path) -> Vec<String> {
    let entries = fs::read_dir(directory).into_iter().flatten().flatten();
    entries.filter_map(|entry| entry.file_name().into_string().ok()).collect()
}

#[cfg(test)]
mod tests {
    use super::maps_all_ids;

    #[test]
    fn the_first_user_namespace_maps_every_id_to_itself() {
        assert!(maps_all_ids("         0          0 4294967295\n"));
        for map in ["         0       1000          1\n", "0 0 65536\n65536 65536 1\n", ""] {
            assert!(!maps_all_ids(map), "{map:?}");
        }
    }
}
