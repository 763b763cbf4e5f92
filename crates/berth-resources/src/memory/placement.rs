//! Choice of NUMA nodes for memory blocks, greedy allocation, release. Pure. Spec 06b §2.4, §2.6.

use super::{
    hints::{MaskCandidate, MemoryRequests, candidates},
    machine_state::{MachineState, MemoryBlock, bytes_text},
};
use crate::{
    numa::{NumaMask, TopologyHint},
    pod_level::EmptyPodPoolError,
};

/// Reason why a container gets no memory. The texts are those of the reference; the values are details of the machine's
/// state for logs and events.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum MemoryAllocationError {
    /// A request is malformed, negative, or has a fraction of a byte.
    #[error("[memorymanager] failed to represent quantity as int64")]
    Quantity,
    /// No nodes have enough free memory together.
    #[error("[memorymanager] failed to get the default NUMA affinity, no NUMA nodes with enough memory is available")]
    NoDefaultAffinity(String),
    /// The topology manager requires preferred nodes without naming them, and there are none.
    #[error("[memorymanager] failed to find the default preferred hint")]
    DefaultNotPreferred(String),
    /// The chosen nodes have not enough free memory, nor do they together with others.
    #[error("[memorymanager] failed to find NUMA nodes to extend the current topology hint")]
    NoExtension(String),
    /// The topology manager requires preferred nodes, and those that have enough free memory are not preferred.
    #[error("[memorymanager] failed to find the extended preferred hint")]
    ExtensionNotPreferred(String),
    /// A chosen node is used alone or in another group.
    #[error("[memorymanager] preferred hint violates NUMA node allocation")]
    GroupConflict(String),
    /// The memory of containers leaves none for others of a pod with pod-level resources.
    #[error(transparent)]
    EmptyPodPool(#[from] EmptyPodPoolError),
}

impl MemoryAllocationError {
    /// Reason of the pod's status; `None` for `UnexpectedAdmissionError`, whose message wraps the text.
    pub fn reason(&self) -> Option<&'static str> {
        matches!(self, Self::EmptyPodPool(_)).then_some(EmptyPodPoolError::REASON)
    }

    /// The request, the nodes that were to be used, and the free memory of all nodes, for the log and behind the text
    /// in the event; empty for a malformed request, or for one that does not fit the pod.
    pub fn detail(&self) -> &str {
        match self {
            Self::Quantity | Self::EmptyPodPool(_) => "",
            Self::NoDefaultAffinity(detail)
            | Self::DefaultNotPreferred(detail)
            | Self::NoExtension(detail)
            | Self::ExtensionNotPreferred(detail)
            | Self::GroupConflict(detail) => detail,
        }
    }
}

/// Chooses the nodes of a container. `reusable` are the blocks of earlier init containers of the pod.
///
/// Deviation: a single node that is in a group is extended to its group. The reference allocates on the node alone, and
/// refuses the resulting checkpoint at its next start.
pub fn choose_nodes(
    machine: &MachineState,
    requested: &MemoryRequests,
    reusable: &[MemoryBlock],
    affinity: TopologyHint,
) -> Result<NumaMask, MemoryAllocationError> {
    let best = |included: NumaMask| {
        let candidates = candidates(machine, requested, reusable).into_iter();
        candidates.filter(|candidate| included.is_subset(candidate.mask)).min_by(MaskCandidate::cmp_better)
    };
    let detail = || describe(machine, requested, affinity);
    let chosen = match affinity.mask {
        Some(mask) => MaskCandidate { mask, is_preferred: affinity.is_preferred },
        None => best(NumaMask::default()).ok_or_else(|| MemoryAllocationError::NoDefaultAffinity(detail()))?,
    };
    if affinity.is_preferred && !chosen.is_preferred {
        return Err(MemoryAllocationError::DefaultNotPreferred(detail()));
    }
    let is_enough = requested.iter().all(|(resource, bytes)| machine.free(chosen.mask, resource) >= *bytes);
    let is_single_of_group = chosen.mask.len() == 1 && !machine.is_group_free(chosen.mask);
    let extended = if is_enough && !is_single_of_group {
        chosen
    } else {
        best(chosen.mask).ok_or_else(|| MemoryAllocationError::NoExtension(detail()))?
    };
    if chosen.is_preferred && !extended.is_preferred {
        return Err(MemoryAllocationError::ExtensionNotPreferred(detail()));
    }
    if !machine.is_group_free(extended.mask) {
        return Err(MemoryAllocationError::GroupConflict(detail()));
    }
    Ok(extended.mask)
}

impl MachineState {
    /// Whether the nodes can be used together: a single node is in no group, and each of several nodes is unused or in
    /// the group of exactly these.
    pub fn is_group_free(&self, mask: NumaMask) -> bool {
        let mut nodes = mask.iter().filter_map(|node| self.nodes.get(&node));
        match mask.len() {
            1 => nodes.all(|node| node.group.len() <= 1),
            _ => nodes.all(|node| node.assignments <= 0 || node.group == mask),
        }
    }

    /// Assigns a block to its nodes, and reserves `size` bytes of it: those that are not reused. The first node is used
    /// until it is full, then the next.
    pub fn take(&mut self, block: &MemoryBlock, size: u64) {
        let mut missing = size;
        for id in block.nodes.iter() {
            let Some(node) = self.nodes.get_mut(&id) else { continue };
            node.assignments = node.assignments.saturating_add(1);
            node.group = block.nodes;
            if let Some(table) = node.tables.get_mut(&block.resource) {
                let taken = table.free.min(missing);
                table.free = table.free.saturating_sub(taken);
                table.reserved = table.reserved.saturating_add(taken);
                missing = missing.saturating_sub(taken);
            }
        }
    }

    /// Releases a block: from the first node as much as is reserved there, then from the next.
    pub fn give_back(&mut self, block: &MemoryBlock) {
        let mut remaining = block.size;
        for id in block.nodes.iter() {
            let Some(node) = self.nodes.get_mut(&id) else { continue };
            node.assignments = node.assignments.saturating_sub(1);
            if node.assignments == 0 {
                node.group = NumaMask::from_iter([id]);
            }
            if let Some(table) = node.tables.get_mut(&block.resource) {
                let released = table.reserved.min(remaining);
                table.reserved = table.reserved.saturating_sub(released);
                table.free = table.free.saturating_add(released);
                remaining = remaining.saturating_sub(released);
            }
        }
    }
}

/// Text of the request, the hint, and the free memory of each node.
fn describe(machine: &MachineState, requested: &MemoryRequests, affinity: TopologyHint) -> String {
    let requests: Vec<String> =
        requested.iter().map(|(resource, bytes)| format!("{resource}={}", bytes_text(*bytes))).collect();
    let hint = affinity.mask.map_or_else(|| "any".to_owned(), |mask| mask.to_string());
    let preferred = if affinity.is_preferred { "preferred" } else { "not preferred" };
    let mut text = format!("requested {}, NUMA nodes {hint} ({preferred})", requests.join(" "));
    for (id, node) in &machine.nodes {
        let free: Vec<String> = requested
            .keys()
            .map(|resource| {
                let table = node.tables.get(resource).copied().unwrap_or_default();
                format!("{resource}={}/{}", bytes_text(table.free), bytes_text(table.allocatable))
            })
            .collect();
        text += &format!("; node {id} free/allocatable {}, group {}", free.join(" "), node.group);
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::fixture::{GI, mask, reserved, topology};

    /// Two nodes with 4 GiB of allocatable memory.
    fn machine() -> MachineState {
        let topology = topology(&[(5 * GI, 0), (4 * GI, 0)]);
        MachineState::initial(&topology, &reserved(&topology, "1Gi"))
    }

    fn block(nodes: &[u32], size: u64) -> MemoryBlock {
        MemoryBlock { nodes: mask(nodes), resource: "memory".to_owned(), size }
    }

    fn free(machine: &MachineState) -> Vec<u64> {
        machine.nodes.values().map(|node| node.tables["memory"].free).collect()
    }

    #[test]
    fn blocks_fill_the_nodes_in_ascending_order() {
        let idle = machine();
        let mut machine = idle.clone();
        let large = block(&[0, 1], 6 * GI);
        machine.take(&large, 6 * GI);
        assert_eq!(free(&machine), [0, 2 * GI]);
        // All of it is reused.
        machine.take(&large, 0);
        assert_eq!(free(&machine), [0, 2 * GI]);
        for node in machine.nodes.values() {
            assert_eq!((node.assignments, node.group), (2, mask(&[0, 1])));
        }
        machine.give_back(&block(&[0, 1], 5 * GI));
        assert_eq!(free(&machine), [4 * GI, 3 * GI]);
        assert_eq!(machine.nodes[&1].group, mask(&[0, 1]));
        machine.give_back(&block(&[0, 1], GI));
        assert_eq!(machine, idle);
        // Neither more than a node has nor a node that is missing.
        machine.take(&block(&[1, 7], 5 * GI), 5 * GI);
        assert_eq!(free(&machine), [4 * GI, 0]);
    }

    #[test]
    fn groups_do_not_overlap() {
        let mut machine = machine();
        let is_free = |machine: &MachineState| [1, 2, 3].map(|bits| machine.is_group_free(NumaMask::from_bits(bits)));
        machine.take(&block(&[0], GI), GI);
        assert_eq!(is_free(&machine), [true, true, false]);
        machine.give_back(&block(&[0], GI));
        assert_eq!(is_free(&machine), [true, true, true]);
        machine.take(&block(&[0, 1], GI), GI);
        assert_eq!(is_free(&machine), [false, false, true]);
    }

    fn choose(machine: &MachineState, size: u64, hint: Option<&[u32]>, is_preferred: bool) -> Result<NumaMask, String> {
        let affinity = TopologyHint { mask: hint.map(mask), is_preferred };
        let requested = MemoryRequests::from([("memory".to_owned(), size)]);
        choose_nodes(machine, &requested, &[], affinity).map_err(|error| error.to_string())
    }

    #[test]
    fn nodes_are_chosen_by_hint_and_free_memory() {
        let idle = machine();
        let mut single = idle.clone();
        single.take(&block(&[0], 3 * GI), 3 * GI);
        let mut group = idle.clone();
        group.take(&block(&[0, 1], GI), GI);
        let no_default = "[memorymanager] failed to get the default NUMA affinity, no NUMA nodes with enough memory is \
                          available";
        let no_extension = "[memorymanager] failed to find NUMA nodes to extend the current topology hint";
        let conflict = "[memorymanager] preferred hint violates NUMA node allocation";
        type Case<'a> = (&'a MachineState, u64, Option<&'a [u32]>, bool, Result<&'a [u32], &'a str>);
        let cases: [Case<'_>; 18] = [
            (&idle, GI, None, false, Ok(&[0])),
            (&idle, GI, None, true, Ok(&[0])),
            (&idle, GI, Some(&[1]), true, Ok(&[1])),
            (&idle, 6 * GI, None, true, Ok(&[0, 1])),
            (&idle, 9 * GI, None, false, Err(no_default)),
            (&single, 2 * GI, None, true, Ok(&[1])),
            (&single, 6 * GI, None, false, Err(no_default)),
            (&group, GI, None, false, Ok(&[0, 1])),
            (&group, GI, None, true, Err("[memorymanager] failed to find the default preferred hint")),
            // The merged hint is a part of the memory's own.
            (&idle, 6 * GI, Some(&[1]), true, Ok(&[0, 1])),
            (&idle, 6 * GI, Some(&[1]), false, Ok(&[0, 1])),
            (&single, 2 * GI, Some(&[0]), false, Err(no_extension)),
            (&idle, 9 * GI, Some(&[0, 1]), false, Err(no_extension)),
            (&group, 5 * GI, Some(&[0]), true, Ok(&[0, 1])),
            (&group, 2 * GI, Some(&[0, 1]), true, Ok(&[0, 1])),
            // More nodes than necessary, as another resource needs them.
            (&idle, GI, Some(&[0, 1]), false, Ok(&[0, 1])),
            (&single, GI, Some(&[0, 1]), false, Err(conflict)),
            // Extended to its group.
            (&group, GI, Some(&[0]), false, Ok(&[0, 1])),
        ];
        for (number, (machine, size, hint, is_preferred, expected)) in cases.into_iter().enumerate() {
            let chosen = choose(machine, size, hint, is_preferred);
            assert_eq!(chosen, expected.map(mask).map_err(str::to_owned), "case {number}");
        }
        let mut full = idle.clone();
        full.take(&block(&[0, 1], 4 * GI), 4 * GI);
        let not_preferred = "[memorymanager] failed to find the extended preferred hint";
        assert_eq!(choose(&full, GI, Some(&[0]), true), Err(not_preferred.to_owned()));
    }

    #[test]
    fn memory_of_init_containers_counts_as_free_on_its_nodes() {
        let mut machine = machine();
        machine.take(&block(&[1], 4 * GI), 4 * GI);
        let requested = MemoryRequests::from([("memory".to_owned(), 3 * GI)]);
        let affinity = TopologyHint { mask: Some(mask(&[1])), is_preferred: true };
        let reusable = [block(&[1], 2 * GI), block(&[1], GI)];
        assert_eq!(choose_nodes(&machine, &requested, &reusable, affinity), Ok(mask(&[1])));
        assert!(choose_nodes(&machine, &requested, &reusable[..1], affinity).is_err());
    }

    #[test]
    fn errors_come_with_the_state_of_all_nodes() {
        let mut machine = machine();
        machine.take(&block(&[0], 3 * GI), 3 * GI);
        let requested = MemoryRequests::from([("memory".to_owned(), 6 * GI), ("hugepages-1Gi".to_owned(), GI)]);
        let affinity = TopologyHint { mask: Some(mask(&[0, 1])), is_preferred: false };
        let error = choose_nodes(&machine, &requested, &[], affinity).expect_err("too large");
        assert_eq!(
            error.detail(),
            "requested hugepages-1Gi=1Gi memory=6Gi, NUMA nodes 0,1 (not preferred); node 0 free/allocatable \
             hugepages-1Gi=0/0 memory=1Gi/4Gi, group 0; node 1 free/allocatable hugepages-1Gi=0/0 memory=4Gi/4Gi, \
             group 1"
        );
        let affinity = TopologyHint { mask: None, is_preferred: true };
        let error = choose_nodes(&machine, &requested, &[], affinity).expect_err("too large");
        assert!(error.detail().contains("NUMA nodes any (preferred); node 0"), "{}", error.detail());
        assert_eq!(MemoryAllocationError::Quantity.detail(), "");
    }
}
