//! CRI resources of pods and containers: CPU, memory, huge pages, OOM score, swap. Pure.
//!
//! Implements spec 03a §6.5, 06a §5, §9, §10.

use std::collections::{BTreeMap, HashMap};

use berth_proto::cri;
use berth_types::{
    Pod, api, cpu,
    memory_qos::MemoryQos,
    qos::Qos,
    quantity::Amount,
    resources::{self, CPU, MEMORY, Overhead},
};

/// `oom_score_adj` of containers that are OOM-killed last.
const PROTECTED: i64 = -997;
/// `oom_score_adj` of containers that are OOM-killed first.
const FIRST_TO_DIE: i64 = 1000;

/// `memorySwap.swapBehavior`.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum SwapBehavior {
    /// No swap for pods.
    #[default]
    NoSwap,
    /// Burstable pods get a share of the node's swap.
    LimitedSwap,
}

/// Swap settings of the node.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct NodeSwap {
    /// Whether the kernel can limit swap.
    pub controllable: bool,
    /// The configured swap behavior.
    pub behavior: SwapBehavior,
    /// Swap size of the node, in bytes.
    pub bytes: u64,
}

/// Inputs of the resource values, apart from the pod.
#[derive(Clone, PartialEq, Debug)]
pub struct ResourceInputs {
    /// `cpuCFSQuota`.
    pub cpu_cfs_quota: bool,
    /// `cpuCFSQuotaPeriod`, in microseconds.
    pub cpu_period_us: u64,
    /// Memory of the node, in bytes.
    pub memory_bytes: u64,
    /// Huge page sizes of the node, in bytes.
    pub hugepage_sizes: Vec<u64>,
    /// Whether the node uses cgroup v2.
    pub cgroup_v2: bool,
    /// `singleProcessOOMKill`.
    pub single_process_oom_kill: bool,
    /// Swap settings of the node.
    pub swap: NodeSwap,
    /// Memory QoS; `None` without its gate. Without effect on cgroup v1.
    pub memory_qos: Option<MemoryQos>,
}

/// Whether a container has exclusive CPUs; its CFS quota is off then.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Cpus {
    /// It shares the CPU pool.
    #[default]
    Shared,
    /// It has exclusive CPUs.
    Exclusive,
}

/// Requests and limits to convert.
struct RequestsAndLimits {
    cpu_request: Option<Amount>,
    cpu_limit: Option<Amount>,
    memory_limit: Option<Amount>,
}

/// Resources of a container.
pub fn of_container(
    pod: &Pod,
    container: &api::Container,
    cpus: Cpus,
    machine: &ResourceInputs,
) -> cri::LinuxContainerResources {
    let wanted = RequestsAndLimits {
        cpu_request: resources::request_of(container, CPU),
        cpu_limit: limit(pod, container, CPU),
        memory_limit: limit(pod, container, MEMORY),
    };
    let mut linux = convert(&wanted, cpus, machine);
    linux.oom_score_adj = oom_score_adj(pod, container, machine.memory_bytes);
    linux.hugepage_limits = hugepages(pod, container, machine);
    set_swap(&mut linux, pod, container, machine);
    set_memory_qos(&mut linux, pod, container, machine);
    linux
}

/// Resources of a container that runs: like [`of_container`], and resets what no longer applies. Upstream leaves the old
/// `memory.high` in force.
pub fn of_running_container(
    pod: &Pod,
    container: &api::Container,
    cpus: Cpus,
    machine: &ResourceInputs,
) -> cri::LinuxContainerResources {
    let mut linux = of_container(pod, container, cpus, machine);
    if linux.unified.contains_key("memory.min") || linux.unified.contains_key("memory.low") {
        linux.unified.entry("memory.high".to_owned()).or_insert_with(|| "max".to_owned());
    }
    linux
}

/// Totals of a pod without its overhead.
pub fn of_pod(pod: &Pod, machine: &ResourceInputs) -> cri::LinuxContainerResources {
    let requests = resources::pod_requests(pod.spec(), Overhead::Excluded);
    let limits = resources::pod_limits(pod.spec(), Overhead::Excluded);
    let wanted = RequestsAndLimits {
        cpu_request: requests.get(CPU).copied(),
        cpu_limit: limits.get(CPU).copied(),
        memory_limit: limits.get(MEMORY).copied(),
    };
    convert(&wanted, Cpus::Shared, machine)
}

/// The overhead of a pod, as request and limit; empty if it has none.
pub fn of_overhead(pod: &Pod, machine: &ResourceInputs) -> cri::LinuxContainerResources {
    if pod.spec().overhead.is_none() {
        return cri::LinuxContainerResources::default();
    }
    let overhead = resources::amounts(pod.spec().overhead.as_ref());
    let cpu = Some(resources::amount_of(&overhead, CPU));
    let wanted = RequestsAndLimits { cpu_request: cpu, cpu_limit: cpu, memory_limit: overhead.get(MEMORY).copied() };
    convert(&wanted, Cpus::Shared, machine)
}

/// A container's nonzero limit, else that of the pod level.
fn limit(pod: &Pod, container: &api::Container, resource: &str) -> Option<Amount> {
    let own = container.resources.as_ref().and_then(|r| r.limits.as_ref()?.get(resource));
    let level = pod.spec().resources.as_ref().and_then(|r| r.limits.as_ref()?.get(resource));
    let above_zero = |q| Amount::try_from(q).ok().filter(|a| !a.is_zero());
    own.and_then(above_zero).or_else(|| level.and_then(above_zero))
}

fn convert(wanted: &RequestsAndLimits, cpus: Cpus, machine: &ResourceInputs) -> cri::LinuxContainerResources {
    let milli = |amount: Option<Amount>| amount.map_or(0, Amount::milli);
    // A request of zero is valid; only a missing request defaults to the limit.
    let shares = cpu::shares(milli(wanted.cpu_request.or(wanted.cpu_limit)));
    let mut linux = cri::LinuxContainerResources {
        cpu_shares: i64::try_from(shares).unwrap_or(i64::MAX),
        memory_limit_in_bytes: wanted.memory_limit.map_or(0, Amount::value),
        ..Default::default()
    };
    if machine.cpu_cfs_quota {
        linux.cpu_period = i64::try_from(machine.cpu_period_us).unwrap_or(i64::MAX);
        linux.cpu_quota = match cpus {
            Cpus::Shared => cpu::quota(milli(wanted.cpu_limit), machine.cpu_period_us),
            Cpus::Exclusive => -1,
        };
    }
    if machine.cgroup_v2 && !machine.single_process_oom_kill {
        linux.unified.insert("memory.oom.group".to_owned(), "1".to_owned());
    }
    linux
}

fn hugepages(pod: &Pod, container: &api::Container, machine: &ResourceInputs) -> Vec<cri::HugepageLimit> {
    let mut limits: BTreeMap<u64, u64> = machine.hugepage_sizes.iter().map(|&size| (size, 0)).collect();
    for level in [pod.spec().resources.as_ref(), container.resources.as_ref()] {
        for (name, amount) in resources::amounts(level.and_then(|r| r.limits.as_ref())) {
            let Some(limit) = resources::page_size_of(&name).and_then(|size| limits.get_mut(&size)) else { continue };
            *limit = amount.value().max(0).unsigned_abs();
        }
    }
    limits
        .into_iter()
        .map(|(size, limit)| cri::HugepageLimit { page_size: resources::page_size_name(size), limit })
        .collect()
}

fn set_swap(linux: &mut cri::LinuxContainerResources, pod: &Pod, container: &api::Container, machine: &ResourceInputs) {
    if !machine.swap.controllable {
        return;
    }
    if !machine.cgroup_v2 {
        linux.memory_swap_limit_in_bytes = linux.memory_limit_in_bytes;
        return;
    }
    let unified: &mut HashMap<String, String> = &mut linux.unified;
    unified.insert("memory.swap.max".to_owned(), swap_share(pod, container, machine).to_string());
}

/// Protection and throttling by the container's own request and limit; pod-level resources do not count.
fn set_memory_qos(
    linux: &mut cri::LinuxContainerResources,
    pod: &Pod,
    container: &api::Container,
    machine: &ResourceInputs,
) {
    let Some(qos) = machine.memory_qos.filter(|_| machine.cgroup_v2) else { return };
    let request = resources::request_of(container, MEMORY).map_or(0, bytes);
    let values = qos.of_container(Qos::of(pod), request, own_memory_limit(container));
    linux.unified.extend(values.into_iter().map(|(file, value)| (file.to_owned(), value.to_string())));
}

fn own_memory_limit(container: &api::Container) -> u64 {
    let limit = container.resources.as_ref().and_then(|r| r.limits.as_ref()?.get(MEMORY));
    limit.and_then(|q| Amount::try_from(q).ok()).map_or(0, bytes)
}

fn bytes(amount: Amount) -> u64 {
    amount.value().max(0).unsigned_abs()
}

/// Bytes of swap a container may use on cgroup v2.
fn swap_share(pod: &Pod, container: &api::Container, machine: &ResourceInputs) -> u64 {
    let request = resources::request_of(container, MEMORY).map_or(0, bytes);
    let eligible = machine.swap.behavior == SwapBehavior::LimitedSwap
        && Qos::of(pod) == Qos::Burstable
        && !pod.is_critical()
        && request > 0
        && request != own_memory_limit(container);
    if !eligible || request > machine.memory_bytes || machine.memory_bytes == 0 {
        return 0;
    }
    #[allow(
        clippy::cast_precision_loss,
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "the reference computes the share in floating point; both sides are below 2^63 and not negative"
    )]
    let share = (request as f64 / machine.memory_bytes as f64 * machine.swap.bytes as f64) as u64;
    share
}

/// `oom_score_adj` of a container's processes, -997 to 1000 (spec 06a §9).
pub fn oom_score_adj(pod: &Pod, container: &api::Container, node_memory: u64) -> i64 {
    if pod.is_node_critical() {
        return PROTECTED;
    }
    match Qos::of(pod) {
        Qos::Guaranteed => PROTECTED,
        Qos::BestEffort => FIRST_TO_DIE,
        Qos::Burstable => burstable_score(pod, container, node_memory),
    }
}

fn burstable_score(pod: &Pod, container: &api::Container, node_memory: u64) -> i64 {
    let memory = |c: &api::Container| i128::from(resources::request_of(c, MEMORY).map_or(0, Amount::value));
    let extra = unclaimed_per_container(pod);
    let score = |request: i128| 1000 - (1000 * (request + extra)).checked_div(i128::from(node_memory)).unwrap_or(0);
    let mut adj = score(memory(container));
    let is_init = pod.init_containers().iter().any(|c| c.name == container.name);
    if is_init && Pod::is_sidecar(container) {
        let smallest = pod.containers().iter().map(memory).min().unwrap_or(0);
        adj = adj.min(score(smallest));
    }
    // Between Guaranteed (-997, so at least 3 here) and BestEffort (1000), whatever the sizes.
    i64::try_from(adj.clamp(3, 999)).unwrap_or(999)
}

/// Each container's share of the pod-level memory request that the containers' own requests do not use.
fn unclaimed_per_container(pod: &Pod) -> i128 {
    let level = pod.spec().resources.as_ref().and_then(|r| r.requests.as_ref()?.get(MEMORY));
    let Some(level) = level.and_then(|q| Amount::try_from(q).ok()).filter(|a| !a.is_zero()) else { return 0 };
    let claimed = resources::amount_of(&resources::container_requests(pod.spec()), MEMORY).value();
    let count = pod.containers().len() + pod.init_containers().len();
    let left = i128::from(level.value()) - i128::from(claimed);
    left.checked_div(count as i128).unwrap_or(0).max(0)
}

#[cfg(test)]
mod tests;
