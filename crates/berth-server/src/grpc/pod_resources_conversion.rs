//! Converts exclusive allocations to messages of the PodResources API. Pure.
//!
//! Differences from kubelet, spec 04b §12: a device without NUMA nodes is listed, CPUs are sorted, and a device of a
//! claim names only its own CDI devices.

use crate::ports::{Claim, ClaimDevice, Device, ExclusiveAllocations, MemoryBlock};
use berth_proto::{
    pod_resources::{
        CdiDevice, ClaimResource, ContainerDevices, ContainerMemory, ContainerResources, DynamicResource, NumaNode,
        TopologyInfo,
    },
    v1alpha1,
};
use berth_types::{CpuSet, Pod, api};

/// Containers that version 1 lists: sidecars in order, then the regular ones.
pub fn listed(pod: &Pod) -> impl Iterator<Item = &api::Container> {
    pod.init_containers().iter().filter(|c| Pod::is_sidecar(c)).chain(pod.containers())
}

/// Container entry of version 1.
pub fn container(name: &str, allocations: &ExclusiveAllocations, claims: Vec<Claim>) -> ContainerResources {
    ContainerResources {
        name: name.to_owned(),
        devices: devices(&allocations.devices),
        cpu_ids: cpus(&allocations.cpus),
        memory: memory(&allocations.memory),
        dynamic_resources: claims.into_iter().map(claim).collect(),
    }
}

/// Container entry of version v1alpha1, which has only devices, without topology.
pub fn alpha_container(name: &str, allocations: &ExclusiveAllocations) -> v1alpha1::ContainerResources {
    let devices = devices(&allocations.devices).into_iter();
    v1alpha1::ContainerResources {
        name: name.to_owned(),
        devices: devices
            .map(|d| v1alpha1::ContainerDevices { resource_name: d.resource_name, device_ids: d.device_ids })
            .collect(),
    }
}

/// One entry per device and NUMA node.
pub fn devices(devices: &[Device]) -> Vec<ContainerDevices> {
    let entry = |device: &Device, topology| ContainerDevices {
        resource_name: device.resource.clone(),
        device_ids: vec![device.id.clone()],
        topology,
    };
    let entries = |device: &Device| -> Vec<ContainerDevices> {
        if device.nodes.is_empty() {
            return vec![entry(device, None)];
        }
        device.nodes.iter().map(|node| entry(device, Some(topology(&[*node])))).collect()
    };
    devices.iter().flat_map(entries).collect()
}

/// CPU IDs in ascending order.
pub fn cpus(cpus: &CpuSet) -> Vec<i64> {
    cpus.iter().map(i64::from).collect()
}

/// Memory blocks with their NUMA topology.
pub fn memory(blocks: &[MemoryBlock]) -> Vec<ContainerMemory> {
    let block = |block: &MemoryBlock| ContainerMemory {
        memory_type: block.kind.clone(),
        size: block.bytes,
        topology: Some(topology(&block.nodes)),
    };
    blocks.iter().map(block).collect()
}

fn topology(nodes: &[i64]) -> TopologyInfo {
    TopologyInfo { nodes: nodes.iter().map(|id| NumaNode { id: *id }).collect() }
}

fn claim(claim: Claim) -> DynamicResource {
    let device = |device: ClaimDevice| ClaimResource {
        cdi_devices: device.cdi.into_iter().map(|name| CdiDevice { name }).collect(),
        driver_name: device.driver,
        pool_name: device.pool,
        device_name: device.device,
        share_id: device.share_id,
    };
    DynamicResource {
        claim_name: claim.name,
        claim_namespace: claim.namespace,
        claim_resources: claim.devices.into_iter().map(device).collect(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn device(id: &str, nodes: &[i64]) -> Device {
        Device { resource: "example.com/gpu".to_owned(), id: id.to_owned(), nodes: nodes.to_vec() }
    }

    #[test]
    fn a_device_has_an_entry_per_numa_node() {
        // AC-04b-M16: one device on node 0, one on nodes 0 and 1: three entries.
        let entries = devices(&[device("a", &[0]), device("b", &[0, 1]), device("none", &[])]);
        let seen: Vec<(String, Option<Vec<i64>>)> = entries
            .into_iter()
            .map(|e| (e.device_ids.concat(), e.topology.map(|t| t.nodes.into_iter().map(|n| n.id).collect())))
            .collect();
        let near = |id: &str, node: i64| (id.to_owned(), Some(vec![node]));
        assert_eq!(seen, [near("a", 0), near("b", 0), near("b", 1), ("none".to_owned(), None)]);
    }

    #[test]
    fn a_container_shows_what_it_has() {
        let allocations = ExclusiveAllocations {
            devices: vec![device("a", &[1])],
            cpus: [7, 2].into_iter().collect(),
            memory: vec![MemoryBlock { kind: "hugepages-2Mi".to_owned(), bytes: 4 << 20, nodes: vec![0, 1] }],
        };
        let of_claim = ClaimDevice {
            cdi: vec!["vendor.com/gpu=0".to_owned()],
            driver: "gpu.example.com".to_owned(),
            share_id: Some("s".to_owned()),
            ..ClaimDevice::default()
        };
        let claims = vec![Claim { name: "c".to_owned(), namespace: "n".to_owned(), devices: vec![of_claim] }];
        let shown = container("main", &allocations, claims);
        assert_eq!((shown.name.as_str(), shown.cpu_ids.as_slice()), ("main", &[2, 7][..]));
        assert_eq!(
            (shown.memory[0].size, shown.memory[0].topology.as_ref().map(|t| t.nodes.len())),
            (4 << 20, Some(2))
        );
        let resource = &shown.dynamic_resources[0].claim_resources[0];
        assert_eq!(
            (resource.cdi_devices[0].name.as_str(), resource.share_id.as_deref()),
            ("vendor.com/gpu=0", Some("s"))
        );
        assert_eq!(alpha_container("main", &allocations).devices[0].device_ids, ["a"]);
    }
}
