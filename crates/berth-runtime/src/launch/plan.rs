//! Assembles the launch plan of a container. Pure.
//! Implements spec 09a §3.2, §6-§8, §11.

use super::{
    args::{args, log_path, working_dir},
    bundle,
    capabilities::{capabilities, names},
    devices::{self, DeviceInputs, Rule},
    environment::{self, environment},
    inputs::{Groups, Host, LaunchInputs},
    mounts::{self, MountContext, SharedHostNamespaces},
    namespaces,
    refusal::LaunchError,
    security::{self, Filter},
    users::{ProcessUser, identity},
};
use crate::seccomp;
use berth_proto::cri::{self, NamespaceMode};
use berth_shim::plan::{Capabilities, ExecPlan, LaunchPlan, MAX_BODY, MountKind, PidNamespace, ProcessPlan, Root};

/// Initial terminal size: columns, rows. Used until the client reports a size.
const FIRST_SIZE: (u16, u16) = (80, 24);
/// Maximum total size of a container's arguments and environment, bytes: the plan is one message, and the rest of it
/// needs space too.
const LONGEST_TEXTS: usize = MAX_BODY - (128 << 10);
/// Overhead per string in the message, bytes: upper bound of its length prefix.
const TEXT_OVERHEAD: usize = 5;

/// A container's launch plan and its device rules.
#[derive(Clone, PartialEq, Debug)]
pub struct Launch {
    /// Plan that the shim executes.
    pub plan: LaunchPlan,
    /// Device rules for the container's cgroup.
    pub device_rules: Vec<Rule>,
}

/// Builds the launch plan of a container. This includes the complete validation of the request.
///
/// # Errors
/// The texts of spec 09a §2.4, §6, §7, and §8.
pub fn launch(inputs: &LaunchInputs<'_>) -> Result<Launch, LaunchError> {
    let config = inputs.config;
    if config.metadata.is_none() {
        return Err(LaunchError::invalid("container config must include metadata"));
    }
    let context = security::context(config);
    let is_privileged = security::is_privileged(inputs, &context)?;
    let asked = context.namespace_options.clone().unwrap_or_default();
    let processes = namespaces::processes(inputs, &asked)?;
    security::check_selinux(context.selinux_options.as_ref(), inputs.host)?;
    let identity = identity(&context, inputs.image, &inputs.found.edits.groups)?;
    let process = process(inputs, &context, &identity)?;
    let style = style(inputs, &context, &processes)?;
    let mut all = mounts::mounts(inputs, &style)?;
    let has_own_dev = all.iter().any(|m| m.target == "/dev" && matches!(m.source, MountKind::New { .. }));
    let edited = &inputs.found.edits.mounts;
    all.retain(|mount| !edited.iter().any(|edit| edit.target == mount.target));
    all.extend(edited.iter().cloned());
    let nodes: Vec<_> = inputs.found.devices.iter().chain(&inputs.found.edits.nodes).cloned().collect();
    let wanted = DeviceInputs {
        nodes: &nodes,
        host: is_privileged.then_some(&*inputs.found.host_devices),
        owner: owner(&context, &identity, inputs.host),
        has_own_dev,
        terminal: config.tty,
    };
    let list = |paths: &[String]| if is_privileged { Vec::new() } else { paths.to_vec() };
    let plan = LaunchPlan {
        container: inputs.id.to_owned(),
        groups: inputs.groups.clone(),
        has_group_namespace: style.has_group_namespace,
        processes,
        root: Root {
            is_read_only: context.readonly_rootfs,
            is_shared: mounts::is_shared(config),
            ..inputs.root.clone()
        },
        mounts: all,
        devices: devices::devices(&wanted),
        masked: list(&context.masked_paths),
        read_only: list(&context.readonly_paths),
        process,
        stdin: config.stdin,
        stdin_once: config.stdin_once,
        log: log_path(&inputs.sandbox.config.log_directory, &config.log_path)?,
        longest_record: inputs.longest_record,
        limit_ms: inputs.limit_ms,
        hooks: bundle::hooks(inputs).map(Box::new),
    };
    check_length(&plan.process)?;
    Ok(Launch { plan, device_rules: devices::rules(&wanted) })
}

/// Rejects at create what would exceed the shim's message size at start.
fn check_length(process: &ProcessPlan) -> Result<(), LaunchError> {
    let texts = process.args.iter().chain(&process.env);
    let length: usize = texts.map(|text| text.len() + TEXT_OVERHEAD).sum();
    if length > LONGEST_TEXTS {
        let text = format!("arguments and environment have {length} bytes, more than the maximum of {LONGEST_TEXTS}");
        return Err(LaunchError::invalid(text));
    }
    Ok(())
}

fn process(
    inputs: &LaunchInputs<'_>,
    context: &cri::LinuxContainerSecurityContext,
    identity: &ProcessUser,
) -> Result<ProcessPlan, LaunchError> {
    let (config, image, host) = (inputs.config, inputs.image, inputs.host);
    let resources = config.linux.as_ref().and_then(|linux| linux.resources.as_ref());
    let sources = environment::EnvironmentInputs {
        terminal: config.tty,
        hostname: inputs.sandbox.hostname,
        image: &image.config.env,
        requested: &config.envs,
        devices: &inputs.found.edits.env,
        home: identity.home.as_deref(),
    };
    let capabilities = capabilities(context.capabilities.as_ref(), context.privileged, host.capabilities)?;
    let filter = filter(inputs, context, &capabilities)?;
    Ok(ProcessPlan {
        args: args(&config.command, &config.args, &image.config)?,
        env: environment(&sources)?,
        cwd: working_dir(&config.working_dir, &image.config)?,
        uid: identity.uid,
        gid: identity.gid,
        groups: identity.groups.clone(),
        capabilities,
        no_new_privileges: context.no_new_privs,
        seccomp_flags: filter.as_ref().map_or(0, |filter| filter.flags),
        seccomp: filter.map(|filter| filter.bytes()),
        apparmor: security::apparmor(context, host.has_apparmor.then_some(&*inputs.found.apparmor))?,
        limits: host.limits.clone(),
        oom_score_adj: security::oom_score_adj(resources, host.least_oom_score_adj),
        terminal: config.tty.then_some(FIRST_SIZE),
    })
}

/// Compiles the seccomp filter of a container.
fn filter(
    inputs: &LaunchInputs<'_>,
    context: &cri::LinuxContainerSecurityContext,
    capabilities: &Capabilities,
) -> Result<Option<seccomp::Filter>, LaunchError> {
    let wanted = security::filter(context, inputs.host.has_seccomp)?;
    let is_built_in = matches!(wanted, Filter::BuiltIn);
    let text = match wanted {
        Filter::None => return Ok(None),
        Filter::BuiltIn => seccomp::DEFAULT_PROFILE.as_bytes(),
        Filter::File(path) => inputs
            .found
            .profile
            .as_deref()
            .ok_or_else(|| LaunchError::plain(format!("failed to load seccomp profile {path:?}: not found")))?,
    };
    let conditions = seccomp::Conditions {
        machine: inputs.host.machine,
        capabilities: names(capabilities.bounding),
        kernel: inputs.host.kernel,
        has_spec_allow: inputs.host.has_spec_allow,
    };
    let architecture = inputs.image.architecture.as_str();
    let is_native = architecture.is_empty() || architecture == conditions.machine.name();
    let filter = seccomp::SeccompProfile::parse(text).and_then(|mut profile| {
        if is_built_in && is_native && !inputs.host.allows_32_bit {
            profile.restrict_to(conditions.machine);
        }
        seccomp::compile(&profile, &conditions)
    });
    filter.map(Some).map_err(|error| LaunchError::plain(format!("invalid seccomp profile: {error}")))
}

fn style(
    inputs: &LaunchInputs<'_>,
    context: &cri::LinuxContainerSecurityContext,
    processes: &PidNamespace,
) -> Result<MountContext, LaunchError> {
    let of_sandbox = namespaces::options(inputs.sandbox.config);
    let is_host = |mode: i32| mode == i32::from(NamespaceMode::Node);
    Ok(MountContext {
        is_privileged: context.privileged,
        has_read_only_root: context.readonly_rootfs,
        has_group_namespace: !context.privileged && matches!(inputs.host.groups, Groups::V2 { .. }),
        users: namespaces::users(of_sandbox.userns_options.as_ref())?,
        host: SharedHostNamespaces {
            network: is_host(of_sandbox.network),
            processes: *processes == PidNamespace::Host,
            ipc: is_host(of_sandbox.ipc),
        },
    })
}

/// Owner of the request's devices: the requested user and group; `None` if neither is requested or the setting is off.
fn owner(context: &cri::LinuxContainerSecurityContext, identity: &ProcessUser, host: &Host) -> Option<(u32, u32)> {
    if !host.owns_devices {
        return None;
    }
    let uid = context.run_as_user.as_ref().map(|_| identity.uid);
    let gid = context.run_as_group.as_ref().map(|_| identity.gid);
    (uid.is_some() || gid.is_some()).then(|| (uid.unwrap_or(0), gid.unwrap_or(0)))
}

/// The plan of an exec process: the container's process with other arguments, with or without a terminal.
///
/// # Errors
/// The command is empty, or an argument contains a NUL.
pub fn exec(
    first: &LaunchPlan,
    exec: &str,
    words: &[String],
    terminal: Option<(u16, u16)>,
) -> Result<ExecPlan, LaunchError> {
    if words.is_empty() {
        return Err(LaunchError::invalid("exec cmd must not be empty"));
    }
    if let Some(word) = words.iter().find(|word| word.contains('\0')) {
        return Err(LaunchError::invalid(format!("argument {word:?} contains a NUL byte")));
    }
    let mut process = ProcessPlan { args: words.to_vec(), terminal, ..first.process.clone() };
    if terminal.is_some() {
        environment::set(&mut process.env, "TERM", "xterm");
    }
    Ok(ExecPlan { container: first.container.clone(), exec: exec.to_owned(), process, keeps_orphans: false })
}

#[cfg(test)]
mod tests;
