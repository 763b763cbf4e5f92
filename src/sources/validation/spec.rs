//! Validates the pod specification apart from containers and volumes. Pure.

use std::collections::BTreeSet;

use super::{
    affinity,
    container::{self, PodContext},
    dns, env,
    field::{FieldErrors, Path},
    metadata, resources, security, tolerations, volumes, windows,
};
use berth_types::{api, names};

/// Checks a specification.
pub fn check(spec: &api::PodSpec, errors: &mut FieldErrors) {
    let at = Path::root("spec");
    containers_and_volumes(spec, &at, errors);
    resources::pod(spec, &at, errors);
    policies(spec, &at, errors);
    if let Some(security) = spec.security_context.as_ref() {
        security::of_pod(spec, security, &at.child("securityContext"), errors);
    }
    dns::check(spec, &at, errors);
    dns::host_names(spec, &at, errors);
    dns::host_aliases(spec.host_aliases.as_deref().unwrap_or_default(), &at.child("hostAliases"), errors);
    class_names(spec, &at, errors);
    scheduling(spec, &at, errors);
    host_namespaces(spec, &at, errors);
    windows::host_processes(spec, &at, errors);
    windows::operating_system(spec, &at, errors);
    env::file_volumes(spec, &at, errors);
    on_create(spec, &at, errors);
}

fn containers_and_volumes(spec: &api::PodSpec, at: &Path, errors: &mut FieldErrors) {
    let all = spec.volumes.as_deref().unwrap_or_default();
    let has_account = spec.service_account_name.as_ref().is_some_and(|name| !name.is_empty());
    volumes::check(all, has_account, &at.child("volumes"), errors);
    let names: BTreeSet<&str> = all.iter().map(|volume| volume.name.as_str()).collect();
    let context = PodContext {
        volumes: all,
        volume_names: &names,
        claims: spec.resource_claims.iter().flatten().map(|claim| claim.name.as_str()).collect(),
        grace: spec.termination_grace_period_seconds.unwrap_or(0),
        host_users: spec.host_users != Some(false),
        os: spec.os.as_ref().map(|os| os.name.as_str()),
        restart_policy: spec.restart_policy.as_deref().unwrap_or_default(),
    };
    container::regular(&spec.containers, &context, &at.child("containers"), errors);
    container::init(spec, &context, &at.child("initContainers"), errors);
    if spec.host_network == Some(true) {
        container::host_network_ports(&spec.containers, &at.child("containers"), errors);
    }
}

/// Checks for combinations of host namespaces that are not allowed.
fn host_namespaces(spec: &api::PodSpec, at: &Path, errors: &mut FieldErrors) {
    if spec.share_process_namespace == Some(true) && spec.host_pid == Some(true) {
        let at = at.child("securityContext").child("shareProcessNamespace");
        errors.invalid(&at, true, "ShareProcessNamespace and HostPID cannot both be enabled");
    }
    if spec.host_users != Some(false) {
        return;
    }
    let text = "when `hostUsers` is false";
    for (member, is_set) in [("hostNetwork", spec.host_network), ("hostPID", spec.host_pid), ("hostIPC", spec.host_ipc)]
    {
        if is_set == Some(true) {
            errors.forbidden(&at.child(member), text);
        }
    }
    for (at, one) in container::with_paths(spec, at) {
        if one.volume_devices.as_ref().is_some_and(|devices| !devices.is_empty()) {
            errors.forbidden(&at.child("volumeDevices"), text);
        }
    }
}

fn policies(spec: &api::PodSpec, at: &Path, errors: &mut FieldErrors) {
    let restart = spec.restart_policy.as_deref();
    errors.one_of(&at.child("restartPolicy"), restart, &["Always", "OnFailure", "Never"]);
    if let Some(policy) = spec.preemption_policy.as_deref() {
        errors.one_of(&at.child("preemptionPolicy"), Some(policy), &["PreemptLowerPriority", "Never"]);
    }
    if let Some(seconds) = spec.active_deadline_seconds.filter(|one| !(1..=i64::from(i32::MAX)).contains(one)) {
        let text = "must be between 1 and 2147483647, inclusive";
        errors.invalid(&at.child("activeDeadlineSeconds"), seconds, text);
    }
    if let Some(overhead) = spec.overhead.as_ref() {
        resources::overhead(overhead, &at.child("overhead"), errors);
    }
}

/// Checks names of API objects. The node name is not checked: it is always that of this node.
fn class_names(spec: &api::PodSpec, at: &Path, errors: &mut FieldErrors) {
    for (member, name) in
        [("serviceAccountName", &spec.service_account_name), ("priorityClassName", &spec.priority_class_name)]
    {
        if let Some(name) = name.as_deref().filter(|name| !name.is_empty()) {
            errors.complaints(&at.child(member), name, names::dns_subdomain(name));
        }
    }
    if let Some(name) = spec.runtime_class_name.as_deref() {
        errors.complaints(&at.child("runtimeClassName"), name, names::dns_subdomain(name));
    }
    if let Some(group) = spec.scheduling_group.as_ref() {
        let at = at.child("schedulingGroup").child("podGroupName");
        match group.pod_group_name.as_deref() {
            None => errors.invalid(&at, "null", "must specify one of: `podGroupName`"),
            Some(name) => errors.complaints(&at, name, names::dns_subdomain(name)),
        }
    }
}

fn scheduling(spec: &api::PodSpec, at: &Path, errors: &mut FieldErrors) {
    metadata::labels(spec.node_selector.as_ref(), &at.child("nodeSelector"), errors);
    tolerations::check(spec.tolerations.as_deref().unwrap_or_default(), &at.child("tolerations"), errors);
    if let Some(affinity) = spec.affinity.as_ref() {
        affinity::check(affinity, &at.child("affinity"), errors);
    }
    let spread = spec.topology_spread_constraints.as_deref().unwrap_or_default();
    affinity::topology_spread(spread, &at.child("topologySpreadConstraints"), errors);
    for (i, gate) in spec.readiness_gates.iter().flatten().enumerate() {
        let name = gate.condition_type.as_str();
        let at = at.child("readinessGates").index(i).child("conditionType");
        errors.complaints(&at, name, names::qualified_name(name));
    }
    let mut seen = BTreeSet::new();
    for (i, gate) in spec.scheduling_gates.iter().flatten().enumerate() {
        let at = at.child("schedulingGates").index(i);
        errors.complaints(&at, &gate.name, names::qualified_name(&gate.name));
        if !seen.insert(gate.name.as_str()) {
            errors.duplicate(&at, &gate.name);
        }
    }
}

/// Rejects fields that must not be set when a pod is created.
fn on_create(spec: &api::PodSpec, at: &Path, errors: &mut FieldErrors) {
    if spec.ephemeral_containers.as_ref().is_some_and(|list| !list.is_empty()) {
        errors.forbidden(&at.child("ephemeralContainers"), "cannot be set on create");
    }
    let gated = spec.scheduling_gates.as_ref().is_some_and(|gates| !gates.is_empty());
    if gated && spec.node_name.as_deref().is_some_and(|name| !name.is_empty()) {
        errors.forbidden(&at.child("nodeName"), "cannot be set until all schedulingGates have been cleared");
    }
}
