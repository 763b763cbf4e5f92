//! Packed CPU allocator: whole units of the topology before single CPUs. Pure. Spec 06b §1.8.
//!
//! ```text
//!  NUMA nodes, sockets ─► uncore caches (option) ─► cores (unless spread) ─► single CPUs
//! ```
//!
//! A step takes units in one order that it computes at its start: fewest free CPUs first, then the lower ID, nested as
//! the machine is. "Free" counts candidates that are not taken yet; a unit is whole if all of its CPUs are free.
//!
//! Differs from the reference where that would break an invariant: the reference compares the free CPUs of a socket or
//! a core with the average size on the machine, then takes all CPUs of the unit. If sizes differ (offline CPUs, cores
//! with and without SMT), that can include CPUs that are not candidates. Here such a unit is not whole.

use std::mem;

use berth_types::CpuSet;

use crate::topology::{CpuInfo, CpuTopology};

/// Options of the static policy that change which CPUs are taken. Default: neither.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct AllocatorOptions {
    /// `prefer-align-cpus-by-uncorecache`: tries whole uncore caches and parts of a single one before cores.
    pub prefers_uncore_cache: bool,
    /// `distribute-cpus-across-cores`: takes single CPUs by number instead of whole cores, so that threads of different
    /// cores come first.
    pub spreads_over_cores: bool,
}

/// Fewer candidates than requested CPUs. The text is the reference's.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error("not enough cpus available to satisfy request: requested={requested}, available={available}")]
pub struct NotEnoughCpus {
    /// Number of CPUs to take.
    pub requested: usize,
    /// Number of candidates that are online.
    pub available: usize,
}

/// Takes `count` of the candidates, packed onto as few units of the topology as the order of the steps allows.
/// Candidates that are not online are ignored.
///
/// # Errors
/// There are fewer candidates than `count`.
pub fn take_packed(
    topology: &CpuTopology,
    candidates: &CpuSet,
    count: usize,
    options: AllocatorOptions,
) -> Result<CpuSet, NotEnoughCpus> {
    CpuHierarchy::new(topology).take_packed(candidates, count, options)
}

/// Level of the topology; its discriminant is the index into tables by level.
#[derive(Clone, Copy)]
enum TopologyLevel {
    Node,
    Socket,
    UncoreCache,
    Core,
}

/// Number of levels.
const LEVELS: usize = 4;

/// Units of one level. Units and CPUs are indexes that ascend with their IDs.
struct UnitTable {
    /// Unit of each CPU.
    unit_of: Vec<usize>,
    /// CPUs of each unit, ascending.
    cpus_of: Vec<Vec<usize>>,
    /// CPUs per unit, rounded down; 0 without CPUs.
    average_size: usize,
}

impl UnitTable {
    /// Table of the units with these IDs, one for each CPU.
    fn new(ids: Vec<u32>) -> Self {
        let mut units = ids.clone();
        // Neighbors mostly share a unit: without them there is little to sort.
        units.dedup();
        units.sort_unstable();
        units.dedup();
        let unit_of: Vec<usize> = ids.iter().map(|id| units.partition_point(|unit| unit < id)).collect();
        let mut cpus_of = vec![Vec::new(); units.len()];
        for (cpu, unit) in unit_of.iter().enumerate() {
            cpus_of[*unit].push(cpu);
        }
        let average_size = ids.len().checked_div(units.len()).unwrap_or(0);
        Self { unit_of, cpus_of, average_size }
    }

    /// Number of free CPUs of each unit.
    fn count_free(&self, is_free: &[bool]) -> Vec<usize> {
        let mut free = vec![0; self.cpus_of.len()];
        for (unit, is_free) in self.unit_of.iter().zip(is_free) {
            free[*unit] += usize::from(*is_free);
        }
        free
    }
}

/// CPUs and units of a topology by index, so that an allocation does no searches by ID.
pub(super) struct CpuHierarchy {
    /// Number of each online CPU, ascending.
    cpus: Vec<u32>,
    /// Units by [`TopologyLevel`].
    units: [UnitTable; LEVELS],
    /// Whether sockets are the parts of NUMA nodes, not the other way around. True if there are at least as many.
    has_sockets_in_nodes: bool,
}

impl CpuHierarchy {
    pub(super) fn new(topology: &CpuTopology) -> Self {
        let table = |id: fn(&CpuInfo) -> u32| UnitTable::new(topology.cpus.values().map(id).collect());
        let nodes = table(|info| info.node);
        let sockets = table(|info| info.socket);
        let has_sockets_in_nodes = sockets.cpus_of.len() >= nodes.cpus_of.len();
        let units = [nodes, sockets, table(|info| info.uncore_cache), table(|info| info.core)];
        Self { cpus: topology.cpus.keys().copied().collect(), units, has_sockets_in_nodes }
    }

    /// See [`take_packed`].
    pub(super) fn take_packed(
        &self,
        candidates: &CpuSet,
        count: usize,
        options: AllocatorOptions,
    ) -> Result<CpuSet, NotEnoughCpus> {
        let mut accumulator = CpuAccumulator::new(self, candidates, count);
        let available = accumulator.is_free.iter().filter(|is_free| **is_free).count();
        if count > available {
            return Err(NotEnoughCpus { requested: count, available });
        }
        let levels = if self.has_sockets_in_nodes {
            [TopologyLevel::Node, TopologyLevel::Socket]
        } else {
            [TopologyLevel::Socket, TopologyLevel::Node]
        };
        for level in levels {
            accumulator.take_whole_units(level);
        }
        if options.prefers_uncore_cache {
            accumulator.take_uncore_caches();
        }
        if options.spreads_over_cores {
            accumulator.take_single_cpus(TopologyLevel::Socket);
        } else {
            accumulator.take_whole_units(TopologyLevel::Core);
            accumulator.take_single_cpus(TopologyLevel::Core);
        }
        Ok(accumulator.taken.into_iter().collect())
    }

    /// Candidates of each NUMA node that has some, in the order in which nodes are taken.
    pub(super) fn candidates_by_node(&self, candidates: &CpuSet) -> Vec<CpuSet> {
        let accumulator = CpuAccumulator::new(self, candidates, 0);
        let nodes = self.table(TopologyLevel::Node);
        let mut is_listed = vec![false; nodes.cpus_of.len()];
        let mut order = accumulator.order(TopologyLevel::Node);
        // A node that spans sockets occurs once for each.
        order.retain(|node| !mem::replace(&mut is_listed[*node], true));
        let candidates_of = |node: usize| -> CpuSet {
            let free = nodes.cpus_of[node].iter().filter(|cpu| accumulator.is_free[**cpu]);
            free.map(|cpu| self.cpus[*cpu]).collect()
        };
        order.into_iter().map(candidates_of).collect()
    }

    /// Units of a level.
    fn table(&self, level: TopologyLevel) -> &UnitTable {
        &self.units[level as usize]
    }
}

/// State of one allocation.
struct CpuAccumulator<'a> {
    hierarchy: &'a CpuHierarchy,
    /// Whether each CPU is a candidate that is not taken yet.
    is_free: Vec<bool>,
    /// Number of free CPUs of each unit, by [`TopologyLevel`].
    free: [Vec<usize>; LEVELS],
    /// Number of CPUs still to take.
    needed: usize,
    /// Numbers of the CPUs taken so far.
    taken: Vec<u32>,
}

impl<'a> CpuAccumulator<'a> {
    fn new(hierarchy: &'a CpuHierarchy, candidates: &CpuSet, needed: usize) -> Self {
        // Both are sorted: a merge is quicker than a search for each CPU.
        let mut candidates = candidates.iter().peekable();
        let is_candidate = |cpu: &u32| {
            while candidates.next_if(|candidate| candidate < cpu).is_some() {}
            candidates.next_if_eq(cpu).is_some()
        };
        let is_free: Vec<bool> = hierarchy.cpus.iter().map(is_candidate).collect();
        let free = hierarchy.units.each_ref().map(|table| table.count_free(&is_free));
        Self { hierarchy, is_free, free, needed, taken: Vec::with_capacity(needed.min(hierarchy.cpus.len())) }
    }

    /// Takes a free CPU.
    fn take(&mut self, cpu: usize) {
        self.is_free[cpu] = false;
        for (free, table) in self.free.iter_mut().zip(&self.hierarchy.units) {
            free[table.unit_of[cpu]] -= 1;
        }
        self.needed -= 1;
        self.taken.push(self.hierarchy.cpus[cpu]);
    }

    /// Units of a level that have free CPUs, in the order in which they are taken. A unit that belongs to several units
    /// of the level above occurs once for each of them.
    fn order(&self, level: TopologyLevel) -> Vec<usize> {
        use TopologyLevel::{Core, Node, Socket, UncoreCache};
        let outer = match (level, self.hierarchy.has_sockets_in_nodes) {
            (Node, true) | (Socket, false) => return self.sorted(level, 0..self.is_free.len()),
            (Node, false) | (Core, true) => Socket,
            (Socket, true) | (Core, false) | (UncoreCache, _) => Node,
        };
        let cpus_of = &self.hierarchy.table(outer).cpus_of;
        let outer_units = self.order(outer).into_iter();
        outer_units.flat_map(|unit| self.sorted(level, cpus_of[unit].iter().copied())).collect()
    }

    /// Units of the free ones among `cpus`: fewest free CPUs first, then the lower ID.
    fn sorted(&self, level: TopologyLevel, cpus: impl Iterator<Item = usize>) -> Vec<usize> {
        let (free, unit_of) = (&self.free[level as usize], &self.hierarchy.table(level).unit_of);
        let mut units: Vec<usize> = cpus.filter(|cpu| self.is_free[*cpu]).map(|cpu| unit_of[cpu]).collect();
        units.dedup();
        units.sort_unstable_by_key(|unit| (free[*unit], *unit));
        units.dedup();
        units
    }

    /// Whether a unit is whole and not larger than what is needed.
    fn can_take(&self, level: TopologyLevel, unit: usize) -> bool {
        let table = self.hierarchy.table(level);
        let size = table.cpus_of[unit].len();
        let has_expected_size = match level {
            TopologyLevel::Node | TopologyLevel::UncoreCache => true,
            TopologyLevel::Socket | TopologyLevel::Core => size == table.average_size,
        };
        has_expected_size && size <= self.needed && self.free[level as usize][unit] == size
    }

    /// Takes whole units as long as they are not larger than what is needed.
    fn take_whole_units(&mut self, level: TopologyLevel) {
        let cpus_of = &self.hierarchy.table(level).cpus_of;
        // Mostly there is no such unit: then no order is needed.
        if !(0..cpus_of.len()).any(|unit| self.can_take(level, unit)) {
            return;
        }
        for unit in self.order(level) {
            if self.can_take(level, unit) {
                for cpu in &cpus_of[unit] {
                    self.take(*cpu);
                }
            }
        }
    }

    /// Takes whole uncore caches, then what is left from a single one if that has exactly as many as needed.
    fn take_uncore_caches(&mut self) {
        for cache in self.order(TopologyLevel::UncoreCache) {
            if self.needed >= self.hierarchy.table(TopologyLevel::UncoreCache).average_size {
                self.take_whole_units(TopologyLevel::UncoreCache);
            }
            if self.needed == 0 {
                return;
            }
            self.take_part_of_cache(cache);
        }
    }

    /// Takes the lowest cores of an uncore cache with their free CPUs, if these are exactly as many as needed.
    fn take_part_of_cache(&mut self, cache: usize) {
        let cores = self.hierarchy.table(TopologyLevel::Core);
        let is_free = |cpu: &&usize| self.is_free[**cpu];
        let cpus = self.hierarchy.table(TopologyLevel::UncoreCache).cpus_of[cache].iter();
        let mut lowest: Vec<usize> = cpus.filter(is_free).map(|cpu| cores.unit_of[*cpu]).collect();
        lowest.sort_unstable();
        lowest.dedup();
        lowest.truncate(self.needed.div_ceil(cores.average_size));
        let mut cpus: Vec<usize> =
            lowest.iter().flat_map(|core| &cores.cpus_of[*core]).filter(is_free).copied().collect();
        cpus.sort_unstable();
        // The last core of an odd request is shared, whatever the number of threads per core: the reference's rule.
        if self.needed % 2 == 1 && cores.average_size > 1 && cpus.len() > self.needed {
            cpus.pop();
        }
        if cpus.len() == self.needed {
            for cpu in cpus {
                self.take(cpu);
            }
        }
    }

    /// Takes single CPUs by number, unit by unit.
    fn take_single_cpus(&mut self, level: TopologyLevel) {
        if self.needed == 0 {
            return;
        }
        let cpus_of = &self.hierarchy.table(level).cpus_of;
        for cpu in self.order(level).into_iter().flat_map(|unit| &cpus_of[unit]) {
            if self.needed == 0 {
                return;
            }
            if self.is_free[*cpu] {
                self.take(*cpu);
            }
        }
    }
}

#[cfg(test)]
pub(super) mod tests;
