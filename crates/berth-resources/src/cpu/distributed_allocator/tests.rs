//! Tests of the distributed CPU allocator, also against a slow transcription of spec 06b §1.9.

use proptest::prelude::*;

use super::*;
use crate::cpu::packed_allocator::tests::{
    Layout, cpus, masks, nodes_slowly, subset, take_slowly, topologies, topology,
};

/// Machine, candidates, number of CPUs, CPUs per group, and the CPUs that are taken.
type Row = (&'static str, &'static str, usize, usize, &'static str);

const DISTRIBUTED: &[Row] = &[
    ("A", "0-7", 0, 1, ""),
    ("A", "0-7", 1, 1, "0"),
    ("A", "1,3,5-7", 1, 1, "6"),
    ("A", "0-3,6", 2, 1, "2,6"),
    ("B", "0-11", 6, 1, "0,2,4,6,8,10"),
    ("B", "0-11", 7, 1, "0-3,6-8"),
    ("B", "0-11", 8, 1, "0-3,6-9"),
    ("B", "0-11", 12, 1, "0-11"),
    ("B", "1-11", 6, 1, "1,3,5,7,9,11"),
    ("B", "1-11", 10, 1, "1-10"),
    ("B", "1-11", 8, 2, "1-4,7-10"),
    // Node 1 has more free CPUs: the CPU comes from there although node 0 is first.
    ("B", "1-5,7-11", 1, 1, "1"),
    // Not a multiple of the group size: packed.
    ("B", "1-5,7-11", 1, 2, "2"),
    ("B", "0-11", 7, 2, "0-2,4,6,8,10"),
    ("C", "0-79", 20, 1, "0-9,40-49"),
    ("C", "0-79", 21, 1, "0-5,10-14,40-44,50-54"),
    ("C", "0-79", 22, 2, "0-5,10-14,40-45,50-54"),
    // AC-06b-9
    ("C", "0-79", 26, 1, "0-6,10-16,40-45,50-55"),
    // AC-06b-10
    ("C", "0-79", 26, 2, "0-6,10-15,40-46,50-55"),
    ("C", "0-79", 40, 1, "0-19,40-59"),
    ("C", "0-79", 48, 1, "0-7,10-17,20-27,40-47,50-57,60-67"),
    ("C", "0-79", 62, 1, "0-7,10-17,20-27,30-37,40-47,50-57,60-66,70-76"),
    ("C", "0-79", 62, 2, "0-7,10-17,20-27,30-36,40-47,50-57,60-67,70-76"),
    ("C", "0-79", 64, 1, "0-7,10-17,20-27,30-37,40-47,50-57,60-67,70-77"),
    ("C", "0-79", 79, 1, "0-78"),
    ("C", "0-79", 80, 2, "0-79"),
    ("C", "1-79", 78, 2, "1-39,41-79"),
    // The balance decides between nodes.
    ("C", "1-29,32-39,41-69,72-79", 48, 1, "1-8,10-17,20-27,41-48,50-57,60-67"),
    ("C", "2-29,31-39,42-69,71-79", 48, 1, "10-17,20-27,31-38,50-57,60-67,71-78"),
    ("C", "0-4,10-19,30-33,50-59", 16, 1, "10-17,50-57"),
    ("C", "0,10,20,30", 3, 1, "0,10,20"),
    ("C", "0,10,20,30,40,50", 4, 2, "0,10,40,50"),
    // The balance decides who contributes the rest.
    ("C", "0-8,10-18,20-39,40-48,50-58,60-79", 62, 1, "0-7,10-17,20-27,30-37,40-46,50-56,60-67,70-77"),
    ("C", "0-8,10-18,20-39,40-48,50-58,60-79", 62, 2, "0-7,10-16,20-27,30-37,40-47,50-56,60-67,70-77"),
    // Only one node can contribute the rest.
    ("C", "0-3,10-13,20-23,30-36,40-43,50-53,60-63,70-76", 34, 1, "0-3,10-13,20-23,30-34,40-43,50-53,60-63,70-74"),
    ("C", "0-2,10-12,20-22,30-32,40-41,50-51,60-61,70-71", 16, 1, "0-1,10-11,20-21,30-31,40-41,50-51,60-61,70-71"),
    // No combination permits an even distribution: packed.
    ("C", "0-2,10-12,20-29,60-69", 24, 1, "0-2,10,20-29,60-69"),
    ("C", "0-1,10-11,20-29,60-69", 21, 1, "0,20-29,60-69"),
    ("C", "0-2,10-12,40", 4, 2, "0-2,40"),
    ("C", "0-10,20,40-50,60", 22, 2, "0-10,40-50"),
    ("W", "0-15", 3, 1, "0-1,8"),
    ("W", "0-15", 10, 1, "0-2,4-6,8-9,12-13"),
    ("W", "1-15", 9, 1, "2-6,10-13"),
    ("W", "1-15", 12, 2, "1-6,9-14"),
    (
        "L",
        "0,30-31,43-47,62-63,75-79,94,96,101-111,126-128,158-159,171-175,190-191,203-207,222-223,229-239,254-255",
        28,
        1,
        "43-47,75-79,96,101-105,171-174,203-206,229-232",
    ),
];

#[test]
fn cpus_are_divided_evenly_among_nodes() {
    for (name, candidates, count, group_size, expected) in DISTRIBUTED {
        let taken = take_distributed(&topology(name), &cpus(candidates), *count, *group_size).expect(name);
        assert_eq!(taken.to_string(), *expected, "machine {name}, {count} of {candidates} by {group_size}");
    }
}

#[test]
fn too_few_candidates_are_an_error_with_the_text_of_the_reference() {
    for (candidates, count, group_size, available) in [("0,2,4,6", 5, 1, 4), ("", 2, 2, 0), ("0-2", 4, 0, 3)] {
        let error = take_distributed(&topology("A"), &cpus(candidates), count, group_size).expect_err(candidates);
        let text = format!("not enough cpus available to satisfy request: requested={count}, available={available}");
        assert_eq!(error.to_string(), text);
    }
}

#[test]
fn groups_of_no_cpus_are_packed() {
    let taken = take_distributed(&topology("A"), &cpus("0-7"), 2, 0);
    assert_eq!(taken, Ok(cpus("0,4")));
}

#[test]
fn a_walk_visits_prefixes_in_order_and_skips_below() {
    let visit = |skipped: &[usize]| {
        let mut walk = CombinationWalk::new(4, 2);
        let (mut prefixes, mut descends) = (Vec::new(), true);
        while let Some(prefix) = walk.step(descends) {
            descends = prefix != skipped;
            prefixes.push(prefix.to_vec());
        }
        prefixes
    };
    let all: &[&[usize]] = &[&[0], &[0, 1], &[0, 2], &[0, 3], &[1], &[1, 2], &[1, 3], &[2], &[2, 3]];
    assert_eq!(visit(&[]), all);
    let without_one: &[&[usize]] = &[&[0], &[0, 1], &[0, 2], &[0, 3], &[1], &[2], &[2, 3]];
    assert_eq!(visit(&[1]), without_one);
}

/// Number of steps of a search, and the sum of all shares.
fn search(free: &[usize], size: usize, groups: usize, group_size: usize) -> (usize, usize) {
    let mut search = NodeSearch::new(free, size, groups, group_size);
    let shares = search.run().expect("a combination");
    assert_eq!(shares.len(), size);
    let cpus = |share: &NodeShare| share.even + share.extra_groups * group_size;
    assert!(shares.iter().all(|share| cpus(share) <= free[share.node]), "{shares:?}");
    (MAX_STEPS - search.steps_left, shares.iter().map(cpus).sum())
}

#[test]
fn searches_among_64_equal_nodes_are_short() {
    for size in 1..=64 {
        for groups in [size, size * 3 + size / 2, size * 7, size * 8] {
            let (steps, taken) = search(&[16; 64], size, groups, 2);
            assert_eq!(taken, groups * 2);
            assert!(steps < 1000, "{groups} groups of {size} nodes: {steps} steps");
        }
    }
}

#[test]
fn searches_among_64_different_nodes_end() {
    let free: Vec<usize> = (1..=64).collect();
    // No combination has its best conceivable balance: the limit ends the search.
    let (steps, taken) = search(&free, 27, 1040, 1);
    assert_eq!((steps, taken), (MAX_STEPS, 1040));
}

#[test]
fn searches_among_8_nodes_are_complete() {
    for size in 1..=8 {
        for groups in [size, size + 1, 2 * size + 3, 24, 29, 31, 67] {
            let mut search = NodeSearch::new(&[11, 5, 6, 7, 13, 9, 8, 10], size, groups, 1);
            let _ = search.run();
            assert!(search.steps_left > MAX_STEPS / 2, "{groups} of {size} nodes");
        }
    }
}

#[test]
fn a_machine_with_64_nodes_is_divided_evenly() {
    let layout = Layout { sockets: 8, nodes: 64, cores: 256, threads: 2, cores_per_cache: 4, is_interleaved: false };
    let topology = layout.topology();
    let taken = take_distributed(&topology, &topology.all(), 300, 1).expect("enough CPUs");
    let of_node = |node: u32| taken.intersection(&topology.select(|info| info.node == node)).len();
    // 38 nodes have 304 CPUs: 34 contribute all of their 8, 4 of them 7.
    let expected: Vec<usize> = (0..64).map(|node| if node < 34 { 8 } else { 7 * usize::from(node < 38) }).collect();
    assert_eq!((0..64).map(of_node).collect::<Vec<usize>>(), expected);
}

fn rounded(value: f64) -> f64 {
    (value * 1000.0).round() / 1000.0
}

/// Standard deviation as the reference computes it.
fn deviation(free: &[usize]) -> f64 {
    let mean = rounded(free.iter().sum::<usize>() as f64 / free.len() as f64);
    let squares: f64 = free.iter().map(|free| (*free as f64 - mean) * (*free as f64 - mean)).sum();
    rounded((squares / free.len() as f64).sqrt())
}

/// All combinations of `size` of these numbers, in lexicographic order of positions.
fn combinations(of: &[usize], size: usize) -> Vec<Vec<usize>> {
    if size == 0 {
        return vec![Vec::new()];
    }
    let from = |at: usize| {
        let rest = combinations(&of[at + 1..], size - 1).into_iter();
        rest.map(move |rest| iter::once(of[at]).chain(rest).collect::<Vec<usize>>())
    };
    (0..of.len()).flat_map(from).collect()
}

/// A combination of nodes, and those of them that contribute the rest round-robin.
struct SlowChoice {
    balance: f64,
    nodes: Vec<usize>,
    rest: Vec<usize>,
}

/// Balance after the nodes of a subset have contributed the rest round-robin; `None` if they have too few groups.
fn balance_of_subset(free: &[usize], subset: &[usize], mut rest: usize, group_size: usize) -> Option<f64> {
    let mut free = free.to_vec();
    if subset.iter().map(|node| free[*node] / group_size * group_size).sum::<usize>() < rest {
        return None;
    }
    while rest > 0 {
        for node in subset {
            if rest > 0 && free[*node] >= group_size {
                free[*node] -= group_size;
                rest -= group_size;
            }
        }
    }
    Some(deviation(&free))
}

/// Step 2 for one combination.
fn choice_of(free: &[usize], nodes: &[usize], count: usize, group_size: usize) -> Option<SlowChoice> {
    let even = count / nodes.len() / group_size * group_size;
    let in_groups: usize = nodes.iter().map(|node| free[*node] / group_size * group_size).sum();
    if in_groups < count || nodes.iter().any(|node| free[*node] < even) {
        return None;
    }
    let mut after = free.to_vec();
    nodes.iter().for_each(|node| after[*node] -= even);
    let rest = count - even * nodes.len();
    if rest == 0 {
        return Some(SlowChoice { balance: deviation(&after), nodes: nodes.to_vec(), rest: Vec::new() });
    }
    let open: Vec<usize> = nodes.iter().copied().filter(|node| after[*node] >= group_size).collect();
    let mut best: Option<SlowChoice> = None;
    for subset in (1..=open.len()).rev().flat_map(|size| combinations(&open, size)) {
        let Some(balance) = balance_of_subset(&after, &subset, rest, group_size) else { continue };
        if best.as_ref().is_none_or(|best| balance < best.balance) {
            best = Some(SlowChoice { balance, nodes: nodes.to_vec(), rest: subset });
        }
    }
    best
}

/// Transcription of spec 06b §1.9 that enumerates everything. `None` if there are too few candidates.
fn distribute_slowly(topology: &CpuTopology, candidates: &CpuSet, count: usize, group_size: usize) -> Option<CpuSet> {
    let packed = |cpus: &CpuSet, count| take_slowly(topology, cpus, count, AllocatorOptions::default());
    let mut nodes = nodes_slowly(topology, candidates);
    if count == 0 || !count.is_multiple_of(group_size) || count > candidates.len() {
        return packed(candidates, count);
    }
    let free: Vec<usize> = nodes.iter().map(CpuSet::len).collect();
    let all: Vec<usize> = (0..free.len()).collect();
    let per_node = topology.num_cpus().div_ceil(group_size).div_ceil(topology.num_nodes());
    let fewest = count.div_ceil(group_size).div_ceil(per_node);
    for size in fewest..=free.len().min(count.div_ceil(group_size)) {
        let mut best: Option<SlowChoice> = None;
        for combination in combinations(&all, size) {
            let choice = choice_of(&free, &combination, count, group_size);
            let is_better = |choice: &SlowChoice| best.as_ref().is_none_or(|best| choice.balance < best.balance);
            if choice.as_ref().is_some_and(is_better) {
                best = choice;
            }
        }
        let Some(best) = best else { continue };
        let even = count / size / group_size * group_size;
        let mut turns: Vec<(usize, usize)> = best.nodes.iter().map(|node| (*node, even)).collect();
        let rest = (count - even * size) / group_size;
        let mut left = free.clone();
        best.nodes.iter().for_each(|node| left[*node] -= even);
        for node in best.rest.iter().cycle() {
            if turns.len() == size + rest {
                break;
            }
            if left[*node] >= group_size {
                left[*node] -= group_size;
                turns.push((*node, group_size));
            }
        }
        let mut taken = CpuSet::default();
        for (node, count) in turns {
            let cpus = packed(&nodes[node], count)?;
            nodes[node] = nodes[node].difference(&cpus);
            taken = taken.union(&cpus);
        }
        return Some(taken);
    }
    packed(candidates, count)
}

proptest! {
    #[test]
    fn results_equal_those_of_the_slow_allocator(
        topology in topologies(1..=2),
        mask in masks(),
        count in 0usize..=70,
        group_size in 1usize..=3,
        is_multiple in any::<bool>(),
    ) {
        let candidates = subset(&topology.all(), mask);
        let count = count % (candidates.len() + 2);
        let count = if is_multiple { count / group_size * group_size } else { count };
        let taken = take_distributed(&topology, &candidates, count, group_size);
        prop_assert_eq!(&taken, &take_distributed(&topology, &candidates, count, group_size));
        let expected = distribute_slowly(&topology, &candidates, count, group_size);
        let error = NotEnoughCpus { requested: count, available: candidates.len() };
        prop_assert_eq!(&taken, &expected.ok_or(error));
        if let Ok(taken) = taken {
            prop_assert_eq!(taken.len(), count);
            prop_assert!(taken.is_subset(&candidates));
        }
    }

    #[test]
    fn choices_equal_those_of_the_enumeration(
        free in proptest::collection::vec(1usize..40, 1..7),
        size in 1usize..7,
        groups in 1usize..200,
        group_size in 1usize..=4,
    ) {
        let size = size.min(free.len());
        let all: Vec<usize> = (0..free.len()).collect();
        let most: usize = free.iter().map(|free| free / group_size).sum();
        prop_assume!(most >= size);
        let groups = size + groups % (most - size + 1);
        let mut best: Option<SlowChoice> = None;
        for nodes in combinations(&all, size) {
            if let Some(choice) = choice_of(&free, &nodes, groups * group_size, group_size)
                && best.as_ref().is_none_or(|best| choice.balance < best.balance)
            {
                best = Some(choice);
            }
        }
        let shares = NodeSearch::new(&free, size, groups, group_size).run();
        let nodes = shares.map(|shares| shares.iter().map(|share| share.node).collect::<Vec<usize>>());
        prop_assert_eq!(nodes, best.map(|best| best.nodes));
    }

    #[test]
    fn balance_is_the_deviation_in_thousandths(free in proptest::collection::vec(0usize..1024, 1..64)) {
        let scale = BalanceScale::new(free.len(), free.iter().sum());
        let balance = scale.balance(free.iter().map(|free| square(*free)).sum());
        prop_assert_eq!(balance, (deviation(&free) * 1000.0).round() as u64);
    }
}
