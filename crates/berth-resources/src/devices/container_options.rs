//! Merges the plugins' responses into the options of a container; logs conflicts. Spec 06c §1.7.

use std::collections::{BTreeMap, BTreeSet, btree_map::Entry};

use prost::Message;
use tracing::{error, warn};

use super::model::ContainerAssignments;
use berth_ports::ContainerDevices;
use berth_proto::{cri, device_plugin::ContainerAllocateResponse};

/// Merges the stored responses of all resources, in the order of their names. The first value of a key wins.
pub fn merged(container: &str, assignments: &ContainerAssignments) -> ContainerDevices {
    let mut options = Options { container, ..Options::default() };
    for (resource, assignment) in assignments {
        let Some(response) = &assignment.response else { continue };
        match ContainerAllocateResponse::decode(response.as_slice()) {
            Ok(response) => options.add(response),
            Err(err) => error!(resource, containerName = container, %err, "Cannot decode stored allocate response"),
        }
    }
    options.finish()
}

#[derive(Default)]
struct Options<'a> {
    container: &'a str,
    envs: BTreeMap<String, String>,
    mounts: BTreeMap<String, cri::Mount>,
    devices: BTreeMap<String, cri::Device>,
    annotations: BTreeMap<String, String>,
    cdi_devices: Vec<cri::CdiDevice>,
    cdi_names: BTreeSet<String>,
}

impl Options<'_> {
    fn add(&mut self, response: ContainerAllocateResponse) {
        for (name, value) in sorted(response.envs) {
            insert_first("environment variable", self.container, &mut self.envs, name, value);
        }
        for device in response.devices {
            let node = cri::Device {
                container_path: device.container_path.clone(),
                host_path: device.host_path,
                permissions: device.permissions,
            };
            insert_first("device", self.container, &mut self.devices, device.container_path, node);
        }
        for mount in response.mounts {
            let path = mount.container_path.clone();
            let mount = cri::Mount {
                container_path: mount.container_path,
                host_path: mount.host_path,
                readonly: mount.read_only,
                ..Default::default()
            };
            insert_first("mount", self.container, &mut self.mounts, path, mount);
        }
        for (name, value) in sorted(response.annotations) {
            insert_first("annotation", self.container, &mut self.annotations, name, value);
        }
        for device in response.cdi_devices {
            if self.cdi_names.insert(device.name.clone()) {
                self.cdi_devices.push(cri::CdiDevice { name: device.name });
            } else {
                warn!(containerName = self.container, device = %device.name, "Skipping duplicate CDI device");
            }
        }
    }

    fn finish(self) -> ContainerDevices {
        ContainerDevices {
            envs: self.envs.into_iter().collect(),
            mounts: self.mounts.into_values().collect(),
            devices: self.devices.into_values().collect(),
            cdi_devices: self.cdi_devices,
            annotations: self.annotations.into_iter().collect(),
        }
    }
}

fn sorted(map: impl IntoIterator<Item = (String, String)>) -> BTreeMap<String, String> {
    map.into_iter().collect()
}

fn insert_first<V: PartialEq>(kind: &str, container: &str, into: &mut BTreeMap<String, V>, key: String, value: V) {
    match into.entry(key) {
        Entry::Vacant(place) => {
            place.insert(value);
        }
        Entry::Occupied(place) if *place.get() == value => {}
        Entry::Occupied(place) => {
            error!(containerName = container, kind, key = %place.key(), "Skipping conflicting value of another device plugin");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::devices::DeviceAssignment;
    use berth_proto::device_plugin::{CdiDevice, DeviceSpec, Mount};

    fn response(value: &str, path: &str, cdi: &[&str]) -> DeviceAssignment {
        let response = ContainerAllocateResponse {
            envs: [("A".to_owned(), value.to_owned())].into(),
            mounts: vec![Mount { container_path: path.into(), host_path: format!("/host/{value}"), read_only: true }],
            devices: vec![DeviceSpec {
                container_path: format!("/dev{path}"),
                host_path: "/dev/null".into(),
                permissions: "rw".into(),
            }],
            annotations: [("example.com/a".to_owned(), value.to_owned())].into(),
            cdi_devices: cdi.iter().map(|name| CdiDevice { name: (*name).to_owned() }).collect(),
        };
        DeviceAssignment { response: Some(response.encode_to_vec()), ..DeviceAssignment::default() }
    }

    #[test]
    fn the_first_value_of_a_key_wins() {
        // AC-06c-6, AC-06c-7
        let assignments = ContainerAssignments::from([
            ("example.com/a".to_owned(), response("1", "/a", &["vendor/class=x", "vendor/class=y"])),
            ("example.com/b".to_owned(), response("2", "/a", &["vendor/class=x", "vendor/class=z"])),
            ("example.com/c".to_owned(), DeviceAssignment { response: Some(vec![0xff]), ..Default::default() }),
            ("example.com/d".to_owned(), DeviceAssignment::default()),
        ]);
        let options = merged("c", &assignments);
        assert_eq!(options.envs, [("A".to_owned(), "1".to_owned())]);
        assert_eq!(options.annotations, [("example.com/a".to_owned(), "1".to_owned())]);
        let mounts: Vec<_> = options.mounts.iter().map(|m| (m.container_path.as_str(), m.host_path.as_str())).collect();
        assert_eq!(mounts, [("/a", "/host/1")]);
        assert!(options.mounts.iter().all(|mount| mount.readonly && !mount.selinux_relabel));
        let devices: Vec<_> =
            options.devices.iter().map(|d| (d.container_path.as_str(), d.permissions.as_str())).collect();
        assert_eq!(devices, [("/dev/a", "rw")]);
        let cdi: Vec<_> = options.cdi_devices.iter().map(|device| device.name.as_str()).collect();
        assert_eq!(cdi, ["vendor/class=x", "vendor/class=y", "vendor/class=z"]);
    }
}
