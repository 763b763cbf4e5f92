//! Pod and QoS cgroups with their values: blocking operations of the resource manager. Spec 06a §3, §4.

use std::sync::Arc;

use tracing::{info, warn};

use super::{
    shares::BurstableShares,
    tree::{EnsureResult, Tree},
    values::{self, CgroupLimits, PodRules},
};
use berth_ports::{ContainerPlacements, ResourceError};
use berth_sys::cgroup::CgroupPresence;
use berth_types::{Pod, PodUid, qos::Qos};

/// Cgroups of all pods, shared with jobs on the blocking pool.
pub(super) struct CgroupState {
    pub tree: Tree,
    pub shares: BurstableShares,
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
        for (_, uid) in self.tree.pods()?.into_iter().filter(|(class, _)| *class == Qos::Burstable) {
            // An unreadable value counts as zero; the pod's first sync corrects it.
            let milli = names.pod(Qos::Burstable, &uid).ok().and_then(|n| self.tree.requested_milli(&n).ok());
            self.shares.set_milli(uid, milli.unwrap_or(0));
        }
        self.write_classes()
    }

    pub fn ensure_class(&self, class: Qos) -> Result<EnsureResult, ResourceError> {
        let name = self.tree.names.qos(class);
        let limits = match class {
            Qos::Guaranteed => self.kubepods.clone(),
            class => values::of_class(class, 0, &self.rules.hugepage_sizes),
        };
        self.tree.ensure(&name, &limits)
    }

    pub fn write_classes(&self) -> Result<(), ResourceError> {
        let names = &self.tree.names;
        self.tree
            .update(&names.qos(Qos::BestEffort), &values::of_class(Qos::BestEffort, 0, &self.rules.hugepage_sizes))?;
        self.shares.invalidate();
        self.write_burstable()
    }

    pub fn write_burstable(&self) -> Result<(), ResourceError> {
        self.shares.write_changed(|sum| {
            let limits = values::of_class(Qos::Burstable, sum, &self.rules.hugepage_sizes);
            self.tree.update(&self.tree.names.qos(Qos::Burstable), &limits)
        })
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
        self.shares.set(pod);
        // Parent cgroups had disappeared and were recreated, but without their values.
        let above = if ensured.made_above { self.restore_classes() } else { self.write_burstable() };
        ensured.complaints.extend(above.err().map(|e| e.0));
        Ok(ensured)
    }

    pub fn restore_classes(&self) -> Result<(), ResourceError> {
        self.verify()?;
        self.tree.update(&self.tree.names.kubepods(), &self.kubepods)
    }

    /// Whether the pod's cgroup exists; one that lacks controllers is repaired first.
    pub fn has_pod(&self, pod: &Pod) -> Result<bool, ResourceError> {
        let name = self.tree.names.pod(Qos::of(pod), pod.uid())?;
        match self.tree.presence(&name)? {
            CgroupPresence::Complete => Ok(true),
            CgroupPresence::Absent => Ok(false),
            CgroupPresence::Partial(_) => {
                self.tree.ensure(&name, &self.pod_limits(pod))?;
                Ok(self.tree.presence(&name)? == CgroupPresence::Complete)
            }
        }
    }

    pub fn remove_pod(&self, uid: &PodUid) -> Result<(), ResourceError> {
        self.tree.remove_pod(uid)?;
        self.shares.remove(uid);
        if let Err(e) = self.write_burstable() {
            // The pod cgroup is removed; the weight is verified each minute.
            warn!(podUID = %uid, err = %e, "Failed to write CPU weight of the Burstable QoS cgroup");
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
