//! Memory-backed (tmpfs) volumes for data that must not reach a disk. Blocking.
//!
//! Implements spec 07 §7.1, §7.3.

use std::{collections::BTreeMap, io, path::Path};

use berth_config::has_swap;
use berth_sys::{
    mount::{self, NewFileSystem},
    mount_api,
};
use berth_types::{
    Pod,
    quantity::Amount,
    resources::{self, MEMORY, Overhead},
};

/// Where volumes with credentials are stored.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum CredentialStorage {
    /// In memory. Requires permission to mount.
    InMemory,
    /// On disk, like the other volumes: for an agent without permission to mount.
    OnDisk,
}

impl CredentialStorage {
    /// Returns `InMemory` if this process runs as root.
    pub fn of_this_process() -> Self {
        if rustix::process::geteuid().is_root() { Self::InMemory } else { Self::OnDisk }
    }
}

/// Returns the maximum size in bytes of a memory-backed volume: the pod's memory limit if every container has one and
/// it is below the node's allocatable memory, which is the default. 0 if neither is known.
pub fn size(allocatable: &BTreeMap<String, String>, pod: &Pod) -> u64 {
    let bytes = |amount: Amount| u64::try_from(amount.value()).unwrap_or(0);
    let node = allocatable.get(MEMORY).and_then(|text| Amount::parse(text).ok()).map_or(0, bytes);
    let is_limited = |container| resources::limit_of(pod.spec(), container, MEMORY).is_some();
    if !pod.init_containers().iter().chain(pod.containers()).all(is_limited) {
        return node;
    }
    let limits = resources::pod_limits(pod.spec(), Overhead::Included);
    let limit = limits.get(MEMORY).copied().map_or(0, bytes);
    if limit > 0 && (node == 0 || limit <= node) { limit } else { node }
}

/// Mounts a tmpfs on the directory unless something is already mounted there.
///
/// # Errors
/// If the mount fails.
pub fn ensure(dir: &Path, bytes: u64) -> io::Result<()> {
    if mount::is_mount_point(dir)? {
        return Ok(());
    }
    let mounted = |swap: Swap| {
        let size = (bytes > 0).then(|| format!("size={bytes}"));
        let noswap = (swap == Swap::Never).then(|| "noswap".to_owned());
        let options: Vec<String> = size.into_iter().chain(noswap).collect();
        mount::file_system(NewFileSystem { kind: "tmpfs", source: "tmpfs", options: &options }, dir)
    };
    match mounted(Swap::Never) {
        // Kernels before 6.4 do not support `noswap`, and no kernel allows it in a user namespace.
        Err(e) if e.kind() == io::ErrorKind::InvalidInput => mounted(Swap::Allowed),
        other => other,
    }
}

/// Whether memory-backed data may still be written to a disk: the node has swap, and the kernel does not support
/// `noswap`.
pub fn may_reach_disk() -> bool {
    has_swap()
        && CredentialStorage::of_this_process() == CredentialStorage::InMemory
        && mount_api::new_mount("tmpfs", "noswap", 0).is_err()
}

/// Whether tmpfs pages may be swapped out.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Swap {
    Allowed,
    Never,
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    #[test]
    fn a_volume_is_no_larger_than_its_pod() {
        let size_of = |limits: Value, node: &str| {
            let containers: Vec<Value> = limits
                .as_array()
                .expect("a list")
                .iter()
                .map(|limit| json!({"name": "c", "resources": {"limits": limit}}))
                .collect();
            let object =
                json!({"metadata": {"name": "p", "namespace": "n", "uid": "u"}, "spec": {"containers": containers}});
            let pod = Pod::new(serde_json::from_value(object).expect("a pod")).expect("complete");
            size(&[("memory".to_owned(), node.to_owned())].into(), &pod)
        };
        for (limits, node, expected) in [
            (json!([{"memory": "64Mi"}]), "1Gi", 64 << 20),
            (json!([{"memory": "64Mi"}, {"memory": "64Mi"}]), "1Gi", 128 << 20),
            (json!([{"memory": "64Mi"}, {"cpu": "1"}]), "1Gi", 1 << 30),
            (json!([{"memory": "2Gi"}]), "1Gi", 1 << 30),
            (json!([{}]), "nonsense", 0),
            (json!([{"memory": "64Mi"}]), "", 64 << 20),
        ] {
            assert_eq!(size_of(limits.clone(), node), expected, "{limits} on {node}");
        }
    }
}
