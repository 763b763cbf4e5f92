//! Merge of the topology hints of all providers into one hint. Pure. Spec 06b §3.2 to §3.4, §3.6.
//!
//! ```text
//!  provider hints ─► hint lists ─┬─► masks preferred in every list ─► best mask, preferred
//!                                └─► reachable masks ──────────────► best mask, not preferred
//! ```
//!
//! The result equals the one of the full product of the lists, which is never computed; `reachable_masks` states the
//! limit up to which that holds. It does not depend on the order of the lists.

mod reachable_masks;
#[cfg(test)]
mod tests;

use std::cmp::Ordering;

use self::reachable_masks::reachable_masks;
use super::{
    hint::{ProviderHints, TopologyHint},
    mask::{MAX_NODES, NumaMask},
};
use crate::topology::MachineTopology;

/// No preference: any nodes serve the request.
const ANY_NODES: &[TopologyHint] = &[TopologyHint { mask: None, is_preferred: true }];

/// The request cannot be served now: no nodes, and never preferred.
const NO_NODES: &[TopologyHint] = &[TopologyHint { mask: None, is_preferred: false }];

/// Hints for one resource; the merge takes one of them.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct HintList<'a> {
    /// Resource name; empty for a provider without preference for any resource.
    pub resource: &'a str,
    /// Alternatives, in any order.
    pub hints: &'a [TopologyHint],
}

/// Converts the answers of the providers to lists: the table of §3.2.
pub fn hint_lists(providers: &[ProviderHints]) -> Vec<HintList<'_>> {
    let mut lists = Vec::new();
    for provider in providers {
        if provider.is_empty() {
            lists.push(HintList { resource: "", hints: ANY_NODES });
        }
        lists.extend(provider.iter().map(|(resource, hints)| {
            let hints = match hints.as_deref() {
                None => ANY_NODES,
                Some([]) => NO_NODES,
                Some(hints) => hints,
            };
            HintList { resource, hints }
        }));
    }
    lists
}

/// NUMA nodes of the machine, and the order of masks of the same size.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct MergeTopology {
    nodes: NumaMask,
    /// Distance of each ordered pair of nodes, in rows of [`MAX_NODES`]; `None` without `prefer-closest-numa-nodes`.
    distances: Option<Vec<u64>>,
}

impl MergeTopology {
    /// All nodes of the machine; with `prefers_closest` also their distances, 0 where the kernel reports none.
    pub fn new(machine: &MachineTopology, prefers_closest: bool) -> Self {
        let distance = |from: u32, to: u32| machine.nodes.get(&from).and_then(|node| node.distances.get(&to));
        let row = |from: u32| (0..MAX_NODES).map(move |to| distance(from, to).copied().map_or(0, u64::from));
        Self {
            nodes: machine.nodes.keys().copied().collect(),
            distances: prefers_closest.then(|| (0..MAX_NODES).flat_map(row).collect()),
        }
    }

    /// All nodes of the machine.
    pub fn nodes(&self) -> NumaMask {
        self.nodes
    }

    /// Sum of the distances of all ordered pairs of nodes, including a node to itself. Masks of the same size have the
    /// order of their average distances. 0 for all masks without `prefer-closest-numa-nodes`.
    fn distance(&self, mask: NumaMask) -> u64 {
        let Some(distances) = &self.distances else { return 0 };
        let pairs = mask.iter().flat_map(|from| mask.iter().map(move |to| from * MAX_NODES + to));
        pairs.filter_map(|pair| distances.get(usize::try_from(pair).ok()?)).sum()
    }

    /// The mask with the lowest rank; of several the one with the closest nodes, then the numerically smallest. Masks
    /// with the same rank have the same size.
    fn best(&self, masks: &[NumaMask], rank: impl Fn(NumaMask) -> (u8, u32)) -> Option<NumaMask> {
        let lowest = masks.iter().map(|mask| rank(*mask)).min()?;
        let ties = masks.iter().copied().filter(|mask| rank(*mask) == lowest);
        ties.min_by_key(|mask| (self.distance(*mask), *mask))
    }
}

/// Best hint under the policies best-effort and restricted (§3.3).
pub fn merge(lists: &[HintList<'_>], topology: &MergeTopology) -> TopologyHint {
    let lists: Vec<&[TopologyHint]> = lists.iter().map(|list| list.hints).collect();
    best_hint(&lists, topology)
}

/// Best hint under the policy single-numa-node (§3.4): of a single node, or without mask. Distances do not matter.
pub fn merge_single_node(lists: &[HintList<'_>], topology: &MergeTopology) -> TopologyHint {
    let candidates = |list: &HintList<'_>| -> Vec<TopologyHint> {
        list.hints.iter().copied().filter(|hint| is_preferred_single_node(*hint)).collect()
    };
    let lists: Vec<Vec<TopologyHint>> = lists.iter().map(candidates).collect();
    let lists: Vec<&[TopologyHint]> = lists.iter().map(Vec::as_slice).collect();
    let hint = best_hint(&lists, &MergeTopology { nodes: topology.nodes, distances: None });
    TopologyHint { mask: hint.mask.filter(|mask| *mask != topology.nodes), ..hint }
}

/// Whether the policy single-numa-node considers a hint.
pub fn is_preferred_single_node(hint: TopologyHint) -> bool {
    hint.is_preferred && hint.mask.is_none_or(|mask| mask.len() == 1)
}

fn best_hint(lists: &[&[TopologyHint]], topology: &MergeTopology) -> TopologyHint {
    let preferred = preferred_masks(lists, topology.nodes);
    if let Some(mask) = topology.best(&preferred, |mask| (0, mask.len())) {
        return TopologyHint { mask: Some(mask), is_preferred: true };
    }
    let size = common_size(lists);
    let reachable = reachable_masks(lists, topology.nodes, size);
    let best = topology.best(&reachable, |mask| size_rank(mask.len(), size));
    TopologyHint { mask: Some(best.unwrap_or(topology.nodes)), is_preferred: false }
}

/// Results of the combinations whose hints are all preferred and whose masks are all equal.
fn preferred_masks(lists: &[&[TopologyHint]], nodes: NumaMask) -> Vec<NumaMask> {
    let preferred = |list: &[TopologyHint]| -> Vec<Option<NumaMask>> {
        let mut masks: Vec<_> = list.iter().filter(|hint| hint.is_preferred).map(|hint| hint.mask).collect();
        masks.sort_unstable();
        masks.dedup();
        masks
    };
    let lists: Vec<Vec<Option<NumaMask>>> = lists.iter().map(|list| preferred(list)).collect();
    // `None` sorts first. A list with it accepts any mask of the others.
    let (open, strict): (Vec<_>, Vec<_>) = lists.iter().partition(|masks| masks.first() == Some(&None));
    let common: Vec<NumaMask> = match strict.split_first() {
        Some((first, others)) => {
            let is_common = |mask: &NumaMask| others.iter().all(|masks| masks.binary_search(&Some(*mask)).is_ok());
            first.iter().copied().flatten().filter(is_common).collect()
        }
        None => open.into_iter().flatten().map(|mask| mask.unwrap_or(nodes)).chain([nodes]).collect(),
    };
    let on_machine = common.into_iter().map(|mask| mask.intersection(nodes));
    on_machine.filter(|mask| !mask.is_empty()).collect()
}

/// Number of nodes that a result without preference best has: the largest of the lists' smallest masks.
fn common_size(lists: &[&[TopologyHint]]) -> u32 {
    let smallest = |list: &&[TopologyHint]| list.iter().filter_map(|hint| hint.mask).map(NumaMask::len).min();
    lists.iter().filter_map(smallest).max().unwrap_or_default()
}

/// Rank of a result without preference: `best` nodes, then fewer (the closer to `best` the better), then more.
fn size_rank(size: u32, best: u32) -> (u8, u32) {
    let class = match size.cmp(&best) {
        Ordering::Equal => 0,
        Ordering::Less => 1,
        Ordering::Greater => 2,
    };
    (class, size.abs_diff(best))
}
