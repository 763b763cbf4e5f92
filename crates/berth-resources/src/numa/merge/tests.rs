//! Tests of the merge of topology hints: tables of the rules, and a comparison with the full product.

use std::{
    collections::BTreeMap,
    time::{Duration, Instant},
};

use proptest::prelude::*;

use super::*;
use crate::topology::NumaNode;

/// A hint: node IDs with commas between them, `-` for no mask, and `p` at the end if preferred.
fn hint(text: &str) -> TopologyHint {
    let nodes = text.trim_end_matches('p');
    let node = |id: &str| -> u32 { id.parse().expect("a node") };
    let mask = (nodes != "-").then(|| nodes.split(',').map(node).collect());
    TopologyHint { mask, is_preferred: text.ends_with('p') }
}

fn hints(texts: &str) -> Vec<TopologyHint> {
    texts.split_whitespace().map(hint).collect()
}

/// Machine with `count` nodes; distances of a node to each node are in a row. Without rows they are not used.
fn topology(count: u32, rows: &[Vec<u32>]) -> MergeTopology {
    let distances = |node: u32| -> BTreeMap<u32, u32> {
        let row = rows.get(node as usize).into_iter().flatten();
        (0..).zip(row.copied()).collect()
    };
    let nodes = (0..count).map(|node| (node, NumaNode { distances: distances(node), ..NumaNode::default() }));
    let machine = MachineTopology { nodes: nodes.collect(), ..MachineTopology::default() };
    MergeTopology::new(&machine, !rows.is_empty())
}

/// Rows of distances, with commas between them.
fn rows(text: &str) -> Vec<Vec<u32>> {
    let distance = |text: &str| -> u32 { text.parse().expect("a distance") };
    text.split(',').map(|row| row.split_whitespace().map(distance).collect()).collect()
}

fn lists(owned: &[Vec<TopologyHint>]) -> Vec<HintList<'_>> {
    owned.iter().map(|hints| HintList { resource: "r", hints }).collect()
}

fn merged(texts: &[&str], topology: &MergeTopology) -> TopologyHint {
    let owned: Vec<Vec<TopologyHint>> = texts.iter().map(|texts| hints(texts)).collect();
    merge(&lists(&owned), topology)
}

#[test]
fn answers_of_providers_become_lists() {
    let answers = |entries: &[(&str, Option<&str>)]| -> ProviderHints {
        entries.iter().map(|(resource, texts)| ((*resource).to_owned(), texts.map(hints))).collect()
    };
    for (case, provider, expected) in [
        ("nothing at all", answers(&[]), vec![("", "-p")]),
        ("null list", answers(&[("r", None)]), vec![("r", "-p")]),
        ("empty list", answers(&[("r", Some(""))]), vec![("r", "-")]),
        ("hints", answers(&[("r", Some("0p 0,1"))]), vec![("r", "0p 0,1")]),
        ("two resources", answers(&[("b", Some("1")), ("a", None)]), vec![("a", "-p"), ("b", "1")]),
    ] {
        let providers = [provider];
        let actual: Vec<(&str, Vec<TopologyHint>)> =
            hint_lists(&providers).iter().map(|list| (list.resource, list.hints.to_vec())).collect();
        let expected: Vec<(&str, Vec<TopologyHint>)> =
            expected.into_iter().map(|(resource, texts)| (resource, hints(texts))).collect();
        assert_eq!(actual, expected, "{case}");
    }
    let order: Vec<ProviderHints> = vec![answers(&[("z", None)]), answers(&[]), answers(&[("a", None)])];
    let resources: Vec<&str> = hint_lists(&order).iter().map(|list| list.resource).collect();
    assert_eq!(resources, ["z", "", "a"]);
}

#[test]
fn the_best_combination_is_chosen() {
    for (case, nodes, texts, expected) in [
        ("no preference", 2, &["-p"][..], "0,1p"),
        ("no list", 2, &[], "0,1p"),
        ("nothing available", 2, &["-"], "0,1"),
        ("AC-06b-21: nothing available of one resource", 2, &["0p 1p", "-"], "0"),
        ("a node and no preference", 2, &["1p", "-p"], "1p"),
        ("lowest preferred node", 2, &["1p 0p", "-p"], "0p"),
        ("fewer preferred nodes", 3, &["0,1p 2p"], "2p"),
        ("a mask or no mask", 2, &["-p 1p", "-p"], "1p"),
        ("preferred in all lists", 2, &["0p 1p 0,1", "1p 0,1"], "1p"),
        ("preferred beats narrower", 3, &["0,1p 2", "0,1p 2"], "0,1p"),
        ("preferred but unequal", 2, &["0,1p", "0p"], "0"),
        ("preferred in different lists only", 2, &["0p 1", "0 1p"], "0"),
        ("AC-06b-19: nothing in common", 2, &["0p", "1p"], "0,1"),
        ("nodes that the machine lacks", 2, &["0,5p"], "0p"),
        ("only nodes that the machine lacks", 2, &["5p"], "0,1"),
        ("not preferred: the common size beats fewer nodes", 4, &["0,1p 2,3p", "0,1,2p 3p"], "0,1"),
        ("not preferred: same size, lower nodes", 4, &["0,2p 0,1,2,3", "0,1p 0,1,2,3"], "0,1"),
        ("not preferred: below the common size more nodes", 3, &["0,1,2p", "0,1p 2p"], "0,1"),
        ("not preferred: below beats above", 6, &["0,1p 2,3,4", "0,5p 2,3,4"], "0"),
        ("not preferred: above the common size fewer nodes", 5, &["0p 1,2 1,2,3", "4p 1,2 1,2,3"], "1,2"),
    ] {
        assert_eq!(merged(texts, &topology(nodes, &[])), hint(expected), "{case}");
    }
}

#[test]
fn closer_nodes_are_preferred_among_masks_of_the_same_size() {
    let four = rows("10 20 12 20, 20 10 20 12, 12 20 10 11, 20 12 11 10");
    let two = rows("30 20, 20 10");
    for (case, rows, texts, closest, narrowest) in [
        ("closest", &four, &["0,1p 0,2p 2,3p"][..], "2,3p", "0,1p"),
        ("same distance, lower nodes", &four, &["1,3p 0,2p"], "0,2p", "0,2p"),
        ("fewer nodes first", &four, &["2,3p 0p"], "0p", "0p"),
        ("not preferred", &four, &["0,1p 2,3p", "-"], "2,3", "0,1"),
        ("not preferred: the common size first", &four, &["0,1p 0,2,3", "0,1,2 3p"], "0,2", "0,1"),
        ("distance of a node to itself", &two, &["0p 1p"], "1p", "0p"),
    ] {
        let count = if rows.len() == 4 { 4 } else { 2 };
        assert_eq!(merged(texts, &topology(count, rows)), hint(closest), "{case}");
        assert_eq!(merged(texts, &topology(count, &[])), hint(narrowest), "{case}");
    }
}

#[test]
fn the_policy_single_numa_node_takes_one_node_or_no_mask() {
    // Node 1 is closer to itself than node 0: distances do not matter.
    let rows = rows("30 20, 20 10");
    for (case, nodes, texts, expected) in [
        ("one node", 2, &["0p 1p 0,1", "1p 0,1"][..], "1p"),
        ("AC-06b-20: two nodes preferred", 2, &["0,1p"], "-"),
        ("one node, not preferred", 2, &["0 1"], "-"),
        ("no common node", 2, &["0p", "1p"], "-"),
        ("nothing available", 2, &["0p", "-"], "-"),
        ("no preference", 2, &["-p", "-p"], "-p"),
        ("the only node", 1, &["0p"], "-p"),
        ("lowest node", 2, &["1p 0p"], "0p"),
        ("one empty list", 2, &["0p", ""], "-"),
    ] {
        let owned: Vec<Vec<TopologyHint>> = texts.iter().map(|texts| hints(texts)).collect();
        assert_eq!(merge_single_node(&lists(&owned), &topology(nodes, &rows)), hint(expected), "{case}");
    }
}

#[test]
fn the_order_of_lists_and_hints_does_not_matter() {
    // AC-06b-28
    let mut owned: Vec<Vec<TopologyHint>> =
        ["0,1p 2,3p 0,1,2,3", "1,2p 3p 0,1", "-p 0,1,3", "2,3 0,1,2p"].map(hints).into();
    let topology = topology(4, &[]);
    let expected = merge(&lists(&owned), &topology);
    assert_eq!(expected, hint("0,1"));
    for _ in 0..owned.len() {
        owned.rotate_left(1);
        for _ in 0..2 {
            owned.iter_mut().for_each(|hints| hints.reverse());
            assert_eq!(merge(&lists(&owned), &topology), expected, "{owned:?}");
            owned.swap(0, 1);
        }
    }
}

#[test]
fn a_machine_with_36_nodes_and_8_resources_is_merged_in_bounded_time() {
    // All masks of 2 and 3 of 36 nodes. The full product has 10^31 combinations; the bar is 50 ms when optimized.
    let pairs: Vec<[u32; 2]> = (0..36).flat_map(|a| (a + 1..36).map(move |b| [a, b])).collect();
    let triples = pairs.iter().flat_map(|&[a, b]| (b + 1..36).map(move |c| [a, b, c]));
    let mut masks: Vec<NumaMask> = pairs.iter().map(|pair| pair.iter().copied().collect()).collect();
    masks.extend(triples.map(NumaMask::from_iter));
    assert_eq!(masks.len(), 630 + 7140);
    // Some lists lack masks: those of the result are then intersections of larger ones.
    for (is_preferred, missing) in [(true, 0), (false, 0), (false, 50)] {
        let list = |number: usize| -> Vec<TopologyHint> {
            let hints = masks.iter().map(|mask| TopologyHint { mask: Some(*mask), is_preferred });
            hints.skip(number * missing).collect()
        };
        let owned: Vec<Vec<TopologyHint>> = (0..8).map(list).collect();
        let start = Instant::now();
        let best = merge(&lists(&owned), &topology(36, &[]));
        let elapsed = start.elapsed();
        assert_eq!(best, TopologyHint { is_preferred, ..hint("0,1") }, "{missing}");
        assert!(elapsed < Duration::from_secs(5), "{elapsed:?}");
    }
}

/// Result of the full product of the lists: a transcription of §3.3, one combination after the other.
fn product(lists: &[Vec<TopologyHint>], topology: &MergeTopology) -> TopologyHint {
    let smallest = |list: &Vec<TopologyHint>| list.iter().filter_map(|hint| hint.mask).map(NumaMask::len).min();
    let size = lists.iter().filter_map(smallest).max().unwrap_or(0);
    let mut combinations: Vec<Vec<TopologyHint>> = vec![Vec::new()];
    for list in lists {
        let extended = combinations.iter().flat_map(|combination| {
            list.iter().map(move |hint| combination.iter().copied().chain([*hint]).collect::<Vec<_>>())
        });
        combinations = extended.collect();
    }
    let mut best: Option<(NumaMask, bool)> = None;
    for combination in combinations {
        let masks: Vec<NumaMask> = combination.iter().filter_map(|hint| hint.mask).collect();
        let is_equal = masks.iter().all(|mask| *mask == masks[0]);
        let is_preferred = is_equal && combination.iter().all(|hint| hint.is_preferred);
        let mask = masks.iter().fold(topology.nodes(), |all, mask| all.intersection(*mask));
        if !mask.is_empty() {
            let candidate = (mask, is_preferred);
            best = Some(best.map_or(candidate, |current| better_of(current, candidate, size, topology)));
        }
    }
    let (mask, is_preferred) = best.unwrap_or((topology.nodes(), false));
    TopologyHint { mask: Some(mask), is_preferred }
}

/// The table of §3.3, row by row.
fn better_of(
    current: (NumaMask, bool),
    candidate: (NumaMask, bool),
    size: u32,
    topology: &MergeTopology,
) -> (NumaMask, bool) {
    let average = |mask: NumaMask| {
        let distances = topology.distances.as_ref().expect("distances");
        let pairs = mask.iter().flat_map(|from| mask.iter().map(move |to| (from, to)));
        let sum: u64 = pairs.map(|(from, to)| distances[(from * 64 + to) as usize]).sum();
        sum as f64 / f64::from(mask.len() * mask.len())
    };
    let better = || {
        let ((old, _), (new, _)) = (current, candidate);
        let is_better = if old.len() != new.len() {
            new.len() < old.len()
        } else if topology.distances.is_some() && average(old) != average(new) {
            average(new) < average(old)
        } else {
            new.bits() < old.bits()
        };
        if is_better { candidate } else { current }
    };
    let (old, new) = (current.0.len(), candidate.0.len());
    match (current.1, candidate.1) {
        (false, true) => candidate,
        (true, false) => current,
        (true, true) => better(),
        (false, false) if old > size => better(),
        (false, false) if old == size && new == size => better(),
        (false, false) if old == size => current,
        (false, false) if new > size => current,
        (false, false) if new == size || new > old => candidate,
        (false, false) if new < old => current,
        (false, false) => better(),
    }
}

fn some_lists(mask: BoxedStrategy<u64>, most: usize) -> impl Strategy<Value = Vec<Vec<TopologyHint>>> {
    let hint = (proptest::option::weighted(0.9, mask), proptest::bool::weighted(0.6))
        .prop_map(|(mask, is_preferred)| TopologyHint { mask: mask.map(NumaMask::from_bits), is_preferred });
    proptest::collection::vec(proptest::collection::vec(hint, 0..most), 0..5)
}

/// Distances of 4 nodes to each other, in half of the cases. They need not be symmetric.
fn some_distances() -> impl Strategy<Value = Vec<Vec<u32>>> {
    let row = proptest::collection::vec(10..14_u32, 4);
    proptest::option::of(proptest::collection::vec(row, 4)).prop_map(Option::unwrap_or_default)
}

fn reversed(mut owned: Vec<Vec<TopologyHint>>) -> Vec<Vec<TopologyHint>> {
    owned.reverse();
    owned
}

proptest! {
    #[test]
    fn the_merge_equals_the_full_product(
        owned in some_lists((0..16_u64).boxed(), 8),
        nodes in 1..5_u32,
        distances in some_distances(),
    ) {
        let topology = topology(nodes, &distances);
        let best = merge(&lists(&owned), &topology);
        prop_assert_eq!(best, product(&owned, &topology));

        let is_candidate = |hint: &TopologyHint| hint.is_preferred && hint.mask.is_none_or(|mask| mask.len() == 1);
        let single: Vec<Vec<TopologyHint>> =
            owned.iter().map(|list| list.iter().copied().filter(is_candidate).collect()).collect();
        let expected = product(&single, &MergeTopology { distances: None, ..topology.clone() });
        let expected = TopologyHint { mask: expected.mask.filter(|mask| *mask != topology.nodes()), ..expected };
        prop_assert_eq!(merge_single_node(&lists(&owned), &topology), expected);

        let reversed = reversed(owned);
        prop_assert_eq!(merge(&lists(&reversed), &topology), best);
    }

    #[test]
    fn small_lists_on_many_nodes_are_merged_exactly(
        owned in some_lists((any::<u64>(), any::<u64>()).prop_map(|(a, b)| a | b).boxed(), 7),
        nodes in 17..64_u32,
    ) {
        let topology = topology(nodes, &[]);
        let best = merge(&lists(&owned), &topology);
        prop_assert_eq!(best, product(&owned, &topology));
        let reversed = reversed(owned);
        prop_assert_eq!(merge(&lists(&reversed), &topology), best);
    }
}
