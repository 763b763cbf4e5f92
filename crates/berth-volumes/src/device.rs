//! The role of plugins whose volumes are more than files of this agent: those that are attached, staged
//! once for all pods of a node and published to each, or that hang when their server does.
//!
//! ```text
//!            attached ─► stage (once) ─► publish (each pod)
//!                        unstage      ◄─ unpublish
//! ```
//!
//! The owner of a volume calls one of these at a time per volume, each with a deadline; whatever outlives that
//! (`operation.rs`) is waited for before the next one. A plugin keeps no state of its own but what it writes beside its
//! mounts. Everything is asked again until it succeeds, so
//! everything is idempotent. Behaviour: spec 07 §2.4, §4, §7, §12.

use std::{
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use async_trait::async_trait;
use tokio::sync::watch;

use super::{
    layout::PodLayout,
    operation::Operation,
    spec::{Mode, UniqueName, VolumeSpec},
};
use berth_ports::Fullness;
use berth_types::{Pod, PodUid};

/// What a failure says about the state of things (spec 07 §2.4).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Class {
    /// It may have happened, or may still happen.
    Uncertain,
    /// Nothing was tried.
    Transient,
    /// It did not happen and will not.
    Final,
}

/// What went wrong, where that is more than its class.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Trouble {
    /// Anything.
    Other,
    /// It is not attached: what was tried is a part of staging that is told apart.
    NotAttached,
    /// The plugin cannot do that at all (expansion: counts as done).
    Unsupported,
    /// The volume cannot be expanded while it is in use (`FailedPrecondition`).
    InUse,
    /// Asking again does not help (`InvalidArgument`, `OutOfRange`, `NotFound`).
    Infeasible,
    /// What is on the device is another file system than the volume says.
    WrongFilesystem,
}

/// Why an operation failed.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("{text}")]
pub struct OpError {
    /// What it says about the state.
    pub class: Class,
    /// What went wrong.
    pub trouble: Trouble,
    /// For people: follows `MountVolume.SetUp failed for volume "x" : `.
    pub text: String,
}

impl OpError {
    /// It did not happen.
    pub fn failed(text: impl Into<String>) -> Self {
        Self { class: Class::Final, trouble: Trouble::Other, text: text.into() }
    }

    /// It may have happened.
    pub fn uncertain(text: impl Into<String>) -> Self {
        Self { class: Class::Uncertain, trouble: Trouble::Other, text: text.into() }
    }

    /// It was not tried.
    pub fn transient(text: impl Into<String>) -> Self {
        Self { class: Class::Transient, trouble: Trouble::Other, text: text.into() }
    }

    /// The same, known closer.
    #[must_use]
    pub fn because(mut self, trouble: Trouble) -> Self {
        self.trouble = trouble;
        self
    }
}

/// What a volume is like, by its plugin.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Traits {
    /// What the plugin calls the volume (`<driver>^<handle>`); matters where pods share it.
    pub volume: String,
    /// Label `volume_plugin` of metrics: the plugin's name, for CSI with `:<driver>`.
    pub label: String,
    /// Label `migrated` of metrics.
    pub is_migrated: bool,
    /// Somebody attaches it to the node first (`node.status.volumesAttached`).
    pub attachable: bool,
    /// It is staged once for all pods of the node.
    pub stages: bool,
    /// It takes mount options.
    pub mount_options: bool,
    /// It is published again with every turn of its pod.
    pub republishes: bool,
    /// The node's part of an expansion can be done.
    pub expands: bool,
    /// It can be mounted with a label of SELinux.
    pub takes_label: bool,
}

impl Traits {
    /// Whether pods share it, so that it has one name for all of them (spec 07 §2.1).
    pub fn is_shared(&self) -> bool {
        self.attachable || self.stages
    }

    /// The volume's name on this node.
    pub fn unique(&self, plugin: &str, pod: &PodUid, spec: &VolumeSpec) -> UniqueName {
        if self.is_shared() {
            UniqueName::shared(plugin, &self.volume)
        } else {
            UniqueName::of_pod(plugin, pod, &spec.name)
        }
    }
}

/// The group that a volume is given to, and how.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct GroupOf {
    /// `fsGroup`.
    pub group: u32,
    /// `fsGroupChangePolicy: OnRootMismatch`.
    pub on_root_mismatch: bool,
}

/// Who uses which volume, and how: all that staging and publishing need.
#[derive(Clone, Debug)]
pub struct Usage {
    /// The pod.
    pub pod: Arc<Pod>,
    /// The volume.
    pub spec: Arc<VolumeSpec>,
    /// Its name on this node.
    pub unique: UniqueName,
    /// As what the pod gets it.
    pub mode: Mode,
    /// Where the pod's things lie.
    pub layout: PodLayout,
    /// `pods/<uid>/volumes/<plugin~>/<spec name>`, not yet there; for a device the link below `volumeDevices`.
    pub target: PathBuf,
    /// Where the node's status says that it is attached; empty where it says nothing.
    pub device: String,
    /// Given to the volume as a whole; `None` to leave it as it is.
    pub group: Option<GroupOf>,
    /// The user that all containers run as, if it is one.
    pub user: Option<u32>,
    /// The label of SELinux that it is mounted with, if with one.
    pub label: Option<String>,
    /// Whether another pod has it mounted already: then it is nobody's to give away (spec 07 §7.6).
    pub is_shared_now: bool,
    /// The pod has it already: a failure leaves what is there.
    pub is_republish: bool,
    /// It was there before this agent: a failure leaves what is there.
    pub was_rebuilt: bool,
    /// What is being done: whatever blocks does so through it.
    pub operation: Operation,
}

/// What of a volume is to go.
#[derive(Clone, Debug)]
pub struct Removal {
    /// The volume; rebuilt from disk, where nothing else knows it any more.
    pub spec: Arc<VolumeSpec>,
    /// Its name on this node.
    pub unique: UniqueName,
    /// As what it is there.
    pub mode: Mode,
    /// The pod and the volume's place in it; `None` for what all pods shared.
    pub pod: Option<(PodUid, PathBuf)>,
    /// Where it is attached; empty where nothing says so.
    pub device: String,
    /// What is being done: whatever blocks does so through it.
    pub operation: Operation,
}

/// What the pod gets.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Published {
    /// The directory to bind, or the device.
    pub path: PathBuf,
    /// Whether the runtime may relabel it.
    pub relabel: bool,
}

/// An expansion on the node.
#[derive(Clone, Debug)]
pub struct Expansion {
    /// The pod that has it.
    pub usage: Usage,
    /// What it was published as.
    pub path: PathBuf,
    /// Bytes from.
    pub from: u64,
    /// Bytes to.
    pub to: u64,
}

/// A volume found on disk at start.
#[derive(Clone, Debug)]
pub struct Found {
    /// Of which pod.
    pub pod: PodUid,
    /// The name of its directory.
    pub name: String,
    /// As what.
    pub mode: Mode,
    /// Where: below the pod's `volumes`, or the link below its `volumeDevices`.
    pub path: PathBuf,
}

/// What a plugin made of it.
#[derive(Clone, Debug)]
pub struct Rebuilt {
    /// As much of the volume as undoing needs.
    pub spec: VolumeSpec,
    /// What it is like.
    pub traits: Traits,
    /// The label of SELinux that it is mounted with.
    pub label: Option<String>,
}

/// A kind of volume that is more than files.
#[async_trait]
pub trait DevicePlugin: Send + Sync + 'static {
    /// Full name, `kubernetes.io/csi`.
    fn name(&self) -> &'static str;

    /// Whether such volumes are its.
    fn supports(&self, spec: &VolumeSpec) -> bool;

    /// What this volume is like. May ask others; asked with every turn of the pod.
    async fn describe(&self, pod: &Pod, spec: &VolumeSpec) -> Result<Traits, OpError>;

    /// Whether the volume is attached, for plugins that know better than the node's status; a path overrides that of the
    /// status.
    async fn attached(&self, usage: &Usage) -> Result<Option<String>, OpError> {
        let _usage = usage;
        Ok(None)
    }

    /// Makes the volume ready for all pods of the node; only asked where it [stages](Traits::stages).
    async fn stage(&self, usage: &Usage) -> Result<(), OpError> {
        let _usage = usage;
        Ok(())
    }

    /// Gives it to the pod.
    async fn publish(&self, usage: &Usage) -> Result<Published, OpError>;

    /// Takes it from the pod.
    async fn unpublish(&self, removal: &Removal) -> Result<(), OpError>;

    /// Undoes [`stage`](Self::stage), when no pod has it.
    async fn unstage(&self, removal: &Removal) -> Result<(), OpError> {
        let _removal = removal;
        Ok(())
    }

    /// Does the node's part of an expansion; the size there is afterwards, in bytes.
    async fn expand(&self, expansion: &Expansion) -> Result<u64, OpError> {
        let _expansion = expansion;
        Err(OpError::failed("not supported").because(Trouble::Unsupported))
    }

    /// How full it is, as the pod has it at that path.
    async fn fullness(&self, usage: &Usage, path: &Path) -> Result<Fullness, OpError> {
        let _asked = (usage, path);
        Err(OpError::failed("not supported").because(Trouble::Unsupported))
    }

    /// What a directory is that an earlier agent left. Blocking; looks at no volume, only beside it.
    ///
    /// # Errors
    /// It cannot be told.
    fn rebuild(&self, found: &Found) -> Result<Rebuilt, String>;

    /// What an earlier agent staged, whether a pod has it or not. Blocking, as [`rebuild`](Self::rebuild).
    ///
    /// # Errors
    /// Some of it cannot be told.
    fn staged(&self) -> Result<Vec<(Mode, Rebuilt)>, String> {
        Ok(Vec::new())
    }

    /// The directory in which each pod that has the device finds it (`global map path`).
    fn map_dir(&self, root: &Path, spec: &VolumeSpec) -> PathBuf {
        root.join("plugins").join(self.name().replace('/', "~")).join("volumeDevices").join(&spec.name)
    }

    /// Whether it is not attached because the node takes no more such volumes.
    async fn is_over_limit(&self, usage: &Usage) -> bool {
        let _usage = usage;
        false
    }

    /// How long one call may take.
    fn limit(&self) -> Duration {
        Duration::from_secs(120)
    }

    /// Moves when what failed may succeed now: a driver was registered. What waits is tried at once then.
    fn cured(&self) -> watch::Receiver<u64> {
        watch::channel(0).1
    }
}
