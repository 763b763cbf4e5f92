//! Distributed CPU allocator: equal numbers of CPUs from several NUMA nodes. Pure. Spec 06b §1.9.
//!
//! A request that fits no single node is divided evenly among as few nodes as possible, in groups of CPUs (whole cores
//! or single CPUs). Groups that remain come from some of these nodes. Among all choices of nodes, the one with the
//! lowest balance wins: the standard deviation of the free CPUs of all nodes afterwards. Among equals the first one
//! wins, by the order of the reference's enumeration.
//!
//! The reference enumerates all combinations: up to 10^18 of 64 nodes. Here a branch-and-bound search returns the same
//! result: it skips every prefix whose best conceivable completion is not better than the best choice so far, and ends
//! once a choice reaches the best conceivable balance. On 64 equal nodes that takes fewer than 1,000 steps. The
//! reference can also overwrite its best combination of four or more nodes while it enumerates; here it stays.

use std::{cmp::Reverse, collections::BinaryHeap, iter};

use berth_types::CpuSet;

use super::packed_allocator::{AllocatorOptions, CpuHierarchy, NotEnoughCpus};
use crate::topology::CpuTopology;

/// Most prefixes of combinations that one search visits: enough for any request on up to 8 nodes. After that the best
/// choice so far is taken, which also divides the request evenly, but may leave the nodes less balanced.
const MAX_STEPS: usize = 50_000;

/// Takes `count` of the candidates in groups of `group_size` CPUs, evenly from as few NUMA nodes as possible.
///
/// Takes them packed if `count` is not a multiple of `group_size`, or if no combination of nodes permits an even
/// distribution. The work is bounded: with more than 8 nodes of different numbers of free CPUs, a search that has
/// visited 50,000 partial combinations takes the best one so far.
///
/// # Errors
/// There are fewer candidates than `count`.
pub fn take_distributed(
    topology: &CpuTopology,
    candidates: &CpuSet,
    count: usize,
    group_size: usize,
) -> Result<CpuSet, NotEnoughCpus> {
    let hierarchy = CpuHierarchy::new(topology);
    let packed = |cpus: &CpuSet, count| hierarchy.take_packed(cpus, count, AllocatorOptions::default());
    let nodes = hierarchy.candidates_by_node(candidates);
    let free: Vec<usize> = nodes.iter().map(CpuSet::len).collect();
    let can_divide = count > 0 && count.is_multiple_of(group_size) && count <= free.iter().sum::<usize>();
    let shares = if can_divide { shares_of_nodes(topology, &free, count / group_size, group_size) } else { None };
    let Some(shares) = shares else { return packed(candidates, count) };
    let mut taken = CpuSet::default();
    for share in shares {
        let mut left = nodes[share.node].clone();
        // One allocation per group, as the reference does: a single one could take other CPUs.
        for size in iter::once(share.even).chain(iter::repeat_n(group_size, share.extra_groups)) {
            let cpus = packed(&left, size)?;
            left = left.difference(&cpus);
            taken.extend(cpus.iter());
        }
    }
    Ok(taken)
}

/// What one NUMA node contributes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct NodeShare {
    /// Index in the list of nodes.
    node: usize,
    /// CPUs that every chosen node contributes.
    even: usize,
    /// Groups in addition.
    extra_groups: usize,
}

/// Shares of the best combination of the lowest possible number of nodes; `None` if no combination can be divided.
fn shares_of_nodes(topology: &CpuTopology, free: &[usize], groups: usize, group_size: usize) -> Option<Vec<NodeShare>> {
    let groups_per_node = topology.num_cpus().div_ceil(group_size).div_ceil(topology.num_nodes());
    let fewest = groups.div_ceil(groups_per_node);
    let most = groups.min(free.len());
    (fewest..=most).find_map(|size| NodeSearch::new(free, size, groups, group_size).run())
}

/// Balance of allocations on one machine: standard deviation of the free CPUs per node, in thousandths of a CPU.
///
/// Computes with integers what the reference computes with floating-point numbers: mean and result are both rounded to
/// three decimals. The mean is the same for all choices, so the balance depends on the sum of squares only, and rises
/// with it.
struct BalanceScale {
    nodes: u64,
    /// Free CPUs of all nodes after the allocation.
    total: u64,
    /// In thousandths of a CPU.
    mean: u64,
}

impl BalanceScale {
    fn new(nodes: usize, total: usize) -> Self {
        let (nodes, total) = (nodes as u64, total as u64);
        Self { nodes, total, mean: (2000 * total + nodes) / (2 * nodes) }
    }

    /// Balance, from the sum of the squares of the nodes' free CPUs.
    fn balance(&self, squares: u64) -> u64 {
        // Sum of the squared differences from the mean, in millionths.
        let differences = 1_000_000 * squares + self.nodes * self.mean * self.mean - 2000 * self.mean * self.total;
        let root = (differences / self.nodes).isqrt();
        let rounds_up = 4 * differences >= self.nodes * (2 * root + 1) * (2 * root + 1);
        root + u64::from(rounds_up)
    }
}

fn square(count: usize) -> u64 {
    let count = count as u64;
    count * count
}

/// Combinations of `size` of the numbers below `end`, in lexicographic order, with all of their prefixes.
struct CombinationWalk {
    end: usize,
    size: usize,
    prefix: Vec<usize>,
}

impl CombinationWalk {
    /// `size` is at least 1 and at most `end`.
    fn new(end: usize, size: usize) -> Self {
        Self { end, size, prefix: Vec::with_capacity(size) }
    }

    /// Moves to the first extension of the current prefix if `descends`, otherwise to the next prefix that does not
    /// extend it. `None` at the end.
    fn step(&mut self, descends: bool) -> Option<&[usize]> {
        if descends && self.prefix.len() < self.size {
            let next = self.prefix.last().map_or(0, |last| last + 1);
            self.prefix.push(next);
            return Some(&self.prefix);
        }
        while let Some(last) = self.prefix.pop() {
            // The rest of the combination must fit behind.
            if last + self.size - self.prefix.len() < self.end {
                self.prefix.push(last + 1);
                return Some(&self.prefix);
            }
        }
        None
    }
}

/// Best choice of an enumeration so far. The first one wins among equals, therefore an estimate from outside the
/// enumeration loses against its equals.
struct BestChoice<T> {
    balance: u64,
    choice: T,
    is_estimate: bool,
}

impl<T> BestChoice<T> {
    /// Whether a choice with this balance would replace the current one.
    fn admits(&self, balance: u64) -> bool {
        balance < self.balance || (self.is_estimate && balance == self.balance)
    }

    fn offer(&mut self, balance: u64, choice: T) {
        if self.admits(balance) {
            *self = Self { balance, choice, is_estimate: false };
        }
    }

    /// Whether no later choice can replace this one, given the lowest conceivable balance.
    fn is_final(&self, bound: u64) -> bool {
        !self.is_estimate && self.balance <= bound
    }
}

/// Free CPUs after every chosen node has contributed its even share.
struct EvenShare {
    /// Of each chosen node.
    free: Vec<usize>,
    /// Sum of squares over all nodes, chosen or not.
    squares: u64,
}

/// Search for the combination of `size` nodes with the lowest balance. Nodes are indexes into `free`.
struct NodeSearch<'a> {
    /// Candidates of each node, in the order in which nodes are taken.
    free: &'a [usize],
    /// Nodes with most candidates first.
    widest: Vec<usize>,
    /// Number of nodes to combine: at most all of them.
    size: usize,
    /// Number of groups requested: at least `size`.
    groups: usize,
    /// CPUs per group.
    group_size: usize,
    /// Sum of squares of `free`.
    squares: u64,
    scale: BalanceScale,
    steps_left: usize,
}

impl<'a> NodeSearch<'a> {
    fn new(free: &'a [usize], size: usize, groups: usize, group_size: usize) -> Self {
        let mut widest: Vec<usize> = (0..free.len()).collect();
        widest.sort_by_key(|node| Reverse(free[*node]));
        let squares = free.iter().map(|free| square(*free)).sum();
        let scale = BalanceScale::new(free.len(), free.iter().sum::<usize>() - groups * group_size);
        Self { free, widest, size, groups, group_size, squares, scale, steps_left: MAX_STEPS }
    }

    /// CPUs that each chosen node contributes at least.
    fn even(&self) -> usize {
        self.groups / self.size * self.group_size
    }

    /// Groups that remain: fewer than nodes.
    fn extra(&self) -> usize {
        self.groups % self.size
    }

    /// Best combination; `None` if none has enough CPUs.
    ///
    /// Nodes with more free CPUs never make a combination worse, if extra groups may go anywhere. So the widest nodes
    /// show whether there is a combination at all, and give the lowest conceivable balance.
    fn run(&mut self) -> Option<Vec<NodeShare>> {
        let widest = self.completion(&[]);
        let bound = self.bound(&widest)?;
        let (balance, extra_groups) = self.divide_extra(&widest)?;
        let choice = self.shares(&widest, &extra_groups);
        let mut best = BestChoice { balance, choice, is_estimate: true };
        let mut walk = CombinationWalk::new(self.free.len(), self.size);
        let mut descends = true;
        while let Some(prefix) = walk.step(descends) {
            if best.is_final(bound) || !self.count_step() {
                break;
            }
            descends = self.bound(&self.completion(prefix)).is_some_and(|bound| best.admits(bound));
            if descends
                && prefix.len() == self.size
                && let Some((balance, extra_groups)) = self.divide_extra(prefix)
            {
                best.offer(balance, self.shares(prefix, &extra_groups));
            }
        }
        Some(best.choice)
    }

    /// Shares of nodes, from their numbers of extra groups.
    fn shares(&self, nodes: &[usize], extra_groups: &[usize]) -> Vec<NodeShare> {
        let even = self.even();
        let pairs = nodes.iter().zip(extra_groups);
        pairs.map(|(node, extra_groups)| NodeShare { node: *node, even, extra_groups: *extra_groups }).collect()
    }

    /// False once the search has taken all of its steps.
    fn count_step(&mut self) -> bool {
        let may_continue = self.steps_left > 0;
        self.steps_left = self.steps_left.saturating_sub(1);
        may_continue
    }

    /// The combination with this prefix whose other nodes have most free CPUs, in ascending order.
    fn completion(&self, prefix: &[usize]) -> Vec<usize> {
        let next = prefix.last().map_or(0, |last| last + 1);
        let others = self.widest.iter().filter(|node| **node >= next).take(self.size - prefix.len());
        let mut nodes: Vec<usize> = prefix.iter().chain(others).copied().collect();
        nodes.sort_unstable();
        nodes
    }

    /// Lowest balance that any distribution over these nodes could have; `None` if they have too few CPUs.
    fn bound(&self, nodes: &[usize]) -> Option<u64> {
        let groups: usize = nodes.iter().map(|node| self.free[*node] / self.group_size).sum();
        if groups < self.groups || nodes.iter().any(|node| self.free[*node] < self.even()) {
            return None;
        }
        let EvenShare { free, squares } = self.even_share(nodes);
        self.bound_of_groups(free, squares, self.extra())
    }

    fn even_share(&self, nodes: &[usize]) -> EvenShare {
        let free: Vec<usize> = nodes.iter().map(|node| self.free[*node] - self.even()).collect();
        let before: u64 = nodes.iter().map(|node| square(self.free[*node])).sum();
        let after: u64 = free.iter().map(|free| square(*free)).sum();
        EvenShare { free, squares: self.squares - before + after }
    }

    /// Lowest balance if each of `groups` may come from any of the nodes: always from the one with most free CPUs.
    fn bound_of_groups(&self, free: Vec<usize>, mut squares: u64, groups: usize) -> Option<u64> {
        let mut heap = BinaryHeap::from(free);
        for _ in 0..groups {
            let before = heap.pop().filter(|most| *most >= self.group_size)?;
            let after = before - self.group_size;
            squares -= square(before) - square(after);
            heap.push(after);
        }
        Some(self.scale.balance(squares))
    }

    /// Balance, and extra groups of each of these nodes, for the best way to divide the extra groups.
    ///
    /// The reference tries all subsets, larger ones first, and takes the groups round-robin from the nodes of a subset.
    /// Only the first nodes of a subset contribute if it has more nodes than there are groups: prefixes of that
    /// length represent all of them. The reference never ends if a subset has enough CPUs but not in whole groups; here
    /// such a subset is skipped.
    fn divide_extra(&mut self, nodes: &[usize]) -> Option<(u64, Vec<usize>)> {
        let bound = self.bound(nodes)?;
        let share = self.even_share(nodes);
        let extra = self.extra();
        if extra == 0 {
            return Some((bound, vec![0; nodes.len()]));
        }
        let open: Vec<usize> = (0..nodes.len()).filter(|at| share.free[*at] >= self.group_size).collect();
        let mut widest = open.clone();
        widest.sort_by_key(|at| Reverse(share.free[*at]));
        widest.truncate(extra);
        widest.sort_unstable();
        let (balance, choice) = self.round_robin(&share, &widest)?;
        let mut best = BestChoice { balance, choice, is_estimate: true };
        for subset_size in (1..=open.len()).rev() {
            let size = subset_size.min(extra);
            // Leaves enough nodes behind the contributing ones for a subset of this size.
            let open = &open[..open.len() - (subset_size - size)];
            let mut walk = CombinationWalk::new(open.len(), size);
            let mut descends = true;
            while let Some(prefix) = walk.step(descends) {
                if best.is_final(bound) || !self.count_step() {
                    return Some((best.balance, best.choice));
                }
                descends = self.bound_of_subset(&share, open, prefix).is_some_and(|bound| best.admits(bound));
                if descends && prefix.len() == size {
                    let contributors: Vec<usize> = prefix.iter().map(|at| open[*at]).collect();
                    if let Some((balance, choice)) = self.round_robin(&share, &contributors) {
                        best.offer(balance, choice);
                    }
                }
            }
        }
        Some((best.balance, best.choice))
    }

    /// Lowest balance of subsets of `open` that begin with a prefix, each node of which contributes at least one group.
    fn bound_of_subset(&self, share: &EvenShare, open: &[usize], prefix: &[usize]) -> Option<u64> {
        let next = prefix.last().map_or(0, |last| last + 1);
        let mut squares = share.squares;
        let mut free: Vec<usize> = open[next..].iter().map(|at| share.free[*at]).collect();
        for at in prefix {
            let before = share.free[open[*at]];
            let after = before - self.group_size;
            squares -= square(before) - square(after);
            free.push(after);
        }
        self.bound_of_groups(free, squares, self.extra() - prefix.len())
    }

    /// Balance, and extra groups of each node, if the groups are taken round-robin from `contributors`. `None` if they
    /// have too few groups.
    fn round_robin(&self, share: &EvenShare, contributors: &[usize]) -> Option<(u64, Vec<usize>)> {
        let mut free = share.free.clone();
        let mut squares = share.squares;
        let mut extra_groups = vec![0; free.len()];
        let mut needed = self.extra();
        while needed > 0 {
            let needed_before = needed;
            for at in contributors {
                let before = free[*at];
                if needed > 0 && before >= self.group_size {
                    free[*at] = before - self.group_size;
                    squares -= square(before) - square(free[*at]);
                    extra_groups[*at] += 1;
                    needed -= 1;
                }
            }
            if needed == needed_before {
                return None;
            }
        }
        Some((self.scale.balance(squares), extra_groups))
    }
}

#[cfg(test)]
mod tests;
