//! Tests of the packed CPU allocator, also against a slow transcription of spec 06b §1.8.

use std::{
    collections::{BTreeMap, BTreeSet},
    ops::RangeInclusive,
    time::{Duration, Instant},
};

use proptest::prelude::*;

use super::*;
use crate::topology::machines::{machine_a, machine_b, machine_c};

/// Machine of regular shape. CPU n and n + `cores` are siblings.
#[derive(Clone, Copy, Debug)]
pub(in crate::cpu) struct Layout {
    pub sockets: u32,
    pub nodes: u32,
    pub cores: u32,
    pub threads: u32,
    pub cores_per_cache: u32,
    /// Whether neighboring cores are in different nodes and sockets, not in the same ones.
    pub is_interleaved: bool,
}

impl Layout {
    pub(in crate::cpu) fn topology(self) -> CpuTopology {
        let info = |core: u32| {
            let units = self.nodes.max(self.sockets);
            let interleaved = (core % units) * (self.cores / units) + core / units;
            let at = if self.is_interleaved { interleaved } else { core };
            CpuInfo {
                node: at * self.nodes / self.cores,
                socket: at * self.sockets / self.cores,
                core,
                uncore_cache: at / self.cores_per_cache,
            }
        };
        CpuTopology { cpus: (0..self.cores * self.threads).map(|cpu| (cpu, info(cpu % self.cores))).collect() }
    }
}

fn layout(sockets: u32, nodes: u32, cores: u32, threads: u32, cores_per_cache: u32) -> CpuTopology {
    Layout { sockets, nodes, cores, threads, cores_per_cache, is_interleaved: false }.topology()
}

/// Machines of the tables, by the first letter of the row.
pub(in crate::cpu) fn topology(name: &str) -> CpuTopology {
    match name {
        "A" => machine_a(),
        "B" => machine_b(),
        "C" => machine_c(),
        // Two sockets in each of two nodes; two cores per socket.
        "W" => layout(4, 2, 8, 2, 2),
        // 16 cores without SMT in four caches.
        "N" => layout(1, 1, 16, 1, 4),
        // The same on two sockets, and on two nodes of one socket.
        "D" => layout(2, 2, 16, 1, 4),
        "M" => layout(1, 2, 16, 1, 4),
        // 8 cores with SMT in two caches.
        "T" => layout(1, 1, 8, 2, 4),
        // Two sockets with SMT, two caches each.
        "Q" => layout(2, 2, 16, 2, 4),
        // Two sockets with four nodes each.
        "L" => layout(2, 8, 128, 2, 64),
        // Two cores with SMT, four without.
        "H" => {
            let info = |core: u32| CpuInfo { node: 0, socket: 0, core, uncore_cache: 0 };
            CpuTopology { cpus: (0..8).map(|cpu| (cpu, info(if cpu < 4 { cpu / 2 * 2 } else { cpu }))).collect() }
        }
        // Machine B while CPU 11 is offline.
        "B-11" => CpuTopology { cpus: machine_b().cpus.into_iter().filter(|(cpu, _)| *cpu != 11).collect() },
        _ => panic!("no machine {name}"),
    }
}

pub(in crate::cpu) fn cpus(list: &str) -> CpuSet {
    CpuSet::parse(list).expect(list)
}

/// A row of a table: machine, candidates, number of CPUs, and the CPUs that are taken.
type Row = (&'static str, &'static str, usize, &'static str);

fn check(rows: &[Row], options: AllocatorOptions) {
    for (name, candidates, count, expected) in rows {
        let taken = take_packed(&topology(name), &cpus(candidates), *count, options).expect(name);
        assert_eq!(taken.to_string(), *expected, "machine {name}, {count} of {candidates}");
    }
}

const PACKED: &[Row] = &[
    ("A", "0-7", 0, ""),
    // AC-06b-1
    ("A", "0-7", 1, "0"),
    // AC-06b-2
    ("A", "1,3,5-7", 1, "6"),
    // AC-06b-3
    ("A", "0-7", 2, "0,4"),
    // AC-06b-4
    ("A", "0-3,6", 2, "2,6"),
    ("A", "0-7", 3, "0-1,4"),
    ("A", "0-7", 5, "0-2,4-5"),
    ("A", "0-7", 7, "0-6"),
    ("A", "0-7", 8, "0-7"),
    ("A", "1-7", 2, "1,5"),
    // The half-used core comes before a further whole one.
    ("A", "1-7", 3, "1,4-5"),
    ("A", "0-3", 2, "0-1"),
    ("A", "1,3,5-7", 4, "1,3,5,7"),
    // AC-06b-5
    ("B", "0-11", 6, "0,2,4,6,8,10"),
    // AC-06b-6
    ("B", "0-11", 8, "0-2,4,6-8,10"),
    ("B", "1-5,7-11", 1, "2"),
    ("B", "1-11", 6, "1,3,5,7,9,11"),
    ("B", "1-11", 7, "1,3,5-7,9,11"),
    ("B", "0-5", 3, "0,2,4"),
    // Socket 1 has fewer free CPUs.
    ("B", "0-4,6-8,10", 2, "1,7"),
    // AC-06b-8
    ("C", "0-79", 20, "0-9,40-49"),
    ("C", "10-39,50-79", 20, "10-19,50-59"),
    ("C", "0-79", 21, "0-10,40-49"),
    ("C", "0-79", 40, "0-19,40-59"),
    ("C", "0-79", 59, "0-29,40-68"),
    ("C", "0-79", 60, "0-29,40-69"),
    ("C", "0-79", 64, "0-31,40-71"),
    ("C", "1-79", 20, "10-19,50-59"),
    ("C", "1-79", 40, "20-39,60-79"),
    ("C", "1-39,41-79", 60, "10-39,50-79"),
    ("C", "0-9,20-29,60-69", 21, "0,20-29,60-69"),
    ("C", "5,25,35,45,65", 3, "5,35,45"),
    ("W", "0-15", 4, "0-1,8-9"),
    ("W", "0-15", 5, "0-2,8-9"),
    ("W", "0-15", 6, "0-2,8-10"),
    ("W", "0-15", 8, "0-3,8-11"),
    ("W", "1-15", 8, "4-7,12-15"),
    ("W", "1-15", 4, "2-3,10-11"),
    ("W", "1-15", 6, "1-3,9-11"),
    ("W", "1-15", 7, "1-3,8-11"),
    ("W", "1-15", 12, "2-7,10-15"),
    ("W", "0,5,8,13", 2, "0,8"),
    ("W", "0,5,8", 2, "0,8"),
];

const SPREAD: &[Row] = &[
    ("A", "0-7", 3, "0-2"),
    ("A", "1-7", 3, "1-3"),
    ("A", "1,4-7", 2, "1,4"),
    ("B", "0-11", 2, "0,2"),
    ("B", "0-11", 3, "0,2,4"),
    ("B", "0-11", 6, "0,2,4,6,8,10"),
    // AC-06b-7
    ("B", "0-11", 8, "0-4,6,8,10"),
    ("B", "1-11", 3, "2,4,6"),
    ("B", "0,3,5-6,9", 4, "0,3,5-6"),
    ("C", "0-79", 8, "0-7"),
    ("C", "0-79", 20, "0-9,40-49"),
    ("C", "0-79", 21, "0-10,40-49"),
    ("C", "1-79", 12, "1-12"),
    ("C", "1-79", 40, "20-39,60-79"),
];

const UNCORE_CACHES: &[Row] = &[
    ("N", "0-15", 1, "0"),
    ("N", "0-15", 4, "0-3"),
    ("N", "0-15", 6, "0-5"),
    ("N", "0-15", 9, "0-8"),
    ("N", "1-15", 3, "1-3"),
    ("N", "1-15", 10, "1-2,4-11"),
    ("N", "1-3,5-15", 4, "8-11"),
    ("N", "1-2,5,9,13", 2, "1-2"),
    // No cache has enough.
    ("N", "1,5,9,13", 3, "1,5,9"),
    ("D", "0-15", 4, "0-3"),
    ("D", "2-15", 6, "2-7"),
    ("D", "8-15", 4, "8-11"),
    ("M", "3-8,12", 2, "4-5"),
    ("T", "0-15", 3, "0-1,8"),
    ("T", "0-15", 5, "0-2,8-9"),
    ("T", "0-15", 8, "0-3,8-11"),
    ("T", "0-15", 9, "0-4,8-11"),
    ("T", "1-15", 3, "1,8-9"),
    ("T", "1-15", 7, "1-3,8-11"),
    ("T", "1-15", 8, "4-7,12-15"),
    ("T", "1-15", 9, "4-8,12-15"),
    ("T", "1-7,9-15", 10, "1,4-7,9,12-15"),
    ("T", "2-7,10-15", 6, "4-6,12-14"),
    // Two cores have two free CPUs only: not the number that is needed.
    ("T", "0-7", 3, "0-2"),
    ("T", "0-7", 4, "0-3"),
    ("T", "0-1,4-5,12-13", 3, "4-5,12"),
    ("Q", "0-31", 8, "0-3,16-19"),
    ("Q", "0-31", 12, "0-5,16-21"),
    ("Q", "0-31", 20, "0-9,16-25"),
    ("Q", "1-31", 10, "4-8,20-24"),
    ("Q", "1-31", 16, "8-15,24-31"),
    ("Q", "1-31", 24, "4-15,20-31"),
    ("Q", "2-31", 11, "4-9,20-24"),
    // The cache of machine C is that of the socket, which has two nodes.
    ("C", "0-79", 3, "0-1,40"),
    ("C", "0-79", 10, "0-4,40-44"),
    ("C", "1-79", 20, "10-19,50-59"),
    ("C", "1-79", 41, "20-40,60-79"),
];

#[test]
fn whole_units_are_taken_first() {
    check(PACKED, AllocatorOptions::default());
}

#[test]
fn spread_allocation_takes_cpus_by_number() {
    check(SPREAD, AllocatorOptions { spreads_over_cores: true, ..AllocatorOptions::default() });
}

#[test]
fn uncore_caches_are_preferred_to_cores() {
    check(UNCORE_CACHES, AllocatorOptions { prefers_uncore_cache: true, ..AllocatorOptions::default() });
}

#[test]
fn units_of_different_sizes_never_add_cpus_that_are_not_candidates() {
    let rows: &[Row] = &[
        ("H", "0-7", 2, "4-5"),
        // CPU 1 alone is as many as an average core has.
        ("H", "1-7", 2, "4-5"),
        ("H", "1-3", 2, "1-2"),
        ("B-11", "0-10", 5, "1,3,5,7,9"),
        // The node with the offline CPU is whole too, and has fewer free CPUs.
        ("B-11", "0-10", 6, "0-1,3,5,7,9"),
        ("B-11", "0-9", 5, "1,3,5,7,9"),
    ];
    check(rows, AllocatorOptions::default());
}

#[test]
fn too_few_candidates_are_an_error_with_the_text_of_the_reference() {
    for (candidates, count, available) in [("0,2,4,6", 5, 4), ("", 1, 0), ("6-9", 3, 2)] {
        let error = take_packed(&machine_a(), &cpus(candidates), count, AllocatorOptions::default());
        let text = format!("not enough cpus available to satisfy request: requested={count}, available={available}");
        assert_eq!(error.expect_err(candidates).to_string(), text);
    }
    let none = take_packed(&CpuTopology::default(), &CpuSet::default(), 0, AllocatorOptions::default());
    assert_eq!(none, Ok(CpuSet::default()));
}

#[test]
fn one_of_512_cpus_is_taken_in_a_few_milliseconds() {
    let layout = Layout { sockets: 2, nodes: 8, cores: 256, threads: 2, cores_per_cache: 8, is_interleaved: false };
    let topology = layout.topology();
    let all = topology.all();
    let measure = |_| {
        let start = Instant::now();
        let taken = take_packed(&topology, &all, 1, AllocatorOptions::default());
        assert_eq!(taken, Ok(cpus("0")));
        start.elapsed()
    };
    let fastest = (0..20).map(measure).min().expect("20 measurements");
    assert!(fastest <= Duration::from_millis(50), "{fastest:?}");
}

/// Transcription of the steps of spec 06b §1.8, without tables of units. `None` if there are too few candidates.
pub(in crate::cpu) fn take_slowly(
    topology: &CpuTopology,
    candidates: &CpuSet,
    count: usize,
    options: AllocatorOptions,
) -> Option<CpuSet> {
    let mut slow = SlowAllocator::new(topology, candidates, count);
    if slow.free.len() < count {
        return None;
    }
    let levels = [TopologyLevel::Node, TopologyLevel::Socket];
    let levels = if slow.sockets_are_in_nodes() { levels } else { [levels[1], levels[0]] };
    levels.into_iter().for_each(|level| slow.take_whole_units(level));
    if options.prefers_uncore_cache {
        slow.take_uncore_caches();
    }
    let last = if options.spreads_over_cores { TopologyLevel::Socket } else { TopologyLevel::Core };
    if !options.spreads_over_cores {
        slow.take_whole_units(TopologyLevel::Core);
    }
    for unit in slow.order(last) {
        for cpu in slow.free_of(last, unit).iter() {
            if slow.needed > 0 {
                slow.take(&[cpu].into_iter().collect());
            }
        }
    }
    Some(slow.taken)
}

/// Candidates of each node, in the order of spec 06b §1.8, each node once.
pub(in crate::cpu) fn nodes_slowly(topology: &CpuTopology, candidates: &CpuSet) -> Vec<CpuSet> {
    let slow = SlowAllocator::new(topology, candidates, 0);
    let mut nodes: Vec<u32> = Vec::new();
    for node in slow.order(TopologyLevel::Node) {
        if !nodes.contains(&node) {
            nodes.push(node);
        }
    }
    nodes.into_iter().map(|node| slow.free_of(TopologyLevel::Node, node)).collect()
}

struct SlowAllocator<'a> {
    topology: &'a CpuTopology,
    free: CpuSet,
    taken: CpuSet,
    needed: usize,
}

fn id(level: TopologyLevel, info: &CpuInfo) -> u32 {
    match level {
        TopologyLevel::Node => info.node,
        TopologyLevel::Socket => info.socket,
        TopologyLevel::UncoreCache => info.uncore_cache,
        TopologyLevel::Core => info.core,
    }
}

impl<'a> SlowAllocator<'a> {
    fn new(topology: &'a CpuTopology, candidates: &CpuSet, needed: usize) -> Self {
        let free = candidates.intersection(&topology.all());
        Self { topology, free, taken: CpuSet::default(), needed }
    }

    fn sockets_are_in_nodes(&self) -> bool {
        self.topology.num_sockets() >= self.topology.num_nodes()
    }

    fn all_of(&self, level: TopologyLevel, unit: u32) -> CpuSet {
        self.topology.select(|info| id(level, info) == unit)
    }

    fn free_of(&self, level: TopologyLevel, unit: u32) -> CpuSet {
        self.free.intersection(&self.all_of(level, unit))
    }

    fn sorted(&self, level: TopologyLevel, cpus: &CpuSet) -> Vec<u32> {
        let units: BTreeSet<u32> = cpus.iter().map(|cpu| id(level, &self.topology.cpus[&cpu])).collect();
        let mut units: Vec<u32> = units.into_iter().collect();
        units.sort_by_cached_key(|unit| (self.free_of(level, *unit).len(), *unit));
        units
    }

    fn within(&self, outer: TopologyLevel, level: TopologyLevel) -> Vec<u32> {
        self.order(outer).into_iter().flat_map(|unit| self.sorted(level, &self.free_of(outer, unit))).collect()
    }

    fn order(&self, level: TopologyLevel) -> Vec<u32> {
        match (level, self.sockets_are_in_nodes()) {
            (TopologyLevel::Node, true) | (TopologyLevel::Socket, false) => self.sorted(level, &self.free),
            (TopologyLevel::Node, false) => self.within(TopologyLevel::Socket, level),
            (TopologyLevel::Socket, true) => self.within(TopologyLevel::Node, level),
            (TopologyLevel::UncoreCache, _) => self.within(TopologyLevel::Node, level),
            (TopologyLevel::Core, true) => self.within(TopologyLevel::Socket, level),
            (TopologyLevel::Core, false) => self.within(TopologyLevel::Node, level),
        }
    }

    fn take(&mut self, cpus: &CpuSet) {
        assert!(cpus.is_subset(&self.free));
        self.free = self.free.difference(cpus);
        self.taken = self.taken.union(cpus);
        self.needed -= cpus.len();
    }

    fn take_whole_units(&mut self, level: TopologyLevel) {
        let expected = match level {
            TopologyLevel::Node | TopologyLevel::UncoreCache => None,
            TopologyLevel::Socket => Some(self.topology.num_cpus() / self.topology.num_sockets().max(1)),
            TopologyLevel::Core => Some(self.topology.cpus_per_core()),
        };
        for unit in self.order(level) {
            let all = self.all_of(level, unit);
            let has_expected_size = expected.is_none_or(|size| all.len() == size);
            if has_expected_size && all.is_subset(&self.free) && all.len() <= self.needed {
                self.take(&all);
            }
        }
    }

    fn take_uncore_caches(&mut self) {
        for cache in self.order(TopologyLevel::UncoreCache) {
            if self.needed >= self.topology.num_cpus() / self.topology.num_uncore_caches().max(1) {
                self.take_whole_units(TopologyLevel::UncoreCache);
            }
            let free = self.free_of(TopologyLevel::UncoreCache, cache);
            let cores: BTreeSet<u32> = free.iter().map(|cpu| self.topology.cpus[&cpu].core).collect();
            let threads = self.topology.cpus_per_core();
            let cores = cores.into_iter().take(self.needed.div_ceil(threads));
            let mut part: Vec<u32> =
                cores.flat_map(|core| self.free_of(TopologyLevel::Core, core).iter().collect::<Vec<u32>>()).collect();
            part.sort_unstable();
            if self.needed % 2 == 1 && threads > 1 && part.len() > self.needed {
                part.pop();
            }
            if part.len() == self.needed {
                self.take(&part.into_iter().collect());
            }
        }
    }
}

/// Machines with up to 4 times `inner` nodes or sockets, of up to 4 cores with up to 2 threads. Every fourth machine
/// has offline CPUs.
pub(in crate::cpu) fn topologies(inner: RangeInclusive<u32>) -> impl Strategy<Value = CpuTopology> {
    let shape = (1u32..=4, inner, 1u32..=4, 1u32..=2, 1u32..=4);
    let some_offline = (any::<u128>(), any::<u128>()).prop_map(|(a, b)| a | b);
    let online = prop_oneof![3 => Just(u128::MAX), 1 => some_offline];
    (shape, any::<bool>(), any::<bool>(), online).prop_map(|(shape, has_larger_nodes, is_interleaved, online)| {
        let (outer, inner, cores_per_unit, threads, cores_per_cache) = shape;
        let (small, large) = (outer * inner, outer);
        let (sockets, nodes) = if has_larger_nodes { (small, large) } else { (large, small) };
        let cores = small * cores_per_unit;
        let layout = Layout { sockets, nodes, cores, threads, cores_per_cache, is_interleaved };
        let cpus: BTreeMap<u32, CpuInfo> = layout.topology().cpus;
        CpuTopology { cpus: cpus.into_iter().filter(|(cpu, _)| is_in(online, *cpu)).collect() }
    })
}

/// Sets of CPUs as bits, some of them full, some dense.
pub(in crate::cpu) fn masks() -> impl Strategy<Value = u128> {
    let dense = (any::<u128>(), any::<u128>()).prop_map(|(a, b)| a | b);
    prop_oneof![Just(u128::MAX), any::<u128>(), dense]
}

fn is_in(mask: u128, cpu: u32) -> bool {
    (mask >> cpu) & 1 == 1
}

pub(in crate::cpu) fn subset(cpus: &CpuSet, mask: u128) -> CpuSet {
    cpus.iter().filter(|cpu| is_in(mask, *cpu)).collect()
}

proptest! {
    #[test]
    fn results_equal_those_of_the_slow_allocator(
        topology in topologies(1..=4),
        mask in masks(),
        count in 0usize..=130,
        prefers_uncore_cache in any::<bool>(),
        spreads_over_cores in any::<bool>(),
    ) {
        let candidates = subset(&topology.all(), mask);
        let count = count % (candidates.len() + 2);
        let options = AllocatorOptions { prefers_uncore_cache, spreads_over_cores };
        let taken = take_packed(&topology, &candidates, count, options);
        prop_assert_eq!(&taken, &take_packed(&topology, &candidates, count, options));
        let expected = take_slowly(&topology, &candidates, count, options);
        let error = NotEnoughCpus { requested: count, available: candidates.len() };
        prop_assert_eq!(&taken, &expected.ok_or(error));
        if let Ok(taken) = taken {
            prop_assert_eq!(taken.len(), count);
            prop_assert!(taken.is_subset(&candidates));
        }
    }
}
