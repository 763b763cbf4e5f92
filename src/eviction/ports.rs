//! Traits of eviction's dependencies: node statistics, kernel notifications, pods, and reclaim.

use std::{
    collections::{BTreeSet, HashMap},
    sync::Arc,
};

use async_trait::async_trait;

use super::{
    message::EvictionVerdict,
    signals::{PressureCondition, Readings},
    usage::PodUse,
};
use berth_types::{Pod, PodUid};

/// Reads statistics of the node. Implementations have their own deadlines: a value whose read hangs is absent.
#[async_trait]
pub trait NodeStats: Send + Sync + 'static {
    /// Reads once; the caller sets [`Readings::at`].
    async fn read(&self) -> Readings;
}

/// Kernel notification that a threshold may be crossed: re-evaluate now.
#[async_trait]
pub trait ThresholdNotifications: Send + Sync + 'static {
    /// Waits for the next notification; forever if there is no source of them. Cancel-safe.
    async fn notified(&self);
}

/// Scope of pod usage that a caller needs.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum UsageScope {
    /// Memory; available immediately.
    Memory,
    /// Processes; available immediately.
    Processes,
    /// Everything, with the last measurement of disks.
    Disks,
    /// Everything, with a fresh measurement of disks.
    DisksNow,
}

/// The pods of this node.
#[async_trait]
pub trait Pods: Send + Sync + 'static {
    /// Pods that run or are to run, with their allocated resources.
    fn active(&self) -> Vec<Arc<Pod>>;
    /// Usage of each pod; has a deadline.
    ///
    /// # Errors
    /// Why usage is not known.
    async fn usages(&self, needs: UsageScope) -> Result<HashMap<PodUid, PodUse>, String>;
    /// Stops a pod for good and waits until none of its containers runs, at most as long as its grace period allows.
    ///
    /// # Errors
    /// The pod still runs.
    async fn evict(&self, pod: &Arc<Pod>, verdict: &EvictionVerdict) -> Result<(), String>;
    /// Waits until a pod is cleaned up. Cancel-safe.
    async fn cleaned_up(&self, pod: &PodUid);
}

/// Memory that the node is short of.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct MemoryShortage {
    /// Bytes until no threshold is met.
    pub bytes: u64,
    /// Bytes that have to be available then.
    pub least: u64,
    /// Whether the machine is short of memory, or the pods together are (allocatable).
    pub of_machine: bool,
}

/// Reclaims resources that nothing uses. Implementations have deadlines.
#[async_trait]
pub trait Reclaim: Send + Sync + 'static {
    /// Removes dead containers, also those of terminated pods.
    ///
    /// # Errors
    /// What could not be removed.
    async fn containers(&self) -> Result<(), String>;
    /// Removes images that no container uses.
    ///
    /// # Errors
    /// What could not be removed.
    async fn images(&self) -> Result<(), String>;
    /// Reclaims page cache of pods, beginning with the pod that would be evicted, if that can suffice. Returns whether
    /// it was attempted.
    async fn page_cache(&self, worst: &PodUid, missing: MemoryShortage) -> bool;
}

/// Callback on each change: all pressures, and those of them that only an earlier agent observed.
pub type PressureCallback = Arc<dyn Fn(&BTreeSet<PressureCondition>, &BTreeSet<PressureCondition>) + Send + Sync>;
