//! NUMA masks of combinations of one hint per list, in bounded time and memory. Pure. Spec 06b §3.6.
//!
//! ```text
//!  lists ─► masks on the nodes that every list serves ─► groups of nodes that no mask separates
//!                 16 groups or fewer ─► subset convolution ─► all reachable masks
//!                 more groups ────────► pairs within a budget, and one combination per node
//! ```
//!
//! The result is complete for 16 groups or fewer, so for every machine with up to 16 nodes, and for up to 131,072
//! combinations. Beyond, masks are dropped in a fixed order: those stay that can still become a mask of the best size.
//! Every mask of the result is reachable, and there is at least one if there is any.

use std::cmp::Ordering;

use crate::numa::{NumaMask, TopologyHint};

/// Most groups of nodes for which all masks are computed; 2^16 masks exist.
const MAX_GROUPS: usize = 16;

/// Most masks that are kept between two lists.
const MAX_MASKS: usize = 1 << 16;

/// Intersections of two masks that one search computes; a list may use half of what is left.
const MAX_PAIRS: usize = 1 << 20;

/// Intersections that every list may compute.
const MIN_PAIRS: usize = 1 << 14;

/// Non-empty intersections of `nodes` and one mask of each list; a hint without mask counts as all nodes. Above the
/// limits those come first that have, or can shrink to, `size` nodes.
pub(super) fn reachable_masks(lists: &[&[TopologyHint]], nodes: NumaMask, size: u32) -> Vec<NumaMask> {
    let all = NumaMask::from_bits(u64::MAX);
    let union = |list: &&[TopologyHint]| {
        list.iter().map(|hint| hint.mask.unwrap_or(all)).fold(NumaMask::default(), NumaMask::union)
    };
    // Only nodes that each list names can be in a result. A node that each list names is in at least one result.
    let served = lists.iter().map(union).fold(nodes, NumaMask::intersection);
    if served.is_empty() {
        return Vec::new();
    }
    let mut lists: Vec<Vec<NumaMask>> = lists.iter().map(|list| projection(list, served)).collect();
    lists.retain(|masks| masks.as_slice() != [served]);
    if lists.is_empty() {
        return vec![served];
    }
    lists.sort_by(|a, b| a.len().cmp(&b.len()).then_with(|| a.cmp(b)));
    match node_groups(&lists, served) {
        Some(groups) => intersections_of_groups(&lists, &groups),
        None => intersections_within_budget(lists, served, size),
    }
}

/// Distinct non-empty masks of a list, reduced to the `served` nodes, in ascending order.
fn projection(list: &[TopologyHint], served: NumaMask) -> Vec<NumaMask> {
    let masks = list.iter().map(|hint| hint.mask.map_or(served, |mask| mask.intersection(served)));
    let mut masks: Vec<NumaMask> = masks.filter(|mask| !mask.is_empty()).collect();
    masks.sort_unstable();
    masks.dedup();
    masks
}

/// Groups of nodes of which each mask has all or none; `None` if there are more than [`MAX_GROUPS`].
fn node_groups(lists: &[Vec<NumaMask>], served: NumaMask) -> Option<Vec<NumaMask>> {
    let mut groups = vec![served];
    for mask in lists.iter().flatten() {
        let mut outside = Vec::new();
        for group in &mut groups {
            let inside = group.intersection(*mask);
            if !inside.is_empty() && inside != *group {
                outside.push(NumaMask::from_bits(group.bits() ^ inside.bits()));
                *group = inside;
            }
        }
        groups.append(&mut outside);
        if groups.len() > MAX_GROUPS {
            return None;
        }
    }
    Some(groups)
}

/// All reachable masks. A set of masks is a table of 2^groups entries: bit n of an index stands for group n.
fn intersections_of_groups(lists: &[Vec<NumaMask>], groups: &[NumaMask]) -> Vec<NumaMask> {
    let tables = lists.iter().map(|masks| table_of_masks(masks, groups));
    let reachable = tables.reduce(convolve).unwrap_or_default();
    let indexes = reachable.iter().enumerate().skip(1).filter(|(_, count)| **count > 0);
    indexes.map(|(index, _)| mask_of_groups(index, groups)).collect()
}

fn table_of_masks(masks: &[NumaMask], groups: &[NumaMask]) -> Vec<u64> {
    let mut table = vec![0; 1 << groups.len()];
    for mask in masks {
        let members = groups.iter().enumerate().filter(|(_, group)| group.is_subset(*mask));
        let index = members.fold(0_usize, |index, (bit, _)| index | (1 << bit));
        if let Some(entry) = table.get_mut(index) {
            *entry = 1;
        }
    }
    table
}

fn mask_of_groups(index: usize, groups: &[NumaMask]) -> NumaMask {
    let members = groups.iter().enumerate().filter(|(bit, _)| (index >> bit) & 1 == 1);
    members.fold(NumaMask::default(), |mask, (_, group)| mask.union(*group))
}

/// Table of the intersections of each mask of `a` with each mask of `b`. The sums over supersets count pairs whose
/// intersection contains a mask; differences of them count pairs whose intersection equals it, at most 2^32.
fn convolve(mut a: Vec<u64>, mut b: Vec<u64>) -> Vec<u64> {
    for_each_bit(&mut a, |without, with| *without += with);
    for_each_bit(&mut b, |without, with| *without += with);
    for (count, other) in a.iter_mut().zip(&b) {
        *count *= other;
    }
    for_each_bit(&mut a, |without, with| *without -= with);
    for count in &mut a {
        *count = u64::from(*count > 0);
    }
    a
}

/// Changes, bit by bit of the index, each entry without the bit by the entry that has it in addition.
fn for_each_bit(table: &mut [u64], change: impl Fn(&mut u64, u64)) {
    let mut step = 1;
    while step < table.len() {
        for block in table.chunks_exact_mut(2 * step) {
            let (without, with) = block.split_at_mut(step);
            for (entry, other) in without.iter_mut().zip(with.iter()) {
                change(entry, *other);
            }
        }
        step *= 2;
    }
}

/// Reachable masks, list by list; each step keeps the masks and the hints that [`search_rank`] ranks first.
fn intersections_within_budget(lists: Vec<Vec<NumaMask>>, served: NumaMask, size: u32) -> Vec<NumaMask> {
    let mut masks = combination_per_node(&lists, served, size);
    let mut budget = MAX_PAIRS;
    let mut reachable = vec![served];
    for mut list in lists {
        let (kept, added) = shares(reachable.len(), list.len(), (budget / 2).max(MIN_PAIRS));
        keep_first(&mut reachable, kept, size);
        keep_first(&mut list, added, size);
        budget = budget.saturating_sub(reachable.len() * list.len());
        let pairs = reachable.iter().flat_map(|mask| list.iter().map(move |other| mask.intersection(*other)));
        let mut next: Vec<NumaMask> = pairs.filter(|mask| !mask.is_empty()).collect();
        next.sort_unstable();
        next.dedup();
        keep_first(&mut next, MAX_MASKS, size);
        reachable = next;
    }
    masks.extend(reachable);
    masks
}

/// One reachable mask for each node, with this node: each list adds the mask that leaves the best intersection.
fn combination_per_node(lists: &[Vec<NumaMask>], served: NumaMask, size: u32) -> Vec<NumaMask> {
    let combine = |node: u32| {
        lists.iter().fold(served, |reached, masks| {
            let masks = masks.iter().filter(|mask| mask.contains(node)).map(|mask| mask.intersection(reached));
            masks.min_by_key(|mask| search_rank(*mask, size)).unwrap_or(reached)
        })
    };
    served.iter().map(combine).collect()
}

/// Sizes to which two sets are cut so that at most `limit` pairs remain; neither is cut further than needed.
fn shares(first: usize, second: usize, limit: usize) -> (usize, usize) {
    let first = first.min(limit.isqrt().max(limit / second.max(1)));
    (first, second.min(limit / first.max(1)))
}

fn keep_first(masks: &mut Vec<NumaMask>, count: usize, size: u32) {
    if masks.len() > count {
        masks.select_nth_unstable_by_key(count, |mask| search_rank(*mask, size));
        masks.truncate(count);
    }
}

/// Rank of a mask that is intersected further: `size` nodes, then more because they can shrink, then fewer.
fn search_rank(mask: NumaMask, size: u32) -> (u8, u32, NumaMask) {
    let class = match mask.len().cmp(&size) {
        Ordering::Equal => 0,
        Ordering::Greater => 1,
        Ordering::Less => 2,
    };
    (class, mask.len().abs_diff(size), mask)
}
