//! Enumeration of NUMA masks for topology hints, by size and bounded in number. Pure. Spec 06b §1.10.

use std::iter::successors;

use super::mask::NumaMask;

/// Number of nodes up to which all combinations are enumerated: 65,535 masks.
const MAX_COMPLETE_NODES: usize = 16;
/// Limit of masks of complete sizes on machines with more nodes.
const MAX_COMPLETE_MASKS: u128 = 10_000;

/// Non-empty subsets of `nodes`, by number of nodes, then lexicographically by their ascending node lists.
///
/// Up to 16 nodes the enumeration is complete, and in the order of the reference. With more nodes there would be up to
/// 2^64 masks. A size is then complete if all its masks still fit into 10,000 masks, the smallest sizes first; of the
/// other sizes only runs of neighboring nodes are enumerated: of `0,1,2,5` the runs of two are `0,1`, `1,2`, and `2,5`.
/// The mask of all nodes is always the last one, and there are at most 10,622 masks. With 36 nodes all masks of up to
/// three nodes are enumerated, with 64 nodes all of up to two. Requests that fit on so many nodes get the same
/// preferred hints as from a complete enumeration; larger ones get those of neighboring nodes.
pub fn masks(nodes: NumaMask) -> impl Iterator<Item = NumaMask> {
    let nodes: Vec<u32> = nodes.iter().collect();
    sizes(nodes.len()).into_iter().flat_map(move |(size, extent)| {
        let (nodes, count) = (nodes.clone(), nodes.len());
        let first: Vec<usize> = (0..size).collect();
        let all = successors(Some(first), move |positions| match extent {
            SizeExtent::Combinations => next_combination(positions, count),
            SizeExtent::Runs => next_run(positions, count),
        });
        all.map(move |positions| positions.into_iter().filter_map(|at| nodes.get(at).copied()).collect::<NumaMask>())
    })
}

/// Which masks of a size are enumerated.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum SizeExtent {
    /// All masks.
    Combinations,
    /// Masks of neighboring nodes.
    Runs,
}

/// Sizes of masks of `count` nodes, ascending.
fn sizes(count: usize) -> Vec<(usize, SizeExtent)> {
    let mut budget = if count <= MAX_COMPLETE_NODES { u128::MAX } else { MAX_COMPLETE_MASKS };
    let extent = |size: usize| match budget.checked_sub(binomial(count, size)) {
        Some(rest) => {
            budget = rest;
            (size, SizeExtent::Combinations)
        }
        None => (size, SizeExtent::Runs),
    };
    (1..=count).map(extent).collect()
}

/// Number of subsets of `size` elements of a set of `count` elements, of at most 64.
fn binomial(count: usize, size: usize) -> u128 {
    // Each quotient is a binomial coefficient itself, so no remainder is lost.
    (0..size).fold(1, |product, taken| product * (count - taken) as u128 / (taken as u128 + 1))
}

/// Ascending positions below `count` that follow lexicographically.
fn next_combination(positions: &[usize], count: usize) -> Option<Vec<usize>> {
    let size = positions.len();
    let (at, position) = positions.iter().enumerate().rfind(|(at, position)| **position < count - size + at)?;
    let unchanged = positions.iter().copied().take(at);
    Some(unchanged.chain((position + 1..).take(size - at)).collect())
}

/// Neighboring positions below `count`, one further.
fn next_run(positions: &[usize], count: usize) -> Option<Vec<usize>> {
    let last = positions.last()?;
    (last + 1 < count).then(|| positions.iter().map(|position| position + 1).collect())
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    fn first_nodes(count: u32) -> NumaMask {
        (0..count).collect()
    }

    #[test]
    fn masks_are_ordered_by_size_then_by_nodes() {
        let order = |nodes: &[u32]| {
            let nodes: NumaMask = nodes.iter().copied().collect();
            masks(nodes).map(|mask| mask.to_string()).collect::<Vec<_>>().join(" ")
        };
        let cases: [(&[u32], &str); 5] = [
            (&[], ""),
            (&[7], "7"),
            (&[0, 1], "0 1 0,1"),
            (&[0, 2, 63], "0 2 63 0,2 0,63 2,63 0,2,63"),
            (&[0, 1, 2, 3], "0 1 2 3 0,1 0,2 0,3 1,2 1,3 2,3 0,1,2 0,1,3 0,2,3 1,2,3 0,1,2,3"),
        ];
        for (nodes, expected) in cases {
            assert_eq!(order(nodes), expected);
        }
    }

    #[test]
    fn up_to_sixteen_nodes_all_masks_are_enumerated() {
        for count in [1, 5, 8, 16] {
            let all: BTreeSet<NumaMask> = masks(first_nodes(count)).collect();
            assert_eq!(all.len(), (1 << count) - 1, "{count} nodes");
            assert_eq!(masks(first_nodes(count)).count(), all.len(), "{count} nodes");
        }
    }

    #[test]
    fn with_more_nodes_the_number_of_masks_is_bounded() {
        for (count, expected, complete) in [(17, 9_627, 5), (36, 9_028, 3), (64, 6_108, 2)] {
            let nodes = first_nodes(count);
            let all: Vec<NumaMask> = masks(nodes).collect();
            assert_eq!(all.len(), expected, "{count} nodes");
            assert_eq!(all.last(), Some(&nodes), "{count} nodes");
            assert!(all.windows(2).all(|pair| pair[0].len() <= pair[1].len()), "{count} nodes");
            assert_eq!(all.iter().collect::<BTreeSet<_>>().len(), expected, "{count} nodes: duplicates");
            for size in 1..=count {
                let of_size: Vec<&NumaMask> = all.iter().filter(|mask| mask.len() == size).collect();
                let run: NumaMask = (count - size..count).collect();
                assert!(of_size.contains(&&run), "{count} nodes: last run of {size}");
                if size <= complete {
                    let total = binomial(count as usize, size as usize);
                    assert_eq!(of_size.len() as u128, total, "{count} nodes: masks of {size}");
                }
            }
        }
    }

    #[test]
    fn binomial_coefficients_are_exact() {
        let largest = 1_832_624_140_942_590_534;
        for (count, size, expected) in [(5, 2, 10), (17, 6, 12_376), (36, 3, 7_140), (64, 32, largest)] {
            assert_eq!(binomial(count, size), expected);
        }
    }
}
