//! Volumes that a pod needs, and mount points that other mounts need inside a volume. Pure.
//!
//! Implements spec 07 §3.2, §13.1.

use std::collections::BTreeSet;

use berth_types::{Pod, api};

/// Returns the volumes that any container of any type uses, in the order of the pod spec.
pub fn used(pod: &Pod) -> Vec<api::Volume> {
    let names: BTreeSet<&str> = mounts_of_containers(pod)
        .into_iter()
        .flatten()
        .map(|mount| mount.name.as_str())
        .chain(devices(pod).map(|device| device.name.as_str()))
        .collect();
    pod.spec().volumes().filter(|volume| names.contains(volume.name.as_str())).collect()
}

/// How containers of a pod use a volume.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct VolumeUsage {
    /// A container mounts it (`volumeMounts`).
    pub as_directory: bool,
    /// A container uses it as a block device (`volumeDevices`).
    pub as_device: bool,
}

/// Returns how containers of any type use the volume.
pub fn usage(pod: &Pod, volume: &str) -> VolumeUsage {
    VolumeUsage {
        as_directory: mounts_of_containers(pod).into_iter().flatten().any(|mount| mount.name == volume),
        as_device: devices(pod).any(|device| device.name == volume),
    }
}

fn devices(pod: &Pod) -> impl Iterator<Item = &api::VolumeDevice> {
    let plain = pod.init_containers().iter().chain(pod.containers()).map(|c| &c.volume_devices);
    plain.chain(pod.ephemeral_containers().iter().map(|c| &c.volume_devices)).flatten().flatten()
}

/// Returns the mounts of each container.
fn mounts_of_containers(pod: &Pod) -> Vec<&[api::VolumeMount]> {
    let plain = pod.init_containers().iter().chain(pod.containers()).map(|c| c.volume_mounts.as_deref());
    let all = plain.chain(pod.ephemeral_containers().iter().map(|c| c.volume_mounts.as_deref()));
    all.map(Option::unwrap_or_default).collect()
}

/// Returns directories that must exist in a read-only volume because a container mounts something else there: paths
/// relative to the volume, only the outermost of nested ones.
pub fn nested_mount_points(pod: &Pod, volume: &str) -> BTreeSet<String> {
    let mut found = BTreeSet::new();
    for mounts in mounts_of_containers(pod) {
        let all: BTreeSet<String> = mounts.iter().map(|mount| cleaned(&mount.mount_path)).collect();
        for own in mounts.iter().filter(|mount| mount.name == volume).map(|mount| cleaned(&mount.mount_path)) {
            let mut outermost = String::new();
            for nested in all.iter().filter_map(|path| path.strip_prefix(&format!("{own}/"))) {
                let is_deeper = !outermost.is_empty() && nested.starts_with(&format!("{outermost}/"));
                if !is_deeper && !nested.is_empty() {
                    nested.clone_into(&mut outermost);
                    found.insert(outermost.clone());
                }
            }
        }
    }
    found
}

/// Returns the path without `.`, `..`, and repeated slashes; never leads above its start.
fn cleaned(path: &str) -> String {
    let mut parts: Vec<&str> = Vec::new();
    for part in path.split('/') {
        match part {
            "" | "." => {}
            ".." => {
                parts.pop();
            }
            part => parts.push(part),
        }
    }
    format!("/{}", parts.join("/"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    fn pod(spec: Value) -> Pod {
        Pod::new(
            serde_json::from_value(json!({"metadata": {"name": "p", "namespace": "n", "uid": "u"}, "spec": spec}))
                .expect("a pod"),
        )
        .expect("complete")
    }

    #[test]
    fn only_used_volumes_count() {
        // AC-07-13
        let mount = |name: &str| json!([{"name": name, "mountPath": "/m"}]);
        let pod = pod(json!({
            "volumes": [{"name": "unused"}, {"name": "d"}, {"name": "e"}, {"name": "i"}, {"name": "c"}],
            "initContainers": [{"name": "i", "volumeMounts": mount("i")}],
            "containers": [{"name": "c", "volumeMounts": mount("c"), "volumeDevices": [{"name": "d", "devicePath": "/d"}]}],
            "ephemeralContainers": [{"name": "e", "volumeMounts": mount("e")}],
        }));
        assert_eq!(used(&pod).iter().map(|v| v.name.as_str()).collect::<Vec<_>>(), ["d", "e", "i", "c"]);
    }

    #[test]
    fn mounts_inside_a_volume_need_their_directories() {
        let nested = |mounts: Value| {
            let pod = pod(json!({"containers": [{"name": "c", "volumeMounts": mounts}]}));
            nested_mount_points(&pod, "v").into_iter().collect::<Vec<_>>()
        };
        let m = |name: &str, path: &str| json!({"name": name, "mountPath": path});
        assert_eq!(nested(json!([m("v", "/a"), m("x", "/b")])), Vec::<String>::new());
        assert_eq!(nested(json!([m("v", "/a/"), m("x", "/a/b"), m("y", "/a/b/c"), m("z", "/a/d/e")])), ["b", "d/e"]);
        assert_eq!(nested(json!([m("v", "/a"), m("x", "/ab")])), Vec::<String>::new());
        assert_eq!(nested(json!([m("v", "/a"), m("x", "/a/../../b"), m("y", "/a/../a/./c")])), ["c"]);
    }
}
