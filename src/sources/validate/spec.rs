//! The pod's specification beside its containers and volumes. Pure.

use std::{collections::BTreeSet, net::IpAddr};

use super::{
    affinity,
    container::{self, Around},
    field::{FieldErrors, Path},
    metadata,
    names_and_numbers::id,
    resources, volumes,
};
use crate::pod::{api, names};

/// Most name servers that a resolver asks.
const MAX_NAMESERVERS: usize = 3;

/// Checks a specification.
pub fn check(spec: &api::PodSpec, errors: &mut FieldErrors) {
    let at = Path::root("spec");
    let all = spec.volumes.as_deref().unwrap_or_default();
    volumes::check(all, &at.child("volumes"), errors);
    let names: BTreeSet<&str> = all.iter().map(|volume| volume.name.as_str()).collect();
    let around = Around {
        volumes: all,
        volume_names: &names,
        grace: spec.termination_grace_period_seconds.unwrap_or(0),
        host_users: spec.host_users != Some(false),
        os: spec.os.as_ref().map(|os| os.name.as_str()).filter(|name| !name.is_empty()),
    };
    container::regular(&spec.containers, &around, &at.child("containers"), errors);
    container::init(spec, &around, &at.child("initContainers"), errors);
    if spec.host_network == Some(true) {
        container::host_network_ports(&spec.containers, &at.child("containers"), errors);
    }
    resources::pod(spec.resources.as_ref(), &at.child("resources"), errors);
    policies(spec, &at, errors);
    if let Some(security) = spec.security_context.as_ref() {
        security_context(security, &at.child("securityContext"), errors);
    }
    times(spec, &at, errors);
    host_names(spec, &at, errors);
    tolerations(spec.tolerations.as_deref().unwrap_or_default(), &at.child("tolerations"), errors);
    if let Some(affinity) = spec.affinity.as_ref() {
        affinity::check(affinity, &at.child("affinity"), errors);
    }
    let spread = spec.topology_spread_constraints.as_deref().unwrap_or_default();
    affinity::topology_spread(spread, &at.child("topologySpreadConstraints"), errors);
    host_namespaces(spec, &at, errors);
    on_create(spec, &at, errors);
}

/// Which namespaces of the node do not go together with others.
fn host_namespaces(spec: &api::PodSpec, at: &Path, errors: &mut FieldErrors) {
    if spec.share_process_namespace == Some(true) && spec.host_pid == Some(true) {
        let at = at.child("securityContext").child("shareProcessNamespace");
        errors.invalid(&at, true, "ShareProcessNamespace and HostPID cannot both be enabled");
    }
    if spec.host_users != Some(false) {
        return;
    }
    for (member, is_set) in [("hostNetwork", spec.host_network), ("hostPID", spec.host_pid), ("hostIPC", spec.host_ipc)]
    {
        if is_set == Some(true) {
            errors.forbidden(&at.child(member), "when `hostUsers` is false");
        }
    }
}

fn policies(spec: &api::PodSpec, at: &Path, errors: &mut FieldErrors) {
    let restart = spec.restart_policy.as_deref();
    errors.one_of(&at.child("restartPolicy"), restart, &["Always", "Never", "OnFailure"]);
    let dns = spec.dns_policy.as_deref();
    errors.one_of(&at.child("dnsPolicy"), dns, &["ClusterFirst", "ClusterFirstWithHostNet", "Default", "None"]);
    let servers = spec.dns_config.as_ref().and_then(|c| c.nameservers.as_deref()).unwrap_or_default();
    let at_servers = at.child("dnsConfig").child("nameservers");
    if dns == Some("None") && servers.is_empty() {
        errors.required(&at_servers, "must provide at least one DNS nameserver when `dnsPolicy` is None");
    }
    if servers.len() > MAX_NAMESERVERS {
        errors.invalid(&at_servers, servers, &format!("must not have more than {MAX_NAMESERVERS} nameservers"));
    }
    for (i, server) in servers.iter().enumerate() {
        if server.parse::<IpAddr>().is_err() {
            let text = "must be a valid IP address, (e.g. 10.9.8.7 or 2001:db8::ffff)";
            errors.invalid(&at_servers.index(i), server, text);
        }
    }
    metadata::labels(spec.node_selector.as_ref(), &at.child("nodeSelector"), errors);
    if let Some(policy) = spec.preemption_policy.as_deref() {
        errors.one_of(&at.child("preemptionPolicy"), Some(policy), &["Never", "PreemptLowerPriority"]);
    }
    if let Some(os) = spec.os.as_ref() {
        errors.one_of(&at.child("os").child("name"), Some(&os.name), &["linux", "windows"]);
    }
}

fn security_context(security: &api::PodSecurityContext, at: &Path, errors: &mut FieldErrors) {
    id(security.fs_group, &at.child("fsGroup"), errors);
    id(security.run_as_user, &at.child("runAsUser"), errors);
    id(security.run_as_group, &at.child("runAsGroup"), errors);
    for (i, group) in security.supplemental_groups.iter().flatten().enumerate() {
        id(Some(*group), &at.child("supplementalGroups").index(i), errors);
    }
    if let Some(policy) = security.fs_group_change_policy.as_deref() {
        errors.one_of(&at.child("fsGroupChangePolicy"), Some(policy), &["Always", "OnRootMismatch"]);
    }
    if let Some(policy) = security.supplemental_groups_policy.as_deref() {
        errors.one_of(&at.child("supplementalGroupsPolicy"), Some(policy), &["Merge", "Strict"]);
    }
    let mut seen = BTreeSet::new();
    for (i, sysctl) in security.sysctls.iter().flatten().enumerate() {
        let at = at.child("sysctls").index(i).child("name");
        if sysctl.name.is_empty() {
            errors.required(&at, "");
        } else if !seen.insert(sysctl.name.as_str()) {
            errors.duplicate(&at, &sysctl.name);
        }
    }
}

fn times(spec: &api::PodSpec, at: &Path, errors: &mut FieldErrors) {
    let deadline = spec.active_deadline_seconds;
    if let Some(seconds) = deadline.filter(|seconds| !(1..=i64::from(i32::MAX)).contains(seconds)) {
        let text = "must be between 1 and 2147483647, inclusive";
        errors.invalid(&at.child("activeDeadlineSeconds"), seconds, text);
    }
}

fn host_names(spec: &api::PodSpec, at: &Path, errors: &mut FieldErrors) {
    let text = |value: &Option<String>| value.clone().unwrap_or_default();
    let checked = |errors: &mut FieldErrors, field: &str, value: String, check: fn(&str) -> Vec<String>| {
        if !value.is_empty() {
            errors.complaints(&at.child(field), &value, check(&value));
        }
    };
    checked(errors, "serviceAccountName", text(&spec.service_account_name), names::dns_subdomain);
    // The node name is not looked at: it is ours, whatever it looks like.
    checked(errors, "hostname", text(&spec.hostname), names::dns_label);
    checked(errors, "subdomain", text(&spec.subdomain), names::dns_label);
    checked(errors, "hostnameOverride", text(&spec.hostname_override), names::dns_subdomain);
    checked(errors, "runtimeClassName", text(&spec.runtime_class_name), names::dns_subdomain);
    checked(errors, "priorityClassName", text(&spec.priority_class_name), names::dns_subdomain);
    for (i, alias) in spec.host_aliases.iter().flatten().enumerate() {
        let at = at.child("hostAliases").index(i);
        if alias.ip.parse::<IpAddr>().is_err() {
            let text = "must be a valid IP address, (e.g. 10.9.8.7 or 2001:db8::ffff)";
            errors.invalid(&at.child("ip"), &alias.ip, text);
        }
        for (j, name) in alias.hostnames.iter().flatten().enumerate() {
            errors.complaints(&at.child("hostnames").index(j), name, names::dns_subdomain(name));
        }
    }
}

fn tolerations(tolerations: &[api::Toleration], at: &Path, errors: &mut FieldErrors) {
    for (i, one) in tolerations.iter().enumerate() {
        let at = at.index(i);
        let text = |value: &Option<String>| value.clone().unwrap_or_default();
        let (key, value, effect) = (text(&one.key), text(&one.value), text(&one.effect));
        if !key.is_empty() {
            errors.complaints(&at.child("key"), &key, names::qualified_name(&key));
        } else if one.operator.as_deref() != Some("Exists") {
            let text = "operator must be Exists when `key` is empty, which means \"match all values and all keys\"";
            errors.invalid(&at.child("operator"), &one.operator.clone().unwrap_or_default(), text);
        }
        match one.operator.as_deref() {
            None | Some("" | "Equal") => errors.complaints(&at.child("operator"), &value, names::label_value(&value)),
            Some("Exists") if !value.is_empty() => {
                errors.invalid(&at.child("operator"), &value, "value must be empty when `operator` is 'Exists'");
            }
            Some("Exists") => {}
            Some(other) => errors.unsupported(&at.child("operator"), other, &["Equal", "Exists"]),
        }
        if one.toleration_seconds.is_some() && effect != "NoExecute" {
            let text = "effect must be 'NoExecute' when `tolerationSeconds` is set";
            errors.invalid(&at.child("effect"), &effect, text);
        }
        if !matches!(effect.as_str(), "" | "NoSchedule" | "PreferNoSchedule" | "NoExecute") {
            errors.unsupported(&at.child("effect"), &effect, &["NoExecute", "NoSchedule", "PreferNoSchedule"]);
        }
    }
}

/// What a pod may have later, but not when it is created.
fn on_create(spec: &api::PodSpec, at: &Path, errors: &mut FieldErrors) {
    if spec.ephemeral_containers.as_ref().is_some_and(|list| !list.is_empty()) {
        errors.forbidden(&at.child("ephemeralContainers"), "cannot be set on create");
    }
    let gated = spec.scheduling_gates.as_ref().is_some_and(|gates| !gates.is_empty());
    if gated && spec.node_name.as_deref().is_some_and(|name| !name.is_empty()) {
        errors.forbidden(&at.child("nodeName"), "cannot be set until all schedulingGates have been cleared");
    }
}
