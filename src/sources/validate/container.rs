//! Containers of all kinds. Pure.

use std::collections::BTreeSet;

use super::{
    env,
    field::{FieldErrors, Path},
    handlers::{self, ProbeKind},
    mounts,
    names_and_numbers::{id, port},
    resources,
};
use crate::pod::{Pod, api, names};

/// Most rules a container may have.
const MAX_RULES: usize = 20;
/// Most exit codes a rule may have.
const MAX_EXIT_CODES: usize = 255;

/// What containers are checked against.
pub struct Around<'a> {
    /// The pod's volumes.
    pub volumes: &'a [api::Volume],
    /// Their names.
    pub volume_names: &'a BTreeSet<&'a str>,
    /// The pod's grace period, seconds.
    pub grace: i64,
    /// Whether the pod runs with the users of the node.
    pub host_users: bool,
    /// The operating system that the pod names.
    pub os: Option<&'a str>,
}

/// Checks the regular containers.
pub fn regular(containers: &[api::Container], around: &Around<'_>, at: &Path, errors: &mut FieldErrors) {
    if containers.is_empty() {
        errors.required(at, "");
    }
    let mut seen = BTreeSet::new();
    for (i, one) in containers.iter().enumerate() {
        let at = at.index(i);
        common(one, around, &at, errors);
        if !one.name.is_empty() && !seen.insert(one.name.as_str()) {
            errors.duplicate(&at.child("name"), &one.name);
        }
        hooks_and_probes(one, around, &at, errors);
    }
    let mut taken = BTreeSet::new();
    containers.iter().enumerate().for_each(|(i, one)| host_ports(one, &mut taken, &at.index(i), errors));
}

/// Checks the init containers; only sidecars have hooks and probes.
pub fn init(spec: &api::PodSpec, around: &Around<'_>, at: &Path, errors: &mut FieldErrors) {
    let mut seen: BTreeSet<&str> = spec.containers.iter().map(|one| one.name.as_str()).collect();
    let all = spec.init_containers.as_deref().unwrap_or_default();
    for (i, one) in all.iter().enumerate() {
        let at = at.index(i);
        common(one, around, &at, errors);
        if !one.name.is_empty() && !seen.insert(one.name.as_str()) {
            errors.duplicate(&at.child("name"), &one.name);
        }
        if Pod::is_sidecar(one) {
            hooks_and_probes(one, around, &at, errors);
        } else {
            for (member, is_set) in [
                ("lifecycle", one.lifecycle.is_some()),
                ("livenessProbe", one.liveness_probe.is_some()),
                ("readinessProbe", one.readiness_probe.is_some()),
                ("startupProbe", one.startup_probe.is_some()),
            ] {
                if is_set {
                    let text = "may not be set for init containers without restartPolicy=Always";
                    errors.forbidden(&at.child(member), text);
                }
            }
        }
        host_ports(one, &mut BTreeSet::new(), &at, errors);
    }
}

fn common(one: &api::Container, around: &Around<'_>, at: &Path, errors: &mut FieldErrors) {
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
    errors.one_of(&at.child("terminationMessagePolicy"), policy, &["FallbackToLogsOnError", "File"]);
    ports(one.ports.as_deref().unwrap_or_default(), &at.child("ports"), errors);
    env::variables(one.env.as_deref().unwrap_or_default(), &at.child("env"), errors);
    env::from(one.env_from.as_deref().unwrap_or_default(), &at.child("envFrom"), errors);
    mounts::mounts(one, around.volume_names, &at.child("volumeMounts"), errors);
    mounts::devices(one, around.volumes, &at.child("volumeDevices"), errors);
    let pull = one.image_pull_policy.as_deref();
    errors.one_of(&at.child("imagePullPolicy"), pull, &["Always", "IfNotPresent", "Never"]);
    resources::container(one.resources.as_ref(), &at.child("resources"), errors);
    if let Some(security) = one.security_context.as_ref() {
        security_context(security, around.host_users, &at.child("securityContext"), errors);
    }
    resize_policy(one.resize_policy.as_deref().unwrap_or_default(), &at.child("resizePolicy"), errors);
    restart_rules(one, at, errors);
}

fn hooks_and_probes(one: &api::Container, around: &Around<'_>, at: &Path, errors: &mut FieldErrors) {
    if let Some(hooks) = one.lifecycle.as_ref() {
        handlers::lifecycle(hooks, around.grace, around.os, &at.child("lifecycle"), errors);
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
            errors.complaints(&at.child("name"), name, names::port_name(name));
            if !seen.insert(name) {
                errors.duplicate(&at.child("name"), name);
            }
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

/// No two ports may ask for the same port of the node; init containers run one after the other.
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

fn security_context(security: &api::SecurityContext, host_users: bool, at: &Path, errors: &mut FieldErrors) {
    id(security.run_as_user, &at.child("runAsUser"), errors);
    id(security.run_as_group, &at.child("runAsGroup"), errors);
    if let Some(kind) = security.proc_mount.as_deref().filter(|kind| !matches!(*kind, "Default" | "Unmasked")) {
        errors.unsupported(&at.child("procMount"), kind, &["Default", "Unmasked"]);
    }
    if host_users && security.proc_mount.as_deref() == Some("Unmasked") {
        errors.invalid(&at.child("procMount"), "Unmasked", "`hostUsers` must be false to use `Unmasked`");
    }
    if security.allow_privilege_escalation == Some(false) {
        if security.privileged == Some(true) {
            let text = "cannot set `allowPrivilegeEscalation` to false and `privileged` to true";
            errors.invalid(at, "allowPrivilegeEscalation", text);
        }
        let added = security.capabilities.as_ref().and_then(|c| c.add.as_deref()).unwrap_or_default();
        if added.iter().any(|name| name == "CAP_SYS_ADMIN") {
            let text = "cannot set `allowPrivilegeEscalation` to false and `capabilities.Add` CAP_SYS_ADMIN";
            errors.invalid(at, "allowPrivilegeEscalation", text);
        }
    }
}

/// Pods on the network of the node have the ports of their containers on the node.
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

fn resize_policy(policies: &[api::ContainerResizePolicy], at: &Path, errors: &mut FieldErrors) {
    let mut seen = BTreeSet::new();
    for (i, one) in policies.iter().enumerate() {
        if !seen.insert(one.resource_name.as_str()) {
            errors.duplicate(&at.index(i), &one.resource_name);
        }
        errors.one_of(at, Some(&one.resource_name), &["cpu", "memory"]);
        errors.one_of(at, Some(&one.restart_policy), &["NotRequired", "RestartContainer"]);
    }
}

fn restart_rules(one: &api::Container, at: &Path, errors: &mut FieldErrors) {
    let rules = one.restart_policy_rules.as_deref().unwrap_or_default();
    match one.restart_policy.as_deref() {
        None | Some("") if !rules.is_empty() => {
            errors.required(&at.child("restartPolicy"), "must specify restartPolicy when restart rules are used");
        }
        None | Some("" | "Always" | "Never" | "OnFailure") => {}
        Some(other) => errors.unsupported(&at.child("restartPolicy"), other, &["Always", "Never", "OnFailure"]),
    }
    let at = at.child("restartPolicyRules");
    if rules.len() > MAX_RULES {
        errors.too_many(&at, rules.len(), MAX_RULES);
    }
    for (i, rule) in rules.iter().enumerate() {
        let at = at.index(i);
        errors.one_of(&at.child("action"), Some(&rule.action), &["Restart", "RestartAllContainers"]);
        let at = at.child("exitCodes");
        let Some(codes) = rule.exit_codes.as_ref() else {
            errors.required(&at, "must be specified");
            continue;
        };
        errors.one_of(&at.child("operator"), Some(&codes.operator), &["In", "NotIn"]);
        let values = codes.values.as_deref().unwrap_or_default();
        if values.len() > MAX_EXIT_CODES {
            errors.too_many(&at.child("values"), values.len(), MAX_EXIT_CODES);
        }
    }
}
