//! State machine of one volume on this node: known state, next operation, and operation results. Pure.
//!
//! *Uncertain* state may or may not exist: it is torn down as if present and used as if absent. A volume found on disk
//! at startup stays uncertain until it is set up again, and no part of it is torn down before its pod is known not to
//! need it. Implements spec 07 §2.2-2.4, §3.4, §4, §6.

use std::{collections::BTreeMap, time::Instant};

use super::backoff::{Backoffs, OpName};
use crate::{attachable::Class, spec::Mode};
use berth_types::PodUid;

/// Whether a mount, map, or stage exists.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Default)]
pub enum MountPresence {
    /// It does not exist.
    #[default]
    Absent,
    /// It may exist.
    Uncertain,
    /// It exists.
    Present,
}

impl MountPresence {
    /// Returns the presence after a failed attempt to set it up.
    fn after(self, class: Class, was_rebuilt: bool) -> Self {
        match (self, class) {
            (Self::Absent, Class::Uncertain) => Self::Uncertain,
            // The state left by an earlier agent is torn down only when due, whatever a new set-up attempt reports.
            (Self::Uncertain, Class::Final) if !was_rebuilt => Self::Absent,
            (same, _) => same,
        }
    }
}

/// Whether a pod needs the volume.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum DesiredState {
    /// Found on disk; its pod has not been observed yet.
    #[default]
    Unknown,
    /// The pod needs the volume.
    Wanted,
    /// The pod no longer needs the volume.
    Unwanted,
}

/// State of the volume in one pod.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct PodVolumeState {
    /// Whether the pod needs the volume.
    pub desired: DesiredState,
    /// Whether the volume is published to the pod.
    pub presence: MountPresence,
    /// Present, and due to be published again.
    pub needs_republish: bool,
    /// Node-side expansion is due.
    pub needs_expansion: bool,
    /// Found on disk at startup.
    pub was_rebuilt: bool,
    /// Sequence number, among all attempts on the volume, of the last attempt for this pod; 0 for none.
    pub tried: u64,
    /// SELinux label that the pod needs the volume to be mounted with.
    pub label: Option<String>,
}

/// Attachment of the volume according to the node status.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Attachment {
    /// The node status has not been read yet.
    Unread,
    /// The node status does not list the volume.
    Absent,
    /// Attached at this device path; empty where the node status has none.
    At(String),
}

/// State of the volume as other components report it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ExternalState {
    /// The API server lists the volume in `node.status.volumesInUse`.
    pub is_reported: bool,
    /// Attachment according to the node status.
    pub attachment: Attachment,
}

/// State of one volume.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct VolumeState {
    /// The volume must be attached before use.
    pub attachable: bool,
    /// Volume mode in which pods use it.
    pub mode: Mode,
    /// Whether the volume is staged.
    pub stage: MountPresence,
    /// Found on disk at startup.
    pub was_rebuilt: bool,
    /// State of the volume per pod.
    pub pods: BTreeMap<PodUid, PodVolumeState>,
    /// SELinux label of the mount, where any part of the volume may be present.
    pub label: Option<String>,
    /// Number of operations attempted so far.
    attempts: u64,
    /// A pod unknown to the agent may use the volume, so that it must stay staged.
    keeps_stage: bool,
}

/// Operation on a volume.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Op {
    /// Stages the volume where due, and publishes it to the pod.
    Mount(PodUid),
    /// Unpublishes the volume from the pod.
    Unmount(PodUid),
    /// Unstages the volume.
    UnmountDevice,
    /// Expands the volume as published to the pod.
    Resize(PodUid),
}

impl Op {
    /// Returns the pod of the operation; `None` where it concerns the whole volume.
    pub fn pod(&self) -> Option<&PodUid> {
        match self {
            Self::Mount(pod) | Self::Unmount(pod) | Self::Resize(pod) => Some(pod),
            Self::UnmountDevice => None,
        }
    }
}

/// Next step for a volume.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum NextStep {
    /// Run this operation now.
    Do(Op),
    /// Wait until that instant, or until an input changes.
    Wait(Option<Instant>),
    /// The volume is fully removed.
    Removed,
}

/// Result of one step of an operation.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum StepResult {
    /// The volume is staged.
    Staged,
    /// Staging failed.
    NotStaged(Class),
    /// The volume is published to the pod.
    Published(PodUid),
    /// Publishing to the pod failed.
    NotPublished(PodUid, Class),
    /// The volume has its full size in the pod.
    Resized(PodUid),
    /// The volume is unpublished from the pod.
    Unpublished(PodUid),
    /// Unpublishing from the pod failed.
    NotUnpublished(PodUid),
    /// The volume is unstaged.
    Unstaged,
    /// Unstaging failed.
    NotUnstaged,
}

impl VolumeState {
    /// Creates the state of a volume without stage or pods.
    pub fn new(attachable: bool, mode: Mode) -> Self {
        Self {
            attachable,
            mode,
            stage: MountPresence::Absent,
            was_rebuilt: false,
            pods: BTreeMap::new(),
            label: None,
            attempts: 0,
            keeps_stage: false,
        }
    }

    /// Records that the volume was found on disk in that pod.
    pub fn rebuilt(&mut self, pod: PodUid, stages: bool) {
        let own = self.pods.entry(pod).or_default();
        (own.presence, own.was_rebuilt) = (MountPresence::Uncertain, true);
        self.was_rebuilt = true;
        if stages {
            self.stage = MountPresence::Uncertain;
        }
    }

    /// Keeps the volume staged: the reconstruction from disk was incomplete, so that an unknown pod may use it.
    pub fn keep_stage(&mut self) {
        self.keeps_stage = true;
    }

    /// Records that the volume was found staged on disk, in no pod.
    pub fn rebuilt_stage(&mut self) {
        (self.stage, self.was_rebuilt) = (MountPresence::Uncertain, true);
    }

    /// Records that a pod needs the volume; returns whether that is a change.
    pub fn want(&mut self, pod: &PodUid) -> bool {
        let own = self.pods.entry(pod.clone()).or_default();
        std::mem::replace(&mut own.desired, DesiredState::Wanted) != DesiredState::Wanted
    }

    /// Whether the pod must wait for other pods that have the volume mounted with a different SELinux label.
    pub fn is_hindered(&self, pod: &PodUid) -> bool {
        self.pods.get(pod).is_some_and(|own| own.desired == DesiredState::Wanted && !self.has_compatible_label(own))
            && self.other_user(pod).is_some()
    }

    /// Whether the pod can use the volume with its current SELinux label; a pod that already has the volume keeps it.
    fn has_compatible_label(&self, own: &PodVolumeState) -> bool {
        let is_there =
            self.stage != MountPresence::Absent || self.pods.values().any(|own| own.presence != MountPresence::Absent);
        !is_there || own.presence != MountPresence::Absent || own.label == self.label
    }

    /// Records that a pod no longer needs the volume.
    pub fn unwant(&mut self, pod: &PodUid) {
        if let Some(own) = self.pods.get_mut(pod) {
            own.desired = DesiredState::Unwanted;
            if own.presence == MountPresence::Absent {
                self.pods.remove(pod);
            }
        }
    }

    /// Returns another pod that has, or may have, the volume.
    pub fn other_user(&self, pod: &PodUid) -> Option<&PodUid> {
        self.pods
            .iter()
            .find(|(other, own)| *other != pod && own.presence != MountPresence::Absent)
            .map(|(other, _)| other)
    }

    /// Whether the volume is published to the pod.
    pub fn is_mounted(&self, pod: &PodUid) -> bool {
        self.pods.get(pod).is_some_and(|own| own.presence == MountPresence::Present)
    }

    /// Returns the next step. Unmounts precede mounts, so that a volume can move from one pod to the next; among
    /// several pods the least recently attempted comes first, so that a failing pod does not starve the others.
    pub fn due(&self, around: &ExternalState, backoffs: &Backoffs, now: Instant) -> NextStep {
        let mut earliest: Option<Instant> = None;
        for op in self.candidates(around) {
            match backoffs.until(self.name_of(&op), op.pod()) {
                Some(until) if until > now => earliest = Some(earliest.map_or(until, |first| first.min(until))),
                _ => return NextStep::Do(op),
            }
        }
        let is_gone = self.pods.is_empty() && self.stage == MountPresence::Absent;
        if is_gone { NextStep::Removed } else { NextStep::Wait(earliest) }
    }

    /// Whether the volume may be used: attachable volumes must be attached and reported as in use first.
    pub fn may_use(&self, around: &ExternalState) -> bool {
        !self.attachable || (around.is_reported && matches!(around.attachment, Attachment::At(_)))
    }

    fn candidates(&self, around: &ExternalState) -> Vec<Op> {
        let mut found = Vec::new();
        // After a restart, the device path is known only from the node status.
        let may_undo = !(self.was_rebuilt && self.attachable && around.attachment == Attachment::Unread);
        let may_use = self.may_use(around);
        let all = |is_due: &dyn Fn(&PodVolumeState) -> bool, op: fn(PodUid) -> Op| -> Vec<Op> {
            let mut found: Vec<_> = self.pods.iter().filter(|(_, own)| is_due(own)).collect();
            found.sort_by_key(|(_, own)| own.tried);
            found.into_iter().map(|(pod, _)| op(pod.clone())).collect()
        };
        if may_undo {
            found.extend(all(
                &|own| own.desired == DesiredState::Unwanted && own.presence != MountPresence::Absent,
                Op::Unmount,
            ));
        }
        if may_use {
            let is_due = |own: &PodVolumeState| {
                let is_wanting = own.presence != MountPresence::Present || own.needs_republish;
                own.desired == DesiredState::Wanted && is_wanting && self.has_compatible_label(own)
            };
            found.extend(all(&is_due, Op::Mount));
            let is_due = |own: &PodVolumeState| {
                own.desired == DesiredState::Wanted && own.presence == MountPresence::Present && own.needs_expansion
            };
            found.extend(all(&is_due, Op::Resize));
        }
        // Unstages a volume whose SELinux label no pod needs, so that it can be mounted with another one.
        let is_nobodys =
            self.pods.values().all(|own| own.presence == MountPresence::Absent && !self.has_compatible_label(own));
        if may_undo && !self.keeps_stage && is_nobodys && self.stage != MountPresence::Absent {
            found.push(Op::UnmountDevice);
        }
        found
    }

    /// Returns the back-off and metrics name of an operation on this volume.
    pub fn name_of(&self, op: &Op) -> OpName {
        match (op, self.mode) {
            (Op::Mount(_), Mode::Filesystem) => OpName::Mount,
            (Op::Mount(_), Mode::Block) => OpName::Map,
            (Op::Unmount(_), Mode::Filesystem) => OpName::Unmount,
            (Op::Unmount(_), Mode::Block) => OpName::Unmap,
            (Op::UnmountDevice, Mode::Filesystem) => OpName::UnmountDevice,
            (Op::UnmountDevice, Mode::Block) => OpName::UnmapDevice,
            (Op::Resize(_), _) => OpName::Resize,
        }
    }

    /// Records an attempt of an operation.
    pub fn tried(&mut self, op: &Op) {
        self.attempts += 1;
        if let Op::Mount(pod) = op
            && let Some(own) =
                self.pods.get(pod).filter(|own| own.presence == MountPresence::Absent && self.has_compatible_label(own))
        {
            // Either nothing is present, or the mount already has this label.
            self.label = own.label.clone();
        }
        if let Some(own) = op.pod().and_then(|pod| self.pods.get_mut(pod)) {
            own.tried = self.attempts;
        }
    }

    /// Records that an operation ended without a result: every step of it may have taken effect.
    pub fn record_abort(&mut self, op: &Op) {
        match op {
            Op::Mount(pod) => {
                self.record_result(&StepResult::NotStaged(Class::Uncertain));
                self.record_result(&StepResult::NotPublished(pod.clone(), Class::Uncertain));
            }
            Op::Unmount(pod) => self.record_result(&StepResult::NotUnpublished(pod.clone())),
            Op::UnmountDevice => self.record_result(&StepResult::NotUnstaged),
            Op::Resize(_) => {}
        }
    }

    /// Records the result of a step.
    pub fn record_result(&mut self, what: &StepResult) {
        match what {
            StepResult::Staged => self.stage = MountPresence::Present,
            StepResult::NotStaged(class) => self.stage = self.stage.after(*class, self.was_rebuilt),
            StepResult::Published(pod) => {
                let own = self.pods.entry(pod.clone()).or_default();
                (own.presence, own.needs_republish, own.was_rebuilt) = (MountPresence::Present, false, false);
            }
            StepResult::NotPublished(pod, class) => {
                if let Some(own) = self.pods.get_mut(pod) {
                    own.presence = own.presence.after(*class, own.was_rebuilt);
                }
            }
            StepResult::Resized(pod) => {
                if let Some(own) = self.pods.get_mut(pod) {
                    own.needs_expansion = false;
                }
            }
            StepResult::Unpublished(pod) => match self.pods.get_mut(pod) {
                Some(own) if own.desired != DesiredState::Unwanted => {
                    own.presence = MountPresence::Absent;
                }
                _ => {
                    self.pods.remove(pod);
                }
            },
            StepResult::NotUnpublished(pod) => {
                if let Some(own) = self.pods.get_mut(pod) {
                    own.presence = MountPresence::Uncertain;
                }
            }
            StepResult::Unstaged => (self.stage, self.was_rebuilt) = (MountPresence::Absent, false),
            StepResult::NotUnstaged => self.stage = MountPresence::Uncertain,
        }
        // Drops pods that neither have nor need the volume.
        self.pods.retain(|_, own| own.desired != DesiredState::Unwanted || own.presence != MountPresence::Absent);
    }
}

#[cfg(test)]
mod tests;
