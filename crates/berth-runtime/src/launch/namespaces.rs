//! Pod namespaces, user namespace id mappings, sysctls, and PID namespace mode of containers. Pure.
//! Implements spec 09a §2.3, §2.4.

use std::collections::BTreeMap;

use super::{
    inputs::{Host, LaunchInputs, Sandbox},
    refusal::LaunchError,
    security,
};
use berth_proto::cri::{self, NamespaceMode};
use berth_shim::plan::{IdMap, Namespace, NamespacePlan, PidNamespace};

/// The namespaces that a sandbox requests. The caller fills in the cgroups.
///
/// # Errors
/// The texts of spec 09a §2.3, §2.4, and §7.7, or the sandbox has no metadata.
pub fn namespaces(config: &cri::PodSandboxConfig, hostname: &str, host: &Host) -> Result<NamespacePlan, LaunchError> {
    if config.metadata.is_none() {
        return Err(LaunchError::invalid("sandbox config must include metadata"));
    }
    let context = config.linux.as_ref().and_then(|linux| linux.security_context.as_ref());
    security::check_selinux(context.and_then(|context| context.selinux_options.as_ref()), host)?;
    let options = options(config);
    let network = own_or_host("network", options.network)?;
    let ipc = own_or_host("ipc", options.ipc)?;
    let pid = mode("pid", options.pid)?;
    if pid == NamespaceMode::Target {
        return Err(unsupported("pid", pid));
    }
    let users = users(options.userns_options.as_ref())?;
    if users.is_some() && !host.has_user_namespaces {
        return Err(LaunchError::impossible("user namespaces are not supported by this host"));
    }
    let mut made = Vec::new();
    made.extend(users.is_some().then_some(Namespace::User));
    made.extend(network.then_some(Namespace::Network));
    made.extend(ipc.then_some(Namespace::Ipc));
    made.extend(network.then_some(Namespace::Uts));
    let requested = config.linux.as_ref().map(|linux| &linux.sysctls);
    let mut sysctls = BTreeMap::new();
    for (name, value) in requested.into_iter().flatten() {
        sysctls.insert(sysctl(name, network, ipc)?, value.clone());
    }
    if network {
        let mut default = |is_wanted: bool, file: &str, value: &str| {
            if is_wanted && !sysctls.contains_key(file) {
                sysctls.insert(file.to_owned(), value.to_owned());
            }
        };
        default(host.unprivileged_ports, "net/ipv4/ip_unprivileged_port_start", "0");
        default(host.unprivileged_icmp && users.is_none(), "net/ipv4/ping_group_range", "0 2147483647");
    }
    Ok(NamespacePlan {
        made,
        users,
        hostname: if network { hostname.to_owned() } else { String::new() },
        sysctls,
        shares_processes: pid == NamespaceMode::Pod,
        groups: Vec::new(),
    })
}

/// Namespace options of a sandbox; without any, every namespace is the pod's own.
pub fn options(config: &cri::PodSandboxConfig) -> cri::NamespaceOption {
    let context = config.linux.as_ref().and_then(|linux| linux.security_context.as_ref());
    context.and_then(|context| context.namespace_options.clone()).unwrap_or_default()
}

/// The PID namespace of a container.
///
/// # Errors
/// The target container does not exist, belongs to another sandbox, or is not running, or the container's user
/// namespace options differ from those of its sandbox.
pub fn processes(inputs: &LaunchInputs<'_>, asked: &cri::NamespaceOption) -> Result<PidNamespace, LaunchError> {
    let of_sandbox = options(inputs.sandbox.config);
    if users(asked.userns_options.as_ref())? != users(of_sandbox.userns_options.as_ref())? {
        return Err(LaunchError::invalid("user namespace config for sandbox is different from container"));
    }
    match mode("pid", asked.pid)? {
        NamespaceMode::Container => Ok(PidNamespace::Own),
        NamespaceMode::Node => Ok(PidNamespace::Host),
        NamespaceMode::Target => target(inputs, &asked.target_id),
        // A pod without a shared PID namespace has the host's, or one per container.
        NamespaceMode::Pod => match mode("pid", of_sandbox.pid)? {
            NamespaceMode::Node => Ok(PidNamespace::Host),
            NamespaceMode::Container => Ok(PidNamespace::Own),
            _ => Ok(PidNamespace::Pod),
        },
    }
}

fn target(inputs: &LaunchInputs<'_>, id: &str) -> Result<PidNamespace, LaunchError> {
    let Some(target) = inputs.target else {
        let text = format!("an error occurred when try to find container {id:?}: not found");
        return Err(LaunchError::missing(text));
    };
    let Sandbox { id: sandbox, .. } = inputs.sandbox;
    if target.sandbox != sandbox {
        let text =
            format!("container {:?} (sandbox {}) does not belong to sandbox {sandbox}", target.id, target.sandbox);
        return Err(LaunchError::invalid(text));
    }
    if target.pid.is_none() {
        let text = format!("container {:?} is not running - in state {}", target.id, target.state);
        return Err(LaunchError::state(text));
    }
    Ok(PidNamespace::Of(target.id.to_owned()))
}

/// The id mappings of a pod's user namespace; `None` where the pod uses the host's.
///
/// # Errors
/// There is not exactly one range that begins at 0, for both users and groups, or the mode is unsupported.
pub fn users(asked: Option<&cri::UserNamespace>) -> Result<Option<(IdMap, IdMap)>, LaunchError> {
    let Some(asked) = asked else { return Ok(None) };
    let mode = match NamespaceMode::try_from(asked.mode) {
        Ok(mode @ (NamespaceMode::Pod | NamespaceMode::Node)) => mode,
        Ok(other) => return Err(unsupported_users(other.as_str_name())),
        Err(_) => return Err(unsupported_users(&asked.mode.to_string())),
    };
    let (uids, gids) = (range(&asked.uids)?, range(&asked.gids)?);
    match (mode, uids, gids) {
        (NamespaceMode::Node, None, None) => Ok(None),
        (NamespaceMode::Node, ..) => {
            Err(LaunchError::invalid("can't use user namespace mode \"NODE\" with UID or GID mappings"))
        }
        (_, Some(uids), Some(gids)) => Ok(Some((uids, gids))),
        _ => Err(LaunchError::invalid("can't use user namespace mode \"POD\" without UID and GID mappings")),
    }
}

/// The only range of a list; `None` for an empty list.
///
/// # Errors
/// The list has more than one range, or the range is empty, does not begin at 0, or overflows.
pub fn range(lines: &[cri::IdMapping]) -> Result<Option<IdMap>, LaunchError> {
    let line = match lines {
        [] => return Ok(None),
        [line] => line,
        _ => {
            let text = format!("only one mapping line supported, got {} mapping lines", lines.len());
            return Err(LaunchError::invalid(text));
        }
    };
    if line.length < 1 || line.host_id.checked_add(line.length - 1).is_none() {
        return Err(LaunchError::invalid(format!("invalid mapping length: {}", line.length)));
    }
    if line.container_id != 0 {
        return Err(LaunchError::invalid("container ID 0 is not mapped"));
    }
    Ok(Some(IdMap { inside: 0, outside: line.host_id, count: line.length }))
}

fn unsupported_users(mode: &str) -> LaunchError {
    LaunchError::invalid(format!("unsupported user namespace mode: {mode:?}"))
}

/// Whether the pod has its own namespace of this kind.
fn own_or_host(which: &str, number: i32) -> Result<bool, LaunchError> {
    match mode(which, number)? {
        NamespaceMode::Pod | NamespaceMode::Container => Ok(true),
        NamespaceMode::Node => Ok(false),
        NamespaceMode::Target => Err(unsupported(which, NamespaceMode::Target)),
    }
}

fn mode(which: &str, number: i32) -> Result<NamespaceMode, LaunchError> {
    NamespaceMode::try_from(number)
        .map_err(|_| LaunchError::invalid(format!("unsupported {which} namespace mode: {number}")))
}

fn unsupported(which: &str, mode: NamespaceMode) -> LaunchError {
    LaunchError::invalid(format!("unsupported {which} namespace mode: {:?}", mode.as_str_name()))
}

/// Validates a sysctl name and returns its file below `/proc/sys`.
fn sysctl(name: &str, has_network: bool, has_ipc: bool) -> Result<String, LaunchError> {
    // The first separator determines the notation: `net/ipv4/conf/eth0.1/forwarding`.
    let slashes_first = name.find(['.', '/']).is_some_and(|at| name.as_bytes().get(at) == Some(&b'/'));
    let swapped = |c| match c {
        '.' => '/',
        '/' => '.',
        c => c,
    };
    let file: String = if slashes_first { name.to_owned() } else { name.chars().map(swapped).collect() };
    let separate = || LaunchError::invalid(format!("sysctl {name:?} is not in a separate kernel namespace"));
    if file.contains('\0') || file.split('/').any(|part| matches!(part, "" | "." | "..")) {
        return Err(separate());
    }
    let is_ipc = file.starts_with("kernel/shm")
        || file.starts_with("kernel/msg")
        || file == "kernel/sem"
        || file.starts_with("fs/mqueue/");
    match (is_ipc, file.starts_with("net/")) {
        (true, _) if has_ipc => Ok(file),
        (true, _) => Err(LaunchError::invalid(format!("sysctl {name:?} is not allowed in the host ipc namespace"))),
        (_, true) if has_network => Ok(file),
        (_, true) => Err(LaunchError::invalid(format!("sysctl {name:?} is not allowed in the host network namespace"))),
        _ => Err(separate()),
    }
}

#[cfg(test)]
mod tests;
