//! Validation of CPU and memory reservations, and of kernel requirements. Pure.

use std::collections::BTreeSet;

use super::{Failures, ValidationInput};
use crate::{text::quote, version};
use berth_types::CpuSet;

/// Applies the rules from the reserved CPUs to the hidden metrics.
pub(super) fn check(subject: ValidationInput<'_>, f: &mut Failures) {
    let ValidationInput { config: c, .. } = subject;
    if !c.reserved_system_cpus.is_empty() {
        if !c.system_reserved_cgroup.is_empty() || !c.kube_reserved_cgroup.is_empty() {
            f.invalid(
                "can't use reservedSystemCPUs (--reserved-cpus) with systemReservedCgroup (--system-reserved-cgroup) or \
                 kubeReservedCgroup (--kube-reserved-cgroup)",
            );
        }
        if let Err(error) = CpuSet::parse(&c.reserved_system_cpus) {
            f.invalid(format!(
                "unable to parse reservedSystemCPUs (--reserved-cpus) {}, error: {error}",
                c.reserved_system_cpus
            ));
        }
    }
    reserved_memory(subject, f);
    if let Some(failure) = kernel(subject) {
        f.bare(failure);
    }
    let shown = &c.show_hidden_metrics_for_version;
    if !shown.is_empty() && shown != version::PREVIOUS {
        f.bare(format!(
            "invalid showHiddenMetricsForVersion: showHiddenMetricsForVersion: Invalid value: {}: must be omitted or \
             have the value '{}'; only the previous minor version is allowed",
            quote(shown),
            version::PREVIOUS
        ));
    }
}

fn reserved_memory(ValidationInput { config: c, .. }: ValidationInput<'_>, f: &mut Failures) {
    let mut seen = BTreeSet::new();
    for reservation in &c.reserved_memory {
        let node = reservation.numa_node;
        for (name, amount) in &reservation.limits {
            let shown = quote(name);
            if name != "memory" && !name.starts_with("hugepages-") {
                f.invalid(format!(
                    "the limit type {shown} for NUMA node {node} is not supported, only [memory \
                     hugepages-<HugePageSize>] is accepted"
                ));
            }
            if amount.amount().is_zero() {
                f.invalid(format!("reserved memory may not be zero for NUMA node {node} and resource {shown}"));
            }
            if !seen.insert((node, name.as_str())) {
                f.invalid(format!(
                    "the reserved memory has a duplicate value for NUMA node {node} and resource {shown}"
                ));
            }
        }
    }
}

/// Returns the first failure of the rules about the kernel: they report one at most.
fn kernel(ValidationInput { config: c, host, .. }: ValidationInput<'_>) -> Option<String> {
    if host.cgroup_v1 && c.fail_cgroup_v1 {
        return Some(
            "kubelet is configured to not run on a host using cgroup v1. cgroup v1 support is unsupported and will be \
             removed in a future release"
                .to_owned(),
        );
    }
    if host.cgroup_v1 && c.single_process_oom_kill == Some(false) {
        return Some(
            "invalid configuration: singleProcessOOMKill must not be explicitly set to false when using cgroup v1"
                .to_owned(),
        );
    }
    let ids = c.user_namespaces.as_ref()?.ids_per_pod?;
    let must = match ids {
        ..65_536 => "not be less than 65536",
        _ if ids % 65_536 != 0 => "be a multiple of 65536",
        _ if ids > i64::from(u32::MAX) => "not be more than 4294967295",
        _ => return None,
    };
    Some(format!("invalid configuration: userNamespaces.idsPerPod must {must}"))
}
