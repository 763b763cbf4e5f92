//! Security contexts of sandboxes and containers: users, groups, profiles, namespaces. Pure.
//!
//! Implements spec 03a §5, §6.4.

use std::path::{Path, PathBuf};

use berth_proto::cri;
use berth_types::{ContainerId, Pod, PodRef, api};

const MASKED: [&str; 12] = [
    "/proc/asound",
    "/proc/acpi",
    "/proc/interrupts",
    "/proc/kcore",
    "/proc/keys",
    "/proc/latency_stats",
    "/proc/timer_list",
    "/proc/timer_stats",
    "/proc/sched_debug",
    "/proc/scsi",
    "/sys/firmware",
    "/sys/devices/virtual/powercap",
];
const READ_ONLY: [&str; 5] = ["/proc/bus", "/proc/fs", "/proc/irq", "/proc/sys", "/proc/sysrq-trigger"];
const APPARMOR_ANNOTATION: &str = "container.apparmor.security.beta.kubernetes.io/";

/// Why a security context cannot be built.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum SecurityError {
    /// The supplemental groups policy is neither `Merge` nor `Strict`.
    #[error("unsupported supplementalGroupsPolicy: {0}")]
    GroupsPolicy(String),
    /// A `Localhost` seccomp profile without its name.
    #[error("localhostProfile must be set if seccompProfile type is Localhost.")]
    NoSeccompName,
    /// The seccomp profile is outside the profile directory.
    #[error("seccomp localhostProfile {0:?} must be a relative path without '..'")]
    SeccompPath(String),
    /// A `Localhost` AppArmor profile without its name.
    #[error("missing localhost apparmor profile name")]
    NoAppArmorName,
    /// The type of the AppArmor profile is unknown.
    #[error("unknown profile type: {0}")]
    AppArmorType(String),
    /// `runAsUser: 0` together with `runAsNonRoot`.
    #[error("container's runAsUser breaks non-root policy (pod: \"{pod}\", container: {container})")]
    RunAsRoot {
        /// Reference of the pod.
        pod: PodRef,
        /// Name of the container.
        container: String,
    },
    /// The image's user is a name, so `runAsNonRoot` cannot be verified.
    #[error(
        "container has runAsNonRoot and image has non-numeric user ({user}), cannot verify user is non-root (pod: \
         \"{pod}\", container: {container})"
    )]
    NamedUser {
        /// The user name.
        user: String,
        /// Reference of the pod.
        pod: PodRef,
        /// Name of the container.
        container: String,
    },
    /// The image runs as root despite `runAsNonRoot`.
    #[error("container has runAsNonRoot and image will run as root (pod: \"{pod}\", container: {container})")]
    ImageRoot {
        /// Reference of the pod.
        pod: PodRef,
        /// Name of the container.
        container: String,
    },
    /// The image's UID is out of range.
    #[error(
        "container has runAsNonRoot and image has an invalid user id ({uid}). (Must be 1-(2147483647)): (pod: \
         \"{pod}\", container: {container})"
    )]
    InvalidUid {
        /// UID from the image's configuration, outside of 1 to 2147483647.
        uid: i64,
        /// Reference of the pod.
        pod: PodRef,
        /// Name of the container.
        container: String,
    },
}

/// User of an image; an image without a user has UID 0.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ImageAccount<'a> {
    /// Numeric UID.
    Uid(i64),
    /// User name.
    Name(&'a str),
}

/// Inputs of a container's security context, apart from the pod.
pub struct SecurityInputs<'a> {
    /// User of the image.
    pub image: ImageAccount<'a>,
    /// `<root>/seccomp`.
    pub seccomp_root: &'a Path,
    /// `seccompDefault`.
    pub seccomp_default: bool,
    /// Supplemental groups of the pod's volumes.
    pub volume_groups: &'a [i64],
    /// Paths of this machine that are masked besides the fixed ones.
    pub machine_masked: &'a [String],
    /// Namespace options, see [`namespaces`].
    pub namespaces: cri::NamespaceOption,
}

/// Builds the security context of a container.
///
/// # Errors
/// A field of the pod is invalid, or the image violates `runAsNonRoot`.
pub fn of_container(
    pod: &Pod,
    container: &api::Container,
    inputs: SecurityInputs<'_>,
) -> Result<cri::LinuxContainerSecurityContext, SecurityError> {
    let own = container.security_context.as_ref();
    let shared = pod.spec().security_context.as_deref();
    let run_as_user = own.and_then(|c| c.run_as_user).or(shared.and_then(|c| c.run_as_user));
    let run_as_group = own.and_then(|c| c.run_as_group).or(shared.and_then(|c| c.run_as_group));
    check_non_root(pod, container, inputs.image)?;
    let (user, username) = match (run_as_user, inputs.image) {
        (Some(uid), _) | (None, ImageAccount::Uid(uid)) => (Some(uid), String::new()),
        (None, ImageAccount::Name(name)) => (None, name.to_owned()),
    };
    let unmasked = own.and_then(|c| c.proc_mount.as_deref()) == Some("Unmasked");
    let (apparmor, apparmor_name) = apparmor(pod, container)?;
    let seccomp = seccomp(pod, container, &inputs)?;
    #[allow(deprecated, reason = "runtimes older than CRI 1.20 read the deprecated field")]
    Ok(cri::LinuxContainerSecurityContext {
        capabilities: own.and_then(|c| c.capabilities.as_ref()).map(capabilities),
        privileged: own.and_then(|c| c.privileged) == Some(true),
        namespace_options: Some(inputs.namespaces),
        selinux_options: own
            .and_then(|c| c.se_linux_options.as_ref())
            .or(shared.and_then(|c| c.se_linux_options.as_ref()))
            .map(selinux),
        run_as_user: user.map(int64),
        run_as_group: run_as_group.map(int64),
        run_as_username: username,
        readonly_rootfs: own.and_then(|c| c.read_only_root_filesystem) == Some(true),
        supplemental_groups: container_groups(shared, inputs.volume_groups),
        supplemental_groups_policy: groups_policy(shared)?.into(),
        no_new_privs: own.and_then(|c| c.allow_privilege_escalation) == Some(false),
        masked_paths: if unmasked { Vec::new() } else { masked(inputs.machine_masked) },
        readonly_paths: if unmasked { Vec::new() } else { READ_ONLY.map(str::to_owned).to_vec() },
        seccomp: Some(seccomp),
        apparmor,
        apparmor_profile: apparmor_name,
        seccomp_profile_path: String::new(),
    })
}

/// Builds the security context of a sandbox.
///
/// # Errors
/// The supplemental groups policy is unknown.
pub fn of_sandbox(
    pod: &Pod,
    volume_groups: &[i64],
    namespaces: impl FnOnce() -> cri::NamespaceOption,
) -> Result<cri::LinuxSandboxSecurityContext, SecurityError> {
    let mut context = cri::LinuxSandboxSecurityContext {
        privileged: is_privileged(pod),
        seccomp: Some(profile(cri::security_profile::ProfileType::RuntimeDefault, String::new())),
        ..Default::default()
    };
    let Some(shared) = pod.spec().security_context.as_deref() else { return Ok(context) };
    context.run_as_user = shared.run_as_user.map(int64);
    context.run_as_group = shared.run_as_group.map(int64);
    context.namespace_options = Some(namespaces());
    context.supplemental_groups.extend(shared.fs_group);
    context.supplemental_groups.extend(volume_groups);
    context.supplemental_groups.extend(shared.supplemental_groups.iter().flatten());
    context.set_supplemental_groups_policy(groups_policy(Some(shared))?);
    context.selinux_options = shared.se_linux_options.as_ref().map(selinux);
    Ok(context)
}

/// Namespace options of a pod; `target` is the container whose PID namespace an ephemeral container
/// joins if the pod does not share one.
pub fn namespaces(pod: &Pod, target: Option<&ContainerId>, userns: cri::UserNamespace) -> cri::NamespaceOption {
    use cri::NamespaceMode as Mode;
    let spec = pod.spec();
    let node_or_pod = |node: bool| if node { Mode::Node } else { Mode::Pod };
    let pid = match (spec.host_pid == Some(true), spec.share_process_namespace == Some(true)) {
        (true, _) => Mode::Node,
        (false, true) => Mode::Pod,
        (false, false) => Mode::Container,
    };
    let target = target.filter(|_| pid == Mode::Container);
    cri::NamespaceOption {
        network: node_or_pod(pod.is_host_network()).into(),
        pid: if target.is_some() { Mode::Target } else { pid }.into(),
        ipc: node_or_pod(spec.host_ipc == Some(true)).into(),
        target_id: target.map(ToString::to_string).unwrap_or_default(),
        userns_options: Some(userns),
    }
}

fn check_non_root(pod: &Pod, container: &api::Container, image: ImageAccount<'_>) -> Result<(), SecurityError> {
    let own = container.security_context.as_ref();
    let shared = pod.spec().security_context.as_deref();
    if own.and_then(|c| c.run_as_non_root).or(shared.and_then(|c| c.run_as_non_root)) != Some(true) {
        return Ok(());
    }
    let pod_id = || pod.id().clone();
    let name = || container.name.clone();
    match own.and_then(|c| c.run_as_user).or(shared.and_then(|c| c.run_as_user)) {
        Some(0) => return Err(SecurityError::RunAsRoot { pod: pod_id(), container: name() }),
        Some(_) => return Ok(()),
        None => {}
    }
    match image {
        ImageAccount::Uid(0) => Err(SecurityError::ImageRoot { pod: pod_id(), container: name() }),
        ImageAccount::Uid(uid) if i32::try_from(uid).is_ok_and(|uid| uid > 0) => Ok(()),
        ImageAccount::Uid(uid) => Err(SecurityError::InvalidUid { uid, pod: pod_id(), container: name() }),
        ImageAccount::Name(user) => {
            Err(SecurityError::NamedUser { user: user.to_owned(), pod: pod_id(), container: name() })
        }
    }
}

fn is_privileged(pod: &Pod) -> bool {
    let regular = pod.init_containers().iter().chain(pod.containers()).map(|c| c.security_context.as_ref());
    let ephemeral = pod.ephemeral_containers().iter().map(|c| c.security_context.as_ref());
    regular.chain(ephemeral).flatten().any(|context| context.privileged == Some(true))
}

fn container_groups(shared: Option<&api::PodSecurityContext>, volume_groups: &[i64]) -> Vec<i64> {
    let mut groups: Vec<i64> = shared.and_then(|c| c.fs_group).into_iter().collect();
    groups.extend(shared.iter().flat_map(|c| c.supplemental_groups.iter().flatten()));
    groups.extend(volume_groups);
    groups
}

fn groups_policy(shared: Option<&api::PodSecurityContext>) -> Result<cri::SupplementalGroupsPolicy, SecurityError> {
    match shared.and_then(|c| c.supplemental_groups_policy.as_deref()) {
        None | Some("Merge") => Ok(cri::SupplementalGroupsPolicy::Merge),
        Some("Strict") => Ok(cri::SupplementalGroupsPolicy::Strict),
        Some(other) => Err(SecurityError::GroupsPolicy(other.to_owned())),
    }
}

fn seccomp(
    pod: &Pod,
    container: &api::Container,
    inputs: &SecurityInputs<'_>,
) -> Result<cri::SecurityProfile, SecurityError> {
    use cri::security_profile::ProfileType;
    let own = container.security_context.as_ref().and_then(|c| c.seccomp_profile.as_ref());
    let shared = pod.spec().security_context.as_deref().and_then(|c| c.seccomp_profile.as_ref());
    let Some(wanted) = own.or(shared) else {
        let kind = if inputs.seccomp_default { ProfileType::RuntimeDefault } else { ProfileType::Unconfined };
        return Ok(profile(kind, String::new()));
    };
    match wanted.type_.as_str() {
        "RuntimeDefault" => Ok(profile(ProfileType::RuntimeDefault, String::new())),
        "Localhost" => {
            let name = wanted.localhost_profile.as_deref().filter(|n| !n.is_empty());
            let path = below(inputs.seccomp_root, name.ok_or(SecurityError::NoSeccompName)?)?;
            Ok(profile(ProfileType::Localhost, path.to_string_lossy().into_owned()))
        }
        _ => Ok(profile(ProfileType::Unconfined, String::new())),
    }
}

/// The API server validates this path; this check covers static pods.
fn below(root: &Path, name: &str) -> Result<PathBuf, SecurityError> {
    let plain = Path::new(name).components().all(|c| matches!(c, std::path::Component::Normal(_)));
    if plain { Ok(root.join(name)) } else { Err(SecurityError::SeccompPath(name.to_owned())) }
}

/// The first of the container's field, the pod's annotation for the container, and the pod's field. The
/// returned text is the value of the deprecated CRI field.
fn apparmor(pod: &Pod, container: &api::Container) -> Result<(Option<cri::SecurityProfile>, String), SecurityError> {
    use cri::security_profile::ProfileType;
    let own = container.security_context.as_ref().and_then(|c| c.app_armor_profile.as_ref());
    let shared = pod.spec().security_context.as_deref().and_then(|c| c.app_armor_profile.as_ref());
    let annotated = annotated_apparmor(pod, &container.name);
    let Some(wanted) = own.or(annotated.as_ref()).or(shared) else { return Ok((None, String::new())) };
    let (kind, name, text) = match wanted.type_.as_str() {
        "RuntimeDefault" => (ProfileType::RuntimeDefault, String::new(), "runtime/default".to_owned()),
        "Unconfined" => (ProfileType::Unconfined, String::new(), "unconfined".to_owned()),
        "Localhost" => {
            let name = wanted.localhost_profile.clone().ok_or(SecurityError::NoAppArmorName)?;
            (ProfileType::Localhost, name.clone(), format!("localhost/{name}"))
        }
        other => return Err(SecurityError::AppArmorType(other.to_owned())),
    };
    Ok((Some(profile(kind, name)), text))
}

fn annotated_apparmor(pod: &Pod, container: &str) -> Option<api::AppArmorProfile> {
    let text = pod.annotation(&format!("{APPARMOR_ANNOTATION}{container}"))?;
    let (kind, name) = match text {
        "runtime/default" => ("RuntimeDefault", None),
        "unconfined" => ("Unconfined", None),
        _ => ("Localhost", Some(text.strip_prefix("localhost/")?.to_owned())),
    };
    Some(api::AppArmorProfile { type_: kind.to_owned(), localhost_profile: name })
}

fn profile(kind: cri::security_profile::ProfileType, localhost_ref: String) -> cri::SecurityProfile {
    cri::SecurityProfile { profile_type: kind.into(), localhost_ref }
}

fn capabilities(wanted: &api::Capabilities) -> cri::Capability {
    cri::Capability {
        add_capabilities: wanted.add.clone().unwrap_or_default(),
        drop_capabilities: wanted.drop.clone().unwrap_or_default(),
        add_ambient_capabilities: Vec::new(),
    }
}

fn selinux(wanted: &api::SELinuxOptions) -> cri::SeLinuxOption {
    cri::SeLinuxOption {
        user: wanted.user.clone().unwrap_or_default(),
        role: wanted.role.clone().unwrap_or_default(),
        r#type: wanted.type_.clone().unwrap_or_default(),
        level: wanted.level.clone().unwrap_or_default(),
    }
}

fn masked(machine: &[String]) -> Vec<String> {
    MASKED.iter().map(|&path| path.to_owned()).chain(machine.iter().cloned()).collect()
}

fn int64(value: i64) -> cri::Int64Value {
    cri::Int64Value { value }
}

#[cfg(test)]
mod tests;
