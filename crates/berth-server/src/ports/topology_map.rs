//! Port of `/debug/topology`: CPUs and memory by NUMA node, and the containers that have them.

use std::collections::BTreeMap;

use serde::Serialize;

/// CPUs and memory of this node, with their use.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct TopologyMap {
    /// Policies of the CPU, memory, and topology managers.
    pub policies: ManagerPolicies,
    /// CPUs of containers without CPUs of their own, as a list such as `0-3,8`.
    pub shared: String,
    /// CPUs reserved for system and node agents, as a list; empty without the static policy.
    pub reserved: String,
    /// CPUs that the kernel keeps free of ordinary work (`isolcpus`), as a list.
    pub isolated: String,
    /// NUMA nodes in ascending order of their IDs.
    pub nodes: Vec<NumaNodeEntry>,
    /// Online CPUs in ascending order.
    pub cpus: Vec<CpuEntry>,
    /// Containers with exclusive CPUs or reserved memory.
    pub containers: Vec<PinnedContainer>,
    /// The last 32 pods that were refused for their topology, the newest last.
    pub refusals: Vec<TopologyRefusal>,
}

/// Policies in the spelling of the kubelet configuration.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct ManagerPolicies {
    /// `cpuManagerPolicy`
    pub cpu: String,
    /// `memoryManagerPolicy`
    pub memory: String,
    /// `topologyManagerPolicy`
    pub topology: String,
    /// `topologyManagerScope`
    pub scope: String,
    /// `cpuManagerPolicyOptions` and `topologyManagerPolicyOptions`, whose names are distinct.
    pub options: BTreeMap<String, String>,
}

/// A NUMA node, with or without CPUs.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct NumaNodeEntry {
    /// Number of the node in the kernel.
    pub id: u32,
    /// Online CPUs, as a list; empty for a node with memory only.
    pub cpus: String,
    /// Total memory, in bytes.
    pub memory_bytes: u64,
    /// Memory that containers can get: without huge pages and what is reserved; `None` without the static policy.
    pub allocatable_memory_bytes: Option<u64>,
    /// Allocatable memory that no container has; `None` without the static policy.
    pub free_memory_bytes: Option<u64>,
    /// Pools by page size, in ascending order.
    pub hugepages: Vec<HugePagePool>,
    /// Distance to each node (10 is local), by node ID; empty if the kernel reports none.
    pub distances: BTreeMap<u32, u32>,
}

/// Huge pages of one size on a NUMA node.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct HugePagePool {
    /// Size of a page, in bytes.
    pub page_size: u64,
    /// Number of pages.
    pub total: u64,
    /// Number of pages that no container has reserved; `None` without the static policy of the memory manager.
    pub free: Option<u64>,
}

/// Who may run on a CPU.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum CpuUse {
    /// Containers without CPUs of their own.
    Shared,
    /// Reserved for system and node agents; without `strict-cpu-reservation` also containers of the shared pool.
    Reserved,
    /// One container, or containers of one pod that reuse the CPUs of an init container.
    Exclusive,
}

/// An online CPU.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct CpuEntry {
    /// Number of the CPU in the kernel.
    pub cpu: u32,
    /// Lowest CPU among the hardware threads of the core.
    pub core: u32,
    /// Physical package ID.
    pub socket: u32,
    /// NUMA node ID.
    pub node: u32,
    /// ID of the cache of level 3 or higher below the NUMA node; otherwise the socket ID.
    pub uncore_cache: u32,
    /// Who may run on it.
    #[serde(rename = "use")]
    pub usage: CpuUse,
}

/// A container with exclusive CPUs or reserved memory.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct PinnedContainer {
    /// Namespace of the pod; empty if the pod is unknown.
    pub namespace: String,
    /// Name of the pod; empty if the pod is unknown.
    pub pod: String,
    /// UID of the pod.
    pub uid: String,
    /// Container name.
    pub container: String,
    /// Exclusive CPUs, as a list; empty for a container of the shared pool.
    pub cpus: String,
    /// Reserved memory; empty without the static policy of the memory manager.
    pub memory: Vec<PinnedMemory>,
}

/// Memory of one type that a container has reserved.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct PinnedMemory {
    /// Memory type: `memory`, `hugepages-2Mi`, …
    #[serde(rename = "type")]
    pub kind: String,
    /// Size in bytes.
    pub bytes: u64,
    /// NUMA node IDs.
    pub nodes: Vec<i64>,
}

/// A pod that was refused because its resources could not be aligned.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct TopologyRefusal {
    /// Namespace of the pod.
    pub namespace: String,
    /// Name of the pod.
    pub pod: String,
    /// UID of the pod.
    pub uid: String,
    /// Which resource did not fit, and what would have.
    pub detail: String,
}

/// Source of the map of this node.
pub trait TopologyMapSource: Send + Sync + 'static {
    /// The current map. Never blocks.
    fn topology(&self) -> TopologyMap;
}

/// A map that never changes.
impl TopologyMapSource for TopologyMap {
    fn topology(&self) -> TopologyMap {
        self.clone()
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn the_document_has_the_names_of_the_api() {
        let cpu = CpuEntry { cpu: 5, core: 1, socket: 0, node: 1, uncore_cache: 2, usage: CpuUse::Exclusive };
        let memory = PinnedMemory { kind: "hugepages-2Mi".to_owned(), bytes: 4 << 20, nodes: vec![0, 1] };
        let map = TopologyMap {
            policies: ManagerPolicies {
                cpu: "static".to_owned(),
                memory: "Static".to_owned(),
                topology: "restricted".to_owned(),
                scope: "pod".to_owned(),
                options: BTreeMap::from([("full-pcpus-only".to_owned(), "true".to_owned())]),
            },
            shared: "2-4".to_owned(),
            reserved: "0".to_owned(),
            isolated: String::new(),
            nodes: vec![NumaNodeEntry {
                id: 1,
                cpus: "1-2,5".to_owned(),
                memory_bytes: 8,
                hugepages: vec![HugePagePool { page_size: 2 << 20, total: 3, free: None }],
                distances: BTreeMap::from([(0, 21), (1, 10)]),
                ..NumaNodeEntry::default()
            }],
            cpus: vec![cpu],
            containers: vec![PinnedContainer {
                namespace: "n".to_owned(),
                pod: "p".to_owned(),
                uid: "u".to_owned(),
                container: "c".to_owned(),
                cpus: "5".to_owned(),
                memory: vec![memory],
            }],
            refusals: vec![TopologyRefusal { uid: "v".to_owned(), ..TopologyRefusal::default() }],
        };
        let expected = json!({
            "policies": {
                "cpu": "static",
                "memory": "Static",
                "topology": "restricted",
                "scope": "pod",
                "options": {"full-pcpus-only": "true"},
            },
            "shared": "2-4",
            "reserved": "0",
            "isolated": "",
            "nodes": [{
                "id": 1,
                "cpus": "1-2,5",
                "memoryBytes": 8,
                "allocatableMemoryBytes": null,
                "freeMemoryBytes": null,
                "hugepages": [{"pageSize": 2_097_152, "total": 3, "free": null}],
                "distances": {"0": 21, "1": 10},
            }],
            "cpus": [{"cpu": 5, "core": 1, "socket": 0, "node": 1, "uncoreCache": 2, "use": "exclusive"}],
            "containers": [{
                "namespace": "n",
                "pod": "p",
                "uid": "u",
                "container": "c",
                "cpus": "5",
                "memory": [{"type": "hugepages-2Mi", "bytes": 4_194_304, "nodes": [0, 1]}],
            }],
            "refusals": [{"namespace": "", "pod": "", "uid": "v", "detail": ""}],
        });
        assert_eq!(serde_json::to_value(map.topology()).expect("encodable"), expected);
    }
}
