//! Cgroups of pods on this node: create, update, read, and remove.
//!
//! Blocks: the manager calls it on the blocking pool.

use prometheus::Histogram;
use tracing::debug;

use super::{
    names::{CLASSES, CgroupDriver, CgroupName, NameError, PodTree},
    slices::Slices,
    values::{self, CgroupLimits, CgroupVersion, FileController, Write},
};
use berth_metrics::CgroupMetrics;
use berth_ports::{PodCgroupValues, ResourceError};
use berth_sys::cgroup::{
    CgroupError, CgroupPresence, CgroupResult, Controller, GroupPath, Hierarchy,
    systemd::{cgroup_watcher::WrittenCgroups, names::path_of},
};
use berth_types::{ContainerId, PodUid, cpu, memory_qos, qos::Qos};

const EINVAL: i32 = 22;
const EBUSY: i32 = 16;

/// Result of ensuring a cgroup.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub(super) struct EnsureResult {
    /// Whether the cgroup did not exist before.
    pub created: bool,
    /// Whether parent cgroups had to be created.
    pub made_above: bool,
    /// Values that could not be written; a cgroup without them is better than none.
    pub complaints: Vec<String>,
}

/// The cgroups of this node, by name.
#[derive(Debug)]
pub(super) struct Tree {
    hierarchy: Hierarchy,
    pub names: PodTree,
    metrics: CgroupMetrics,
    /// Slices, for the systemd driver.
    slices: Option<Slices>,
}

impl Tree {
    pub(super) fn new(hierarchy: Hierarchy, names: PodTree, metrics: CgroupMetrics, slices: Option<Slices>) -> Self {
        metrics.set_version(hierarchy.version());
        Self { hierarchy, names, metrics, slices }
    }

    pub(super) fn version(&self) -> CgroupVersion {
        match self.hierarchy {
            Hierarchy::V1(_) => CgroupVersion::V1,
            Hierarchy::V2(_) => CgroupVersion::V2,
        }
    }

    /// Whether the cgroup exists with all controllers.
    pub(super) fn presence(&self, name: &CgroupName) -> Result<CgroupPresence, ResourceError> {
        self.hierarchy.presence(&self.group(name)?).map_err(text_of)
    }

    /// Creates the cgroup with its values if it is missing, and repairs one that lacks controllers.
    pub(super) fn ensure(&self, name: &CgroupName, limits: &CgroupLimits) -> Result<EnsureResult, ResourceError> {
        let group = self.group(name)?;
        let before = self.hierarchy.presence(&group).map_err(text_of)?;
        if before == CgroupPresence::Complete {
            if let Some(slices) = &self.slices {
                slices.adopt(&self.hierarchy, &group, &self.writes(limits));
            }
            return Ok(EnsureResult::default());
        }
        timed(&self.metrics.create, || {
            let made = self.make(&group, limits).map_err(text_of)?;
            let complaints = self.apply(&group, limits).into_iter().map(|e| e.to_string()).collect();
            if let Some(slices) = &self.slices {
                slices.keep(&self.hierarchy, &group, &self.writes(limits));
            }
            Ok(EnsureResult { created: before == CgroupPresence::Absent, made_above: !made.is_empty(), complaints })
        })
    }

    /// Writes the values of an existing cgroup.
    pub(super) fn update(&self, name: &CgroupName, limits: &CgroupLimits) -> Result<(), ResourceError> {
        self.update_group(&self.group(name)?, limits)
    }

    /// Like [`Self::update`], for a cgroup that is not part of the pod tree.
    pub(super) fn update_group(&self, group: &GroupPath, limits: &CgroupLimits) -> Result<(), ResourceError> {
        timed(&self.metrics.update, || {
            let write = || self.apply(group, limits);
            let failures = match &self.slices {
                None => write(),
                Some(slices) => slices.change(&self.hierarchy, group, &self.writes(limits), write),
            };
            if failures.is_empty() {
                return Ok(());
            }
            Err(ResourceError(failures.iter().map(ToString::to_string).collect::<Vec<_>>().join("; ")))
        })
    }

    /// Restores values that systemd or others have changed in slices of the agent.
    pub(super) fn repair(&self, written: &WrittenCgroups) {
        if let Some(slices) = &self.slices {
            slices.repair(&self.hierarchy, written, |group, writes| {
                writes.iter().filter_map(|write| self.apply_one(group, write, writes).err()).collect()
            });
        }
    }

    /// Kills remaining processes in the cgroups of a pod, of any QoS class, and removes them.
    pub(super) fn remove_pod(&self, uid: &PodUid) -> Result<(), ResourceError> {
        for name in self.names.pod_anywhere(uid) {
            let group = self.group(&name)?;
            if self.hierarchy.presence(&group).map_err(text_of)? == CgroupPresence::Absent {
                continue;
            }
            timed(&self.metrics.destroy, || self.remove(&group))
                .map_err(|e| ResourceError(format!("failed to delete cgroup paths for {group} : {e}")))?;
        }
        Ok(())
    }

    /// All pods with a cgroup, and the QoS class of its parent.
    pub(super) fn pods(&self) -> Result<Vec<(Qos, PodUid)>, ResourceError> {
        let mut pods = Vec::new();
        for class in CLASSES {
            let children = self.hierarchy.children(&self.group(&self.names.qos(class))?).map_err(text_of)?;
            pods.extend(children.iter().filter_map(|child| Some((class, self.names.uid_of(child)?))));
        }
        Ok(pods)
    }

    /// CPU request in milli-CPU that a cgroup's weight corresponds to.
    pub(super) fn requested_milli(&self, name: &CgroupName) -> Result<i64, ResourceError> {
        Ok(cpu::milli_of_shares(self.shares(&self.group(name)?)?))
    }

    /// Memory request of a pod in bytes, as its cgroup protects it; 0 if it protects none.
    pub(super) fn protected_memory(&self, name: &CgroupName, class: Qos) -> u64 {
        let read = || {
            let group = self.group(name)?;
            self.number(&group, Controller::Memory, memory_qos::protection_file(class))
        };
        match self.version() {
            CgroupVersion::V1 => 0,
            CgroupVersion::V2 => read().unwrap_or(0).max(0).unsigned_abs(),
        }
    }

    /// Sets the metrics of memory QoS: protected requests of Guaranteed and of Burstable pods, in bytes.
    pub(super) fn report_protected(&self, guaranteed: u64, burstable: u64) {
        if self.version() == CgroupVersion::V2 {
            self.metrics.set_protected_memory(guaranteed, burstable);
        }
    }

    /// Current CPU and memory values of a cgroup. The weight of cgroup v2 is coarser than shares: if it
    /// equals that of `wanted`, `wanted` is returned.
    pub(super) fn values(&self, name: &CgroupName, wanted: Option<u64>) -> Result<PodCgroupValues, ResourceError> {
        let group = self.group(name)?;
        let (quota, period, memory) = match self.version() {
            CgroupVersion::V1 => (
                self.number(&group, Controller::Cpu, "cpu.cfs_quota_us")?,
                self.number(&group, Controller::Cpu, "cpu.cfs_period_us")?,
                self.number(&group, Controller::Memory, "memory.limit_in_bytes")?,
            ),
            CgroupVersion::V2 => {
                let text = self.read(&group, Controller::Cpu, "cpu.max")?;
                let (quota, period) = text.split_once(' ').unwrap_or((&text, "100000"));
                let quota = if quota == "max" { -1 } else { number(quota, &group, "cpu.max")? };
                let memory = self.number(&group, Controller::Memory, "memory.max")?;
                (quota, number(period, &group, "cpu.max")?, memory)
            }
        };
        let shares = self.shares(&group)?;
        let is_wanted = |wanted: &u64| {
            self.version() == CgroupVersion::V2 && cpu::shares_of_weight(cpu::linear_weight(*wanted)) == shares
        };
        Ok(PodCgroupValues {
            cpu_shares: Some(wanted.filter(is_wanted).unwrap_or(shares)),
            cpu_quota: Some(quota),
            cpu_period: Some(period.max(0).unsigned_abs()),
            memory_limit: Some(memory),
        })
    }

    /// Memory usage in bytes of a cgroup, or of one of its containers' cgroups.
    pub(super) fn memory_usage(
        &self,
        name: &CgroupName,
        container: Option<&ContainerId>,
    ) -> Result<u64, ResourceError> {
        let mut group = self.group(name)?;
        if let Some(id) = container {
            // Runtimes name it by the ID alone, or as `cri-containerd-<id>.scope`, `crio-<id>`.
            let children = self.hierarchy.children(&group).map_err(text_of)?;
            let child = children.iter().find(|child| child.contains(id.as_str()));
            let missing = || ResourceError(format!("container {id} has no cgroup below {group}"));
            group = child.and_then(|child| group.child(child)).ok_or_else(missing)?;
        }
        let file = match self.version() {
            CgroupVersion::V1 => "memory.usage_in_bytes",
            CgroupVersion::V2 => "memory.current",
        };
        Ok(self.number(&group, Controller::Memory, file)?.max(0).unsigned_abs())
    }

    /// The path of a cgroup from the configuration; that of a slice follows from its name.
    pub(super) fn foreign(&self, path: &str) -> Result<GroupPath, ResourceError> {
        let slice = path.rsplit('/').next().filter(|_| self.names.driver() == CgroupDriver::Systemd);
        match slice.and_then(|slice| path_of(slice).ok()) {
            Some(group) => Ok(group),
            None => Self::parse(path),
        }
    }

    fn parse(path: &str) -> Result<GroupPath, ResourceError> {
        GroupPath::parse(path).ok_or_else(|| ResourceError(format!("invalid cgroup path {path:?}")))
    }

    pub(super) fn presence_of(&self, group: &GroupPath) -> Result<CgroupPresence, ResourceError> {
        self.hierarchy.presence(group).map_err(text_of)
    }

    fn group(&self, name: &CgroupName) -> Result<GroupPath, ResourceError> {
        Self::parse(&self.names.path(name))
    }

    fn shares(&self, group: &GroupPath) -> Result<u64, ResourceError> {
        match self.version() {
            CgroupVersion::V1 => Ok(self.number(group, Controller::Cpu, "cpu.shares")?.max(0).unsigned_abs()),
            CgroupVersion::V2 => {
                let weight = self.number(group, Controller::Cpu, "cpu.weight")?.max(0).unsigned_abs();
                Ok(cpu::shares_of_weight(weight))
            }
        }
    }

    /// Creates the cgroup and missing parents; returns the created parents.
    fn make(&self, group: &GroupPath, limits: &CgroupLimits) -> CgroupResult<Vec<GroupPath>> {
        match &self.slices {
            None => self.hierarchy.create(group),
            Some(slices) => slices.make(&self.hierarchy, group, &self.writes(limits)),
        }
    }

    fn remove(&self, group: &GroupPath) -> CgroupResult<()> {
        match &self.slices {
            None => self.hierarchy.remove(group),
            Some(slices) => slices.remove(&self.hierarchy, group),
        }
    }

    /// The files to write for limits, for available controllers.
    fn writes(&self, limits: &CgroupLimits) -> Vec<Write> {
        let mut writes = values::writes(limits, self.version());
        writes.retain(|write| self.hierarchy.has(controller(write.owner)));
        writes
    }

    /// Writes the files of available controllers; continues after a failure.
    fn apply(&self, group: &GroupPath, limits: &CgroupLimits) -> Vec<CgroupError> {
        let writes = self.writes(limits);
        writes.iter().filter_map(|write| self.apply_one(group, write, &writes).err()).collect()
    }

    fn apply_one(&self, group: &GroupPath, write: &Write, all: &[Write]) -> Result<(), CgroupError> {
        let result = self.hierarchy.write(group, controller(write.owner), &write.file, &write.value);
        match result {
            Err(e) if write.optional && e.is_missing() => Ok(()),
            // The kernel refuses a period that would make the current quota exceed that of the parent:
            // write the quota first then.
            Err(e) if write.file == "cpu.cfs_period_us" && e.errno() == Some(EINVAL) => {
                let quota = all.iter().find(|w| w.file == "cpu.cfs_quota_us").ok_or(e)?;
                self.hierarchy.write(group, Controller::Cpu, &quota.file, &quota.value)?;
                self.hierarchy.write(group, Controller::Cpu, &write.file, &write.value)
            }
            Err(e) if write.file == "memory.limit_in_bytes" && e.errno() == Some(EBUSY) => {
                let read = |file| self.hierarchy.read(group, Controller::Memory, file).unwrap_or_default();
                Err(CgroupError::Other(format!(
                    "unable to set memory limit to {} (current usage: {}, peak usage: {})",
                    write.value,
                    read("memory.usage_in_bytes"),
                    read("memory.max_usage_in_bytes")
                )))
            }
            Ok(()) if write.file == "cpu.shares" => self.check_shares(group, &write.value),
            other => other,
        }
    }

    /// The kernel clamps shares silently; compare the result.
    fn check_shares(&self, group: &GroupPath, wanted: &str) -> Result<(), CgroupError> {
        let got = self.hierarchy.read(group, Controller::Cpu, "cpu.shares")?;
        if got == wanted {
            return Ok(());
        }
        Err(CgroupError::Other(format!("cpu.shares of {group}: wrote {wanted}, kernel set {got}")))
    }

    fn read(&self, group: &GroupPath, controller: Controller, file: &str) -> Result<String, ResourceError> {
        self.hierarchy.read(group, controller, file).map_err(text_of)
    }

    fn number(&self, group: &GroupPath, controller: Controller, file: &str) -> Result<i64, ResourceError> {
        number(&self.read(group, controller, file)?, group, file)
    }
}

impl From<NameError> for ResourceError {
    fn from(error: NameError) -> Self {
        Self(error.to_string())
    }
}

/// Converts to the controller of the kernel interface.
pub(super) fn controller(owner: FileController) -> Controller {
    match owner {
        FileController::Cpu => Controller::Cpu,
        FileController::Cpuset => Controller::Cpuset,
        FileController::Memory => Controller::Memory,
        FileController::Pids => Controller::Pids,
        FileController::Hugetlb => Controller::Hugetlb,
    }
}

/// Parses a number; `max` and numbers out of range become the largest.
fn number(text: &str, group: &GroupPath, file: &str) -> Result<i64, ResourceError> {
    if text == "max" {
        return Ok(i64::MAX);
    }
    let parsed: Result<i128, _> = text.parse();
    let value = parsed.map_err(|_| ResourceError(format!("{file} of {group}: expected a number, got {text:?}")))?;
    Ok(i64::try_from(value).unwrap_or(i64::MAX))
}

fn timed<T>(histogram: &Histogram, work: impl FnOnce() -> T) -> T {
    let timer = histogram.start_timer();
    let result = work();
    let seconds = timer.stop_and_record();
    debug!(duration = seconds, "Cgroup operation");
    result
}

fn text_of(error: CgroupError) -> ResourceError {
    ResourceError(error.to_string())
}
