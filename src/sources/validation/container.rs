//! Validates init and regular containers. Pure.

use std::collections::BTreeSet;

use super::{
    env,
    field::{FieldErrors, Path},
    handlers::{self, ProbeKind},
    mounts,
    names_and_numbers::port,
    resources, security,
};
use berth_types::{Pod, api, names};

/// Maximum number of restart rules per container.
const MAX_RULES: usize = 20;
/// Maximum number of exit codes per rule.
const MAX_EXIT_CODES: usize = 255;

/// Properties of the pod that its containers are checked against.
pub struct PodContext<'a> {
    /// The pod's volumes.
    pub volumes: &'a [api::Volume],
    /// Names of the pod's volumes.
    pub volume_names: &'a BTreeSet<&'a str>,
    /// Names of the pod's resource claims.
    pub claims: BTreeSet<&'a str>,
    /// The pod's grace period in seconds.
    pub grace: i64,
    /// Whether the pod uses the user namespace of the node.
    pub host_users: bool,
    /// `spec.os.name` of the pod.
    pub os: Option<&'a str>,
    /// The pod's restart policy.
    pub restart_policy: &'a str,
}

/// Init containers, then regular ones, each with its field path.
pub fn with_paths<'a>(spec: &'a api::PodSpec, at: &Path) -> Vec<(Path, &'a api::Container)> {
    let init = spec.init_containers.as_deref().unwrap_or_default();
    let lists = [("initContainers", init), ("containers", spec.containers.as_slice())];
    let mut all = Vec::new();
    for (list, containers) in lists {
        let at = at.child(list);
        all.extend(containers.iter().enumerate().map(|(i, one)| (at.index(i), one)));
    }
    all
}

/// Checks the regular containers.
pub fn regular(containers: &[api::Container], context: &PodContext<'_>, at: &Path, errors: &mut FieldErrors) {
    if containers.is_empty() {
        errors.required(at, "");
    }
    let mut seen = BTreeSet::new();
    for (i, one) in containers.iter().enumerate() {
        let at = at.index(i);
        common(one, context, &at, errors);
        if !one.name.is_empty() && !seen.insert(one.name.as_str()) {
            errors.duplicate(&at.child("name"), &one.name);
        }
        hooks_and_probes(one, context, &at, errors);
    }
    let mut taken = BTreeSet::new();
    containers.iter().enumerate().for_each(|(i, one)| host_ports(one, &mut taken, &at.index(i), errors));
}

/// Checks the init containers; only sidecars may have hooks and probes.
pub fn init(spec: &api::PodSpec, context: &PodContext<'_>, at: &Path, errors: &mut FieldErrors) {
    let mut seen: BTreeSet<&str> = spec.containers.iter().map(|one| one.name.as_str()).collect();
    let all = spec.init_containers.as_deref().unwrap_or_default();
    for (i, one) in all.iter().enumerate() {
        let at = at.index(i);
        common(one, context, &at, errors);
        if !one.name.is_empty() && !seen.insert(one.name.as_str()) {
            errors.duplicate(&at.child("name"), &one.name);
        }
        if Pod::is_sidecar(one) {
            hooks_and_probes(one, context, &at, errors);
        } else {
            plain_init(one, &at, errors);
        }
        host_ports(one, &mut BTreeSet::new(), &at, errors);
    }
}

/// Rejects fields that only sidecars may have among the init containers.
fn plain_init(one: &api::Container, at: &Path, errors: &mut FieldErrors) {
    for (member, is_set) in [
        ("lifecycle", one.lifecycle.is_some()),
        ("livenessProbe", one.liveness_probe.is_some()),
        ("readinessProbe", one.readiness_probe.is_some()),
        ("startupProbe", one.startup_probe.is_some()),
    ] {
        if is_set {
            errors.forbidden(&at.child(member), "may not be set for init containers without restartPolicy=Always");
        }
    }
    for (i, policy) in one.resize_policy.iter().flatten().enumerate() {
        if policy.restart_policy == "RestartContainer" {
            let at = at.child("resizePolicy").index(i).child("restartPolicy");
            let text = "must not be set to 'RestartContainer' for non-sidecar initContainers";
            errors.invalid(&at, &policy.restart_policy, text);
        }
    }
}

fn common(one: &api::Container, context: &PodContext<'_>, at: &Path, errors: &mut FieldErrors) {
    match one.name.as_str() {
        "" => errors.required(&at.child("name"), ""),
        name => errors.complaints(&at.child("name"), name, names::dns_label(name)),
    }
    match one.image.as_deref().unwrap_or_default() {
        "" => errors.required(&at.child("image"), ""),
        image if image.trim() != image => {
            errors.invalid(&at.child("image"), image, "must not have leading or trailing whitespace");
        }
        _ => {}
    }
    let policy = one.termination_message_policy.as_deref();
    errors.one_of(&at.child("terminationMessagePolicy"), policy, &["File", "FallbackToLogsOnError"]);
    ports(one.ports.as_deref().unwrap_or_default(), &at.child("ports"), errors);
    env::variables(one.env.as_deref().unwrap_or_default(), &at.child("env"), errors);
    env::from(one.env_from.as_deref().unwrap_or_default(), &at.child("envFrom"), errors);
    mounts::mounts(one, context.volume_names, &at.child("volumeMounts"), errors);
    mounts::devices(one, context.volumes, &at.child("volumeDevices"), errors);
    let pull = one.image_pull_policy.as_deref();
    errors.one_of(&at.child("imagePullPolicy"), pull, &["Always", "IfNotPresent", "Never"]);
    if let Some(own) = one.resources.as_ref() {
        resources::container(own, &context.claims, &at.child("resources"), errors);
    }
    let resize = one.resize_policy.as_deref().unwrap_or_default();
    resize_policy(resize, context.restart_policy, &at.child("resizePolicy"), errors);
    if let Some(own) = one.security_context.as_ref() {
        security::of_container(own, context.host_users, &at.child("securityContext"), errors);
    }
    restart_rules(one, at, errors);
}

fn hooks_and_probes(one: &api::Container, context: &PodContext<'_>, at: &Path, errors: &mut FieldErrors) {
    if let Some(hooks) = one.lifecycle.as_ref() {
        handlers::lifecycle(hooks, context.grace, context.os, &at.child("lifecycle"), errors);
    }
    for (member, probe, kind) in [
        ("livenessProbe", &one.liveness_probe, ProbeKind::Killing),
        ("readinessProbe", &one.readiness_probe, ProbeKind::Readiness),
        ("startupProbe", &one.startup_probe, ProbeKind::Killing),
    ] {
        if let Some(probe) = probe {
            handlers::probe(probe, kind, &at.child(member), errors);
        }
    }
}

fn ports(ports: &[api::ContainerPort], at: &Path, errors: &mut FieldErrors) {
    let mut seen = BTreeSet::new();
    for (i, one) in ports.iter().enumerate() {
        let at = at.index(i);
        if let Some(name) = one.name.as_deref().filter(|name| !name.is_empty()) {
            let complaints = names::port_name(name);
            if complaints.is_empty() && !seen.insert(name) {
                errors.duplicate(&at.child("name"), name);
            }
            errors.complaints(&at.child("name"), name, complaints);
        }
        match one.container_port {
            0 => errors.required(&at.child("containerPort"), ""),
            number => port(number, &at.child("containerPort"), errors),
        }
        let host_port = one.host_port.unwrap_or(0);
        if host_port != 0 {
            port(host_port, &at.child("hostPort"), errors);
        }
        errors.one_of(&at.child("protocol"), one.protocol.as_deref(), &["SCTP", "TCP", "UDP"]);
    }
}

/// Rejects duplicate host ports; init containers run one at a time.
fn host_ports(one: &api::Container, taken: &mut BTreeSet<String>, at: &Path, errors: &mut FieldErrors) {
    for (i, port) in one.ports.iter().flatten().enumerate() {
        let Some(number) = port.host_port.filter(|number| *number != 0) else { continue };
        let text = |part: &Option<String>| part.clone().unwrap_or_default();
        let key = format!("{}/{}/{number}", text(&port.protocol), text(&port.host_ip));
        if !taken.insert(key.clone()) {
            errors.duplicate(&at.child("ports").index(i).child("hostPort"), &key);
        }
    }
}

/// With host network, host ports must equal container ports.
pub fn host_network_ports(containers: &[api::Container], at: &Path, errors: &mut FieldErrors) {
    for (i, container) in containers.iter().enumerate() {
        for (j, port) in container.ports.iter().flatten().enumerate() {
            let host_port = port.host_port.unwrap_or(0);
            if host_port != 0 && host_port != port.container_port {
                let at = at.index(i).child("ports").index(j).child("hostPort");
                errors.invalid(&at, host_port, "must match `containerPort` when `hostNetwork` is true");
            }
        }
    }
}

fn resize_policy(policies: &[api::ContainerResizePolicy], of_pod: &str, at: &Path, errors: &mut FieldErrors) {
    let mut seen = BTreeSet::new();
    for (i, one) in policies.iter().enumerate() {
        if !seen.insert(one.resource_name.as_str()) {
            errors.duplicate(&at.index(i), &one.resource_name);
        }
        errors.one_of(at, Some(&one.resource_name), &["cpu", "memory"]);
        errors.one_of(at, Some(&one.restart_policy), &["NotRequired", "RestartContainer"]);
        if of_pod == "Never" && one.restart_policy != "NotRequired" {
            errors.invalid(at, &one.restart_policy, "must be 'NotRequired' when pod `restartPolicy` is 'Never'");
        }
    }
}

fn restart_rules(one: &api::Container, at: &Path, errors: &mut FieldErrors) {
    let rules = one.restart_policy_rules.as_deref().unwrap_or_default();
    match one.restart_policy.as_deref() {
        None if !rules.is_empty() => {
            errors.required(&at.child("restartPolicy"), "must specify restartPolicy when restart rules are used");
        }
        None => {}
        Some(policy) => errors.supported(&at.child("restartPolicy"), policy, &["Always", "Never", "OnFailure"]),
    }
    let at = at.child("restartPolicyRules");
    if rules.len() > MAX_RULES {
        errors.too_many(&at, rules.len(), MAX_RULES);
    }
    for (i, rule) in rules.iter().enumerate() {
        let at = at.index(i);
        errors.supported(&at.child("action"), &rule.action, &["Restart", "RestartAllContainers"]);
        let at = at.child("exitCodes");
        let Some(codes) = rule.exit_codes.as_ref() else {
            errors.required(&at, "must be specified");
            continue;
        };
        errors.supported(&at.child("operator"), &codes.operator, &["In", "NotIn"]);
        let values = codes.values.as_deref().unwrap_or_default();
        if values.len() > MAX_EXIT_CODES {
            errors.too_many(&at.child("values"), values.len(), MAX_EXIT_CODES);
        }
    }
}
