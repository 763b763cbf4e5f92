//! Volume operations step by step (mount, unmount, unstage, resize) with upstream's error messages.
//!
//! Implements spec 07 §4.

use std::{panic::AssertUnwindSafe, path::PathBuf, sync::Arc, time::Duration};

use futures::FutureExt;
use tokio::time::timeout;

use super::{
    registry::{DesiredVolume, ReconcilerRegistry},
    state::{MountPresence, StepResult},
    task::{OperationFailure, VolumeReconciler},
};
use crate::{
    attachable::{Class, ErrorCause, OpError, PublishedVolume, Removal, Usage},
    block_mapper, expansion,
    operation::Operation,
    spec::{Mode, VolumeSpec},
};
use berth_ports::{EventKind, EventRecord};
use berth_sys::panics::panic_message;
use berth_types::{PodUid, node_selector};

/// Timeout for reading the mode of a volume's root.
const MODE_READ_TIMEOUT: Duration = Duration::from_secs(10);
/// Mode of sub-path directories where the root's mode cannot be read.
const FALLBACK_MODE: u32 = 0o750;
const FOR_ONE_POD: &str = "volume uses the ReadWriteOncePod access mode and is already in use by another pod";

/// Formats `<prefix> for volume "<name>" : <cause>`.
pub(super) fn error_message(prefix: &str, name: &str, cause: impl std::fmt::Display) -> String {
    format!("{prefix} for volume {name:?} : {cause}")
}

/// Returns the mode of a volume's root as cached by the kernel, without querying a server that may never answer.
fn root_mode(path: &std::path::Path) -> Option<u32> {
    use rustix::fs::{AtFlags, CWD, StatxFlags, statx};
    let found = statx(CWD, path, AtFlags::STATX_DONT_SYNC, StatxFlags::MODE | StatxFlags::TYPE).ok()?;
    // A file system without cached attributes may report no mode.
    Some(u32::from(found.stx_mode) & 0o7777).filter(|mode| mode & 0o777 != 0)
}

impl VolumeReconciler {
    /// Runs a plugin call with the plugin's timeout, extended while the operation makes progress. A timeout or a panic
    /// is an uncertain error: the call may still take effect.
    async fn within<T>(
        &self,
        operation: &Operation,
        call: impl Future<Output = Result<T, OpError>>,
    ) -> Result<T, OpError> {
        let mut call = std::pin::pin!(AssertUnwindSafe(call).catch_unwind());
        loop {
            let signs = operation.progress();
            match timeout(self.plugin.limit(), &mut call).await {
                Ok(Ok(done)) => return done,
                Ok(Err(panic)) => return Err(OpError::uncertain(panic_message(&*panic))),
                Err(_) if operation.progress() != signs => {}
                Err(_) => return Err(OpError::uncertain("context deadline exceeded")),
            }
        }
    }

    pub(super) async fn mount(
        &mut self,
        board: &ReconcilerRegistry,
        pod: &PodUid,
        operation: &Operation,
    ) -> Result<(), OperationFailure> {
        let Some(desire) = self.desires.get(pod).cloned() else { return Ok(()) };
        let usage = self.usage(&desire, operation);
        let (kind, reason) = match usage.mode {
            Mode::Filesystem => ("MountVolume", "FailedMount"),
            Mode::Block => ("MapVolume", "FailedMapVolume"),
        };
        let (stage_step, publish_step) = match usage.mode {
            Mode::Filesystem => ("MountDevice", "SetUp"),
            Mode::Block => ("SetUpDevice", "MapPodDevice"),
        };
        let fails = |step: &str, reason: &'static str, cause: &dyn std::fmt::Display| OperationFailure {
            is_for_all: step == stage_step,
            event: Some((usage.pod.clone(), reason)),
            text: error_message(&format!("{kind}.{step} failed"), &usage.spec.name, cause),
        };
        if !self.suits_node(board, &usage.spec) {
            return Err(fails("NodeAffinity check", "FailedMount", &"no matching NodeSelectorTerms"));
        }
        if !self.traits.mount_options && !usage.spec.mount_options().is_empty() {
            let cause = "mount options are not supported for this volume type";
            return Err(fails("MountOptionSupport check", reason, &cause));
        }
        if usage.spec.is_for_one_pod() && self.state.other_user(pod).is_some() {
            let step = if usage.mode == Mode::Block { stage_step } else { publish_step };
            return Err(OperationFailure { is_for_all: false, ..fails(step, reason, &FOR_ONE_POD) });
        }
        let usage_of_device = self.attached(&usage).await.map_err(|e| fails("WaitForAttach", reason, &e))?;
        if self.traits.stages && self.state.stage != MountPresence::Present {
            if let Err(e) = self.within(operation, self.plugin.stage(&usage_of_device)).await {
                self.state.record_result(&StepResult::NotStaged(e.class));
                record_filesystem_mismatch(board, &usage, &e);
                let step = if e.trouble == ErrorCause::NotAttached { "WaitForAttach" } else { stage_step };
                return Err(fails(step, reason, &e));
            }
            self.state.record_result(&StepResult::Staged);
        }
        match self.publish(board, &usage_of_device).await {
            Ok(published) => self.record_published(pod, published).await,
            Err(e) => {
                self.state.record_result(&StepResult::NotPublished(pod.clone(), e.class));
                let is_absent = self.state.pods.get(pod).is_none_or(|own| own.presence == MountPresence::Absent);
                if usage.mode == Mode::Block && is_absent && self.unmark(board, &usage).await.is_err() {
                    // An earlier attempt bound a device there, which must be unmapped.
                    self.state.record_result(&StepResult::NotPublished(pod.clone(), Class::Uncertain));
                }
                record_filesystem_mismatch(board, &usage, &e);
                return Err(fails(publish_step, reason, &e));
            }
        }
        self.state.record_result(&StepResult::Published(pod.clone()));
        if !usage.is_republish {
            board.deps.metrics.mounted(&self.traits.label, desire.since.elapsed());
        }
        Ok(())
    }

    /// Builds the plugin's input from the pod's desire and the current volume state.
    fn usage(&self, desire: &DesiredVolume, operation: &Operation) -> Usage {
        let pod = desire.usage.pod.uid();
        let own = self.state.pods.get(pod);
        Usage {
            device: self.device.clone(),
            has_other_users: self.state.other_user(pod).is_some(),
            is_republish: self.state.is_mounted(pod),
            was_rebuilt: own.is_some_and(|own| own.was_rebuilt),
            label: self.state.label.clone(),
            operation: operation.clone(),
            ..desire.usage.clone()
        }
    }

    fn suits_node(&self, board: &ReconcilerRegistry, spec: &VolumeSpec) -> bool {
        let required = spec.volume().and_then(|of| of.node_affinity.as_ref()?.required.as_ref());
        let facts = board.deps.facts.borrow();
        required.is_none_or(|required| node_selector::matches(required, &facts.name, &facts.labels))
    }

    async fn attached(&mut self, usage: &Usage) -> Result<Usage, OpError> {
        let mut usage = usage.clone();
        if self.traits.attachable {
            let found = self.within(&usage.operation, self.plugin.attached(&usage)).await?;
            if let Some(device) = found {
                self.device.clone_from(&device);
                usage.device = device;
            }
        }
        Ok(usage)
    }

    /// Removes the mark of a pod that did not get the device.
    async fn unmark(&self, board: &ReconcilerRegistry, usage: &Usage) -> Result<(), OpError> {
        let map = self.map(board, usage);
        self.within(&usage.operation, async { block_mapper::forget(&map).await.map_err(OpError::uncertain) }).await
    }

    fn map(&self, board: &ReconcilerRegistry, usage: &Usage) -> block_mapper::Map {
        block_mapper::Map {
            device: PathBuf::new(),
            global: self.plugin.map_dir(&board.deps.root, &usage.spec),
            pod: usage.pod.uid().clone(),
            link: usage.target.clone(),
            operation: usage.operation.clone(),
        }
    }

    async fn publish(&self, board: &ReconcilerRegistry, usage: &Usage) -> Result<PublishedVolume, OpError> {
        if usage.mode == Mode::Filesystem {
            return self.within(&usage.operation, self.plugin.publish(usage)).await;
        }
        let map = self.map(board, usage);
        // A failure here did nothing, and proves nothing about an earlier attempt.
        self.within(&usage.operation, async { block_mapper::mark(&map).await.map_err(OpError::transient) }).await?;
        let published = self.within(&usage.operation, self.plugin.publish(usage)).await?;
        if published.path.as_os_str().is_empty() {
            return Err(OpError::uncertain("device path of the volume is empty"));
        }
        let map = block_mapper::Map { device: published.path, ..map };
        // From here on the pod may have the device, whatever fails.
        let device =
            self.within(&usage.operation, async { block_mapper::map(&map).await.map_err(OpError::uncertain) }).await?;
        if !usage.is_republish {
            let name = &usage.spec.name;
            for (what, path) in [("globalMapPath", &map.global), ("volumeMapPath", &map.link)] {
                let text = format!(
                    "MapVolume.MapPodDevice succeeded for volume {name:?} {what} {:?}",
                    path.display().to_string()
                );
                board.deps.events.record(EventRecord::normal(usage.pod.id(), "SuccessfulMountVolume", text));
            }
        }
        Ok(PublishedVolume { path: device, relabel: false })
    }

    async fn record_published(&mut self, pod: &PodUid, published: PublishedVolume) {
        let path = published.path.clone();
        let reading = self.mode_reads.take(MODE_READ_TIMEOUT, move || root_mode(&path));
        let mode = reading.await.ok().flatten();
        if let Some(pod_volume) = self.pod_volumes.get_mut(pod) {
            pod_volume.published = Some(published);
            pod_volume.root_mode = mode.unwrap_or(FALLBACK_MODE);
        }
    }

    pub(super) async fn unmount(
        &mut self,
        board: &ReconcilerRegistry,
        pod: &PodUid,
        operation: &Operation,
    ) -> Result<(), OperationFailure> {
        let Some(pod_volume) = self.pod_volumes.get(pod) else {
            self.state.record_result(&StepResult::Unpublished(pod.clone()));
            return Ok(());
        };
        let removal = Removal {
            spec: pod_volume.spec.clone(),
            unique: self.name.clone(),
            mode: self.state.mode,
            pod: Some((pod.clone(), pod_volume.target.clone())),
            device: self.device.clone(),
            operation: operation.clone(),
        };
        let undone = self.within(operation, self.unpublish(board, pod, &removal)).await;
        match undone {
            Ok(()) => {
                self.state.record_result(&StepResult::Unpublished(pod.clone()));
                Ok(())
            }
            Err(e) => {
                self.state.record_result(&StepResult::NotUnpublished(pod.clone()));
                let prefix = match self.state.mode {
                    Mode::Filesystem => "UnmountVolume.TearDown failed",
                    Mode::Block => "UnmapVolume.UnmapPodDevice failed",
                };
                Err(OperationFailure {
                    is_for_all: false,
                    event: None,
                    text: error_message(prefix, self.name.as_str(), e),
                })
            }
        }
    }

    async fn unpublish(&self, board: &ReconcilerRegistry, pod: &PodUid, removal: &Removal) -> Result<(), OpError> {
        let (Mode::Block, Some((_, link))) = (removal.mode, &removal.pod) else {
            return self.plugin.unpublish(removal).await;
        };
        let map = block_mapper::Map {
            device: Default::default(),
            global: self.plugin.map_dir(&board.deps.root, &removal.spec),
            pod: pod.clone(),
            link: link.clone(),
            operation: removal.operation.clone(),
        };
        block_mapper::unmap(&map).await.map_err(OpError::uncertain)?;
        self.plugin.unpublish(removal).await?;
        block_mapper::forget(&map).await.map_err(OpError::uncertain)
    }

    pub(super) async fn unmount_device(
        &mut self,
        board: &ReconcilerRegistry,
        operation: &Operation,
    ) -> Result<(), OperationFailure> {
        let Some(spec) = self.last_spec.clone() else {
            self.state.record_result(&StepResult::Unstaged);
            return Ok(());
        };
        let (name, mode, device) = (self.name.clone(), self.state.mode, self.device.clone());
        let global = self.plugin.map_dir(&board.deps.root, &spec);
        let removal = Removal { spec, unique: name, mode, pod: None, device, operation: operation.clone() };
        let undone = self.within(operation, async {
            if mode == Mode::Block {
                block_mapper::check_unmapped(operation, &global).await.map_err(OpError::failed)?;
                // No pod has it: a directory that the plugin expects to be empty must not contain marks of pods that
                // never got it.
                block_mapper::clear_marks(operation, &global).await.map_err(OpError::uncertain)?;
            }
            self.plugin.unstage(&removal).await?;
            if mode == Mode::Block {
                block_mapper::remove_dir(operation, &global).await.map_err(OpError::uncertain)?;
            }
            block_mapper::check_not_open(operation, &removal.device).await.map_err(OpError::uncertain)
        });
        match undone.await {
            Ok(()) => {
                self.state.record_result(&StepResult::Unstaged);
                Ok(())
            }
            Err(e) => {
                self.state.record_result(&StepResult::NotUnstaged);
                let prefix = match mode {
                    Mode::Filesystem => "UnmountDevice failed",
                    Mode::Block => "UnmapDevice failed",
                };
                Err(OperationFailure {
                    is_for_all: false,
                    event: None,
                    text: error_message(prefix, self.name.as_str(), e),
                })
            }
        }
    }

    pub(super) async fn resize(
        &mut self,
        board: &ReconcilerRegistry,
        pod: &PodUid,
        operation: &Operation,
    ) -> Result<(), OperationFailure> {
        let (Some(desire), Some(pod_volume)) = (self.desires.get(pod).cloned(), self.pod_volumes.get(pod)) else {
            return Ok(());
        };
        let Some(path) = pod_volume.published.as_ref().map(|published| published.path.clone()) else { return Ok(()) };
        let work = expansion::NodeExpansion {
            plugin: &*self.plugin,
            storage: &*board.deps.storage,
            events: &*board.deps.events,
            node: board.deps.facts.borrow().name.clone(),
            usage: self.usage(&desire, operation),
            growth: desire.growth,
            path,
        };
        let pod_object = desire.usage.pod.clone();
        match self.within(operation, work.run()).await {
            Ok(()) => {
                self.record_size(pod, &desire);
                Ok(())
            }
            // The volume cannot be expanded on this node while it is in use.
            Err(e) if e.trouble == ErrorCause::InUse => {
                self.record_size(pod, &desire);
                Err(self.not_resized(&pod_object, &desire, &e))
            }
            Err(e) => Err(self.not_resized(&pod_object, &desire, &e)),
        }
    }

    /// Records that the volume has its size, or will not get it on this node.
    fn record_size(&mut self, pod: &PodUid, desire: &DesiredVolume) {
        self.state.record_result(&StepResult::Resized(pod.clone()));
        if let (Some(pod_volume), Some((_, to))) = (self.pod_volumes.get_mut(pod), desire.growth) {
            pod_volume.grown_to = to;
        }
    }

    fn not_resized(&self, pod: &Arc<berth_types::Pod>, desire: &DesiredVolume, e: &OpError) -> OperationFailure {
        let text = error_message("NodeExpandVolume.NodeExpandVolume failed", &desire.usage.spec.name, e);
        let has_event = e.class != Class::Transient;
        OperationFailure { is_for_all: false, event: has_event.then(|| (pod.clone(), "VolumeResizeFailed")), text }
    }
}

/// Records an event on the persistent volume if its device has a different file system.
fn record_filesystem_mismatch(board: &ReconcilerRegistry, usage: &Usage, error: &OpError) {
    let persistent = usage.spec.as_persistent().filter(|_| error.trouble == ErrorCause::WrongFilesystem);
    if let Some(of) = persistent {
        let text = format!("MountVolume failed for volume {:?} {error}", usage.spec.name);
        let (kind, reason) = (EventKind::Warning, "FailedMountOnFilesystemMismatch");
        board.deps.events.record(EventRecord::on_volume(&of.volume, kind, reason, text));
    }
}
