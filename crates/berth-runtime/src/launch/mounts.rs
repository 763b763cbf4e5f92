//! Mount list of a container, in mount order. Pure.
//!
//! Default mounts come first, then the sandbox's files, the image's volumes, and the request's mounts, sorted by number
//! of path components. A mount of the request replaces a default mount. Implements spec 09a §8.1-§8.3.

use std::path::Path;

use super::{
    args::absolute,
    inputs::{Groups, LaunchInputs, MountSource},
    namespaces::range,
    refusal::LaunchError,
};
use berth_proto::cri::{self, MountPropagation};
use berth_shim::plan::{Access, IdMap, Mount, MountKind, Propagation};

/// `MS_*` bits.
pub const NO_SUID: u64 = 1 << 1;
const NO_DEV: u64 = 1 << 2;
const NO_EXEC: u64 = 1 << 3;
const RELATIVE_TIME: u64 = 1 << 21;
const STRICT_TIME: u64 = 1 << 24;
const USUAL: u64 = NO_SUID | NO_EXEC | NO_DEV;

/// Container properties that mounts depend on.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct MountContext {
    /// Whether the container is privileged.
    pub is_privileged: bool,
    /// Whether its root file system is read-only.
    pub has_read_only_root: bool,
    /// Whether it gets its own cgroup namespace.
    pub has_group_namespace: bool,
    /// User and group id mapping of the pod's user namespace.
    pub users: Option<(IdMap, IdMap)>,
    /// Host namespaces that it shares.
    pub host: SharedHostNamespaces,
}

/// Host namespaces that a container shares.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct SharedHostNamespaces {
    /// Host network namespace.
    pub network: bool,
    /// Host PID namespace.
    pub processes: bool,
    /// Host IPC namespace (message queues and shared memory).
    pub ipc: bool,
}

/// All mounts of a container, in mount order.
///
/// # Errors
/// The texts of spec 09a §8.2 and §8.3.
pub fn mounts(inputs: &LaunchInputs<'_>, style: &MountContext) -> Result<Vec<Mount>, LaunchError> {
    let mut requested = Vec::new();
    for (index, mount) in inputs.config.mounts.iter().enumerate() {
        let place = inputs.found.places.get(index);
        let place =
            place.ok_or_else(|| LaunchError::plain(format!("mount {:?} was not resolved", mount.container_path)))?;
        requested.push(of_request(mount, place, inputs.host.has_recursive_read_only)?);
    }
    let is_free = |target: &str| !requested.iter().any(|mount| mount.target == target);
    let has_own_dev = is_free("/dev");
    let mut all = kernel(style, &inputs.host.groups);
    all.retain(|mount| is_free(&mount.target) && (has_own_dev || !mount.target.starts_with("/dev/")));
    let mut later = sandbox_files(inputs, style);
    later.retain(|mount| is_free(&mount.target) && (has_own_dev || !mount.target.starts_with("/dev/")));
    later.extend(volumes(inputs, style.users).into_iter().filter(|mount| is_free(&mount.target)));
    later.extend(requested);
    later.sort_by_key(|mount| components(&mount.target));
    all.extend(later);
    Ok(all)
}

/// Whether any requested mount propagates back to the host (bidirectional).
pub fn is_shared(config: &cri::ContainerConfig) -> bool {
    config.mounts.iter().any(|mount| mount.propagation() == MountPropagation::PropagationBidirectional)
}

fn components(target: &str) -> usize {
    target.split('/').filter(|name| !name.is_empty()).count()
}

fn mount(target: &str, source: MountKind, flags: u64) -> Mount {
    Mount {
        target: target.to_owned(),
        source,
        access: Access::ReadWrite,
        propagation: Propagation::Private,
        flags,
        ids: None,
    }
}

fn new(target: &str, kind: &str, data: &str, flags: u64) -> Mount {
    mount(target, MountKind::New { kind: kind.to_owned(), data: data.to_owned() }, flags)
}

fn bind(target: &str, source: &Path) -> Mount {
    mount(target, MountKind::Bind(source.to_owned()), 0)
}

/// Kernel file systems. Bind-mounts the host's where a user namespace may not mount a new instance.
fn kernel(style: &MountContext, groups: &Groups) -> Vec<Mount> {
    let is_foreign = |of_host: bool| style.users.is_some() && of_host;
    let proc = match is_foreign(style.host.processes) {
        true => bind("/proc", Path::new("/proc")),
        false => new("/proc", "proc", "", USUAL),
    };
    let mqueue = match is_foreign(style.host.ipc) {
        true => bind("/dev/mqueue", Path::new("/dev/mqueue")),
        false => new("/dev/mqueue", "mqueue", "", USUAL),
    };
    let plain = if style.is_privileged { Access::ReadWrite } else { Access::ReadOnly };
    let sys = match is_foreign(style.host.network) {
        true => Mount { access: Access::RecursivelyReadOnly, flags: USUAL, ..bind("/sys", Path::new("/sys")) },
        false => Mount { access: plain, ..new("/sys", "sysfs", "", USUAL) },
    };
    let options = match groups {
        Groups::V2 { options } if !style.has_group_namespace => options.as_str(),
        _ => "",
    };
    let cgroup = Mount { access: plain, ..new("/sys/fs/cgroup", "cgroup", options, USUAL | RELATIVE_TIME) };
    let pts = "newinstance,ptmxmode=0666,mode=0620,gid=5";
    vec![
        proc,
        new("/dev", "tmpfs", "mode=755,size=65536k", NO_SUID | STRICT_TIME),
        new("/dev/pts", "devpts", pts, NO_SUID | NO_EXEC),
        mqueue,
        sys,
        cgroup,
    ]
}

/// `/etc/hostname`, `/etc/hosts`, `/etc/resolv.conf`, and `/dev/shm` of the sandbox.
fn sandbox_files(inputs: &LaunchInputs<'_>, style: &MountContext) -> Vec<Mount> {
    let access = if style.has_read_only_root { Access::ReadOnly } else { Access::ReadWrite };
    let file = |name: &str| Mount {
        access,
        ids: style.users,
        ..bind(&format!("/etc/{name}"), &inputs.sandbox.files.join(name))
    };
    let mut all: Vec<Mount> = ["hostname", "hosts", "resolv.conf"].into_iter().map(file).collect();
    all.push(bind("/dev/shm", inputs.sandbox.shm));
    all
}

fn volumes(inputs: &LaunchInputs<'_>, users: Option<(IdMap, IdMap)>) -> Vec<Mount> {
    let volumes = inputs.found.volumes.iter();
    volumes.map(|(path, directory)| Mount { ids: users, ..bind(&absolute(path), directory) }).collect()
}

fn of_request(asked: &cri::Mount, place: &MountSource, has_recursive: bool) -> Result<Mount, LaunchError> {
    if asked.container_path.is_empty() || asked.container_path.contains('\0') {
        return Err(LaunchError::invalid(format!("mount of {:?} has no container path", asked.host_path)));
    }
    check_target(&absolute(&asked.container_path))?;
    let propagation = MountPropagation::try_from(asked.propagation)
        .map_err(|_| LaunchError::invalid(format!("unknown mount propagation {}", asked.propagation)))?;
    let ids = match (range(&asked.uid_mappings)?, range(&asked.gid_mappings)?) {
        (Some(uids), Some(gids)) => Some((uids, gids)),
        (None, None) => None,
        _ => return Err(LaunchError::invalid("mount must have both UID and GID mappings or neither")),
    };
    let source = match place {
        MountSource::Host { path, on, is_shared, is_slave } => {
            check_propagation(propagation, path, on, (*is_shared, *is_slave))?;
            MountKind::Bind(path.clone())
        }
        MountSource::Image { layers, lower } => {
            check_image(asked)?;
            let sub_path = absolute(&asked.image_sub_path).trim_start_matches('/').to_owned();
            MountKind::Layers { layers: layers.clone(), lower: lower.clone(), sub_path }
        }
    };
    let access = access(asked, propagation, has_recursive)?;
    let propagation = match propagation {
        MountPropagation::PropagationPrivate => Propagation::Private,
        MountPropagation::PropagationHostToContainer => Propagation::Slave,
        MountPropagation::PropagationBidirectional => Propagation::Shared,
    };
    Ok(Mount { target: absolute(&asked.container_path), source, access, propagation, flags: 0, ids })
}

/// Files of `/proc` that a mount may cover; any other target below `/proc` could deceive the process that sets up the
/// container.
const OF_PROC: [&str; 10] = [
    "/proc/cpuinfo",
    "/proc/diskstats",
    "/proc/loadavg",
    "/proc/meminfo",
    "/proc/net/dev",
    "/proc/slabinfo",
    "/proc/stat",
    "/proc/swaps",
    "/proc/sys/kernel/ns_last_pid",
    "/proc/uptime",
];

fn check_target(target: &str) -> Result<(), LaunchError> {
    if target == "/" {
        return Err(LaunchError::invalid("cannot mount on the root of the container"));
    }
    if target.starts_with("/proc/") && !OF_PROC.contains(&target) {
        return Err(LaunchError::invalid(format!("{target:?} cannot be mounted because it is inside /proc")));
    }
    Ok(())
}

fn check_propagation(
    wanted: MountPropagation,
    path: &Path,
    on: &Path,
    (is_shared, is_slave): (bool, bool),
) -> Result<(), LaunchError> {
    let text = |what: &str| format!("path {path:?} is mounted on {on:?} but it is not a {what}");
    match wanted {
        MountPropagation::PropagationBidirectional if !is_shared => Err(LaunchError::plain(text("shared mount"))),
        MountPropagation::PropagationHostToContainer if !is_shared && !is_slave => {
            Err(LaunchError::plain(text("shared or slave mount")))
        }
        _ => Ok(()),
    }
}

/// Validates a mount of an image volume.
///
/// # Errors
/// The text begins with `ImageVolumeMountFailed: `.
pub fn check_image(asked: &cri::Mount) -> Result<(), LaunchError> {
    let refuse = |text: &str| Err(LaunchError::plain(format!("ImageVolumeMountFailed: {text}")));
    let sub_path = Path::new(&asked.image_sub_path);
    if !asked.host_path.is_empty() {
        return refuse("host_path must be empty while mount image");
    }
    if !asked.readonly {
        return refuse("readonly must be true while mount image");
    }
    if asked.image.as_ref().is_none_or(|image| image.image.is_empty()) {
        return refuse("image must be specified while mount image");
    }
    if sub_path.is_absolute() || sub_path.components().any(|part| part == std::path::Component::ParentDir) {
        return refuse(&format!("image_sub_path {:?} is not below the image", asked.image_sub_path));
    }
    Ok(())
}

fn access(asked: &cri::Mount, propagation: MountPropagation, has_recursive: bool) -> Result<Access, LaunchError> {
    match (asked.recursive_read_only, asked.readonly) {
        (false, false) => Ok(Access::ReadWrite),
        (false, true) => Ok(Access::ReadOnly),
        (true, false) => Err(LaunchError::invalid("recursive read-only mount conflicts with RW mount")),
        (true, true) if propagation != MountPropagation::PropagationPrivate => {
            Err(LaunchError::invalid("recursive read-only mount needs private propagation"))
        }
        (true, true) if !has_recursive => {
            Err(LaunchError::plain("RROUnsupported: recursive read-only mounts need Linux 5.12 or later"))
        }
        (true, true) => Ok(Access::RecursivelyReadOnly),
    }
}

#[cfg(test)]
mod tests;
