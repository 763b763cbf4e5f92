//! The owner of one volume: does what is due, one thing at a time, and shows what is there.

use std::{
    collections::{BTreeMap, BTreeSet},
    path::PathBuf,
    sync::Arc,
    time::Duration,
};

use tokio::{
    sync::watch,
    time::{Instant, sleep, sleep_until},
};
use tracing::error;

use super::{
    backoff::{Backoffs, OpName},
    board::{Board, Desire, Desires, Leftover, Shown, ShownPod, Slot},
    state::{Around, Attachment, Due, Op, Presence, State, Wish},
};
use crate::{
    engine::ports::{Attached, Event},
    metrics::{StorageOperation, World},
    pod::PodUid,
    volumes::{
        device::{DevicePlugin, Published, Traits},
        spec::{Mode, UniqueName, VolumeSpec},
    },
};

/// Pause after a failure, whatever comes next: operations that fail in turns forget each other's back-off, and the
/// reference looks no sooner either.
const PACE: Duration = Duration::from_millis(100);

/// What is known of the volume in a pod, besides whether it is there.
pub(super) struct Held {
    pub(super) spec: Arc<VolumeSpec>,
    pub(super) target: PathBuf,
    pub(super) published: Option<Published>,
    pub(super) root_mode: u32,
    /// The pod's turn in which it was published last.
    turn: u64,
    /// Bytes it was expanded to, or should not be expanded to again.
    pub(super) grown_to: u64,
}

/// Why an operation failed, as it is told.
pub(super) struct Failure {
    /// Told to the pod, if at all.
    pub(super) event: Option<(Arc<crate::pod::Pod>, &'static str)>,
    /// `MountVolume.SetUp failed for volume "x" : …`.
    pub(super) text: String,
}

/// One volume.
pub(super) struct Owner {
    pub(super) name: UniqueName,
    pub(super) plugin: Arc<dyn DevicePlugin>,
    pub(super) traits: Traits,
    pub(super) state: State,
    backoffs: Backoffs,
    pub(super) desires: BTreeMap<PodUid, Arc<Desire>>,
    pub(super) held: BTreeMap<PodUid, Held>,
    /// What undoing the stage needs when no pod is left.
    pub(super) last_spec: Option<Arc<VolumeSpec>>,
    /// Where it is attached.
    pub(super) device: String,
    is_attached: bool,
    /// Counted as wanted, and as there.
    counted: (BTreeSet<PodUid>, BTreeSet<PodUid>),
}

impl Owner {
    pub(super) fn new(name: UniqueName, plugin: Arc<dyn DevicePlugin>, traits: Traits, mode: Mode) -> Self {
        Self {
            name,
            plugin,
            state: State::new(traits.attachable, mode, traits.is_shared()),
            traits,
            backoffs: Backoffs::default(),
            desires: BTreeMap::new(),
            held: BTreeMap::new(),
            last_spec: None,
            device: String::new(),
            is_attached: false,
            counted: Default::default(),
        }
    }

    /// An earlier agent left this.
    pub(super) fn adopt(&mut self, left: Leftover) {
        self.state.rebuilt(left.pod.clone(), left.rebuilt.traits.stages);
        let spec = Arc::new(left.rebuilt.spec);
        self.last_spec = Some(spec.clone());
        let held = Held { spec, target: left.path, published: None, root_mode: 0, turn: 0, grown_to: 0 };
        self.held.insert(left.pod, held);
    }

    /// An earlier agent staged it, and ended before a pod had it or after the last one did.
    pub(super) fn adopt_stage(&mut self, spec: VolumeSpec) {
        self.state.rebuilt_stage();
        self.last_spec = Some(Arc::new(spec));
    }

    /// As others see it.
    pub(super) fn shown(&self) -> Shown {
        let of = |(pod, own): (&PodUid, &super::state::InPod)| {
            let held = self.held.get(pod)?;
            let shown =
                ShownPod { presence: own.presence, published: held.published.clone(), root_mode: held.root_mode };
            Some((pod.clone(), shown))
        };
        Shown {
            attachable: self.traits.attachable,
            is_attached: self.is_attached || !self.traits.attachable,
            pods: self.state.pods.iter().filter_map(of).collect(),
        }
    }

    /// Until nothing is left of it.
    pub(super) async fn run(mut self, board: Arc<Board>, slot: Arc<Slot>) {
        let mut desires = slot.desires.subscribe();
        let (mut attached, mut reported) = (board.attached(), board.deps.reported.clone());
        let (mut cured, mut moved) = (self.plugin.cured(), board.deps.storage.moved());
        loop {
            let wanted = desires.borrow_and_update().clone();
            self.heed(wanted);
            self.tidy(&slot);
            let around = self.around(&attached, &reported);
            self.show(&board, &slot);
            let until = match self.state.due(&around, &self.backoffs, Instant::now().into_std()) {
                Due::Do(op) => {
                    if !self.operate(&board, &op).await {
                        sleep(PACE).await;
                    }
                    continue;
                }
                Due::Gone => {
                    if board.retire(&self.name, &desires) {
                        return;
                    }
                    continue;
                }
                Due::Wait(until) => until.map(Instant::from_std),
            };
            let rest = async {
                match until {
                    Some(until) => sleep_until(until).await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                changed = desires.changed() => if changed.is_err() { return },
                () = rest => {}
                () = heard(&mut attached) => {}
                () = heard(&mut reported) => {}
                () = heard(&mut cured) => self.backoffs.cured(Instant::now().into_std()),
                () = heard(&mut moved) => self.backoffs.cured(Instant::now().into_std()),
            }
        }
    }

    /// Takes notice of what pods want.
    fn heed(&mut self, wanted: Desires) {
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
            let held = self.held.entry(pod.clone()).or_insert_with(|| Held {
                spec: desire.usage.spec.clone(),
                target: desire.usage.target.clone(),
                published: None,
                root_mode: 0,
                turn: desire.turn,
                grown_to: 0,
            });
            held.spec = desire.usage.spec.clone();
            if let Some(own) = self.state.pods.get_mut(&pod) {
                own.is_stale |= desire.traits.republishes && held.turn < desire.turn;
                own.is_small = desire.traits.expands && desire.growth.is_some_and(|(_, to)| to > held.grown_to);
            }
            held.turn = desire.turn;
            self.desires.insert(pod, desire);
        }
    }

    fn around(
        &mut self,
        attached: &watch::Receiver<Attached>,
        reported: &watch::Receiver<Arc<BTreeSet<String>>>,
    ) -> Around {
        let attachment = match &*attached.borrow() {
            None => Attachment::Unread,
            Some(all) => all.get(self.name.as_str()).cloned().map_or(Attachment::Absent, Attachment::At),
        };
        if let Attachment::At(device) = &attachment {
            self.device.clone_from(device);
        }
        self.is_attached = matches!(attachment, Attachment::At(_));
        Around { is_reported: reported.borrow().contains(self.name.as_str()), attachment }
    }

    /// Whether it succeeded.
    async fn operate(&mut self, board: &Board, op: &Op) -> bool {
        let began = Instant::now();
        let done = match op {
            Op::Mount(pod) => self.mount(board, pod).await,
            Op::Unmount(pod) => self.unmount(board, pod).await,
            Op::UnmountDevice => self.unmount_device(board).await,
            Op::Resize(pod) => self.resize(board, pod).await,
        };
        let (name, held) = (self.state.name_of(op), self.state.holds(op).cloned());
        board.deps.metrics.ended(&self.traits.label, name.into(), done.is_ok(), began.elapsed());
        let Err(failure) = done else {
            self.backoffs.succeeded(held.as_ref());
            return true;
        };
        let now = Instant::now();
        let pause = self.backoffs.failed(name, held.as_ref(), now.into_std());
        error!(volume = %self.name, podUID = held.as_ref().map(PodUid::as_str), durationBeforeRetry = ?pause, err = %failure.text, "Operation failed. No retries permitted until that pause is over");
        if let Some((pod, reason)) = failure.event {
            board.deps.events.record(Event::warning(pod.id(), reason, failure.text));
        }
        false
    }

    /// Forgets pods that are gone.
    fn tidy(&mut self, slot: &Slot) {
        let gone: Vec<PodUid> = self.held.keys().filter(|pod| !self.state.pods.contains_key(*pod)).cloned().collect();
        for pod in &gone {
            self.held.remove(pod);
            self.backoffs.forget(pod);
        }
        slot.desires.send_if_modified(|all| {
            all.retain(|pod, desire| desire.is_some() || self.held.contains_key(pod));
            false
        });
    }

    fn show(&mut self, board: &Board, slot: &Slot) {
        let all = |is: fn(&super::state::InPod) -> bool| -> BTreeSet<PodUid> {
            self.state.pods.iter().filter(|(_, own)| is(own)).map(|(pod, _)| pod.clone()).collect()
        };
        let now = (all(|own| own.wish == Wish::Wanted), all(|own| own.presence != Presence::Absent));
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

/// Until it changes; for ever where nobody can change it any more.
async fn heard<T>(receiver: &mut watch::Receiver<T>) {
    if receiver.changed().await.is_err() {
        std::future::pending::<()>().await;
    }
}
