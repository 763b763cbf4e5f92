//! Machines, reservations, and pods for tests of the memory manager.

use std::collections::BTreeMap;

use berth_types::{Pod, quantity::Amount, resources::MEMORY};
use serde_json::{Value, json};

use super::{NodeMemoryReservation, ReservedMemory};
use crate::{
    numa::NumaMask,
    topology::{MachineTopology, NumaNode},
};

/// 1 MiB.
pub const MI: u64 = 1 << 20;
/// 1 GiB.
pub const GI: u64 = 1 << 30;

/// A mask of these nodes.
pub fn mask(nodes: &[u32]) -> NumaMask {
    nodes.iter().copied().collect()
}

/// Nodes 0, 1, … with this memory in bytes, and this number of huge pages of 2 MiB.
pub fn topology(nodes: &[(u64, u64)]) -> MachineTopology {
    let node = |(memory, pages): &(u64, u64)| NumaNode {
        memory: *memory,
        hugepages: BTreeMap::from([(2 * MI, *pages)]),
        distances: BTreeMap::new(),
    };
    MachineTopology { nodes: (0..).zip(nodes.iter().map(node)).collect(), ..MachineTopology::default() }
}

/// Memory reserved on node 0.
pub fn reserved(topology: &MachineTopology, quantity: &str) -> ReservedMemory {
    let amounts = BTreeMap::from([(MEMORY.to_owned(), Amount::parse(quantity).expect(quantity))]);
    let reservation = NodeMemoryReservation { node: 0, amounts: amounts.clone() };
    ReservedMemory::new(&[reservation], &amounts, topology).expect("consistent")
}

/// Nodes 0 and 1 with 4 GiB of allocatable memory each; 1 GiB of node 0 is reserved.
pub fn two_nodes() -> (MachineTopology, ReservedMemory) {
    let topology = topology(&[(5 * GI, 0), (4 * GI, 0)]);
    let reserved = reserved(&topology, "1Gi");
    (topology, reserved)
}

/// Role of a container in a pod.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Role {
    /// An init container that ends.
    Init,
    /// A restartable init container.
    Sidecar,
    /// A regular container.
    App,
}

/// A Guaranteed pod with the name and UID `uid`; containers with their role, and requests of memory and huge pages of
/// 2 MiB in bytes. They are named `c0`, `c1`, … in this order; init containers are before regular ones.
pub fn pod(uid: &str, containers: &[(Role, u64, u64)]) -> Pod {
    let (mut init, mut regular) = (Vec::new(), Vec::new());
    for (number, (role, memory, huge_pages)) in containers.iter().enumerate() {
        let mut amounts = json!({"cpu": "1", "memory": memory.to_string()});
        if *huge_pages > 0 {
            amounts["hugepages-2Mi"] = huge_pages.to_string().into();
        }
        let resources = json!({"requests": amounts, "limits": amounts});
        let mut container = json!({"name": format!("c{number}"), "resources": resources});
        if *role == Role::Sidecar {
            container["restartPolicy"] = "Always".into();
        }
        match role {
            Role::App => regular.push(container),
            Role::Init | Role::Sidecar => init.push(container),
        }
    }
    pod_with_spec(uid, json!({"initContainers": init, "containers": regular}))
}

/// A pod with the name and UID `uid`.
pub fn pod_with_spec(uid: &str, spec: Value) -> Pod {
    let object = json!({"metadata": {"name": uid, "namespace": "n", "uid": uid}, "spec": spec});
    Pod::new(serde_json::from_value(object).expect("a pod")).expect("complete")
}
