//! What eviction needs of others.

use std::{
    collections::{BTreeSet, HashMap},
    sync::Arc,
};

use async_trait::async_trait;

use super::{
    message::Verdict,
    signals::{Condition, Readings},
    usage::PodUse,
};
use berth_types::{Pod, PodUid};

/// Looks at the node. Has deadlines of its own: what hangs is absent.
#[async_trait]
pub trait Gauges: Send + Sync + 'static {
    /// One look; its time is left to the caller.
    async fn look(&self) -> Readings;
}

/// Says that something may have changed before the next look was due: a word of the kernel.
#[async_trait]
pub trait Alarm: Send + Sync + 'static {
    /// Waits for the next word; for ever where there is none to come. Safe to drop.
    async fn rung(&self);
}

/// What has to be known of pods.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Needs {
    /// Memory: known at once.
    Memory,
    /// Processes: known at once.
    Processes,
    /// Everything, disks included, as it was measured last.
    Disks,
    /// Everything, and disks as they are now.
    DisksNow,
}

/// The pods of this node.
#[async_trait]
pub trait Pods: Send + Sync + 'static {
    /// Those that run or are to, with the resources they hold.
    fn active(&self) -> Vec<Arc<Pod>>;
    /// What each takes; has a deadline.
    ///
    /// # Errors
    /// Why that is not known.
    async fn usages(&self, needs: Needs) -> Result<HashMap<PodUid, PodUse>, String>;
    /// Stops a pod for good and waits until none of its containers runs, as long as its grace allows.
    ///
    /// # Errors
    /// It still runs.
    async fn evict(&self, pod: &Arc<Pod>, verdict: &Verdict) -> Result<(), String>;
    /// Waits until nothing of a pod is left; safe to drop.
    async fn gone(&self, pod: &PodUid);
}

/// Memory that the node is short of.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Missing {
    /// Bytes until the node is short of none.
    pub bytes: u64,
    /// Bytes that are to be left then.
    pub least: u64,
    /// Whether the machine is short of it, or the pods together.
    pub of_machine: bool,
}

/// Frees what nobody needs. Has deadlines.
#[async_trait]
pub trait Reclaim: Send + Sync + 'static {
    /// Removes dead containers, also those of pods that have ended.
    ///
    /// # Errors
    /// What could not be removed.
    async fn containers(&self) -> Result<(), String>;
    /// Removes images that nothing runs from.
    ///
    /// # Errors
    /// What could not be removed.
    async fn images(&self) -> Result<(), String>;
    /// Takes back pages of files that pods have read, of the pod first that would have to go, where that can be enough;
    /// says whether it was tried.
    async fn page_cache(&self, worst: &PodUid, missing: Missing) -> bool;
}

/// Hears which pressures there are, and which of them only an earlier agent has seen, whenever that changes.
pub type Pressures = Arc<dyn Fn(&BTreeSet<Condition>, &BTreeSet<Condition>) + Send + Sync>;
