//! Validates security contexts of pods and containers; profiles are in `profiles.rs`. Pure.

use std::collections::BTreeSet;

use super::{
    field::{FieldErrors, Path},
    names_and_numbers::id,
    windows,
};
use berth_types::api;

/// Maximum length of a sysctl's name, in bytes.
const MAX_SYSCTL: usize = 253;
const SYSCTL_PATTERN: &str = r"^([a-z0-9]([-_a-z0-9]*[a-z0-9])?[\./])*[a-z0-9]([-_a-z0-9]*[a-z0-9])?$";

/// Checks the security context of a pod.
pub fn of_pod(spec: &api::PodSpec, security: &api::PodSecurityContext, at: &Path, errors: &mut FieldErrors) {
    id(security.fs_group, &at.child("fsGroup"), errors);
    id(security.run_as_user, &at.child("runAsUser"), errors);
    id(security.run_as_group, &at.child("runAsGroup"), errors);
    for (i, group) in security.supplemental_groups.iter().flatten().enumerate() {
        id(Some(*group), &at.child("supplementalGroups").index(i), errors);
    }
    sysctls(spec, security.sysctls.as_deref().unwrap_or_default(), &at.child("sysctls"), errors);
    for (member, policy, supported) in [
        ("fsGroupChangePolicy", &security.fs_group_change_policy, ["Always", "OnRootMismatch"]),
        ("supplementalGroupsPolicy", &security.supplemental_groups_policy, ["Merge", "Strict"]),
        ("seLinuxChangePolicy", &security.se_linux_change_policy, ["MountOption", "Recursive"]),
    ] {
        if let Some(policy) = policy {
            errors.supported(&at.child(member), policy, &supported);
        }
    }
    if let Some(options) = security.windows_options.as_ref() {
        windows::options(options, &at.child("windowsOptions"), errors);
    }
}

fn sysctls(spec: &api::PodSpec, sysctls: &[api::Sysctl], at: &Path, errors: &mut FieldErrors) {
    let mut seen = BTreeSet::new();
    for (i, sysctl) in sysctls.iter().enumerate() {
        let at = at.index(i).child("name");
        let name = sysctl.name.as_str();
        if name.is_empty() {
            errors.required(&at, "");
        } else if !is_sysctl(name) {
            let text = format!("must have at most {MAX_SYSCTL} characters and match regex {SYSCTL_PATTERN}");
            errors.invalid(&at, name, &text);
        } else if seen.contains(name) {
            errors.duplicate(&at, name);
        }
        seen.insert(name);
        match namespace_of(name) {
            Some(SysctlNamespace::Net) if spec.host_network == Some(true) => {
                errors.invalid(&at, name, "may not be specified when 'hostNetwork' is true");
            }
            Some(SysctlNamespace::Ipc) if spec.host_ipc == Some(true) => {
                errors.invalid(&at, name, "may not be specified when 'hostIPC' is true");
            }
            _ => {}
        }
    }
}

fn is_sysctl(name: &str) -> bool {
    let alphanumeric = |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit();
    let is_segment = |segment: &str| {
        let bytes = segment.as_bytes();
        let ends = matches!((bytes.first(), bytes.last()), (Some(&a), Some(&b)) if alphanumeric(a) && alphanumeric(b));
        ends && bytes.iter().all(|&b| alphanumeric(b) || matches!(b, b'-' | b'_'))
    };
    name.len() <= MAX_SYSCTL && name.split(['.', '/']).all(is_segment)
}

/// The kernel namespace that a sysctl belongs to.
#[derive(Clone, Copy, PartialEq, Eq)]
enum SysctlNamespace {
    Net,
    Ipc,
}

fn namespace_of(name: &str) -> Option<SysctlNamespace> {
    const IPC: [&str; 10] = [
        "kernel.msg",
        "kernel.msgmax",
        "kernel.msgmnb",
        "kernel.msgmni",
        "kernel.sem",
        "kernel.shm",
        "kernel.shm_rmid_forced",
        "kernel.shmall",
        "kernel.shmmax",
        "kernel.shmmni",
    ];
    // If the first separator is a slash, dots and slashes are exchanged.
    let is_slashed = name.find(['.', '/']).and_then(|i| name.get(i..)).is_some_and(|rest| rest.starts_with('/'));
    let name = if is_slashed { name.replace('.', "\0").replace('/', ".").replace('\0', "/") } else { name.to_owned() };
    if name.starts_with("net.") {
        Some(SysctlNamespace::Net)
    } else if name.starts_with("fs.mqueue.") || IPC.contains(&name.as_str()) {
        Some(SysctlNamespace::Ipc)
    } else {
        None
    }
}

/// Checks the security context of a container; `host_users`: whether the pod uses the user namespace of
/// the node.
pub fn of_container(security: &api::SecurityContext, host_users: bool, at: &Path, errors: &mut FieldErrors) {
    id(security.run_as_user, &at.child("runAsUser"), errors);
    id(security.run_as_group, &at.child("runAsGroup"), errors);
    if let Some(kind) = security.proc_mount.as_deref() {
        errors.supported(&at.child("procMount"), kind, &["Default", "Unmasked"]);
        if host_users && kind == "Unmasked" {
            errors.invalid(&at.child("procMount"), kind, "`hostUsers` must be false to use `Unmasked`");
        }
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
    if let Some(options) = security.windows_options.as_ref() {
        windows::options(options, &at.child("windowsOptions"), errors);
    }
}
