//! What is known of one volume on this node, what is due, and what an operation's end makes of it. Pure.
//! Behaviour: spec 07 §2.2-2.4, §3.4, §4, §6.
//!
//! *Uncertain* is what may or may not be there: it is undone like what is there, and used like what is not.
//! A volume that was found on disk at start is uncertain until it was set up again, and nothing of it is
//! undone before somebody says that its pod needs it no more.

use std::{collections::BTreeMap, time::Instant};

use super::backoff::{Backoffs, OpName};
use crate::{device::Class, spec::Mode};
use berth_types::PodUid;

/// Whether something is there.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Default)]
pub enum Presence {
    /// No.
    #[default]
    Absent,
    /// It may be.
    Uncertain,
    /// Yes.
    Present,
}

impl Presence {
    /// After an attempt to make it failed.
    fn after(self, class: Class, was_rebuilt: bool) -> Self {
        match (self, class) {
            (Self::Absent, Class::Uncertain) => Self::Uncertain,
            // What an earlier agent made is undone in its time, whatever an attempt to make it anew says.
            (Self::Uncertain, Class::Final) if !was_rebuilt => Self::Absent,
            (same, _) => same,
        }
    }
}

/// What a pod wants of the volume.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Wish {
    /// Found on disk; its pod has not been heard of yet.
    #[default]
    Unknown,
    /// It is to be there.
    Wanted,
    /// It is to go.
    Unwanted,
}

/// The volume in one pod.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct InPod {
    /// What the pod wants.
    pub wish: Wish,
    /// Whether it is there.
    pub presence: Presence,
    /// It is there and has to be published again.
    pub is_stale: bool,
    /// The node's part of an expansion is due.
    pub is_small: bool,
    /// It was found on disk.
    pub was_rebuilt: bool,
    /// Which attempt of all on the volume the last one for this pod was; 0 for none.
    pub tried: u64,
    /// The label of SELinux that it is to be mounted with.
    pub label: Option<String>,
}

/// Where it is attached.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Attachment {
    /// The node was not read yet.
    Unread,
    /// The node says: nowhere.
    Absent,
    /// At this device; empty where the node does not say at which.
    At(String),
}

/// What others say about the volume.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Around {
    /// The API server knows that this node uses it.
    pub is_reported: bool,
    /// Where it is attached.
    pub attachment: Attachment,
}

/// One volume.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct State {
    /// It has to be attached by somebody first.
    pub attachable: bool,
    /// As what pods get it.
    pub mode: Mode,
    /// Whether it is staged.
    pub stage: Presence,
    /// It was found on disk.
    pub was_rebuilt: bool,
    /// Its pods.
    pub pods: BTreeMap<PodUid, InPod>,
    /// The label of SELinux that it is mounted with, where something of it may be there.
    pub label: Option<String>,
    /// Operations tried so far.
    attempts: u64,
    /// A pod that nobody knows of may have it.
    keeps_stage: bool,
}

/// What may be done with a volume.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Op {
    /// Stage it where that is due, and give it to the pod.
    Mount(PodUid),
    /// Take it from the pod.
    Unmount(PodUid),
    /// Undo the stage.
    UnmountDevice,
    /// Expand it, as the pod has it.
    Resize(PodUid),
}

impl Op {
    /// The pod that it is for; `None` where it is for the whole volume.
    pub fn pod(&self) -> Option<&PodUid> {
        match self {
            Self::Mount(pod) | Self::Unmount(pod) | Self::Resize(pod) => Some(pod),
            Self::UnmountDevice => None,
        }
    }
}

/// What is due.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Due {
    /// This, now.
    Do(Op),
    /// Nothing before that moment, or before something changes.
    Wait(Option<Instant>),
    /// Nothing is left of it.
    Gone,
}

/// How a step of an operation ended.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Happened {
    /// It is staged.
    Staged,
    /// It could not be staged.
    NotStaged(Class),
    /// The pod has it.
    Published(PodUid),
    /// The pod could not be given it.
    NotPublished(PodUid, Class),
    /// The pod has it, in its full size.
    Resized(PodUid),
    /// The pod does not have it any more.
    Unpublished(PodUid),
    /// It could not be taken from the pod.
    NotUnpublished(PodUid),
    /// It is not staged any more.
    Unstaged,
    /// That could not be undone.
    NotUnstaged,
}

impl State {
    /// Nothing of it is there.
    pub fn new(attachable: bool, mode: Mode) -> Self {
        Self {
            attachable,
            mode,
            stage: Presence::Absent,
            was_rebuilt: false,
            pods: BTreeMap::new(),
            label: None,
            attempts: 0,
            keeps_stage: false,
        }
    }

    /// Found on disk, in that pod.
    pub fn rebuilt(&mut self, pod: PodUid, stages: bool) {
        let own = self.pods.entry(pod).or_default();
        (own.presence, own.was_rebuilt) = (Presence::Uncertain, true);
        self.was_rebuilt = true;
        if stages {
            self.stage = Presence::Uncertain;
        }
    }

    /// Not all was understood of what is on disk: a pod that nobody knows of may have it, so that it stays staged.
    pub fn keep_stage(&mut self) {
        self.keeps_stage = true;
    }

    /// Found staged on disk, in no pod.
    pub fn rebuilt_stage(&mut self) {
        (self.stage, self.was_rebuilt) = (Presence::Uncertain, true);
    }

    /// A pod wants it; says whether that is news.
    pub fn want(&mut self, pod: &PodUid) -> bool {
        let own = self.pods.entry(pod.clone()).or_default();
        std::mem::replace(&mut own.wish, Wish::Wanted) != Wish::Wanted
    }

    /// Whether the pod has to wait until others, who have the volume with another label of SELinux, have it no more.
    pub fn is_hindered(&self, pod: &PodUid) -> bool {
        self.pods.get(pod).is_some_and(|own| own.wish == Wish::Wanted && !self.agrees(own))
            && self.other_user(pod).is_some()
    }

    /// Whether the pod can be given the volume as it is mounted; what it has it keeps.
    fn agrees(&self, own: &InPod) -> bool {
        let is_there = self.stage != Presence::Absent || self.pods.values().any(|own| own.presence != Presence::Absent);
        !is_there || own.presence != Presence::Absent || own.label == self.label
    }

    /// A pod does not want it any more.
    pub fn unwant(&mut self, pod: &PodUid) {
        if let Some(own) = self.pods.get_mut(pod) {
            own.wish = Wish::Unwanted;
            if own.presence == Presence::Absent {
                self.pods.remove(pod);
            }
        }
    }

    /// The pod that has it, or may have it, besides this one.
    pub fn other_user(&self, pod: &PodUid) -> Option<&PodUid> {
        self.pods.iter().find(|(other, own)| *other != pod && own.presence != Presence::Absent).map(|(other, _)| other)
    }

    /// Whether the pod has it.
    pub fn is_mounted(&self, pod: &PodUid) -> bool {
        self.pods.get(pod).is_some_and(|own| own.presence == Presence::Present)
    }

    /// What is due. What goes comes before what comes, so that a volume moves from one pod to the next; of several
    /// pods the one that had its last turn first, so that none that fails keeps the others from theirs.
    pub fn due(&self, around: &Around, backoffs: &Backoffs, now: Instant) -> Due {
        let mut earliest: Option<Instant> = None;
        for op in self.candidates(around) {
            match backoffs.until(self.name_of(&op), op.pod()) {
                Some(until) if until > now => earliest = Some(earliest.map_or(until, |first| first.min(until))),
                _ => return Due::Do(op),
            }
        }
        let is_gone = self.pods.is_empty() && self.stage == Presence::Absent;
        if is_gone { Due::Gone } else { Due::Wait(earliest) }
    }

    /// Whether it is attached, and known to be in use, where that matters.
    pub fn may_use(&self, around: &Around) -> bool {
        !self.attachable || (around.is_reported && matches!(around.attachment, Attachment::At(_)))
    }

    fn candidates(&self, around: &Around) -> Vec<Op> {
        let mut found = Vec::new();
        // After a restart only the node says where it was attached.
        let may_undo = !(self.was_rebuilt && self.attachable && around.attachment == Attachment::Unread);
        let may_use = self.may_use(around);
        let all = |is_due: &dyn Fn(&InPod) -> bool, op: fn(PodUid) -> Op| -> Vec<Op> {
            let mut found: Vec<_> = self.pods.iter().filter(|(_, own)| is_due(own)).collect();
            found.sort_by_key(|(_, own)| own.tried);
            found.into_iter().map(|(pod, _)| op(pod.clone())).collect()
        };
        if may_undo {
            found.extend(all(&|own| own.wish == Wish::Unwanted && own.presence != Presence::Absent, Op::Unmount));
        }
        if may_use {
            let is_due = |own: &InPod| {
                let is_wanting = own.presence != Presence::Present || own.is_stale;
                own.wish == Wish::Wanted && is_wanting && self.agrees(own)
            };
            found.extend(all(&is_due, Op::Mount));
            let is_due = |own: &InPod| own.wish == Wish::Wanted && own.presence == Presence::Present && own.is_small;
            found.extend(all(&is_due, Op::Resize));
        }
        // Where it is mounted with a label that nobody wants it comes anew.
        let is_nobodys = self.pods.values().all(|own| own.presence == Presence::Absent && !self.agrees(own));
        if may_undo && !self.keeps_stage && is_nobodys && self.stage != Presence::Absent {
            found.push(Op::UnmountDevice);
        }
        found
    }

    /// The name of an operation on this volume.
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

    /// Takes note that an operation is tried.
    pub fn tried(&mut self, op: &Op) {
        self.attempts += 1;
        if let Op::Mount(pod) = op
            && let Some(own) = self.pods.get(pod).filter(|own| own.presence == Presence::Absent && self.agrees(own))
        {
            // Either nothing is there, or it is mounted with that.
            self.label = own.label.clone();
        }
        if let Some(own) = op.pod().and_then(|pod| self.pods.get_mut(pod)) {
            own.tried = self.attempts;
        }
    }

    /// Takes note that an operation came to no end that says anything: all of it may have happened.
    pub fn broke_off(&mut self, op: &Op) {
        match op {
            Op::Mount(pod) => {
                self.happened(&Happened::NotStaged(Class::Uncertain));
                self.happened(&Happened::NotPublished(pod.clone(), Class::Uncertain));
            }
            Op::Unmount(pod) => self.happened(&Happened::NotUnpublished(pod.clone())),
            Op::UnmountDevice => self.happened(&Happened::NotUnstaged),
            Op::Resize(_) => {}
        }
    }

    /// Takes note of how a step ended.
    pub fn happened(&mut self, what: &Happened) {
        match what {
            Happened::Staged => self.stage = Presence::Present,
            Happened::NotStaged(class) => self.stage = self.stage.after(*class, self.was_rebuilt),
            Happened::Published(pod) => {
                let own = self.pods.entry(pod.clone()).or_default();
                (own.presence, own.is_stale, own.was_rebuilt) = (Presence::Present, false, false);
            }
            Happened::NotPublished(pod, class) => {
                if let Some(own) = self.pods.get_mut(pod) {
                    own.presence = own.presence.after(*class, own.was_rebuilt);
                }
            }
            Happened::Resized(pod) => {
                if let Some(own) = self.pods.get_mut(pod) {
                    own.is_small = false;
                }
            }
            Happened::Unpublished(pod) => match self.pods.get_mut(pod) {
                Some(own) if own.wish != Wish::Unwanted => {
                    own.presence = Presence::Absent;
                }
                _ => {
                    self.pods.remove(pod);
                }
            },
            Happened::NotUnpublished(pod) => {
                if let Some(own) = self.pods.get_mut(pod) {
                    own.presence = Presence::Uncertain;
                }
            }
            Happened::Unstaged => (self.stage, self.was_rebuilt) = (Presence::Absent, false),
            Happened::NotUnstaged => self.stage = Presence::Uncertain,
        }
        // What never came and is not wanted is gone.
        self.pods.retain(|_, own| own.wish != Wish::Unwanted || own.presence != Presence::Absent);
    }
}

#[cfg(test)]
mod tests;
