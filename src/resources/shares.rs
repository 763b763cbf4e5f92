//! What burstable pods request together, and the weight that follows for their group.
//!
//! Owned by the manager; counted when a pod comes, goes or is resized, written only when it
//! changes (the reference rewrites it each minute and before each pod).

use std::{
    collections::HashMap,
    sync::{Mutex, MutexGuard, PoisonError},
};

use berth_types::{Pod, PodUid, cpu, qos::Qos};

use super::values;

/// The sum and what was last written of it.
#[derive(Debug, Default)]
pub(super) struct BurstableShares(Mutex<State>);

#[derive(Debug, Default)]
struct State {
    requested: HashMap<PodUid, i64>,
    written: Option<u64>,
}

impl BurstableShares {
    /// A pod runs with these requests.
    pub(super) fn set(&self, pod: &Pod) {
        if Qos::of(pod) == Qos::Burstable {
            self.set_milli(pod.uid().clone(), values::requested_milli(pod));
        }
    }

    /// A pod of a former life of the agent is there.
    pub(super) fn set_milli(&self, pod: PodUid, milli: i64) {
        self.state().requested.insert(pod, milli.max(0));
    }

    /// A pod is gone.
    pub(super) fn remove(&self, pod: &PodUid) {
        self.state().requested.remove(pod);
    }

    /// Lets `write` bring the group to the present sum where the weight differs from what was
    /// written; one at a time, so that an older sum never overtakes a newer one. Blocks.
    ///
    /// # Errors
    /// What `write` says; the next call tries again.
    pub(super) fn write_changed<E>(&self, write: impl FnOnce(i64) -> Result<(), E>) -> Result<(), E> {
        let mut state = self.state();
        let sum = state.requested.values().fold(0_i64, |sum, milli| sum.saturating_add(*milli));
        if state.written == Some(cpu::shares(sum)) {
            return Ok(());
        }
        state.written = None;
        write(sum)?;
        state.written = Some(cpu::shares(sum));
        Ok(())
    }

    /// Forgets what was written: the next [`Self::write_changed`] writes whatever the sum.
    pub(super) fn doubt(&self) {
        self.state().written = None;
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn written(shares: &BurstableShares) -> Option<i64> {
        let mut seen = None;
        let done: Result<(), ()> = shares.write_changed(|sum| {
            seen = Some(sum);
            Ok(())
        });
        done.expect("written");
        seen
    }

    #[test]
    fn only_a_changed_weight_is_written() {
        // AC-06a-11, AC-06a-12
        let shares = BurstableShares::default();
        assert_eq!(written(&shares), Some(0));
        assert_eq!(written(&shares), None);
        for (uid, milli) in [("a", 100), ("b", 250), ("c", 0)] {
            shares.set_milli(uid.into(), milli);
        }
        assert_eq!(written(&shares), Some(350));
        shares.set_milli("a".into(), 100);
        assert_eq!(written(&shares), None);
        shares.remove(&"b".into());
        assert_eq!(written(&shares), Some(100));
        shares.doubt();
        assert_eq!(written(&shares), Some(100));
    }

    #[test]
    fn a_failed_write_is_tried_again() {
        let shares = BurstableShares::default();
        assert_eq!(shares.write_changed(|_| Err("busy")), Err("busy"));
        assert_eq!(written(&shares), Some(0));
    }
}
