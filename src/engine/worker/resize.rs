//! In-place resize progress of a pod worker: actuation state and pod-level resources in the cgroup.
//!
//! Implements spec 02a §8.3, 02b §6.4.

use tracing::debug;

use super::pod_sync::SyncContext;
use crate::engine::allocation::ActuationProgress;
use berth_ports::{ActionKind, PodCgroupValues, SyncOutcome};
use berth_status::Phase;
use berth_types::{Pod, observation::ObservedPod};

/// Values above this are no limit: cgroup v1 reports the largest multiple of the page size.
const UNLIMITED: i64 = i64::MAX - (1 << 20);

/// Pod-level resource values, read once per definition and after each resize.
pub(super) struct PodLevelValues {
    /// Generation of the pod for which the values were read.
    generation: i64,
    /// Values read from the pod's cgroup.
    pub values: berth_status::PodCgroup,
}

impl SyncContext<'_> {
    /// Reports whether the running containers have the allocated resources, by a fresh observation.
    pub(super) async fn note_resize_progress(&mut self, pod: &Pod, observed: &ObservedPod) {
        let in_progress = self.context.runtime.resize_in_progress(pod, observed);
        let progress = if in_progress { ActuationProgress::Ongoing } else { ActuationProgress::Done };
        self.context.allocations.progress(pod, progress);
        self.read_in_force(pod, in_progress).await;
    }

    /// Reports a failed resize; success is detected by the next observation.
    pub(super) fn report_resize_failure(&mut self, done: &SyncOutcome) {
        let Some(pod) = &self.pod else { return };
        let mut resizes = done.actions.iter().filter(|a| a.action == ActionKind::ResizePodInPlace).peekable();
        if resizes.peek().is_some() {
            self.memory.in_force = None;
        }
        if let Some(failure) = resizes.find_map(|action| action.failure.as_ref()) {
            self.context.allocations.progress(pod, ActuationProgress::Failed(&failure.message));
        }
    }

    /// Reads the values of the pod's cgroup if they are unknown; only for running pods, whose status
    /// contains them.
    async fn read_in_force(&mut self, pod: &Pod, in_progress: bool) {
        let is_known = self.memory.in_force.as_ref().is_some_and(|read| read.generation == pod.generation());
        if is_known || pod.api_phase() != Phase::Running.as_str() {
            return;
        }
        self.memory.progress.enter("pod cgroup");
        let values = match self.context.resources.current_pod_values(pod).await {
            // Without pod-level cgroup values the pod has what its containers have: the previous values
            // are published until the containers have the allocated resources.
            Ok(none) if none == PodCgroupValues::default() => {
                if in_progress {
                    return;
                }
                berth_status::PodCgroup::granted(pod)
            }
            Ok(values) => in_force(values),
            Err(error) => {
                debug!(pod = %pod.object_name(), podUID = %pod.uid(), err = %error, "Failed to read pod cgroup");
                return;
            }
        };
        self.memory.in_force = Some(PodLevelValues { generation: pod.generation(), values });
    }
}

/// Converts cgroup values to resources.
fn in_force(values: PodCgroupValues) -> berth_status::PodCgroup {
    let number = |value: u64| i64::try_from(value).unwrap_or(i64::MAX);
    let period = values.cpu_period.map_or(0, number);
    berth_status::PodCgroup {
        cpu_request_milli: values.cpu_shares.map(|shares| number(shares.saturating_mul(1000).div_ceil(1024))),
        cpu_limit_milli: values
            .cpu_quota
            .filter(|quota| *quota > 0)
            .and_then(|quota| quota.saturating_mul(1000).checked_div(period)),
        memory_limit_bytes: values.memory_limit.filter(|bytes| *bytes > 0 && *bytes < UNLIMITED),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cgroup_values_are_converted_to_resources() {
        let read = |shares, quota, period, memory| {
            let seen = in_force(PodCgroupValues {
                cpu_shares: Some(shares),
                cpu_quota: Some(quota),
                cpu_period: Some(period),
                memory_limit: Some(memory),
            });
            (seen.cpu_request_milli, seen.cpu_limit_milli, seen.memory_limit_bytes)
        };
        assert_eq!(read(512, 50_000, 100_000, 64 << 20), (Some(500), Some(500), Some(64 << 20)));
        assert_eq!(read(340, 250_000, 100_000, -1), (Some(333), Some(2500), None), "333m is 340 shares");
        assert_eq!(read(2, -1, 100_000, 0x7fff_ffff_ffff_f000), (Some(2), None, None));
        assert_eq!(read(2, 1000, 0, 0), (Some(2), None, None));
        let none = berth_status::PodCgroup::default();
        assert_eq!(in_force(PodCgroupValues::default()), none);
    }
}
