//! Validation of enumerated settings and of mutually exclusive settings. Pure.

use std::collections::BTreeSet;

use super::{Failures, ValidationInput};
use crate::{GoDuration, text::quote};

/// Applies the rules from the topology manager to the pull policy.
pub(super) fn check(subject: ValidationInput<'_>, f: &mut Failures) {
    topology(subject, f);
    shutdown(subject, f);
    swap_and_restarts(subject, f);
    enforcement(subject, f);
    let ValidationInput { config: c, .. } = subject;
    if !matches!(c.hairpin_mode.as_str(), "none" | "hairpin-veth" | "promiscuous-bridge") {
        f.invalid(format!(
            "option {} specified for hairpinMode (--hairpin-mode). Valid options are \"none\", \"hairpin-veth\" or \
             \"promiscuous-bridge\"",
            quote(&c.hairpin_mode)
        ));
    }
    pull_policy(subject, f);
}

fn topology(ValidationInput { config: c, .. }: ValidationInput<'_>, f: &mut Failures) {
    if !matches!(c.topology_manager_policy.as_str(), "none" | "best-effort" | "restricted" | "single-numa-node") {
        f.invalid(format!(
            "topologyManagerPolicy (--topology-manager-policy) {} must be one of: [\"none\" \"best-effort\" \
             \"restricted\" \"single-numa-node\"]",
            quote(&c.topology_manager_policy)
        ));
    }
    if !matches!(c.topology_manager_scope.as_str(), "container" | "pod") {
        f.invalid(format!(
            "topologyManagerScope (--topology-manager-scope) {} must be one of: \"container\", or \"pod\"",
            quote(&c.topology_manager_scope)
        ));
    }
}

fn shutdown(ValidationInput { config: c, gates, .. }: ValidationInput<'_>, f: &mut Failures) {
    let (total, critical) = (c.shutdown_grace_period, c.shutdown_grace_period_critical_pods);
    let is_set = total > GoDuration::ZERO || critical > GoDuration::ZERO;
    if gates.enabled("GracefulNodeShutdown") {
        if critical > total {
            f.invalid(format!(
                "shutdownGracePeriodCriticalPods {{{critical}}} must be <= shutdownGracePeriod {{{total}}}"
            ));
        }
        for (field, period) in [("shutdownGracePeriod", total), ("shutdownGracePeriodCriticalPods", critical)] {
            if !period.is_zero() && period < GoDuration::from_secs(1) {
                f.invalid(format!("{field} {{{period}}} must be either zero or otherwise >= 1 sec"));
            }
        }
    } else if is_set {
        f.invalid(
            "specifying shutdownGracePeriod or shutdownGracePeriodCriticalPods requires feature gate GracefulNodeShutdown",
        );
    }
    if c.shutdown_grace_period_by_pod_priority.is_empty() {
        return;
    }
    if !gates.enabled("GracefulNodeShutdownBasedOnPodPriority") {
        f.invalid(
            "Specifying shutdownGracePeriodByPodPriority requires feature gate GracefulNodeShutdownBasedOnPodPriority",
        );
    } else if is_set {
        f.invalid("Cannot specify both shutdownGracePeriodByPodPriority and shutdownGracePeriod at the same time");
    }
}

fn swap_and_restarts(ValidationInput { config: c, gates, .. }: ValidationInput<'_>, f: &mut Failures) {
    let swap = &c.memory_swap.swap_behavior;
    if !matches!(swap.as_str(), "" | "NoSwap" | "LimitedSwap") {
        f.invalid(format!(
            "memorySwap.swapBehavior {} must be one of: \"\", \"LimitedSwap\" or \"NoSwap\"",
            quote(swap)
        ));
    }
    match (gates.enabled("KubeletCrashLoopBackOffMax"), c.crash_loop_back_off.max_container_restart_period) {
        (true, None) => f.invalid(
            "FeatureGate KubeletCrashLoopBackOffMax is enabled, CrashLoopBackOff.MaxContainerRestartPeriod must be set",
        ),
        (true, Some(period)) if !(1_000..=300_000).contains(&(period.nanos() / 1_000_000)) => f.invalid(format!(
            "CrashLoopBackOff.MaxContainerRestartPeriod (got: {} seconds) must be set between 1s and 300s",
            period.as_secs_f64()
        )),
        (false, Some(_)) => f.invalid(
            "FeatureGate KubeletCrashLoopBackOffMax not enabled, CrashLoopBackOff.MaxContainerRestartPeriod must not be \
             set",
        ),
        (true, Some(_)) | (false, None) => {}
    }
}

const ENFORCE: &str = "enforceNodeAllocatable (--enforce-node-allocatable)";

/// Validates `enforceNodeAllocatable` (spec 01 §4.2).
fn enforcement(ValidationInput { config: c, .. }: ValidationInput<'_>, f: &mut Failures) {
    let wanted: Vec<&str> = c.enforce_node_allocatable.iter().map(String::as_str).collect();
    for (whole, compressible) in
        [("system-reserved", "system-reserved-compressible"), ("kube-reserved", "kube-reserved-compressible")]
    {
        if wanted.contains(&whole) && wanted.contains(&compressible) {
            f.invalid(format!("both \"{whole}\" and \"{compressible}\" cannot be specified together in {ENFORCE}"));
        }
    }
    let mut seen = BTreeSet::new();
    for value in &wanted {
        if !seen.insert(*value) {
            f.invalid(format!("duplicated enforcements {} in {ENFORCE}", quote(value)));
            continue;
        }
        match *value {
            "pods" => {}
            "system-reserved" | "system-reserved-compressible" => {
                reserved_cgroup("system", &c.system_reserved_cgroup, f);
            }
            "kube-reserved" | "kube-reserved-compressible" => reserved_cgroup("kube", &c.kube_reserved_cgroup, f),
            "none" => {
                if wanted.len() > 1 {
                    f.invalid(format!("{ENFORCE} may not contain additional enforcements when \"none\" is specified"));
                }
                continue;
            }
            _ => {
                f.invalid(format!(
                    "option {} specified for {ENFORCE}. Valid options are \"pods\", \"system-reserved\", \
                     \"system-reserved-compressible\", \"kube-reserved\", \"kube-reserved-compressible\" or \"none\"",
                    quote(value)
                ));
                continue;
            }
        }
        if !c.cgroups_per_qos {
            f.invalid(format!(
                "cgroupsPerQOS (--cgroups-per-qos) must be set to true when {} contained in {ENFORCE}",
                quote(value)
            ));
        }
    }
}

fn reserved_cgroup(who: &str, cgroup: &str, f: &mut Failures) {
    if cgroup.is_empty() {
        f.invalid(format!(
            "{who}ReservedCgroup (--{who}-reserved-cgroup) must be specified when \"{who}-reserved\" or \
             \"{who}-reserved-compressible\" included in {ENFORCE}"
        ));
    }
}

fn pull_policy(ValidationInput { config: c, gates, .. }: ValidationInput<'_>, f: &mut Failures) {
    let (policy, list) = (&c.image_pull_credentials_verification_policy, &c.preloaded_images_verification_allowlist);
    if !gates.enabled("KubeletEnsureSecretPulledImages") {
        for (field, is_set) in [
            ("imagePullCredentialsVerificationPolicy", !policy.is_empty()),
            ("preloadedImagesVerificationAllowlist", !list.is_empty()),
        ] {
            if is_set {
                f.invalid(format!(
                    "`{field}` must not be set if KubeletEnsureSecretPulledImages feature gate is not enabled"
                ));
            }
        }
        return;
    }
    let allowlisted = policy == "NeverVerifyAllowlistedImages";
    if !allowlisted && !matches!(policy.as_str(), "NeverVerify" | "NeverVerifyPreloadedImages" | "AlwaysVerify") {
        f.invalid(format!(
            "option {} specified for imagePullCredentialsVerificationPolicy. Valid options are \"NeverVerify\", \
             \"NeverVerifyPreloadedImages\", \"NeverVerifyAllowlistedImages\" or \"AlwaysVerify\"",
            quote(policy)
        ));
    }
    if !list.is_empty() && !allowlisted {
        f.invalid(
            "can't set `preloadedImagesVerificationAllowlist` if `imagePullCredentialsVertificationPolicy` is not \
             \"NeverVerifyAllowlistedImages\"",
        );
    } else if let Some(reason) = list.iter().find_map(|pattern| bad_pattern(pattern)) {
        f.invalid(format!("invalid image pattern in `preloadedImagesVerificationAllowlist`: {reason}"));
    }
}

/// Returns why a text is not an image pattern: an image name without tag or digest, or with a trailing `/*`.
fn bad_pattern(pattern: &str) -> Option<String> {
    let shown = quote(pattern);
    if pattern.trim() != pattern {
        return Some(format!("leading/trailing spaces are not allowed: {shown}"));
    }
    let name = pattern.strip_suffix("/*").unwrap_or(pattern);
    if name.is_empty() {
        return Some(format!("the image name is empty: {shown}"));
    }
    if name.contains('*') {
        return Some(format!("only a wildcard of a full trailing path segment, \"/*\", is allowed: {shown}"));
    }
    let tagged = name.rsplit('/').next().is_some_and(|last| last.contains(':'));
    if name.contains('@') || (tagged && name.contains('/')) || (tagged && pattern == name) {
        return Some(format!("tags and digests are not allowed: {shown}"));
    }
    None
}
