//! Sum of the CPU requests of Burstable pods, and the CPU shares of their QoS cgroup.
//!
//! Owned by the manager; updated when a pod is added, removed, or resized, and written only when it
//! changes (upstream rewrites it each minute and before each pod).

use std::{
    collections::HashMap,
    sync::{Mutex, MutexGuard, PoisonError},
};

use berth_types::{Pod, PodUid, cpu, qos::Qos};

use super::values;

/// The requests by pod, and the shares last written.
#[derive(Debug, Default)]
pub(super) struct BurstableShares(Mutex<ShareState>);

#[derive(Debug, Default)]
struct ShareState {
    requested: HashMap<PodUid, i64>,
    written: Option<u64>,
}

impl BurstableShares {
    /// Sets the request of a running pod.
    pub(super) fn set(&self, pod: &Pod) {
        if Qos::of(pod) == Qos::Burstable {
            self.set_milli(pod.uid().clone(), values::requested_milli(pod));
        }
    }

    /// Sets the request of a pod that an earlier agent started.
    pub(super) fn set_milli(&self, pod: PodUid, milli: i64) {
        self.state().requested.insert(pod, milli.max(0));
    }

    /// Removes a pod.
    pub(super) fn remove(&self, pod: &PodUid) {
        self.state().requested.remove(pod);
    }

    /// Calls `write` with the current sum if its shares differ from those last written; serialized, so
    /// that an older sum never overwrites a newer one. Blocks.
    ///
    /// # Errors
    /// The error of `write`; the next call retries.
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

    /// Invalidates the last written value: the next [`Self::write_changed`] writes in any case.
    pub(super) fn invalidate(&self) {
        self.state().written = None;
    }

    fn state(&self) -> MutexGuard<'_, ShareState> {
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
        shares.invalidate();
        assert_eq!(written(&shares), Some(100));
    }

    #[test]
    fn a_failed_write_is_tried_again() {
        let shares = BurstableShares::default();
        assert_eq!(shares.write_changed(|_| Err("busy")), Err("busy"));
        assert_eq!(written(&shares), Some(0));
    }
}
