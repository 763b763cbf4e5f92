//! Topology hints of the CPU manager: NUMA nodes with enough CPUs. Pure. Spec 06b §1.10.

use std::collections::{BTreeMap, BTreeSet};

use berth_types::{CpuSet, Pod, api};

use super::{
    state::CpuState,
    static_policy::{ReusableCpus, StaticPolicy, exclusive_cpus, pod_exclusive_cpus},
};
use crate::{
    numa::{NumaMask, TopologyHint, mask_combinations::masks},
    topology::CpuTopology,
};

impl StaticPolicy {
    /// Hints of a container. `None`: it gets no exclusive CPUs and has no preference. An empty list: impossible.
    pub fn container_hints(
        &self,
        state: &CpuState,
        reusable: &ReusableCpus,
        pod: &Pod,
        container: &api::Container,
    ) -> Option<Vec<TopologyHint>> {
        let count = self.container_cpus(pod, container);
        if count == 0 {
            return None;
        }
        Some(match state.container(pod.uid(), &container.name) {
            Some(assigned) if assigned.len() == count => self.hints(assigned, &CpuSet::default(), count),
            Some(_) => Vec::new(),
            None => self.hints(&self.available(state), &reusable.of(pod.uid()), count),
        })
    }

    /// Hints of a pod as a whole. `None`: no container gets exclusive CPUs. An empty list: impossible.
    pub fn pod_hints(&self, state: &CpuState, reusable: &ReusableCpus, pod: &Pod) -> Option<Vec<TopologyHint>> {
        if self.options.pod_level.manages(pod) {
            return self.whole_pod_hints(state, pod);
        }
        let count = pod_exclusive_cpus(pod);
        if count == 0 {
            return None;
        }
        let mut containers = pod.init_containers().iter().chain(pod.containers());
        let has_other_size = |container: &api::Container| {
            let assigned = state.container(pod.uid(), &container.name);
            assigned.is_some_and(|cpus| cpus.len() != exclusive_cpus(pod, container))
        };
        if containers.any(has_other_size) {
            return Some(Vec::new());
        }
        let assigned = state.pod(pod.uid());
        if assigned.len() == count {
            return Some(self.hints(&assigned, &CpuSet::default(), count));
        }
        let reusable = reusable.of(pod.uid()).union(&assigned);
        Some(self.hints(&self.available(state), &reusable, count))
    }

    /// Hints of a pod with pod-level resources, as [`Self::pod_hints`].
    ///
    /// Deviation: the CPUs that the pod has as a whole are its hint. The reference compares the CPUs of each container
    /// with its request, and refuses the pod after a restart if one shares the pool of the pod.
    fn whole_pod_hints(&self, state: &CpuState, pod: &Pod) -> Option<Vec<TopologyHint>> {
        let count = self.pod_cpus(pod);
        if count == 0 {
            return None;
        }
        if self.check_pod(pod, count).is_err() {
            return Some(Vec::new());
        }
        Some(match state.pod_entries.get(pod.uid()) {
            Some(assigned) if assigned.len() == count => self.hints(assigned, &CpuSet::default(), count),
            Some(_) => Vec::new(),
            None => self.hints(&self.available(state), &state.pod(pod.uid()), count),
        })
    }

    /// Masks that have `count` of the available CPUs together with all reusable ones, in the order of [`masks`].
    ///
    /// A hint is preferred if no smaller number of nodes could serve the request on an idle machine; with the option
    /// `align-by-socket` also if no smaller number of sockets could.
    fn hints(&self, available: &CpuSet, reusable: &CpuSet, count: usize) -> Vec<TopologyHint> {
        let nodes = nodes(&self.topology, available);
        let all: NumaMask = nodes.keys().copied().collect();
        let required = self.topology.nodes_of(reusable);
        let (smallest, sockets) = (smallest_mask(&nodes, count), self.smallest_socket_count(&nodes, count));
        let mut hints = Vec::new();
        for mask in masks(all).filter(|mask| required.is_subset(*mask)) {
            let members = || nodes.iter().filter(move |(node, _)| mask.contains(**node)).map(|(_, cpus)| cpus);
            let sum: usize = members().map(|cpus| cpus.available).sum();
            if reusable.len() + sum < count {
                continue;
            }
            let is_socket_aligned = sockets.is_some_and(|sockets| {
                let spanned: BTreeSet<u32> = members().flat_map(|cpus| cpus.sockets.iter().copied()).collect();
                spanned.len() == sockets
            });
            let is_preferred = is_socket_aligned || usize::try_from(mask.len()) == Ok(smallest);
            hints.push(TopologyHint { mask: Some(mask), is_preferred });
        }
        hints
    }

    /// Number of sockets that an idle machine needs; `None` unless masks are aligned to sockets.
    fn smallest_socket_count(&self, nodes: &BTreeMap<u32, NodeCpus>, count: usize) -> Option<usize> {
        let nodes_per_socket = self.topology.num_nodes().checked_div(self.topology.num_sockets())?;
        if !self.options.aligns_by_socket || nodes_per_socket == 0 {
            return None;
        }
        Some(smallest_mask(nodes, count).div_ceil(nodes_per_socket))
    }
}

/// CPUs of a NUMA node.
#[derive(Default)]
struct NodeCpus {
    /// Number of all CPUs.
    total: usize,
    /// Number of available CPUs, reusable ones not included.
    available: usize,
    sockets: BTreeSet<u32>,
}

/// CPUs of the NUMA nodes that have any.
fn nodes(topology: &CpuTopology, available: &CpuSet) -> BTreeMap<u32, NodeCpus> {
    let mut nodes: BTreeMap<u32, NodeCpus> = BTreeMap::new();
    for (cpu, info) in &topology.cpus {
        let node = nodes.entry(info.node).or_default();
        node.total += 1;
        node.available += usize::from(available.contains(*cpu));
        node.sockets.insert(info.socket);
    }
    nodes
}

/// Number of nodes of the smallest mask with at least `count` CPUs, available or not; all nodes if there is none.
///
/// The largest nodes make the smallest mask, so no enumeration is needed, which may be incomplete.
fn smallest_mask(nodes: &BTreeMap<u32, NodeCpus>, count: usize) -> usize {
    let mut totals: Vec<usize> = nodes.values().map(|node| node.total).collect();
    totals.sort_unstable();
    let mut sum = 0;
    let position = totals.iter().rev().position(|total| {
        sum += total;
        sum >= count
    });
    position.map_or(nodes.len(), |position| position + 1)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        cpu::{
            fixtures::{Containers, Entries, cpus, pod, state},
            policy_options::StaticOptions,
            reserved_cpus::ReservedCpus,
        },
        topology::machines::{machine, machine_b, machine_c},
    };

    fn policy(topology: CpuTopology, reserved: &str, options: StaticOptions) -> StaticPolicy {
        let reserved = ReservedCpus { cpus: cpus(reserved), whole_cores: cpus(reserved) };
        StaticPolicy { topology, reserved, options }
    }

    /// Masks separated by spaces; an exclamation mark marks preferred ones.
    fn listed(hints: Option<Vec<TopologyHint>>) -> String {
        let text =
            |hint: TopologyHint| format!("{}{}", hint.mask.expect("a mask"), if hint.is_preferred { "!" } else { "" });
        match hints {
            None => "no preference".to_owned(),
            Some(hints) if hints.is_empty() => "impossible".to_owned(),
            Some(hints) => hints.into_iter().map(text).collect::<Vec<_>>().join(" "),
        }
    }

    #[test]
    fn hints_of_a_container_are_the_masks_that_have_enough_cpus() {
        let policy = policy(machine_b(), "0,6", StaticOptions::default());
        for (case, cpu, default, assigned, reusable, expected) in [
            ("no whole CPUs", "1500m", "0-11", "", "", "no preference"),
            ("each node", "2", "0-11", "", "", "0! 1! 0,1"),
            ("reserved CPUs are not available", "5", "0-11", "", "", "1! 0,1"),
            ("both nodes are necessary", "8", "0-11", "", "", "0,1!"),
            ("all available CPUs", "10", "0-11", "", "", "0,1!"),
            ("more than available", "11", "0-11", "", "", "impossible"),
            ("more than the machine has", "13", "0-11", "", "", "impossible"),
            ("one node on an idle machine, both now", "2", "0-1,6,2", "", "", "0,1"),
            ("assigned", "2", "0-1,4-11", "2-3", "", "0,1"),
            ("assigned on one node", "2", "0-1,3,5-7,8-11", "2,4", "", "0! 0,1"),
            ("assigned with another size", "2", "0-1,4-11", "2", "", "impossible"),
            ("reusable", "2", "0-1,3-7,9-11", "", "2,8", "0! 0,1"),
            ("reusable on both nodes", "2", "0-1,4-11", "", "2-3", "0,1"),
            ("reusable suffice with available", "4", "0-1,6,2", "", "4,8,10", "0! 0,1"),
        ] {
            let assigned_entry = [("p/c", assigned)];
            let state = state(default, if assigned.is_empty() { &[] } else { &assigned_entry });
            let pod = pod("p", &[], &[&format!("c={cpu}")]);
            let mut reuse = ReusableCpus::default();
            reuse.insert(pod.uid(), &cpus(reusable));
            let hints = policy.container_hints(&state, &reuse, &pod, &pod.containers()[0]);
            assert_eq!(listed(hints), expected, "{case}");
        }
    }

    #[test]
    fn hints_of_a_pod_are_for_all_its_containers() {
        let policy = policy(machine_b(), "0,6", StaticOptions::default());
        let entries = [("p/i", "2,8"), ("p/a", "3,5")];
        let none = Entries::default();
        let cases: [(&str, Containers<'_>, Containers<'_>, &str, Entries<'_>, &str); 11] = [
            ("no whole CPUs", &[], &["a=500m"], "0-11", none, "no preference"),
            ("sum of containers", &[], &["a=2", "b=2"], "0-11", none, "0! 1! 0,1"),
            ("more than a node has", &[], &["a=4", "b=4"], "0-11", none, "0,1!"),
            ("sidecars count with containers", &["s*=3"], &["a=2"], "0-11", none, "1! 0,1"),
            ("the largest init container", &["i=5", "j=2"], &["a=2"], "0-11", none, "1! 0,1"),
            ("after a sidecar", &["s*=1", "i=4"], &["a=2"], "0-11", none, "1! 0,1"),
            ("before a sidecar", &["i=4", "s*=1"], &["a=2"], "0-11", none, "0! 1! 0,1"),
            ("all assigned", &[], &["a=2"], "0-2,4,6-11", &entries[1..], "1! 0,1"),
            ("assigned ones are reusable", &["i=2"], &["a=4"], "0-1,3-7,9-11", &entries[..1], "0! 0,1"),
            ("on both nodes", &["i=2"], &["a=2", "b=2"], "0-1,4,6-7,9-11", &entries, "0,1"),
            ("with another size", &["i=1"], &["a=4"], "0-1,3-7,9-11", &entries[..1], "impossible"),
        ];
        for (case, init, regular, default, assigned, expected) in cases {
            let hints = policy.pod_hints(&state(default, assigned), &ReusableCpus::default(), &pod("p", init, regular));
            assert_eq!(listed(hints), expected, "{case}");
        }
    }

    #[test]
    fn masks_of_whole_sockets_are_preferred_on_request() {
        let all = "0! 1! 2! 3! 0,1! 0,2 0,3 1,2 1,3 2,3! 0,1,2 0,1,3 0,2,3 1,2,3 0,1,2,3";
        let by_node = all.replace("0,1! ", "0,1 ").replace("2,3! ", "2,3 ");
        for (is_aligned, expected) in [(true, all), (false, by_node.as_str())] {
            let options = StaticOptions { aligns_by_socket: is_aligned, ..StaticOptions::default() };
            let policy = policy(machine(2, 2, 2, 2), "", options);
            let pod = pod("p", &[], &["c=4"]);
            let hints =
                policy.container_hints(&state("0-15", &[]), &ReusableCpus::default(), &pod, &pod.containers()[0]);
            assert_eq!(listed(hints), expected, "{is_aligned}");
        }
    }

    #[test]
    fn hints_of_many_nodes_are_bounded() {
        // 36 nodes of two CPUs.
        let policy = policy(machine(36, 1, 1, 2), "", StaticOptions::default());
        let state = state("0-71", &[]);
        for (cpu, preferred) in [("2", 36), ("4", 630), ("6", 7_140), ("8", 33), ("72", 1)] {
            let pod = pod("p", &[], &[&format!("c={cpu}")]);
            let hints = policy.container_hints(&state, &ReusableCpus::default(), &pod, &pod.containers()[0]);
            let hints = hints.expect("hints");
            assert!(hints.len() < 11_000, "{cpu} CPUs: {} hints", hints.len());
            assert_eq!(hints.iter().filter(|hint| hint.is_preferred).count(), preferred, "{cpu} CPUs");
        }
    }

    #[test]
    fn the_smallest_mask_has_the_largest_nodes() {
        let mut topology = machine_c();
        // Node 1 has two CPUs only.
        topology.cpus.retain(|cpu, info| info.node != 1 || cpu % 10 == 0);
        let nodes = nodes(&topology, &CpuSet::default());
        for (count, expected) in [(1, 1), (20, 1), (21, 2), (40, 2), (60, 3), (61, 4), (62, 4), (63, 4)] {
            assert_eq!(smallest_mask(&nodes, count), expected, "{count} CPUs");
        }
    }
}
