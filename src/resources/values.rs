//! Cgroup values of pods, QoS classes, and the node. Pure. Implements spec 06a §4-7.
//!
//! [`CgroupLimits`] are the values of a cgroup; [`writes`] converts them to the files of either cgroup
//! version, in the order in which the kernel accepts them.

use std::collections::BTreeMap;

pub use super::names::CgroupDriver;
use berth_sys::cgroup::systemd::rounded_quota;
use berth_types::{
    Pod, api, cpu,
    memory_qos::MemoryReservationPolicy,
    qos::Qos,
    quantity::Amount,
    resources::{self, CPU, MEMORY, Overhead},
};

/// Values of a cgroup; absent ones are not written.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct CgroupLimits {
    /// CPU weight in shares.
    pub cpu_shares: Option<u64>,
    /// CPU quota in microseconds per period; -1 for none.
    pub cpu_quota: Option<i64>,
    /// CPU period in microseconds.
    pub cpu_period: Option<u64>,
    /// Memory limit in bytes; -1 for none.
    pub memory: Option<i64>,
    /// Memory in bytes that is never reclaimed; cgroup v2 only.
    pub memory_min: Option<u64>,
    /// Memory in bytes that is reclaimed last; cgroup v2 only.
    pub memory_low: Option<u64>,
    /// Maximum number of processes; negative for no limit.
    pub pids: Option<i64>,
    /// Huge page limits in bytes, by page size in bytes.
    pub hugepages: BTreeMap<u64, u64>,
    /// cpuset, as a list like `0-3`.
    pub cpuset_cpus: Option<String>,
}

/// Amounts of the node's resources.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Amounts {
    /// CPU amount in milli-CPU; `None` leaves the CPU weight unset.
    pub cpu_milli: Option<i64>,
    /// Memory amount in bytes; `None` and 0 set no limit.
    pub memory_bytes: Option<i64>,
    /// Number of processes.
    pub pids: Option<i64>,
    /// Huge pages in bytes, by page size in bytes.
    pub hugepages: BTreeMap<u64, u64>,
}

impl Amounts {
    /// Subtracts another amount; no result is negative.
    #[must_use]
    pub fn less(&self, other: &Self) -> Self {
        let less = |own: Option<i64>, other: Option<i64>| own.map(|o| o.saturating_sub(other.unwrap_or(0)).max(0));
        Self {
            cpu_milli: less(self.cpu_milli, other.cpu_milli),
            memory_bytes: less(self.memory_bytes, other.memory_bytes),
            pids: less(self.pids, other.pids),
            hugepages: self
                .hugepages
                .iter()
                .map(|(size, own)| (*size, own.saturating_sub(other.hugepages.get(size).copied().unwrap_or(0))))
                .collect(),
        }
    }
}

/// Inputs of a pod's values, apart from the pod.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct PodRules {
    /// `cpuCFSQuota`.
    pub cpu_cfs_quota: bool,
    /// `cpuCFSQuotaPeriod`, in microseconds.
    pub cpu_period_us: u64,
    /// `podPidsLimit`; zero or negative for none.
    pub pids_limit: i64,
    /// Huge page sizes of the node, in bytes.
    pub hugepage_sizes: Vec<u64>,
    /// `cgroupDriver`.
    pub driver: CgroupDriver,
    /// `memoryReservationPolicy`; `None` without the gate `MemoryQoS`.
    pub memory_qos: Option<MemoryReservationPolicy>,
}

/// Values of a pod's cgroup.
pub fn of_pod(pod: &Pod, rules: &PodRules) -> CgroupLimits {
    let requests = resources::pod_requests(pod.spec(), Overhead::Included);
    let limits = resources::pod_limits(pod.spec(), Overhead::Included);
    let class = Qos::of(pod);
    let milli = |amount: Option<&Amount>| amount.map_or(0, |a| a.milli());
    let has_cpu = class == Qos::Guaranteed || (class == Qos::Burstable && is_limited(pod, CPU));
    let has_memory = class == Qos::Guaranteed || (class == Qos::Burstable && is_limited(pod, MEMORY));
    let shares = if class == Qos::BestEffort { cpu::MIN_SHARES } else { cpu::shares(milli(requests.get(CPU))) };
    let quota = if rules.cpu_cfs_quota { quota(milli(limits.get(CPU)), rules) } else { -1 };
    let request = memory_request(&requests);
    let is_protected = rules.memory_qos == Some(MemoryReservationPolicy::TieredReservation) && request > 0;
    CgroupLimits {
        cpu_shares: Some(shares),
        cpu_quota: has_cpu.then_some(quota),
        cpu_period: has_cpu.then_some(rules.cpu_period_us),
        memory: has_memory.then(|| limits.get(MEMORY).map_or(0, |a| a.value())),
        memory_min: (is_protected && class == Qos::Guaranteed).then_some(request),
        memory_low: (is_protected && class != Qos::Guaranteed).then_some(request),
        pids: (rules.pids_limit > 0).then_some(rules.pids_limit),
        hugepages: pod_hugepages(&requests, rules),
        cpuset_cpus: None,
    }
}

/// Values of a cgroup with an amount of the node: kubepods, or a reservation.
pub fn of_amounts(amounts: &Amounts, hugepage_sizes: &[u64]) -> CgroupLimits {
    let mut hugepages: BTreeMap<u64, u64> = hugepage_sizes.iter().map(|&size| (size, 0)).collect();
    hugepages.extend(&amounts.hugepages);
    CgroupLimits {
        cpu_shares: amounts.cpu_milli.map(cpu::shares),
        memory: amounts.memory_bytes.filter(|bytes| *bytes > 0),
        pids: amounts.pids.filter(|pids| *pids > 0),
        hugepages,
        ..CgroupLimits::default()
    }
}

fn memory_request(requests: &resources::Amounts) -> u64 {
    requests.get(MEMORY).map_or(0, |a| a.value()).max(0).unsigned_abs()
}

/// Whether each container has a nonzero limit, or the pod level has one. For an init container the
/// limits of preceding sidecars count too, as upstream.
fn is_limited(pod: &Pod, resource: &str) -> bool {
    let above_zero = |r: Option<&api::ResourceRequirements>| {
        let quantity = r.and_then(|r| r.limits.as_ref()?.get(resource));
        quantity.and_then(|q| Amount::try_from(q).ok()).is_some_and(|a| !a.is_zero())
    };
    if above_zero(pod.spec().resources.as_ref()) {
        return true;
    }
    let mut sidecars = false;
    let init = pod.init_containers().iter().all(|c| {
        let own = above_zero(c.resources.as_ref());
        sidecars |= own && Pod::is_sidecar(c);
        own || sidecars
    });
    init && pod.containers().iter().all(|c| above_zero(c.resources.as_ref()))
}

fn quota(milli: i64, rules: &PodRules) -> i64 {
    let quota = cpu::quota(milli, rules.cpu_period_us);
    if rules.driver == CgroupDriver::Systemd { rounded_quota(quota, rules.cpu_period_us) } else { quota }
}

/// Huge page limits come from requests; sizes without a request are limited to 0.
fn pod_hugepages(requests: &resources::Amounts, rules: &PodRules) -> BTreeMap<u64, u64> {
    let mut limits: BTreeMap<u64, u64> = rules.hugepage_sizes.iter().map(|&size| (size, 0)).collect();
    for (name, amount) in requests {
        if let Some(limit) = resources::page_size_of(name).and_then(|size| limits.get_mut(&size)) {
            *limit = amount.value().max(0).unsigned_abs();
        }
    }
    limits
}

/// Version of the cgroup hierarchy.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum CgroupVersion {
    /// cgroup v1: a hierarchy per controller.
    V1,
    /// cgroup v2: the unified hierarchy.
    V2,
}

/// Controller that a file belongs to.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum FileController {
    /// `cpu`
    Cpu,
    /// `cpuset`
    Cpuset,
    /// `memory`
    Memory,
    /// `pids`
    Pids,
    /// `hugetlb`
    Hugetlb,
}

/// One file to write. Skipped if its controller is not available.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Write {
    /// Controller of the file.
    pub owner: FileController,
    /// Name of the file.
    pub file: String,
    /// Content to write.
    pub value: String,
    /// Whether the file may be missing.
    pub optional: bool,
}

fn write(owner: FileController, file: impl Into<String>, value: impl ToString) -> Write {
    Write { owner, file: file.into(), value: value.to_string(), optional: false }
}

/// The files to write for limits, in order.
pub fn writes(limits: &CgroupLimits, version: CgroupVersion) -> Vec<Write> {
    match version {
        CgroupVersion::V1 => writes_v1(limits),
        CgroupVersion::V2 => writes_v2(limits),
    }
}

fn writes_v2(limits: &CgroupLimits) -> Vec<Write> {
    let mut all = Vec::new();
    all.extend(limits.pids.map(|n| write(FileController::Pids, "pids.max", pids(n))));
    all.extend(limits.memory.filter(|n| *n != 0).map(|n| write(FileController::Memory, "memory.max", or_max(n))));
    all.extend(limits.memory_min.map(|n| write(FileController::Memory, "memory.min", n)));
    all.extend(limits.memory_low.map(|n| write(FileController::Memory, "memory.low", n)));
    all.extend(limits.cpu_shares.map(|shares| write(FileController::Cpu, "cpu.weight", cpu::linear_weight(shares))));
    let quota = limits.cpu_quota.filter(|quota| *quota != 0);
    if quota.is_some() || limits.cpu_period.is_some_and(|period| period != 0) {
        let quota = quota.map_or_else(|| "max".to_owned(), or_max);
        let value = match limits.cpu_period.filter(|period| *period != 0) {
            Some(period) => format!("{quota} {period}"),
            None => quota,
        };
        all.push(write(FileController::Cpu, "cpu.max", value));
    }
    all.extend(limits.cpuset_cpus.as_ref().map(|cpus| write(FileController::Cpuset, "cpuset.cpus", cpus)));
    for (size, limit) in &limits.hugepages {
        let name = resources::page_size_name(*size);
        all.push(write(FileController::Hugetlb, format!("hugetlb.{name}.max"), limit));
        all.push(Write { optional: true, ..write(FileController::Hugetlb, format!("hugetlb.{name}.rsvd.max"), limit) });
    }
    all
}

fn writes_v1(limits: &CgroupLimits) -> Vec<Write> {
    let mut all = Vec::new();
    all.extend(limits.pids.map(|n| write(FileController::Pids, "pids.max", pids(n))));
    all.extend(limits.memory.filter(|n| *n != 0).map(|n| write(FileController::Memory, "memory.limit_in_bytes", n)));
    all.extend(limits.cpu_shares.map(|shares| write(FileController::Cpu, "cpu.shares", shares)));
    let period = limits.cpu_period.filter(|period| *period != 0);
    all.extend(period.map(|period| write(FileController::Cpu, "cpu.cfs_period_us", period)));
    let quota = limits.cpu_quota.filter(|quota| *quota != 0);
    all.extend(quota.map(|quota| write(FileController::Cpu, "cpu.cfs_quota_us", quota)));
    for (size, limit) in &limits.hugepages {
        let name = resources::page_size_name(*size);
        all.push(write(FileController::Hugetlb, format!("hugetlb.{name}.limit_in_bytes"), limit));
        let reserved = write(FileController::Hugetlb, format!("hugetlb.{name}.rsvd.limit_in_bytes"), limit);
        all.push(Write { optional: true, ..reserved });
    }
    all
}

fn or_max(value: i64) -> String {
    if value < 0 { "max".to_owned() } else { value.to_string() }
}

fn pids(limit: i64) -> String {
    if limit == 0 { "1".to_owned() } else { or_max(limit) }
}

#[cfg(test)]
mod tests;
