//! Requests of all pods, and the values of the QoS cgroups that follow from them.
//!
//! Owned by the manager; updated when a pod is added, removed, or resized. The values of a cgroup are written only when
//! they change (upstream rewrites them each minute and before each pod).

use std::{
    collections::HashMap,
    sync::{Mutex, MutexGuard, PoisonError},
};

use berth_types::{Pod, PodUid, qos::Qos};

use super::{
    class_limits::{self, ClassLimits, ClassRequests, ClassRules, PodRequests},
    values::CgroupLimits,
};

/// The requests by pod, and the values last written.
#[derive(Debug)]
pub(super) struct RequestedResources {
    rules: ClassRules,
    pods: Mutex<HashMap<PodUid, PodRequests>>,
    /// Locked during writes, which may hang; `pods` is not.
    written: Mutex<ClassLimits>,
}

impl RequestedResources {
    /// No pods; nothing is written yet.
    pub(super) fn new(rules: ClassRules) -> Self {
        Self { rules, pods: Mutex::default(), written: Mutex::default() }
    }

    /// Sets the requests of a running pod.
    pub(super) fn set(&self, pod: &Pod) {
        self.set_requests(pod.uid().clone(), PodRequests::of(pod));
    }

    /// Sets the requests of a pod that an earlier agent started.
    pub(super) fn set_requests(&self, pod: PodUid, requests: PodRequests) {
        self.pods().insert(pod, requests);
    }

    /// Removes a pod.
    pub(super) fn remove(&self, pod: &PodUid) {
        self.pods().remove(pod);
    }

    /// Sums of the requests of all pods.
    pub(super) fn sums(&self) -> ClassRequests {
        ClassRequests::sum(self.pods().values())
    }

    /// Values of a QoS cgroup that is about to be created: those without pods.
    pub(super) fn initial(&self, class: Qos) -> CgroupLimits {
        let mut limits = class_limits::of_classes(&ClassRequests::default(), &self.rules);
        limits.remove(&class).unwrap_or_default()
    }

    /// Calls `write` for each QoS cgroup whose values differ from those last written; serialized, so that an older sum
    /// never overwrites a newer one. Blocks.
    ///
    /// # Errors
    /// The first error of `write`; the others are written all the same, and the next call retries.
    pub(super) fn write_changed<E>(&self, write: impl Fn(Qos, &CgroupLimits) -> Result<(), E>) -> Result<(), E> {
        let mut written = self.written();
        let limits = class_limits::of_classes(&self.sums(), &self.rules);
        let mut result = Ok(());
        for (class, limits) in limits {
            if limits == CgroupLimits::default() || written.get(&class) == Some(&limits) {
                continue;
            }
            written.remove(&class);
            match write(class, &limits) {
                Ok(()) => drop(written.insert(class, limits)),
                failed => result = result.and(failed),
            }
        }
        result
    }

    /// Invalidates the values last written: the next [`Self::write_changed`] writes all.
    pub(super) fn invalidate(&self) {
        self.written().clear();
    }

    fn pods(&self) -> MutexGuard<'_, HashMap<PodUid, PodRequests>> {
        self.pods.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn written(&self) -> MutexGuard<'_, ClassLimits> {
        self.written.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;

    use berth_types::memory_qos::MemoryReservationPolicy;

    use super::*;

    fn burstable(cpu_milli: i64) -> PodRequests {
        PodRequests { class: Qos::Burstable, cpu_milli, memory_bytes: 0 }
    }

    /// Classes and CPU shares that are written.
    fn written(requests: &RequestedResources) -> Vec<(Qos, Option<u64>)> {
        let all = RefCell::new(Vec::new());
        let done: Result<(), ()> = requests.write_changed(|class, limits| {
            all.borrow_mut().push((class, limits.cpu_shares));
            Ok(())
        });
        done.expect("written");
        all.into_inner()
    }

    #[test]
    fn only_changed_values_are_written() {
        // AC-06a-11, AC-06a-12
        let requests = RequestedResources::new(ClassRules::default());
        assert_eq!(written(&requests), [(Qos::BestEffort, Some(2)), (Qos::Burstable, Some(2))]);
        assert_eq!(written(&requests), []);
        for (uid, milli) in [("a", 100), ("b", 250), ("c", 0)] {
            requests.set_requests(uid.into(), burstable(milli));
        }
        assert_eq!(written(&requests), [(Qos::Burstable, Some(358))]);
        requests.set_requests("a".into(), burstable(100));
        assert_eq!(written(&requests), []);
        requests.remove(&"b".into());
        assert_eq!(written(&requests), [(Qos::Burstable, Some(102))]);
        requests.invalidate();
        assert_eq!(written(&requests), [(Qos::BestEffort, Some(2)), (Qos::Burstable, Some(102))]);
    }

    #[test]
    fn a_failed_write_does_not_stop_the_others_and_is_retried() {
        let requests = RequestedResources::new(ClassRules::default());
        let failing = |class, _: &CgroupLimits| if class == Qos::BestEffort { Err("busy") } else { Ok(()) };
        assert_eq!(requests.write_changed(failing), Err("busy"));
        assert_eq!(written(&requests), [(Qos::BestEffort, Some(2))]);
    }

    #[test]
    fn memory_requests_of_guaranteed_pods_change_kubepods_only() {
        // AC-06a-27
        let memory_qos = Some(MemoryReservationPolicy::TieredReservation);
        let requests = RequestedResources::new(ClassRules { memory_qos, ..ClassRules::default() });
        assert_eq!(written(&requests).len(), 3);
        let guaranteed = PodRequests { class: Qos::Guaranteed, cpu_milli: 100, memory_bytes: 7 };
        requests.set_requests("a".into(), guaranteed);
        assert_eq!(written(&requests), [(Qos::Guaranteed, None)]);
        assert_eq!(requests.sums().guaranteed_memory, 7);
        assert_eq!(requests.initial(Qos::Burstable).memory_low, Some(0));
    }
}
