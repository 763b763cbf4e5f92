//! Validates Windows options, and fields that `spec.os.name` forbids. Pure.

use super::{
    container,
    field::{FieldErrors, Path},
};
use berth_types::{api, names};

/// Maximum length of a gMSA credential spec, in bytes.
const MAX_CREDENTIAL_SPEC: usize = 64 * 1024;
/// The domain of a user name must be shorter than this, in bytes.
const DOMAIN_LIMIT: usize = 256;
/// Maximum length of a user name without its domain, in bytes.
const MAX_USER: usize = 104;
/// Maximum length of a NetBIOS name, in characters.
const MAX_NETBIOS: usize = 15;

/// Checks the Windows options of a pod or container.
pub fn options(options: &api::WindowsSecurityContextOptions, at: &Path, errors: &mut FieldErrors) {
    if let Some(name) = options.gmsa_credential_spec_name.as_deref() {
        errors.complaints(&at.child("gmsaCredentialSpecName"), name, names::dns_subdomain(name));
    }
    if let Some(spec) = options.gmsa_credential_spec.as_deref() {
        let at = at.child("gmsaCredentialSpec");
        if spec.is_empty() {
            errors.invalid(&at, spec, "gmsaCredentialSpec cannot be an empty string");
        } else if spec.len() > MAX_CREDENTIAL_SPEC {
            errors.invalid(&at, spec, "gmsaCredentialSpec size must be under 64 KiB");
        }
    }
    if let Some(name) = options.run_as_user_name.as_deref() {
        let at = at.child("runAsUserName");
        user_name(name).iter().for_each(|complaint| errors.invalid(&at, name, complaint));
    }
}

fn user_name(name: &str) -> Vec<String> {
    if name.is_empty() {
        return vec!["runAsUserName cannot be an empty string".to_owned()];
    }
    if name.bytes().any(|b| b.is_ascii_control()) {
        return vec!["runAsUserName cannot contain control characters".to_owned()];
    }
    let (domain, user) = match name.split_once('\\') {
        None => (None, name),
        Some((_, user)) if user.contains('\\') => {
            return vec!["runAsUserName cannot contain more than one backslash".to_owned()];
        }
        Some((domain, user)) => (Some(domain), user),
    };
    let mut complaints = Vec::new();
    if let Some(domain) = domain {
        if domain.len() >= DOMAIN_LIMIT {
            complaints.push(format!("runAsUserName's Domain length must be under {DOMAIN_LIMIT} characters"));
        }
        if !(is_netbios_name(domain) || is_dns_name(domain)) {
            complaints.push("runAsUserName's Domain doesn't match the NetBios nor the DNS format".to_owned());
        }
    }
    if user.is_empty() {
        complaints.push("runAsUserName's User cannot be empty".to_owned());
    } else if user.len() > MAX_USER {
        complaints.push(format!("runAsUserName's User length must not be longer than {MAX_USER} characters"));
    }
    if !user.is_empty() && user.bytes().all(|b| matches!(b, b'.' | b' ')) {
        complaints.push("runAsUserName's User cannot contain only periods or spaces".to_owned());
    }
    if user.contains(|c: char| "\"/\\:;|=,+*?<>@[]".contains(c)) {
        complaints.push(r#"runAsUserName's User cannot contain the following characters: "/\:;|=,+*?<>@[]"#.to_owned());
    }
    complaints
}

fn is_netbios_name(domain: &str) -> bool {
    let length = domain.chars().count();
    (1..=MAX_NETBIOS).contains(&length)
        && !domain.starts_with('.')
        && !domain.contains(|c: char| "\\/:*?\"<>|".contains(c))
}

fn is_dns_name(domain: &str) -> bool {
    domain.split('.').all(|label| {
        let bytes = label.as_bytes();
        let ends = [bytes.first(), bytes.last()];
        bytes.len() <= names::LABEL_MAX
            && ends.iter().all(|end| end.is_some_and(u8::is_ascii_alphanumeric))
            && bytes.iter().all(|b| b.is_ascii_alphanumeric() || *b == b'-')
    })
}

/// Checks HostProcess containers: all containers or none.
pub fn host_processes(spec: &api::PodSpec, at: &Path, errors: &mut FieldErrors) {
    let host_process = |options: Option<&api::WindowsSecurityContextOptions>| options.and_then(|o| o.host_process);
    let of_pod = host_process(spec.security_context.as_ref().and_then(|s| s.windows_options.as_ref()));
    let (mut all, mut of_host) = (0_usize, 0_usize);
    for (at, one) in container::with_paths(spec, at) {
        let own = host_process(one.security_context.as_ref().and_then(|s| s.windows_options.as_ref()));
        if let (Some(of_pod), Some(own)) = (of_pod, own)
            && of_pod != own
        {
            let at = at.child("securityContext").child("windowsOptions").child("hostProcess");
            let text = format!("pod hostProcess value must be identical if both are specified, was {of_pod}");
            errors.invalid(&at, own, &text);
        }
        all += 1;
        of_host += usize::from(own.or(of_pod) == Some(true));
    }
    if of_host == 0 {
        return;
    }
    if of_host != all {
        let text = "If pod contains any hostProcess containers then all containers must be HostProcess containers";
        errors.invalid(at, "", text);
    }
    if spec.host_network != Some(true) {
        let text = "hostNetwork must be true if pod contains any hostProcess containers";
        errors.invalid(&at.child("hostNetwork"), false, text);
    }
}

/// Checks `spec.os.name`, and the fields of the other operating system.
pub fn operating_system(spec: &api::PodSpec, at: &Path, errors: &mut FieldErrors) {
    let Some(os) = spec.os.as_ref() else { return };
    match os.name.as_str() {
        "" => errors.required(&at.child("os").child("name"), ""),
        "linux" => linux(spec, at, errors),
        "windows" => windows(spec, at, errors),
        other => errors.unsupported(&at.child("os"), other, &["linux", "windows"]),
    }
}

fn linux(spec: &api::PodSpec, at: &Path, errors: &mut FieldErrors) {
    let text = "windows options cannot be set for a linux pod";
    if spec.security_context.as_ref().is_some_and(|s| s.windows_options.is_some()) {
        errors.forbidden(&at.child("securityContext").child("windowsOptions"), text);
    }
    for (at, one) in container::with_paths(spec, at) {
        if one.security_context.as_ref().is_some_and(|s| s.windows_options.is_some()) {
            errors.forbidden(&at.child("securityContext").child("windowsOptions"), text);
        }
    }
}

fn windows(spec: &api::PodSpec, at: &Path, errors: &mut FieldErrors) {
    let mut forbid = |at: &Path, members: &[(&str, bool)]| {
        for (member, _) in members.iter().filter(|(_, is_set)| *is_set) {
            errors.forbidden(&at.child(member), "cannot be set for a windows pod");
        }
    };
    forbid(
        at,
        &[
            ("hostUsers", spec.host_users.is_some()),
            ("hostPID", spec.host_pid == Some(true)),
            ("hostIPC", spec.host_ipc == Some(true)),
            ("shareProcessNamespace", spec.share_process_namespace.is_some()),
        ],
    );
    if let Some(security) = spec.security_context.as_ref() {
        forbid(
            &at.child("securityContext"),
            &[
                ("appArmorProfile", security.app_armor_profile.is_some()),
                ("seLinuxOptions", security.se_linux_options.is_some()),
                ("seccompProfile", security.seccomp_profile.is_some()),
                ("fsGroup", security.fs_group.is_some()),
                ("fsGroupChangePolicy", security.fs_group_change_policy.is_some()),
                ("sysctls", security.sysctls.as_ref().is_some_and(|list| !list.is_empty())),
                ("runAsUser", security.run_as_user.is_some()),
                ("runAsGroup", security.run_as_group.is_some()),
                ("supplementalGroups", security.supplemental_groups.is_some()),
                ("supplementalGroupsPolicy", security.supplemental_groups_policy.is_some()),
                ("seLinuxChangePolicy", security.se_linux_change_policy.is_some()),
            ],
        );
    }
    for (at, one) in container::with_paths(spec, at) {
        let Some(security) = one.security_context.as_ref() else { continue };
        forbid(
            &at.child("securityContext"),
            &[
                ("appArmorProfile", security.app_armor_profile.is_some()),
                ("seLinuxOptions", security.se_linux_options.is_some()),
                ("seccompProfile", security.seccomp_profile.is_some()),
                ("capabilities", security.capabilities.is_some()),
                ("readOnlyRootFilesystem", security.read_only_root_filesystem.is_some()),
                ("privileged", security.privileged.is_some()),
                ("allowPrivilegeEscalation", security.allow_privilege_escalation.is_some()),
                ("procMount", security.proc_mount.is_some()),
                ("runAsUser", security.run_as_user.is_some()),
                ("runAsGroup", security.run_as_group.is_some()),
            ],
        );
    }
}
