//! Pod and QoS cgroups with their values: blocking operations of the resource manager. Spec 06a §3, §4.

use std::sync::Arc;

use tracing::{info, warn};

use super::{
    class_limits::PodRequests,
    class_requests::RequestedResources,
    tree::{EnsureResult, Tree},
    values::{self, CgroupLimits, PodRules},
};
use berth_ports::{ContainerPlacements, ResourceError};
use berth_sys::cgroup::CgroupPresence;
use berth_types::{Pod, PodUid, memory_qos::MemoryReservationPolicy, qos::Qos};

/// Cgroups of all pods, shared with jobs on the blocking pool.
pub(super) struct CgroupState {
    pub tree: Tree,
    pub requests: RequestedResources,
    pub rules: PodRules,
    pub placements: Arc<dyn ContainerPlacements>,
    pub kubepods: CgroupLimits,
}

impl CgroupState {
    pub fn start(&self) -> Result<(), ResourceError> {
        let names = &self.tree.names;
        match self.tree.presence(names.root())? {
            CgroupPresence::Complete => {}
            missing => {
                return Err(ResourceError(format!(
                    "invalid configuration: cgroup root {} is not usable: {missing:?}",
                    names.path(names.root())
                )));
            }
        }
        for class in [Qos::Guaranteed, Qos::Burstable, Qos::BestEffort] {
            let ensured = self
                .ensure_class(class)
                .map_err(|e| ResourceError(format!("failed to initialize top level QOS containers: {e}")))?;
            for complaint in ensured.complaints {
                info!(cgroupName = %names.path(&names.qos(class)), err = %complaint, "Failed to write cgroup value");
            }
        }
        for (class, uid) in self.tree.pods()?.into_iter().filter(|(class, _)| *class != Qos::BestEffort) {
            // An unreadable value counts as zero; the pod's first sync corrects it.
            let name = names.pod(class, &uid).ok();
            let cpu_milli = name.as_ref().and_then(|name| self.tree.requested_milli(name).ok()).unwrap_or(0);
            let memory_bytes = name.as_ref().map_or(0, |name| self.tree.protected_memory(name, class));
            self.requests.set_requests(uid, PodRequests { class, cpu_milli, memory_bytes });
        }
        if let Err(e) = self.write_classes() {
            // Pods can run without; the values are verified each minute.
            warn!(err = %e, "Failed to update QoS cgroup configuration");
        }
        Ok(())
    }

    pub fn ensure_class(&self, class: Qos) -> Result<EnsureResult, ResourceError> {
        let name = self.tree.names.qos(class);
        let limits = match class {
            Qos::Guaranteed => self.kubepods.clone(),
            class => self.requests.initial(class),
        };
        self.tree.ensure(&name, &limits)
    }

    pub fn write_classes(&self) -> Result<(), ResourceError> {
        self.requests.invalidate();
        self.write_changed_classes()
    }

    pub fn write_changed_classes(&self) -> Result<(), ResourceError> {
        if self.rules.memory_qos == Some(MemoryReservationPolicy::TieredReservation) {
            let sums = self.requests.sums();
            self.tree.report_protected(sums.guaranteed_memory, sums.burstable_memory);
        }
        self.requests.write_changed(|class, limits| self.write_class(class, limits))
    }

    /// Writes the values of a QoS cgroup. A memory limit that the kernel refuses, or of 0, becomes the current usage of
    /// the cgroup: cgroup v1 refuses a limit below it.
    fn write_class(&self, class: Qos, limits: &CgroupLimits) -> Result<(), ResourceError> {
        let name = self.tree.names.qos(class);
        let written = if limits.memory == Some(0) { Ok(()) } else { self.tree.update(&name, limits) };
        let Some(limit) = limits.memory.filter(|limit| *limit == 0 || written.is_err()) else { return written };
        // An unreadable usage leaves the limit as it is; the other values are written.
        let usage = self.tree.memory_usage(&name, None).map_or(0, |bytes| i64::try_from(bytes).unwrap_or(i64::MAX));
        if usage <= limit && written.is_err() {
            return written;
        }
        self.tree.update(&name, &CgroupLimits { memory: Some(usage), ..limits.clone() })
    }

    pub fn verify(&self) -> Result<(), ResourceError> {
        for class in [Qos::Guaranteed, Qos::Burstable, Qos::BestEffort] {
            self.ensure_class(class)?;
        }
        self.write_classes()
    }

    /// Values of a pod's cgroup; a pod with exclusive CPUs runs without quota.
    pub fn pod_limits(&self, pod: &Pod) -> CgroupLimits {
        let mut rules = self.rules.clone();
        rules.cpu_cfs_quota &= !self.placements.pod_runs_without_quota(pod);
        values::of_pod(pod, &rules)
    }

    pub fn ensure_pod(&self, pod: &Pod) -> Result<EnsureResult, ResourceError> {
        let name = self.tree.names.pod(Qos::of(pod), pod.uid())?;
        let mut ensured = self.tree.ensure(&name, &self.pod_limits(pod))?;
        self.requests.set(pod);
        // Parent cgroups had disappeared and were recreated, but without their values.
        let above = if ensured.made_above { self.restore_classes() } else { self.write_changed_classes() };
        ensured.complaints.extend(above.err().map(|e| e.0));
        Ok(ensured)
    }

    pub fn restore_classes(&self) -> Result<(), ResourceError> {
        self.verify()?;
        self.tree.update(&self.tree.names.kubepods(), &self.kubepods)
    }

    /// Whether the pod's cgroup exists; one that lacks controllers is repaired first. Keeps the pod's current requests
    /// for the next update of the QoS cgroups: a resize of memory requests alone changes no value of the pod's cgroup.
    pub fn has_pod(&self, pod: &Pod) -> Result<bool, ResourceError> {
        let name = self.tree.names.pod(Qos::of(pod), pod.uid())?;
        match self.tree.presence(&name)? {
            CgroupPresence::Complete => {
                self.requests.set(pod);
                Ok(true)
            }
            CgroupPresence::Absent => Ok(false),
            CgroupPresence::Partial(_) => {
                self.tree.ensure(&name, &self.pod_limits(pod))?;
                Ok(self.tree.presence(&name)? == CgroupPresence::Complete)
            }
        }
    }

    pub fn remove_pod(&self, uid: &PodUid) -> Result<(), ResourceError> {
        self.tree.remove_pod(uid)?;
        self.requests.remove(uid);
        if let Err(e) = self.write_changed_classes() {
            // The pod cgroup is removed; the values are verified each minute.
            warn!(podUID = %uid, err = %e, "Failed to update QoS cgroup configuration");
        }
        Ok(())
    }

    pub fn enforce_limits(&self, cgroup: &str, limits: &CgroupLimits) -> Result<(), ResourceError> {
        let group = self.tree.foreign(cgroup)?;
        match self.tree.presence_of(&group)? {
            CgroupPresence::Complete => self.tree.update_group(&group, limits),
            CgroupPresence::Absent => Err(ResourceError(format!("{cgroup:?} cgroup does not exist"))),
            CgroupPresence::Partial(missing) => {
                Err(ResourceError(format!("cgroup {cgroup:?} has some missing controllers: {}", missing.join(", "))))
            }
        }
    }
}
