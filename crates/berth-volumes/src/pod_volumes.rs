//! Resolution of a pod's volumes that need an owner task, and the wait until they are mounted.
//!
//! Implements spec 07 §3.2-3.3, §5.1-5.2, §16.

use std::{
    collections::{BTreeMap, HashMap},
    path::PathBuf,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use futures::future::{join_all, select_all};
use tokio::{
    sync::watch,
    time::{Instant, timeout, timeout_at},
};

use super::{
    attachable::{AttachableVolumePlugin, FsGroup, Usage, VolumeTraits},
    claims, expansion,
    labels::LabelPolicy,
    layout::PodLayout,
    operation::Operation,
    ownership, plugins,
    reconciler::{DesiredVolume, MountPresence, ObservedVolume, ReconcilerRegistry},
    selinux::{self, Label},
    spec::{Mode, UniqueName, VolumeSpec},
};
use berth_ports::{BlockVolume, MountedVolume, MountedVolumes, StorageObjects};
use berth_sys::backoff::Backoff;
use berth_types::{Pod, PodUid, api};

/// How long the resolved claim of a mounted volume is reused without another read.
const FRESH: Duration = Duration::from_secs(60);
/// Timeout of all API reads for one volume.
const READ_LIMIT: Duration = Duration::from_secs(30);
/// The same for a mounted volume, whose pod should not wait for the claim.
const REFRESH_TIMEOUT: Duration = Duration::from_secs(2);
/// Back-off before an unusable claim is read again.
const BACKOFF: Backoff = Backoff::new(Duration::from_millis(500), Duration::from_secs(8));

/// Resolved volume of a pod.
#[derive(Clone)]
struct CachedResolution {
    spec: Arc<VolumeSpec>,
    /// For a volume with an owner task: index of its plugin, unique name on the node, and properties.
    device: Option<(usize, UniqueName, VolumeTraits)>,
    read_at: Instant,
}

impl CachedResolution {
    /// Whether the pod spec alone determines the volume. Such a volume is not cached: it needs no API read, and most
    /// volumes are of this type.
    fn is_inline_file_volume(&self) -> bool {
        self.device.is_none() && self.spec.as_inline().is_some()
    }
}

/// Volume that could not be resolved.
#[derive(Clone)]
struct ResolutionFailure {
    text: String,
    again_at: Instant,
    backoff: Backoff,
}

#[derive(Default)]
struct ResolutionCache {
    known: BTreeMap<String, CachedResolution>,
    failed: BTreeMap<String, ResolutionFailure>,
    since: Option<Instant>,
}

/// Volume that a pod waits for.
pub struct PendingVolume {
    /// Name of the volume in the pod.
    pub volume: String,
    spec: Arc<VolumeSpec>,
    target: PathBuf,
    plugin: Arc<dyn AttachableVolumePlugin>,
    usage: Usage,
    shown: watch::Receiver<Arc<ObservedVolume>>,
}

/// Volumes that a pod does not have yet.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct MissingVolumes {
    /// Names of the volumes in the pod.
    pub volumes: Vec<String>,
    /// Reason why waiting longer is useless, such as a conflicting SELinux label.
    pub hindrance: Option<String>,
}

/// Resolved volumes of a pod.
#[derive(Default)]
pub struct ResolvedVolumes {
    /// Volumes that consist of files written by this agent, as inline volumes of the pod.
    pub local: Vec<(api::Volume, Option<Arc<VolumeSpec>>)>,
    /// Volumes with an owner task.
    pub awaited: Vec<PendingVolume>,
    /// Names of volumes that cannot be resolved, each with the reason.
    pub failed: Vec<(String, String)>,
}

/// Volumes of all pods that need an owner task.
pub struct PodVolumes {
    board: Arc<ReconcilerRegistry>,
    plugins: Vec<Arc<dyn AttachableVolumePlugin>>,
    storage: Arc<dyn StorageObjects>,
    /// SELinux label policy; `None` on a node without SELinux.
    labels: Option<LabelPolicy>,
    pods: Mutex<HashMap<PodUid, ResolutionCache>>,
    turns: AtomicU64,
}

impl PodVolumes {
    /// Creates an instance without pods.
    pub fn new(
        board: Arc<ReconcilerRegistry>,
        plugins: Vec<Arc<dyn AttachableVolumePlugin>>,
        storage: Arc<dyn StorageObjects>,
        labels: Option<LabelPolicy>,
    ) -> Self {
        Self { board, plugins, storage, labels, pods: Mutex::default(), turns: AtomicU64::new(0) }
    }

    /// Registered plugins.
    pub fn plugins(&self) -> &[Arc<dyn AttachableVolumePlugin>] {
        &self.plugins
    }

    /// Registry of the volume owners.
    pub fn board(&self) -> &Arc<ReconcilerRegistry> {
        &self.board
    }

    fn pods(&self) -> MutexGuard<'_, HashMap<PodUid, ResolutionCache>> {
        self.pods.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Resolves the volumes, and requests those that need an owner task.
    pub async fn resolve(&self, pod: &Arc<Pod>, layout: &PodLayout, used: &[api::Volume]) -> ResolvedVolumes {
        let found = join_all(used.iter().map(|volume| self.one(pod, volume))).await;
        let turn = self.turns.fetch_add(1, Ordering::Relaxed) + 1;
        let mut resolved = ResolvedVolumes::default();
        for (volume, found) in used.iter().zip(found) {
            match found {
                Err(text) => resolved.failed.push((volume.name.clone(), text)),
                Ok(CachedResolution { spec, device: None, .. }) => {
                    let local = spec.localised().unwrap_or_default();
                    let local = api::Volume { name: volume.name.clone(), ..local };
                    resolved.local.push((local, spec.as_persistent().is_some().then_some(spec)));
                }
                Ok(CachedResolution { spec, device: Some((plugin, unique, traits)), .. }) => {
                    let Some(plugin) = self.plugins.get(plugin) else { continue };
                    let mut usage = usage(pod, layout, &spec, unique, plugin.name());
                    let label = match &self.labels {
                        Some(labels) if traits.supports_mount_label => {
                            labels.of(&self.board, &usage, &volume.name, &traits)
                        }
                        _ => Ok(Label::default()),
                    };
                    let label = match label {
                        Ok(label) => label,
                        Err(text) => {
                            resolved.failed.push((volume.name.clone(), text));
                            continue;
                        }
                    };
                    usage.label = label.mounted;
                    let target = usage.target.clone();
                    // Skips an expansion that is not due on the node yet: the claim's status may lag behind its volume.
                    let growth = claims::growth(&spec).filter(|(_, to)| expansion::is_due(&spec, *to));
                    let since =
                        *self.pods().entry(pod.uid().clone()).or_default().since.get_or_insert_with(Instant::now);
                    let asked_label = label.original;
                    let desire = DesiredVolume { usage: usage.clone(), traits, turn, growth, since, asked_label };
                    let shown = self.board.add_desired(plugin, desire);
                    let (volume, plugin) = (volume.name.clone(), plugin.clone());
                    resolved.awaited.push(PendingVolume { volume, spec, target, plugin, usage, shown });
                }
            }
        }
        resolved
    }

    async fn one(&self, pod: &Pod, volume: &api::Volume) -> Result<CachedResolution, String> {
        let (uid, name) = (pod.uid(), &volume.name);
        let (known, failed) = match self.pods().get(uid) {
            Some(memory) => (memory.known.get(name).cloned(), memory.failed.get(name).cloned()),
            None => (None, None),
        };
        // A mounted volume stays in use even if it cannot be resolved now.
        let there = known.filter(|known| is_of(known, pod, volume) && self.is_there(uid, known));
        if let Some(known) = there.as_ref().filter(|known| known.read_at.elapsed() < FRESH) {
            return Ok(known.clone());
        }
        if let Some(failed) = failed.as_ref().filter(|failed| Instant::now() < failed.again_at) {
            return Err(failed.text.clone());
        }
        let limit = if there.is_some() { REFRESH_TIMEOUT } else { READ_LIMIT };
        let found = timeout(limit, self.find_out(pod, volume)).await;
        let found = found.unwrap_or_else(|_| Err("context deadline exceeded".to_owned()));
        if found.as_ref().is_ok_and(CachedResolution::is_inline_file_volume) {
            if let Some(memory) = self.pods().get_mut(uid) {
                memory.failed.remove(name);
            }
            return found;
        }
        let mut pods = self.pods();
        let memory = pods.entry(uid.clone()).or_default();
        match (found, there) {
            (Ok(known), _) => {
                memory.failed.remove(name);
                memory.known.insert(name.clone(), known.clone());
                Ok(known)
            }
            (Err(_), Some(there)) => Ok(there),
            (Err(text), None) => {
                let mut backoff = failed.map_or(BACKOFF, |failed| failed.backoff);
                let again_at = Instant::now() + backoff.next_delay();
                memory.failed.insert(name.clone(), ResolutionFailure { text: text.clone(), again_at, backoff });
                Err(text)
            }
        }
    }

    fn is_there(&self, pod: &PodUid, known: &CachedResolution) -> bool {
        let Some((_, unique, _)) = &known.device else { return true };
        let shown = self.board.shown(unique);
        shown.is_some_and(|shown| shown.pods.get(pod).is_some_and(|own| own.presence == MountPresence::Present))
    }

    async fn find_out(&self, pod: &Pod, volume: &api::Volume) -> Result<CachedResolution, String> {
        let spec = Arc::new(claims::resolve(&*self.storage, pod, volume).await?);
        let wrong =
            |cause: String| format!("failed to get Plugin from volumeSpec for volume {:?} err={cause}", spec.name);
        let local = spec.localised().as_ref().and_then(plugins::kind).map(|kind| kind.plugin);
        let mut fitting = self.plugins.iter().enumerate().filter(|(_, plugin)| plugin.supports(&spec));
        let read_at = Instant::now();
        let (index, plugin) = match (local, fitting.next(), fitting.next()) {
            (Some(_), None, _) => return Ok(CachedResolution { spec, device: None, read_at }),
            // Inline volume: its set-up reports what is missing.
            (None, None, _) if spec.as_inline().is_some() => {
                return Ok(CachedResolution { spec, device: None, read_at });
            }
            (None, None, _) => return Err(wrong("no volume plugin matched".to_owned())),
            (None, Some(found), None) => found,
            (local, Some((_, one)), other) => {
                let other = other.map(|(_, plugin)| plugin.name());
                let all: Vec<&str> = local.into_iter().chain([one.name()]).chain(other).collect();
                return Err(wrong(format!("multiple volume plugins matched: {}", all.join(","))));
            }
        };
        let traits = plugin.describe(pod, &spec).await.map_err(|e| wrong(e.to_string()))?;
        let unique = traits.unique(plugin.name(), pod.uid(), &spec);
        Ok(CachedResolution { spec, device: Some((index, unique, traits)), read_at })
    }

    /// Waits until the pod has all volumes; returns those missing at the deadline or blocked by other pods.
    pub async fn wait(&self, pod: &PodUid, awaited: &mut [PendingVolume], until: Instant) -> MissingVolumes {
        loop {
            let mut missing: Vec<&mut PendingVolume> = Vec::new();
            for one in awaited.iter_mut() {
                let is_there = one.is_there(pod, true);
                if !is_there {
                    missing.push(one);
                }
            }
            if missing.is_empty() {
                return MissingVolumes::default();
            }
            let volumes = missing.iter().map(|one| one.volume.clone()).collect();
            let hindrance: Vec<String> = missing.iter().filter_map(|one| one.label_conflict(pod)).collect();
            if !hindrance.is_empty() {
                return MissingVolumes { volumes, hindrance: Some(hindrance.join("; ")) };
            }
            // An owner task that has ended is replaced with the next sync.
            let changes = missing.into_iter().map(|one| {
                Box::pin(async {
                    if one.shown.changed().await.is_err() {
                        std::future::pending::<()>().await;
                    }
                })
            });
            if timeout_at(until, select_all(changes)).await.is_err() {
                return MissingVolumes { volumes, hindrance: None };
            }
        }
    }

    /// Whether the pod needs, or may have, any volume.
    pub fn has(&self, pod: &PodUid) -> bool {
        self.board.has(pod)
    }

    /// Forgets a removed pod without volumes here.
    pub fn forget(&self, pod: &PodUid) {
        self.pods().remove(pod);
    }

    /// Releases all volumes of the pod and waits until none is left.
    ///
    /// # Errors
    /// The unique names of the volumes that are still present at the deadline.
    pub async fn release(&self, pod: &PodUid, until: Instant) -> Result<(), Vec<String>> {
        let left = self.board.remove_desired(pod);
        let waits = left.into_iter().map(async |(name, mut shown)| {
            let gone = shown.wait_for(|shown| !shown.pods.contains_key(pod));
            // The channel closes when the owner ends, which it does once nothing is left.
            let ended = timeout_at(until, gone).await.map(drop);
            ended.err().map(|_| name.to_string())
        });
        let left: Vec<String> = join_all(waits).await.into_iter().flatten().collect();
        if !left.is_empty() {
            return Err(left);
        }
        self.pods().remove(pod);
        Ok(())
    }
}

impl PendingVolume {
    fn is_there(&mut self, pod: &PodUid, seen: bool) -> bool {
        let shown = if seen { self.shown.borrow_and_update().clone() } else { self.shown.borrow().clone() };
        shown.pods.get(pod).is_some_and(|own| own.presence == MountPresence::Present && own.published.is_some())
    }

    /// Returns the reason if other pods block the volume.
    fn label_conflict(&self, pod: &PodUid) -> Option<String> {
        let is_hindered = self.shown.borrow().pods.get(pod).is_some_and(|own| own.is_label_blocked);
        is_hindered.then(|| selinux::waiting(self.usage.unique.as_str()))
    }

    /// Returns the error of the last mount attempt, if the pod does not have the volume.
    pub fn failure(&self, pod: &PodUid) -> Option<String> {
        let shown = self.shown.borrow();
        let own =
            shown.pods.get(pod).filter(|own| own.presence != MountPresence::Present || own.published.is_none())?;
        own.failure.as_deref().map(str::to_owned)
    }

    /// Whether the volume cannot be attached because the node reached its attach limit.
    pub async fn is_over_limit(&self) -> bool {
        self.is_unattached() && self.plugin.is_over_limit(&self.usage).await
    }

    /// Whether the volume still has to be attached.
    pub fn is_unattached(&self) -> bool {
        let shown = self.shown.borrow();
        shown.attachable && !shown.is_attached
    }

    /// Adds the published volume to the pod's mounted volumes.
    pub fn put(&self, pod: &PodUid, into: &mut MountedVolumes) {
        let shown = self.shown.borrow().clone();
        let Some(own) = shown.pods.get(pod) else { return };
        let Some(published) = &own.published else { return };
        let read_only = self.spec.read_only();
        match self.spec.mode() {
            Mode::Block => {
                let block = BlockVolume { host_path: self.target.clone(), read_only };
                into.devices.insert(self.volume.clone(), block);
            }
            Mode::Filesystem => {
                let mounted = MountedVolume {
                    host_path: Some(published.path.clone()),
                    read_only,
                    relabel: published.relabel && !read_only,
                    sub_path_mode: own.root_mode,
                };
                into.by_name.insert(self.volume.clone(), mounted);
            }
        }
        into.groups.extend(self.spec.group().filter(|group| !into.groups.contains(group)));
    }
}

/// Whether the cached resolution belongs to this volume.
fn is_of(known: &CachedResolution, pod: &Pod, volume: &api::Volume) -> bool {
    match (claims::reference(pod, volume), known.spec.claim()) {
        (Some(reference), Some((_, name))) => reference.name == name,
        (None, None) => known.spec.as_inline() == Some(volume),
        (None, Some(_)) => {
            claims::resolve_inline(volume, pod.namespace()).is_ok_and(|resolved| resolved == *known.spec)
        }
        (Some(_), None) => false,
    }
}

fn usage(pod: &Arc<Pod>, layout: &PodLayout, spec: &Arc<VolumeSpec>, unique: UniqueName, plugin: &str) -> Usage {
    let folder = plugin.replace('/', "~");
    let mode = spec.mode();
    let target = match mode {
        Mode::Filesystem => layout.volume(&folder, &spec.directory()),
        Mode::Block => layout.device(&folder, &spec.directory()),
    };
    let context = pod.spec().security_context.as_ref();
    let policy = context.and_then(|context| context.fs_group_change_policy.as_deref());
    let group =
        ownership::group_of(pod).map(|group| FsGroup { group, on_root_mismatch: policy == Some("OnRootMismatch") });
    Usage {
        pod: pod.clone(),
        spec: spec.clone(),
        unique,
        mode,
        layout: layout.clone(),
        target,
        device: String::new(),
        group,
        user: plugins::common_user(pod),
        label: None,
        has_other_users: false,
        is_republish: false,
        was_rebuilt: false,
        operation: Operation::default(),
    }
}

#[cfg(test)]
mod tests;
