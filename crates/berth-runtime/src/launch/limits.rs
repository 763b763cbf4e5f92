//! Cgroup file values for a container's resources, and their merge on update. Pure.
//!
//! `cpu.weight` uses the quadratic conversion of other runtimes' containers; cgroups above containers belong to the
//! agent and use the linear one. Implements spec 09a §9.4, 06a §4, §6.

use std::collections::BTreeMap;

use super::{inputs::Groups, refusal::LaunchError};
use berth_proto::cri::LinuxContainerResources;
use berth_sys::cgroup::Controller;

/// Names of the `setrlimit(2)` resources, indexed by the kernel's number.
pub const RESOURCES: [&str; 16] = [
    "cpu",
    "fsize",
    "data",
    "stack",
    "core",
    "rss",
    "nproc",
    "nofile",
    "memlock",
    "as",
    "locks",
    "sigpending",
    "msgqueue",
    "nice",
    "rtprio",
    "rttime",
];

/// One write to a cgroup file; the list's order is the write order.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Write {
    /// Controller that owns the file; `None` for `unified` entries, which are written verbatim.
    pub controller: Option<Controller>,
    /// File name.
    pub file: String,
    /// Content to write.
    pub value: String,
    /// Whether a missing file is acceptable.
    pub is_optional: bool,
}

fn write(controller: Controller, file: impl Into<String>, value: impl ToString) -> Write {
    Write { controller: Some(controller), file: file.into(), value: value.to_string(), is_optional: false }
}

/// Properties of the host's cgroup controllers.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Controllers {
    /// Version of the cgroup hierarchy.
    pub groups: Groups,
    /// Whether the kernel can limit swap.
    pub has_swap: bool,
    /// Whether the kernel can limit huge pages.
    pub has_hugetlb: bool,
    /// `tolerateMissingHugetlb`.
    pub tolerates_missing_hugetlb: bool,
}

/// Converts a container's resources to cgroup file writes. Absent or zero values produce no write.
///
/// # Errors
/// Huge pages cannot be limited and that is not tolerated, a page size is malformed, or `unified` does not fit the
/// host.
pub fn writes(resources: &LinuxContainerResources, on: &Controllers) -> Result<Vec<Write>, LaunchError> {
    let hugetlb = hugetlb(resources, on)?;
    if on.groups == Groups::V1 {
        if !resources.unified.is_empty() {
            return Err(LaunchError::invalid("unified resources require cgroup v2"));
        }
        return Ok(writes_v1(resources, on, hugetlb));
    }
    let mut all = Vec::new();
    let memory = resources.memory_limit_in_bytes;
    if on.has_swap {
        all.extend(swap_v2(resources).map(|value| write(Controller::Memory, "memory.swap.max", value)));
    }
    if memory != 0 {
        all.push(write(Controller::Memory, "memory.max", or_max(memory)));
    }
    if resources.cpu_shares > 0 {
        all.push(write(Controller::Cpu, "cpu.weight", weight(resources.cpu_shares.unsigned_abs())));
    }
    if resources.cpu_quota != 0 || resources.cpu_period > 0 {
        let quota = if resources.cpu_quota == 0 { "max".to_owned() } else { or_max(resources.cpu_quota) };
        let period = if resources.cpu_period > 0 { format!(" {}", resources.cpu_period) } else { String::new() };
        all.push(write(Controller::Cpu, "cpu.max", format!("{quota}{period}")));
    }
    all.extend(cpusets(resources));
    all.extend(hugetlb);
    for (file, value) in sorted(&resources.unified) {
        if file.is_empty() || file.contains(['/', '\0']) || matches!(file, "." | ".." | "cgroup.procs") {
            return Err(LaunchError::invalid(format!("unified resource {file:?} must be a file name")));
        }
        all.push(Write { controller: None, file: file.to_owned(), value: value.to_owned(), is_optional: false });
    }
    Ok(all)
}

fn sorted(map: &std::collections::HashMap<String, String>) -> BTreeMap<&str, &str> {
    map.iter().map(|(key, value)| (key.as_str(), value.as_str())).collect()
}

fn writes_v1(resources: &LinuxContainerResources, on: &Controllers, hugetlb: Vec<Write>) -> Vec<Write> {
    let mut all = Vec::new();
    let memory = resources.memory_limit_in_bytes;
    if memory != 0 {
        all.push(write(Controller::Memory, "memory.limit_in_bytes", memory));
    }
    let both = match resources.memory_swap_limit_in_bytes {
        0 if memory > 0 => memory,
        // The kernel rejects a memory+swap limit below the memory limit; an update may name only one of them.
        both if both > 0 => both.max(memory),
        both => both,
    };
    if on.has_swap && both != 0 {
        all.push(write(Controller::Memory, "memory.memsw.limit_in_bytes", both));
    }
    if resources.cpu_shares > 0 {
        all.push(write(Controller::Cpu, "cpu.shares", resources.cpu_shares));
    }
    if resources.cpu_period > 0 {
        all.push(write(Controller::Cpu, "cpu.cfs_period_us", resources.cpu_period));
    }
    if resources.cpu_quota != 0 {
        all.push(write(Controller::Cpu, "cpu.cfs_quota_us", resources.cpu_quota));
    }
    all.extend(cpusets(resources));
    all.extend(hugetlb);
    all
}

/// The swap limit alone: CRI counts memory and swap together.
fn swap_v2(resources: &LinuxContainerResources) -> Option<String> {
    let (memory, both) = (resources.memory_limit_in_bytes, resources.memory_swap_limit_in_bytes);
    match both {
        0 if memory > 0 => Some("0".to_owned()),
        0 => None,
        both if both < 0 => Some("max".to_owned()),
        both => Some(both.saturating_sub(memory.max(0)).max(0).to_string()),
    }
}

fn cpusets(resources: &LinuxContainerResources) -> Vec<Write> {
    [("cpuset.cpus", &resources.cpuset_cpus), ("cpuset.mems", &resources.cpuset_mems)]
        .into_iter()
        .filter(|(_, list)| !list.is_empty())
        .map(|(file, list)| write(Controller::Cpuset, file, list))
        .collect()
}

fn hugetlb(resources: &LinuxContainerResources, on: &Controllers) -> Result<Vec<Write>, LaunchError> {
    if resources.hugepage_limits.is_empty() || (!on.has_hugetlb && on.tolerates_missing_hugetlb) {
        return Ok(Vec::new());
    }
    if !on.has_hugetlb {
        let text = "huge pages limits are specified but hugetlb cgroup controller is missing. \
                    Please set tolerate_missing_hugetlb_controller to `true` to ignore this error";
        return Err(LaunchError::plain(text));
    }
    let file = if on.groups == Groups::V1 { "limit_in_bytes" } else { "max" };
    let mut all = Vec::new();
    for limit in &resources.hugepage_limits {
        let size = &limit.page_size;
        if size.is_empty() || !size.bytes().all(|b| b.is_ascii_alphanumeric()) {
            return Err(LaunchError::invalid(format!("invalid huge page size {size:?}")));
        }
        all.push(write(Controller::Hugetlb, format!("hugetlb.{size}.{file}"), limit.limit));
        let reserved = write(Controller::Hugetlb, format!("hugetlb.{size}.rsvd.{file}"), limit.limit);
        all.push(Write { is_optional: true, ..reserved });
    }
    Ok(all)
}

fn or_max(value: i64) -> String {
    if value < 0 { "max".to_owned() } else { value.to_string() }
}

/// `cpu.weight` of a container: 100 for 1024 shares, with an exponent quadratic in the logarithm of the shares.
pub fn weight(shares: u64) -> u64 {
    if shares <= 2 {
        return 1;
    }
    if shares >= 262_144 {
        return 10_000;
    }
    // Exact: below 2^18.
    let l = f64::from(u32::try_from(shares).unwrap_or(u32::MAX)).log2();
    let exponent = (l * l + 125.0 * l) / 612.0 - 7.0 / 34.0;
    let weight = 10.0_f64.powf(exponent).ceil().clamp(1.0, 10_000.0);
    // Between 1 and 10,000.
    weight as u64
}

/// The resources to store after an update: non-zero and non-empty values of the update replace the stored ones.
#[must_use]
pub fn merged(stored: &LinuxContainerResources, update: &LinuxContainerResources) -> LinuxContainerResources {
    let number = |old: i64, new: i64| if new == 0 { old } else { new };
    let text = |old: &String, new: &String| if new.is_empty() { old.clone() } else { new.clone() };
    let mut hugepages = stored.hugepage_limits.clone();
    for limit in &update.hugepage_limits {
        match hugepages.iter_mut().find(|earlier| earlier.page_size == limit.page_size) {
            Some(earlier) => earlier.limit = limit.limit,
            None => hugepages.push(limit.clone()),
        }
    }
    let mut unified = stored.unified.clone();
    unified.extend(update.unified.clone());
    LinuxContainerResources {
        cpu_period: number(stored.cpu_period, update.cpu_period),
        cpu_quota: number(stored.cpu_quota, update.cpu_quota),
        cpu_shares: number(stored.cpu_shares, update.cpu_shares),
        memory_limit_in_bytes: number(stored.memory_limit_in_bytes, update.memory_limit_in_bytes),
        oom_score_adj: number(stored.oom_score_adj, update.oom_score_adj),
        cpuset_cpus: text(&stored.cpuset_cpus, &update.cpuset_cpus),
        cpuset_mems: text(&stored.cpuset_mems, &update.cpuset_mems),
        hugepage_limits: hugepages,
        unified,
        memory_swap_limit_in_bytes: number(stored.memory_swap_limit_in_bytes, update.memory_swap_limit_in_bytes),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use berth_proto::cri::HugepageLimit;

    fn on(groups: Groups) -> Controllers {
        Controllers { groups, has_swap: true, has_hugetlb: true, tolerates_missing_hugetlb: true }
    }

    fn v2() -> Controllers {
        on(Groups::V2 { options: String::new() })
    }

    fn files(resources: &LinuxContainerResources, on: &Controllers) -> Vec<String> {
        let all = writes(resources, on).expect("files");
        all.iter().map(|w| format!("{}{}={}", w.file, if w.is_optional { "?" } else { "" }, w.value)).collect()
    }

    fn some() -> LinuxContainerResources {
        LinuxContainerResources {
            cpu_period: 100_000,
            cpu_quota: 50_000,
            cpu_shares: 512,
            memory_limit_in_bytes: 1000,
            cpuset_cpus: "0-1".to_owned(),
            hugepage_limits: vec![HugepageLimit { page_size: "2MB".to_owned(), limit: 5 }],
            ..Default::default()
        }
    }

    #[test]
    fn weights_equal_the_table_of_the_specification() {
        for (shares, expected) in [
            (0, 1),
            (2, 1),
            (5, 2),
            (10, 4),
            (102, 17),
            (256, 35),
            (512, 59),
            // AC-06a-2
            (1024, 100),
            (2048, 174),
            (4096, 303),
            (8192, 532),
            (16_384, 942),
            (65_536, 3023),
            (262_144, 10_000),
            (u64::MAX, 10_000),
        ] {
            assert_eq!(weight(shares), expected, "{shares}");
        }
    }

    #[test]
    fn values_become_files_of_either_kind() {
        assert_eq!(
            files(&some(), &v2()),
            [
                "memory.swap.max=0",
                "memory.max=1000",
                "cpu.weight=59",
                "cpu.max=50000 100000",
                "cpuset.cpus=0-1",
                "hugetlb.2MB.max=5",
                "hugetlb.2MB.rsvd.max?=5"
            ]
        );
        assert_eq!(
            files(&some(), &on(Groups::V1)),
            [
                "memory.limit_in_bytes=1000",
                "memory.memsw.limit_in_bytes=1000",
                "cpu.shares=512",
                "cpu.cfs_period_us=100000",
                "cpu.cfs_quota_us=50000",
                "cpuset.cpus=0-1",
                "hugetlb.2MB.limit_in_bytes=5",
                "hugetlb.2MB.rsvd.limit_in_bytes?=5"
            ]
        );
        assert!(files(&Default::default(), &v2()).is_empty());
        assert!(files(&Default::default(), &on(Groups::V1)).is_empty());
    }

    #[test]
    fn swap_is_what_is_beyond_memory() {
        for (memory, both, expected) in [
            (1000, 0, Some("0")),
            (1000, 1500, Some("500")),
            (1000, -1, Some("max")),
            (0, 0, None),
            (0, 700, Some("700")),
            (1000, 500, Some("0")),
        ] {
            let resources = LinuxContainerResources {
                memory_limit_in_bytes: memory,
                memory_swap_limit_in_bytes: both,
                ..Default::default()
            };
            assert_eq!(swap_v2(&resources).as_deref(), expected, "{memory} {both}");
            let without = Controllers { has_swap: false, ..v2() };
            assert!(!files(&resources, &without).iter().any(|file| file.contains("swap")));
        }
    }

    #[test]
    fn what_does_not_fit_the_host_is_refused() {
        let missing = Controllers { has_hugetlb: false, ..v2() };
        assert!(!files(&some(), &missing).iter().any(|file| file.contains("hugetlb")));
        let strict = Controllers { tolerates_missing_hugetlb: false, ..missing };
        assert!(writes(&some(), &strict).is_err());
        let unified = |file: &str| LinuxContainerResources {
            unified: [(file.to_owned(), "5".to_owned())].into(),
            ..Default::default()
        };
        assert_eq!(files(&unified("pids.max"), &v2()), ["pids.max=5"]);
        assert!(writes(&unified("../pids.max"), &v2()).is_err());
        assert!(writes(&unified("pids.max"), &on(Groups::V1)).is_err());
    }

    #[test]
    fn updates_change_what_they_name() {
        // AC-09a-X18
        let update = LinuxContainerResources {
            cpu_quota: -1,
            hugepage_limits: vec![HugepageLimit { page_size: "2MB".to_owned(), limit: 6 }],
            ..Default::default()
        };
        let both = merged(&some(), &update);
        let expected =
            LinuxContainerResources { cpu_quota: -1, hugepage_limits: update.hugepage_limits.clone(), ..some() };
        assert_eq!(both, expected);
        assert!(files(&both, &v2()).contains(&"cpu.max=max 100000".to_owned()));
    }
}
