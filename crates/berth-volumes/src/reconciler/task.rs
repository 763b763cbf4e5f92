//! Owner task of one volume: runs due operations one at a time and publishes the observed state.

use std::{
    collections::{BTreeMap, BTreeSet},
    panic::AssertUnwindSafe,
    path::PathBuf,
    sync::Arc,
};

use futures::FutureExt;
use tokio::{
    sync::{OwnedSemaphorePermit, Semaphore, watch},
    time::{Instant, sleep_until},
};
use tracing::error;

use super::{
    backoff::{Backoffs, OpName},
    registry::{
        DesiredVolume, Desires, ObservedPodVolume, ObservedVolume, ReconcilerRegistry, ReconstructedPodVolume,
        VolumeChannels,
    },
    state::{Attachment, DesiredState, ExternalState, MountPresence, NextStep, Op, VolumeState},
    volume_operations::error_message,
};
use crate::{
    attachable::{AttachableVolumePlugin, PublishedVolume, ReconstructedVolume, VolumeTraits},
    operation::Operation,
    pending_operations::SerialQueue,
    spec::{Mode, UniqueName, VolumeSpec},
};
use berth_metrics::{OperationTarget, StorageOperation, World};
use berth_ports::{AttachedVolumes, EventRecord};
use berth_sys::{blocking_pool::BlockingPool, panics::panic_message};
use berth_types::PodUid;

/// Error where an operation cannot start.
const HINDERED: &str = "an earlier operation on this volume has not returned";

/// State of the volume in a pod, besides its presence.
pub(super) struct PodVolumeDetails {
    pub(super) spec: Arc<VolumeSpec>,
    pub(super) target: PathBuf,
    pub(super) published: Option<PublishedVolume>,
    pub(super) root_mode: u32,
    /// Sequence number of the pod sync in which it was last published.
    turn: u64,
    /// Size in bytes up to which no further expansion is due: reached, or rejected while in use.
    pub(super) grown_to: u64,
    /// Error of the last mount attempt, as reported.
    failure: Option<Arc<str>>,
}

/// Failed operation, as reported in logs and events.
pub(super) struct OperationFailure {
    /// It failed for the whole volume, whichever pod it was attempted for.
    pub(super) is_for_all: bool,
    /// Pod and reason of the event to record, if any.
    pub(super) event: Option<(Arc<berth_types::Pod>, &'static str)>,
    /// Full message, such as `MountVolume.SetUp failed for volume "x" : …`.
    pub(super) text: String,
}

/// Task state of one volume.
pub(super) struct VolumeReconciler {
    pub(super) name: UniqueName,
    pub(super) plugin: Arc<dyn AttachableVolumePlugin>,
    pub(super) traits: VolumeTraits,
    pub(super) state: VolumeState,
    backoffs: Backoffs,
    pub(super) desires: BTreeMap<PodUid, Arc<DesiredVolume>>,
    pub(super) pod_volumes: BTreeMap<PodUid, PodVolumeDetails>,
    /// Volume spec for unstaging when no pod is left.
    pub(super) last_spec: Option<Arc<VolumeSpec>>,
    /// Device path at which it is attached.
    pub(super) device: String,
    is_attached: bool,
    /// The successful attach verification was counted in the metrics.
    is_verified: bool,
    /// Single permit: kept by the running operation and by any work that outlives it.
    turn: Arc<Semaphore>,
    /// Reads modes of volume roots; these reads delay no operation.
    pub(super) mode_reads: SerialQueue,
    /// Work of an earlier operation had not returned when another operation was due.
    is_hindered: bool,
    /// Pods counted in the metrics as desired and as actual.
    counted: (BTreeSet<PodUid>, BTreeSet<PodUid>),
}

impl VolumeReconciler {
    pub(super) fn new(
        name: UniqueName,
        plugin: Arc<dyn AttachableVolumePlugin>,
        traits: VolumeTraits,
        mode: Mode,
        pool: BlockingPool,
    ) -> Self {
        Self {
            name,
            plugin,
            turn: Arc::new(Semaphore::new(1)),
            mode_reads: SerialQueue::new(pool),
            is_hindered: false,
            state: VolumeState::new(traits.attachable, mode),
            traits,
            backoffs: Backoffs::default(),
            desires: BTreeMap::new(),
            pod_volumes: BTreeMap::new(),
            last_spec: None,
            device: String::new(),
            is_attached: false,
            is_verified: false,
            counted: Default::default(),
        }
    }

    /// Adds a volume that an earlier agent left in a pod.
    pub(super) fn adopt(&mut self, left: ReconstructedPodVolume) {
        self.state.rebuilt(left.pod.clone(), left.rebuilt.traits.stages);
        self.state.label = left.rebuilt.label;
        let spec = Arc::new(left.rebuilt.spec);
        self.last_spec = Some(spec.clone());
        let pod_volume = PodVolumeDetails {
            spec,
            target: left.path,
            published: None,
            root_mode: 0,
            turn: 0,
            grown_to: 0,
            failure: None,
        };
        self.pod_volumes.insert(left.pod, pod_volume);
    }

    /// Adds a stage that an earlier agent left before any pod, or after the last pod, had the volume.
    pub(super) fn adopt_stage(&mut self, rebuilt: ReconstructedVolume) {
        self.state.rebuilt_stage();
        self.state.label = rebuilt.label;
        self.last_spec = Some(Arc::new(rebuilt.spec));
    }

    /// Keeps the volume staged: what an earlier agent left was not fully understood.
    pub(super) fn keep_stage(&mut self) {
        self.state.keep_stage();
    }

    /// Returns the observed state for readers.
    pub(super) fn shown(&self) -> ObservedVolume {
        let of = |(pod, own): (&PodUid, &super::state::PodVolumeState)| {
            let pod_volume = self.pod_volumes.get(pod)?;
            let shown = ObservedPodVolume {
                presence: own.presence,
                published: pod_volume.published.clone(),
                root_mode: pod_volume.root_mode,
                is_label_blocked: self.state.is_hindered(pod),
                failure: pod_volume.failure.clone(),
            };
            Some((pod.clone(), shown))
        };
        ObservedVolume {
            attachable: self.traits.attachable,
            is_attached: self.is_attached || !self.traits.attachable,
            pods: self.state.pods.iter().filter_map(of).collect(),
        }
    }

    /// Runs the task until the volume is fully removed.
    pub(super) async fn run(mut self, board: Arc<ReconcilerRegistry>, slot: Arc<VolumeChannels>) {
        let mut desires = slot.desires.subscribe();
        let (mut attached, mut reported) = (board.attached(), board.deps.reported.clone());
        let (mut cured, mut moved) = (self.plugin.recovered(), board.deps.storage.retry_signal());
        loop {
            let wanted = desires.borrow_and_update().clone();
            self.apply(wanted);
            self.remove_absent_pods(&slot);
            let around = self.around(&board, &attached, &reported);
            self.show(&board, &slot);
            let until = match self.state.due(&around, &self.backoffs, Instant::now().into_std()) {
                NextStep::Do(op) => {
                    self.operate(&board, &slot, &op).await;
                    continue;
                }
                // Keeps the owner while earlier work hangs: a new owner would take a second thread.
                NextStep::Removed if self.turn.available_permits() == 0 => {
                    self.is_hindered = true;
                    None
                }
                NextStep::Removed => {
                    if board.retire(&self.name, &desires) {
                        return;
                    }
                    continue;
                }
                NextStep::Wait(until) => until.map(Instant::from_std),
            };
            let rest = async {
                match until {
                    Some(until) => sleep_until(until).await,
                    None => std::future::pending().await,
                }
            };
            let (turn, is_hindered) = (self.turn.clone(), self.is_hindered);
            let returned = async move {
                if !is_hindered || turn.acquire().await.is_err() {
                    std::future::pending::<()>().await;
                }
            };
            tokio::select! {
                changed = desires.changed() => if changed.is_err() { return },
                () = rest => {}
                () = returned => {
                    self.is_hindered = false;
                    self.backoffs.cured(Instant::now().into_std());
                }
                () = wait_for_change(&mut attached) => {}
                () = wait_for_change(&mut reported) => {}
                () = wait_for_change(&mut cured) => self.backoffs.cured(Instant::now().into_std()),
                () = wait_for_change(&mut moved) => self.backoffs.cured(Instant::now().into_std()),
            }
        }
    }

    /// Applies the desired state of the pods.
    fn apply(&mut self, wanted: Desires) {
        for (pod, desire) in wanted {
            let Some(desire) = desire else {
                self.state.unwant(&pod);
                self.desires.remove(&pod);
                continue;
            };
            self.state.want(&pod);
            self.traits = desire.traits.clone();
            self.state.attachable = desire.traits.attachable;
            self.last_spec = Some(desire.usage.spec.clone());
            let pod_volume = self.pod_volumes.entry(pod.clone()).or_insert_with(|| PodVolumeDetails {
                spec: desire.usage.spec.clone(),
                target: desire.usage.target.clone(),
                published: None,
                root_mode: 0,
                turn: desire.turn,
                grown_to: 0,
                failure: None,
            });
            pod_volume.spec = desire.usage.spec.clone();
            // A volume found only by its mark may lack the target path in the pod.
            pod_volume.target.clone_from(&desire.usage.target);
            if let Some(own) = self.state.pods.get_mut(&pod) {
                own.label.clone_from(&desire.usage.label);
                own.needs_republish |= desire.traits.republishes && pod_volume.turn < desire.turn;
                own.needs_expansion =
                    desire.traits.expands && desire.growth.is_some_and(|(_, to)| to > pod_volume.grown_to);
            }
            pod_volume.turn = desire.turn;
            self.desires.insert(pod, desire);
        }
    }

    fn around(
        &mut self,
        board: &ReconcilerRegistry,
        attached: &watch::Receiver<AttachedVolumes>,
        reported: &watch::Receiver<Arc<BTreeSet<String>>>,
    ) -> ExternalState {
        let began = Instant::now();
        let attachment = match &*attached.borrow() {
            None => Attachment::Unread,
            Some(all) => all.get(self.name.as_str()).cloned().map_or(Attachment::Absent, Attachment::At),
        };
        if let Attachment::At(device) = &attachment {
            self.device.clone_from(device);
        }
        self.is_attached = matches!(attachment, Attachment::At(_));
        let around = ExternalState { is_reported: reported.borrow().contains(self.name.as_str()), attachment };
        let is_usable = self.state.may_use(&around);
        if is_usable && !self.is_verified && !self.desires.is_empty() {
            board.deps.metrics.ended(self.operated(), StorageOperation::Verify, true, began.elapsed());
        }
        self.is_verified = is_usable && (self.is_verified || !self.desires.is_empty());
        around
    }

    fn operated(&self) -> OperationTarget<'_> {
        OperationTarget { plugin: &self.traits.label, is_migrated: self.traits.is_migrated }
    }

    async fn operate(&mut self, board: &ReconcilerRegistry, slot: &VolumeChannels, op: &Op) {
        let began = Instant::now();
        self.state.tried(op);
        let done = match self.turn.clone().try_acquire_owned() {
            Ok(turn) => self.run_with_permit(board, slot, op, turn).await,
            Err(_) => {
                self.is_hindered = true;
                Err(self.abort_failure(op, HINDERED))
            }
        };
        let name = self.state.name_of(op);
        board.deps.metrics.ended(self.operated(), name.into(), done.is_ok(), began.elapsed());
        let now = Instant::now().into_std();
        if let Op::Mount(pod) = op
            && let Some(pod_volume) = self.pod_volumes.get_mut(pod)
        {
            pod_volume.failure = done.as_ref().err().map(|failure| failure.text.as_str().into());
        }
        let Err(failure) = done else {
            self.backoffs.succeeded(name, op.pod());
            if matches!(op, Op::Unmount(_) | Op::UnmountDevice) {
                // Other operations may have failed because the mount existed.
                self.backoffs.cured(now);
            }
            return;
        };
        let pause = self.backoffs.failed(name, op.pod().filter(|_| !failure.is_for_all), now);
        error!(volume = %self.name, podUID = op.pod().map(PodUid::as_str), durationBeforeRetry = ?pause, err = %failure.text, "Operation failed. No retries permitted until durationBeforeRetry has elapsed");
        if let Some((pod, reason)) = failure.event {
            board.deps.events.record(EventRecord::warning(pod.id(), reason, failure.text));
        }
    }

    /// Runs an operation with its permit; work that outlives the operation keeps the permit.
    async fn run_with_permit(
        &mut self,
        board: &ReconcilerRegistry,
        slot: &VolumeChannels,
        op: &Op,
        turn: OwnedSemaphorePermit,
    ) -> Result<(), OperationFailure> {
        let unwanted = board.deps.stop.child_token();
        // Cancels work that outlives this operation at its next progress check: the next operation starts over.
        let _ends = unwanted.clone().drop_guard();
        let operation = Operation::new(turn, board.operation(unwanted.clone()));
        let work = async {
            match op {
                Op::Mount(pod) => self.mount(board, pod, &operation).await,
                Op::Unmount(pod) => self.unmount(board, pod, &operation).await,
                Op::UnmountDevice => self.unmount_device(board, &operation).await,
                Op::Resize(pod) => self.resize(board, pod, &operation).await,
            }
        };
        let mut desires = slot.desires.subscribe();
        let cancel_watch = async {
            let is_gone = |all: &Desires| op.pod().is_some_and(|pod| matches!(all.get(pod), Some(None)));
            if matches!(op, Op::Mount(_)) && desires.wait_for(is_gone).await.is_ok() {
                unwanted.cancel();
            }
            std::future::pending::<()>().await;
        };
        let done = tokio::select! {
            biased;
            done = AssertUnwindSafe(work).catch_unwind() => done,
            () = cancel_watch => return Ok(()), // never completes
        };
        done.unwrap_or_else(|panic| {
            self.state.record_abort(op);
            Err(self.abort_failure(op, &panic_message(&*panic)))
        })
    }

    /// Returns the failure of an operation that ended without its own result.
    fn abort_failure(&self, op: &Op, cause: &str) -> OperationFailure {
        let (prefix, reason) = match (op, self.state.mode) {
            (Op::Mount(_), Mode::Filesystem) => ("MountVolume.SetUp failed", Some("FailedMount")),
            (Op::Mount(_), Mode::Block) => ("MapVolume.MapPodDevice failed", Some("FailedMapVolume")),
            (Op::Unmount(_), Mode::Filesystem) => ("UnmountVolume.TearDown failed", None),
            (Op::Unmount(_), Mode::Block) => ("UnmapVolume.UnmapPodDevice failed", None),
            (Op::UnmountDevice, Mode::Filesystem) => ("UnmountDevice failed", None),
            (Op::UnmountDevice, Mode::Block) => ("UnmapDevice failed", None),
            (Op::Resize(_), _) => ("NodeExpandVolume.NodeExpandVolume failed", Some("VolumeResizeFailed")),
        };
        let desire = op.pod().and_then(|pod| self.desires.get(pod));
        let name = match (op, desire) {
            (Op::Mount(_) | Op::Resize(_), Some(desire)) => desire.usage.spec.name.as_str(),
            _ => self.name.as_str(),
        };
        let text = error_message(prefix, name, cause);
        let event = desire.zip(reason).map(|(desire, reason)| (desire.usage.pod.clone(), reason));
        OperationFailure { is_for_all: false, event, text }
    }

    /// Removes pods that no longer have or need the volume.
    fn remove_absent_pods(&mut self, slot: &VolumeChannels) {
        let gone: Vec<PodUid> =
            self.pod_volumes.keys().filter(|pod| !self.state.pods.contains_key(*pod)).cloned().collect();
        for pod in &gone {
            self.pod_volumes.remove(pod);
            self.backoffs.forget(pod);
        }
        slot.desires.send_if_modified(|all| {
            all.retain(|pod, desire| desire.is_some() || self.pod_volumes.contains_key(pod));
            false
        });
    }

    fn show(&mut self, board: &ReconcilerRegistry, slot: &VolumeChannels) {
        let all = |is: fn(&super::state::PodVolumeState) -> bool| -> BTreeSet<PodUid> {
            self.state.pods.iter().filter(|(_, own)| is(own)).map(|(pod, _)| pod.clone()).collect()
        };
        let now = (all(|own| own.desired == DesiredState::Wanted), all(|own| own.presence != MountPresence::Absent));
        let label = self.plugin.name();
        let by = |now: &BTreeSet<PodUid>, before: &BTreeSet<PodUid>| {
            i64::try_from(now.len()).unwrap_or(0) - i64::try_from(before.len()).unwrap_or(0)
        };
        let changes = [(World::Desired, by(&now.0, &self.counted.0)), (World::Actual, by(&now.1, &self.counted.1))];
        for (world, by) in changes.into_iter().filter(|(_, by)| *by != 0) {
            board.deps.metrics.changed(label, world, by);
        }
        self.counted = now;
        slot.shown.send_replace(Arc::new(self.shown()));
    }
}

impl From<OpName> for StorageOperation {
    fn from(name: OpName) -> Self {
        match name {
            OpName::Mount => Self::Mount,
            OpName::Map => Self::Map,
            OpName::Unmount => Self::Unmount,
            OpName::Unmap => Self::Unmap,
            OpName::UnmountDevice => Self::UnmountDevice,
            OpName::UnmapDevice => Self::UnmapDevice,
            OpName::Resize => Self::Resize,
        }
    }
}

/// Waits for a change; pends forever once the sender is gone.
async fn wait_for_change<T>(receiver: &mut watch::Receiver<T>) {
    if receiver.changed().await.is_err() {
        std::future::pending::<()>().await;
    }
}
