//! Detects the host's capabilities for containers once at start, from `/proc` and `/sys`.
//! Implements spec 09a §6.5, §7.1, §7.6-§7.8, 09 §2, §5.

use std::{fs, io, path::Path};

use super::{
    capabilities::bit,
    inputs::{Groups, Host},
};
use crate::seccomp::CpuArchitecture;
use berth_sys::{cgroup::Hierarchy, mount_table};

/// `RLIMIT_NOFILE`.
const OPEN_FILES: u32 = 7;
/// First kernel that supports id-mapped mounts of both overlayfs and tmpfs.
const USER_NAMESPACES: (u32, u32) = (6, 3);
/// First kernel with `mount_setattr(2)` and `AT_RECURSIVE`.
const RECURSIVE_READ_ONLY: (u32, u32) = (5, 12);
/// First kernel with `SECCOMP_FILTER_FLAG_SPEC_ALLOW`.
const SPEC_ALLOW: (u32, u32) = (4, 17);

/// Settings for all containers (`embeddedRuntime`).
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct LaunchSettings {
    /// `restrictOOMScoreAdj`; `None`: enabled if the agent cannot lower `oom_score_adj`.
    pub restricts_oom_score_adj: Option<bool>,
    /// `defaultUlimits` as resource, soft and hard limit.
    pub limits: Vec<(u32, u64, u64)>,
    /// `deviceOwnershipFromSecurityContext`.
    pub owns_devices: bool,
    /// `ignoreImageVolumes`.
    pub ignores_image_volumes: bool,
    /// `unprivilegedPorts`.
    pub unprivileged_ports: bool,
    /// `unprivilegedICMP`.
    pub unprivileged_icmp: bool,
    /// `allow32BitSystemCalls`.
    pub allows_32_bit: bool,
}

impl Default for LaunchSettings {
    fn default() -> Self {
        Self {
            restricts_oom_score_adj: None,
            limits: vec![(OPEN_FILES, 1024, 524_288)],
            owns_devices: false,
            ignores_image_volumes: false,
            unprivileged_ports: true,
            unprivileged_icmp: true,
            allows_32_bit: false,
        }
    }
}

/// Detects the properties of this host. Blocks, but only on kernel file systems.
///
/// # Errors
/// A file that every Linux has is unreadable or malformed, or the CPU architecture has no system call table.
pub fn detect(settings: &LaunchSettings) -> io::Result<Host> {
    let odd = |what: &str| io::Error::new(io::ErrorKind::InvalidData, format!("failed to parse {what}"));
    let kernel = version(&read("/proc/sys/kernel/osrelease")?).ok_or_else(|| odd("the kernel version"))?;
    let status = read("/proc/self/status")?;
    let set = |name: &str| hexadecimal(&status, name).ok_or_else(|| odd(name));
    let last: u32 = read("/proc/sys/kernel/cap_last_cap")?.trim().parse().map_err(|_| odd("cap_last_cap"))?;
    let known = 1_u64.checked_shl(last.saturating_add(1)).map_or(u64::MAX, |beyond| beyond - 1);
    let can_lower = bit("SYS_RESOURCE").is_some_and(|bit| set("CapEff").is_ok_and(|set| set & bit != 0));
    let own = read("/proc/self/oom_score_adj")?.trim().parse().map_err(|_| odd("oom_score_adj"))?;
    Ok(Host {
        kernel,
        machine: CpuArchitecture::current().ok_or_else(|| odd("the processor architecture"))?,
        capabilities: set("CapBnd")? & known,
        has_seccomp: Path::new("/proc/sys/kernel/seccomp/actions_avail").exists(),
        has_spec_allow: kernel >= SPEC_ALLOW,
        has_apparmor: read("/sys/module/apparmor/parameters/enabled").is_ok_and(|text| text.starts_with('Y')),
        has_selinux: Path::new("/sys/fs/selinux/enforce").exists(),
        groups: groups()?,
        has_recursive_read_only: kernel >= RECURSIVE_READ_ONLY,
        has_user_namespaces: kernel >= USER_NAMESPACES
            && read("/proc/sys/user/max_user_namespaces").is_ok_and(|text| text.trim() != "0"),
        least_oom_score_adj: settings.restricts_oom_score_adj.unwrap_or(!can_lower).then_some(own),
        limits: limits(&read("/proc/1/limits")?, &settings.limits),
        owns_devices: settings.owns_devices,
        ignores_image_volumes: settings.ignores_image_volumes,
        unprivileged_ports: settings.unprivileged_ports,
        unprivileged_icmp: settings.unprivileged_icmp,
        allows_32_bit: settings.allows_32_bit,
    })
}

fn read(path: &str) -> io::Result<String> {
    fs::read_to_string(path).map_err(|error| io::Error::new(error.kind(), format!("read {path}: {error}")))
}

fn groups() -> io::Result<Groups> {
    match Hierarchy::detect().map_err(io::Error::other)? {
        Hierarchy::V1(_) => Ok(Groups::V1),
        Hierarchy::V2(_) => {
            let mounts = mount_table::read()?;
            let options = mounts.iter().find(|mount| mount.kind == "cgroup2").map(|mount| mount.options.as_str());
            let wanted = ["nsdelegate", "memory_recursiveprot"];
            let options = options.unwrap_or_default().split(',').filter(|option| wanted.contains(option));
            Ok(Groups::V2 { options: options.collect::<Vec<_>>().join(",") })
        }
    }
}

/// Parses a kernel release such as `6.12.3-generic`.
fn version(text: &str) -> Option<(u32, u32)> {
    let mut numbers = text.trim().split(|c: char| !c.is_ascii_digit());
    Some((numbers.next()?.parse().ok()?, numbers.next()?.parse().ok()?))
}

/// Parses a line such as `CapBnd:\t000001ffffffffff`.
fn hexadecimal(status: &str, name: &str) -> Option<u64> {
    let line = status.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))?;
    u64::from_str_radix(line.trim(), 16).ok()
}

/// Parses `/proc/<pid>/limits`, whose lines have the kernel's resource order; `ours` overrides individual limits.
fn limits(text: &str, ours: &[(u32, u64, u64)]) -> Vec<(u32, u64, u64)> {
    let number = |word: &str| if word == "unlimited" { Some(u64::MAX) } else { word.parse().ok() };
    let line = |line: &str| {
        // The name is padded to 25 columns.
        let mut words = line.get(25..)?.split_whitespace();
        Some((number(words.next()?)?, number(words.next()?)?))
    };
    let lines = text.lines().filter(|line| line.starts_with("Max ")).zip(0_u32..);
    let mut all: Vec<_> = lines.filter_map(|(text, at)| line(text).map(|(soft, hard)| (at, soft, hard))).collect();
    all.retain(|(at, ..)| !ours.iter().any(|(other, ..)| other == at));
    all.extend(ours);
    all.sort_unstable();
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn texts_of_the_kernel_are_understood() {
        for (text, expected) in
            [("6.12.3-generic\n", Some((6, 12))), ("5.4\n", Some((5, 4))), ("6\n", None), ("", None), ("x.y", None)]
        {
            assert_eq!(version(text), expected, "{text}");
        }
        assert_eq!(hexadecimal("Name:\tx\nCapBnd:\t00ff\n", "CapBnd"), Some(255));
        assert_eq!(hexadecimal("CapBnd:\tz\n", "CapBnd"), None);
        let text = "Limit                     Soft Limit           Hard Limit           Units     \n\
                    Max cpu time              unlimited            unlimited            seconds   \n\
                    Max file size             5                    6                    bytes     \n\
                    Max odd\n";
        assert_eq!(limits(text, &[(7, 1, 2), (1, 3, 4)]), [(0, u64::MAX, u64::MAX), (1, 3, 4), (7, 1, 2)]);
    }

    #[test]
    fn this_host_is_understood() {
        let host = detect(&LaunchSettings::default()).expect("a host");
        assert!(host.kernel >= (5, 0) && host.capabilities < 1 << 63);
        assert_eq!(host.limits.len(), 16);
        let open_files = host.limits.iter().find(|(at, ..)| *at == OPEN_FILES);
        assert_eq!(open_files, Some(&(OPEN_FILES, 1024, 524_288)));
        let restricted = detect(&LaunchSettings { restricts_oom_score_adj: Some(true), ..LaunchSettings::default() });
        assert!(restricted.expect("a host").least_oom_score_adj.is_some());
    }
}
