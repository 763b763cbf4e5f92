//! NUMA nodes that can serve the memory requests of a container or pod. Pure. Spec 06b §2.5.

use std::{cmp::Ordering, collections::BTreeMap};

use berth_types::{
    Pod, api,
    quantity::Amount,
    resources::{MEMORY, is_hugepage},
};

use super::machine_state::{MachineState, MemoryBlock, whole_bytes};
use crate::numa::{NumaMask, ProviderHints, TopologyHint, mask_combinations::masks};

/// Requested bytes by resource: `memory`, `hugepages-2Mi`, …
pub type MemoryRequests = BTreeMap<String, u64>;

/// NUMA nodes that have enough free memory together.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct MaskCandidate {
    /// At least one node.
    pub mask: NumaMask,
    /// Whether no smaller number of nodes could serve the request on an idle machine.
    pub is_preferred: bool,
}

impl MaskCandidate {
    /// Preferred ones first, then those with fewer nodes, then the smaller numeric value.
    pub fn cmp_better(&self, other: &Self) -> Ordering {
        other.is_preferred.cmp(&self.is_preferred).then(self.mask.cmp_narrower(other.mask))
    }
}

/// Memory requests of a container; `None` if one is malformed, negative, or has a fraction of a byte.
pub fn container_requests(container: &api::Container) -> Option<MemoryRequests> {
    let requests = container.resources.as_ref().and_then(|resources| resources.requests.as_ref());
    let memory = requests.into_iter().flatten().filter(|(name, _)| *name == MEMORY || is_hugepage(name));
    memory.map(|(name, quantity)| Some((name.clone(), whole_bytes(Amount::try_from(quantity).ok()?)?))).collect()
}

/// Memory requests of a pod: the larger of all long-running containers together, and of any init container with the
/// sidecars before it. Only resources of regular containers count.
pub fn pod_requests(pod: &Pod) -> Option<MemoryRequests> {
    let (mut sidecars, mut init_peak) = (MemoryRequests::new(), MemoryRequests::new());
    for container in pod.init_containers() {
        for (resource, bytes) in container_requests(container)? {
            let of_sidecars = sidecars.entry(resource.clone()).or_default();
            let total = of_sidecars.saturating_add(bytes);
            if Pod::is_sidecar(container) {
                *of_sidecars = total;
            } else {
                let peak = init_peak.entry(resource).or_default();
                *peak = total.max(*peak);
            }
        }
    }
    let mut requests = MemoryRequests::new();
    for container in pod.containers() {
        for (resource, bytes) in container_requests(container)? {
            let sum = requests.entry(resource).or_default();
            *sum = bytes.saturating_add(*sum);
        }
    }
    let bytes = |from: &MemoryRequests, resource: &str| from.get(resource).copied().unwrap_or(0);
    for (resource, sum) in &mut requests {
        *sum = sum.saturating_add(bytes(&sidecars, resource)).max(bytes(&init_peak, resource));
    }
    Some(requests)
}

/// Masks that can serve a request, in the order of [`masks`]. `reusable` are blocks of earlier init containers of the
/// pod, which count as free on their nodes.
pub fn candidates(machine: &MachineState, requested: &MemoryRequests, reusable: &[MemoryBlock]) -> Vec<MaskCandidate> {
    let reusable_bytes = |mask: NumaMask, resource: &str| {
        let blocks = reusable.iter().filter(|block| block.nodes == mask && block.resource == resource);
        blocks.map(|block| block.size).fold(0, u64::saturating_add)
    };
    let nodes = machine.all_nodes();
    let mut fewest = nodes.len();
    let mut usable = Vec::new();
    for mask in masks(nodes) {
        if requested.iter().any(|(resource, bytes)| machine.allocatable(mask, resource) < *bytes) {
            continue;
        }
        fewest = fewest.min(mask.len());
        let is_enough = requested.iter().all(|(resource, bytes)| {
            machine.free(mask, resource).saturating_add(reusable_bytes(mask, resource)) >= *bytes
        });
        if is_enough && machine.is_group_free(mask) {
            usable.push(mask);
        }
    }
    usable.into_iter().map(|mask| MaskCandidate { mask, is_preferred: mask.len() == fewest }).collect()
}

/// Hints of a request that is not served yet: the same for each resource. Without any candidate there is no preference;
/// the allocation fails afterwards.
pub fn new_hints(machine: &MachineState, requested: &MemoryRequests, reusable: &[MemoryBlock]) -> ProviderHints {
    let hint = |MaskCandidate { mask, is_preferred }| TopologyHint { mask: Some(mask), is_preferred };
    let hints: Vec<TopologyHint> = candidates(machine, requested, reusable).into_iter().map(hint).collect();
    if hints.is_empty() {
        return ProviderHints::new();
    }
    requested.keys().map(|resource| (resource.clone(), Some(hints.clone()))).collect()
}

/// Hints of recorded blocks: their nodes. Blocks that differ from the request in number, resource, or size give no
/// preference, such as those of an init container whose memory a later container reuses.
pub fn recorded_hints(blocks: &[MemoryBlock], requested: &MemoryRequests) -> ProviderHints {
    let is_same = |block: &MemoryBlock| requested.get(&block.resource) == Some(&block.size);
    if blocks.len() != requested.len() || !blocks.iter().all(is_same) {
        return ProviderHints::new();
    }
    let hints = |resource: &String| -> Vec<TopologyHint> {
        let blocks = blocks.iter().filter(|block| block.resource == *resource);
        blocks.map(|block| TopologyHint { mask: Some(block.nodes), is_preferred: true }).collect()
    };
    requested.keys().map(|resource| (resource.clone(), Some(hints(resource)))).collect()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::memory::fixture::{GI, MI, Role, mask, pod, pod_with_spec, reserved, topology};

    fn requests(memory: u64, huge_pages: u64) -> MemoryRequests {
        let all = [("memory".to_owned(), memory), ("hugepages-2Mi".to_owned(), huge_pages)];
        all.into_iter().filter(|(_, bytes)| *bytes > 0).collect()
    }

    #[test]
    fn requests_of_containers_are_memory_and_huge_pages() {
        let container = |amounts: serde_json::Value| {
            let spec = json!({"containers": [{"name": "c", "resources": {"requests": amounts}}]});
            container_requests(&pod_with_spec("p", spec).containers()[0])
        };
        for (amounts, expected) in [
            (json!({"cpu": "1", "memory": "1Gi", "hugepages-2Mi": "4Mi", "x.y/z": "1"}), Some(requests(GI, 4 * MI))),
            (json!({"cpu": "1500m"}), Some(MemoryRequests::new())),
            (json!({"memory": "0"}), Some(MemoryRequests::from([("memory".to_owned(), 0)]))),
            (json!({"memory": "1500m"}), None),
            (json!({"memory": "1Gi", "hugepages-2Mi": "x"}), None),
        ] {
            assert_eq!(container(amounts.clone()), expected, "{amounts}");
        }
        let spec = json!({"containers": [{"name": "c"}]});
        assert_eq!(container_requests(&pod_with_spec("p", spec).containers()[0]), Some(MemoryRequests::new()));
    }

    #[test]
    fn requests_of_pods_are_the_larger_of_starting_and_running() {
        use Role::{App, Init, Sidecar};
        type Case<'a> = (&'a [(Role, u64, u64)], MemoryRequests);
        let cases: [Case<'_>; 6] = [
            (&[(App, GI, 0), (App, 2 * GI, 2 * MI)], requests(3 * GI, 2 * MI)),
            (&[(Init, 4 * GI, 0), (App, 3 * GI, 0)], requests(4 * GI, 0)),
            (&[(Sidecar, GI, 0), (Init, 3 * GI, 0), (App, 2 * GI, 0)], requests(4 * GI, 0)),
            (&[(Init, 3 * GI, 0), (Sidecar, GI, 0), (App, 2 * GI, 0)], requests(3 * GI, 0)),
            (&[(Sidecar, GI, 2 * MI), (Sidecar, GI, 0), (App, GI, 4 * MI)], requests(3 * GI, 6 * MI)),
            // Huge pages that no regular container requests.
            (&[(Init, GI, 2 * MI), (App, GI, 0)], requests(GI, 0)),
        ];
        for (containers, expected) in cases {
            assert_eq!(pod_requests(&pod("p", containers)), Some(expected), "{containers:?}");
        }
        let malformed = json!({"initContainers": [{"name": "i", "resources": {"requests": {"memory": "1m"}}}],
                               "containers": [{"name": "c"}]});
        assert_eq!(pod_requests(&pod_with_spec("p", malformed)), None);
    }

    /// Three nodes with 4 GiB of allocatable memory, and node 1 with 2 MiB of huge pages.
    fn machine() -> MachineState {
        let topology = topology(&[(5 * GI, 0), (4 * GI + 2 * MI, 1), (4 * GI, 0)]);
        MachineState::initial(&topology, &reserved(&topology, "1Gi"))
    }

    fn block(nodes: &[u32], size: u64) -> MemoryBlock {
        MemoryBlock { nodes: mask(nodes), resource: "memory".to_owned(), size }
    }

    /// Allocates the blocks and returns the masks, and of them those that are preferred.
    fn masks_after(blocks: &[MemoryBlock], requested: &MemoryRequests, reusable: &[MemoryBlock]) -> (String, String) {
        let mut machine = machine();
        for block in blocks {
            machine.take(block, block.size);
        }
        let candidates = candidates(&machine, requested, reusable);
        let text = |preferred_only: bool| {
            let masks = candidates.iter().filter(|candidate| !preferred_only || candidate.is_preferred);
            masks.map(|candidate| candidate.mask.to_string()).collect::<Vec<_>>().join(" ")
        };
        (text(false), text(true))
    }

    #[test]
    fn candidates_have_enough_memory_and_respect_groups() {
        type Case<'a> = (&'a [MemoryBlock], MemoryRequests, &'a [MemoryBlock], &'a str, &'a str);
        let cases: [Case<'_>; 12] = [
            (&[], requests(GI, 0), &[], "0 1 2 0,1 0,2 1,2 0,1,2", "0 1 2"),
            (&[], requests(6 * GI, 0), &[], "0,1 0,2 1,2 0,1,2", "0,1 0,2 1,2"),
            (&[], requests(13 * GI, 0), &[], "", ""),
            (&[], requests(GI, 2 * MI), &[], "1 0,1 1,2 0,1,2", "1"),
            (&[], requests(GI, 4 * MI), &[], "", ""),
            // A node that is used alone joins no group.
            (&[block(&[1], GI)], requests(GI, 0), &[], "0 1 2 0,2", "0 1 2"),
            // Nodes of a group are used together only. Their preference is that of an idle machine.
            (&[block(&[0, 1], GI)], requests(GI, 0), &[], "2 0,1", "2"),
            (&[block(&[0, 1, 2], GI)], requests(GI, 0), &[], "0,1,2", ""),
            // Allocatable, but not free.
            (&[block(&[0], 4 * GI)], requests(GI, 0), &[], "1 2 1,2", "1 2"),
            (&[block(&[0], 4 * GI)], requests(GI, 0), &[block(&[0], GI)], "0 1 2 1,2", "0 1 2"),
            (&[block(&[0], 4 * GI)], requests(GI, 0), &[block(&[0], GI - 1)], "1 2 1,2", "1 2"),
            // Init containers' memory on other nodes does not count.
            (&[block(&[0], 4 * GI)], requests(GI, 0), &[block(&[0, 1], GI)], "1 2 1,2", "1 2"),
        ];
        for (number, (blocks, requested, reusable, all, preferred)) in cases.into_iter().enumerate() {
            let masks = masks_after(blocks, &requested, reusable);
            assert_eq!(masks, (all.to_owned(), preferred.to_owned()), "case {number}");
        }
    }

    #[test]
    fn each_resource_has_the_same_new_hints() {
        let hint = |nodes: &[u32], is_preferred| TopologyHint { mask: Some(mask(nodes)), is_preferred };
        let expected = vec![hint(&[1], true), hint(&[0, 1], false), hint(&[1, 2], false), hint(&[0, 1, 2], false)];
        let hints = new_hints(&machine(), &requests(GI, 2 * MI), &[]);
        let expected: ProviderHints =
            ["hugepages-2Mi", "memory"].map(|resource| (resource.to_owned(), Some(expected.clone()))).into();
        assert_eq!(hints, expected);
        assert_eq!(new_hints(&machine(), &requests(13 * GI, 0), &[]), ProviderHints::new());
        assert_eq!(new_hints(&machine(), &MemoryRequests::new(), &[]), ProviderHints::new());
    }

    #[test]
    fn recorded_blocks_are_their_own_hints_if_the_request_is_unchanged() {
        let huge = MemoryBlock { nodes: mask(&[1]), resource: "hugepages-2Mi".to_owned(), size: 2 * MI };
        let hint = |nodes: &[u32]| Some(vec![TopologyHint { mask: Some(mask(nodes)), is_preferred: true }]);
        let blocks = [block(&[0, 1], GI), huge];
        let expected: ProviderHints =
            [("memory".to_owned(), hint(&[0, 1])), ("hugepages-2Mi".to_owned(), hint(&[1]))].into();
        assert_eq!(recorded_hints(&blocks, &requests(GI, 2 * MI)), expected);
        for (blocks, requested) in [
            (&blocks[..], requests(GI, 0)),
            (&blocks[..], requests(GI, 4 * MI)),
            (&blocks[..1], requests(0, GI)),
            (&blocks[..1], requests(GI + 1, 0)),
            (&blocks[..0], requests(GI, 0)),
        ] {
            assert_eq!(recorded_hints(blocks, &requested), ProviderHints::new(), "{requested:?}");
        }
    }
}
