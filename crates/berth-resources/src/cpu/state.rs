//! CPU manager state: shared pool, exclusive CPUs, validation at the start. Pure. Spec 06b §1.4, §1.7.

use std::collections::{BTreeMap, HashSet};

use berth_types::{CpuSet, PodUid};

/// Exclusive CPUs by container name.
pub type ContainerCpus = BTreeMap<String, CpuSet>;

/// Content of the checkpoint.
///
/// Invariant after [`CpuState::initialize`]: the shared pool and all exclusive CPUs together are the online CPUs (with
/// strict reservation without the reserved ones), and no CPU is in the shared pool and exclusive, or of two pods.
/// Containers of one pod share CPUs if one is an init container that ends before the other starts, or if the pod has
/// CPUs as a whole, and the containers are in the pool of the pod.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct CpuState {
    /// CPUs of all containers without exclusive ones: the shared pool.
    pub default: CpuSet,
    /// Exclusive CPUs of containers. A finished init container keeps its entry as long as the pod lives.
    pub assignments: BTreeMap<PodUid, ContainerCpus>,
    /// CPUs of pods as a whole, which are assigned with the feature gate `PodLevelResourceManagers`. Containers of
    /// these pods have subsets. They are preserved and released whether the gate is on or off.
    pub pod_entries: BTreeMap<PodUid, CpuSet>,
}

/// The state does not fit the machine or the configuration; the texts are the reference's.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum CpuStateMismatch {
    /// Containers have exclusive CPUs, but the shared pool is empty.
    #[error("default cpuset cannot be empty")]
    EmptyDefault,
    /// With strict reservation a reserved CPU is in the shared pool.
    #[error("some of strictly reserved cpus: \"{reserved}\" are present in defaultCpuSet: \"{default}\"")]
    StrictlyReserved {
        /// Reserved CPUs that are in the shared pool.
        reserved: CpuSet,
        /// The shared pool.
        default: CpuSet,
    },
    /// Without strict reservation a reserved CPU is not in the shared pool.
    #[error("not all reserved cpus: \"{reserved}\" are present in defaultCpuSet: \"{default}\"")]
    Reserved {
        /// All reserved CPUs.
        reserved: CpuSet,
        /// The shared pool.
        default: CpuSet,
    },
    /// An exclusive CPU is in the shared pool.
    #[error("pod: {pod}, container: {container} cpuset: \"{cpus}\" overlaps with default cpuset \"{default}\"")]
    Overlap {
        /// UID of the pod.
        pod: PodUid,
        /// Name of the container.
        container: String,
        /// CPUs of the container.
        cpus: CpuSet,
        /// The shared pool.
        default: CpuSet,
    },
    /// CPUs of the state are not online, or online ones are not in the state.
    #[error("current set of available CPUs \"{available}\" doesn't match with CPUs in state \"{recorded}\"")]
    OtherCpus {
        /// Online CPUs, with strict reservation without the reserved ones.
        available: CpuSet,
        /// CPUs of the state.
        recorded: CpuSet,
    },
}

/// Whether reserved CPUs belong to the shared pool.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum CpuReservation {
    /// Containers without exclusive CPUs run on reserved CPUs, too.
    Shared,
    /// Option `strict-cpu-reservation`: no container runs on reserved CPUs.
    Strict,
}

impl CpuState {
    /// Fills the shared pool of a fresh state, or validates a restored one. Returns whether the state is changed.
    ///
    /// # Errors
    /// The first check that fails, in the reference's order.
    pub fn initialize(
        &mut self,
        online: &CpuSet,
        reserved: &CpuSet,
        reservation: CpuReservation,
    ) -> Result<bool, CpuStateMismatch> {
        let available = match reservation {
            CpuReservation::Shared => online.clone(),
            CpuReservation::Strict => online.difference(reserved),
        };
        if self.default.is_empty() && self.assignments.is_empty() && self.pod_entries.is_empty() {
            self.default = available;
            return Ok(true);
        }
        self.validate(available, reserved, reservation).map(|()| false)
    }

    fn validate(
        &self,
        available: CpuSet,
        reserved: &CpuSet,
        reservation: CpuReservation,
    ) -> Result<(), CpuStateMismatch> {
        let default = || self.default.clone();
        if self.default.is_empty() {
            return Err(CpuStateMismatch::EmptyDefault);
        }
        match reservation {
            CpuReservation::Strict if !reserved.is_disjoint(&self.default) => {
                let reserved = reserved.intersection(&self.default);
                return Err(CpuStateMismatch::StrictlyReserved { reserved, default: default() });
            }
            CpuReservation::Shared if !reserved.is_subset(&self.default) => {
                return Err(CpuStateMismatch::Reserved { reserved: reserved.clone(), default: default() });
            }
            CpuReservation::Strict | CpuReservation::Shared => {}
        }
        for (pod, containers) in &self.assignments {
            if let Some((container, cpus)) = containers.iter().find(|(_, cpus)| !cpus.is_disjoint(&self.default)) {
                let (pod, container, cpus) = (pod.clone(), container.clone(), cpus.clone());
                return Err(CpuStateMismatch::Overlap { pod, container, cpus, default: default() });
            }
        }
        let recorded = self.default.union(&self.exclusive());
        if recorded != available {
            return Err(CpuStateMismatch::OtherCpus { available, recorded });
        }
        Ok(())
    }

    /// Exclusive CPUs of all containers and pods.
    pub fn exclusive(&self) -> CpuSet {
        let containers = self.assignments.values().flat_map(BTreeMap::values);
        containers.chain(self.pod_entries.values()).flat_map(CpuSet::iter).collect()
    }

    /// Exclusive CPUs of a container; `None` if it runs on the shared pool.
    pub fn container(&self, pod: &PodUid, container: &str) -> Option<&CpuSet> {
        self.assignments.get(pod)?.get(container)
    }

    /// Exclusive CPUs of all containers of a pod.
    pub fn pod(&self, pod: &PodUid) -> CpuSet {
        self.assignments.get(pod).into_iter().flat_map(BTreeMap::values).flat_map(CpuSet::iter).collect()
    }

    /// Takes CPUs out of the shared pool and assigns them to a container.
    pub(super) fn assign(&mut self, pod: &PodUid, container: &str, cpus: CpuSet) {
        self.default = self.default.difference(&cpus);
        self.assignments.entry(pod.clone()).or_default().insert(container.to_owned(), cpus);
    }

    /// Whether a pod or one of its containers has CPUs.
    pub fn has_pod(&self, pod: &PodUid) -> bool {
        self.pod_entries.contains_key(pod) || self.assignments.contains_key(pod)
    }

    /// Takes CPUs out of the shared pool and assigns them to a pod; `parts` are the subsets of its containers.
    pub(super) fn assign_pod(&mut self, pod: &PodUid, cpus: CpuSet, parts: ContainerCpus) {
        self.default = self.default.difference(&cpus);
        self.assignments.insert(pod.clone(), parts);
        self.pod_entries.insert(pod.clone(), cpus);
    }

    /// Returns all CPUs of a pod to the shared pool. Returns whether the state is changed.
    pub fn release_pod(&mut self, pod: &PodUid) -> bool {
        let containers = self.assignments.remove(pod);
        let whole = self.pod_entries.remove(pod);
        let is_changed = containers.is_some() || whole.is_some();
        let released = containers.into_iter().flat_map(BTreeMap::into_values).chain(whole);
        self.default = released.fold(std::mem::take(&mut self.default), |default, cpus| default.union(&cpus));
        is_changed
    }

    /// Releases all pods that are not active. Returns whether the state is changed.
    ///
    /// Call it only once all pod sources are ready: before, active pods may be unknown.
    pub fn retain(&mut self, active: &HashSet<PodUid>) -> bool {
        let pods = self.assignments.keys().chain(self.pod_entries.keys());
        let inactive: Vec<PodUid> = pods.filter(|pod| !active.contains(*pod)).cloned().collect();
        // All of them: `any` would stop at the first.
        inactive.iter().filter(|pod| self.release_pod(pod)).count() > 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::fixtures::{Entries, cpus, state};

    fn start(
        default: &str,
        entries: Entries<'_>,
        online: &str,
        reserved: &str,
        reservation: CpuReservation,
    ) -> Result<String, String> {
        let mut state = state(default, entries);
        let before = state.clone();
        let is_changed =
            state.initialize(&cpus(online), &cpus(reserved), reservation).map_err(|mismatch| mismatch.to_string())?;
        assert_eq!(is_changed, state != before);
        Ok(state.default.to_string())
    }

    #[test]
    fn a_state_that_fits_is_kept_and_a_fresh_one_is_filled() {
        use CpuReservation::{Shared, Strict};
        let cases: [(&str, Entries<'_>, &str, CpuReservation, &str); 7] = [
            ("", &[], "0", Shared, "0-7"),
            // AC-06b-15
            ("", &[], "0", Strict, "1-7"),
            ("1-7", &[], "0", Strict, "1-7"),
            ("0-7", &[], "0", Shared, "0-7"),
            ("0,3-7", &[("p/a", "1"), ("q/b", "2")], "0", Shared, "0,3-7"),
            // An init container and its successor share CPUs.
            ("0,3-7", &[("p/a", "1"), ("p/b", "1-2")], "0", Shared, "0,3-7"),
            // Not all CPUs of a pod are those of a container.
            ("0,4-7", &[("p/a", "1"), ("p", "1-3")], "0", Shared, "0,4-7"),
        ];
        for (default, entries, reserved, reservation, expected) in cases {
            let actual = start(default, entries, "0-7", reserved, reservation);
            assert_eq!(actual, Ok(expected.to_owned()), "{default} {entries:?} {reservation:?}");
        }
    }

    #[test]
    fn a_state_that_does_not_fit_is_refused() {
        use CpuReservation::{Shared, Strict};
        let cases: [(&str, Entries<'_>, &str, &str, CpuReservation, &str); 11] = [
            ("", &[("p/a", "1")], "0-7", "0", Shared, "default cpuset cannot be empty"),
            ("", &[("p", "1")], "0-7", "0", Shared, "default cpuset cannot be empty"),
            (
                "0-1",
                &[],
                "0-11",
                "0,6",
                Strict,
                "some of strictly reserved cpus: \"0\" are present in defaultCpuSet: \"0-1\"",
            ),
            // AC-06b-14
            ("0-1", &[], "0-11", "0,6", Shared, "not all reserved cpus: \"0,6\" are present in defaultCpuSet: \"0-1\""),
            (
                "2-11",
                &[("X/Y", "0-2")],
                "0-11",
                "",
                Shared,
                "pod: X, container: Y cpuset: \"0-2\" overlaps with default cpuset \"2-11\"",
            ),
            (
                "0-12",
                &[],
                "0-11",
                "0",
                Shared,
                "current set of available CPUs \"0-11\" doesn't match with CPUs in state \"0-12\"",
            ),
            (
                "0-9",
                &[("p/a", "10")],
                "0-11",
                "0",
                Shared,
                "current set of available CPUs \"0-11\" doesn't match with CPUs in state \"0-10\"",
            ),
            // The reservation grew into exclusive CPUs, or strictness was switched on or off.
            (
                "0,2-7",
                &[("p/a", "1")],
                "0-7",
                "0-1",
                Shared,
                "not all reserved cpus: \"0-1\" are present in defaultCpuSet: \"0,2-7\"",
            ),
            (
                "0-7",
                &[],
                "0-7",
                "0",
                Strict,
                "some of strictly reserved cpus: \"0\" are present in defaultCpuSet: \"0-7\"",
            ),
            ("1-7", &[], "0-7", "0", Shared, "not all reserved cpus: \"0\" are present in defaultCpuSet: \"1-7\""),
            (
                "2-7",
                &[("p/a", "0-1")],
                "0-7",
                "0",
                Strict,
                "current set of available CPUs \"1-7\" doesn't match with CPUs in state \"0-7\"",
            ),
        ];
        for (default, entries, online, reserved, reservation, expected) in cases {
            assert_eq!(start(default, entries, online, reserved, reservation), Err(expected.to_owned()));
        }
    }

    #[test]
    fn inactive_pods_are_released() {
        let entries = [("p/a", "1"), ("p/b", "1-2"), ("q/a", "3"), ("r", "4-5"), ("s/a", "6"), ("s", "6-7")];
        let cases: [(&[&str], &str, Entries<'_>); 4] = [
            (&["p", "q", "r", "s", "other"], "0", &entries),
            (&["q", "r", "s"], "0-2", &entries[2..]),
            (&["p", "q"], "0,4-7", &entries[..3]),
            (&[], "0-7", &[]),
        ];
        for (active, default, rest) in cases {
            let mut state_after = state("0", &entries);
            let active: HashSet<PodUid> = active.iter().copied().map(PodUid::from).collect();
            assert_eq!(state_after.retain(&active), default != "0");
            assert_eq!(state_after, state(default, rest), "{active:?}");
        }
    }

    #[test]
    fn a_container_runs_on_its_own_cpus_or_the_shared_pool() {
        let state = state("0-3", &[("p/a", "4-5"), ("p/b", "6")]);
        let p = PodUid::from("p");
        assert_eq!(state.container(&p, "a"), Some(&cpus("4-5")));
        for (pod, container) in [(&p, "c"), (&PodUid::from("q"), "a")] {
            assert_eq!(state.container(pod, container), None);
        }
        assert_eq!(state.pod(&p), cpus("4-6"));
        assert_eq!(state.exclusive(), cpus("4-6"));
    }
}
