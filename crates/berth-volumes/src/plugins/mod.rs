//! One file per kind of volume, and their table.

mod config_map;
mod downward_api;
mod empty_dir;
mod files;
mod host_path;
mod huge_pages;
mod image;
mod looked;
mod projected;
mod secret;

use std::{collections::BTreeMap, io, path::Path};

use jiff::Timestamp;

use super::{
    fetched::Fetched,
    layout::{self, PodLayout},
};
pub use files::ObjectOf;
pub use looked::Looked;
pub use projected::common_user;

use berth_ports::{MountedVolume, ObjectError, VolumeError};
use berth_types::{Pod, api, fieldpath::FieldError, volume};

/// Everything a plugin needs to set up one volume.
pub struct SetUp<'a> {
    /// The pod.
    pub pod: &'a Pod,
    /// The volume.
    pub volume: &'a api::Volume,
    /// Where the pod's things lie.
    pub layout: &'a PodLayout,
    /// What containers without a limit may use, by resource.
    pub allocatable: &'a BTreeMap<String, String>,
    /// What was read of the API server.
    pub fetched: &'a Fetched,
    /// How large volumes with credentials may get, in bytes; `None` to keep them on disk.
    pub memory: Option<u64>,
    /// What was found at the last look.
    pub looked: &'a Looked,
    /// Wall time.
    pub now: Timestamp,
}

/// Why a volume is not there; becomes `MountVolume.SetUp failed for volume "x" : <text>`.
#[derive(Debug, thiserror::Error)]
pub enum SetUpError {
    /// No such medium.
    #[error("unknown storage medium {0:?}")]
    Medium(String),
    /// There are no such huge pages.
    #[error(transparent)]
    HugePages(#[from] huge_pages::PagesError),
    /// Other huge pages are mounted already.
    #[error("pagesize '{mounted}' and requested medium size '{wanted}' differ")]
    PageSize {
        /// What is mounted.
        mounted: String,
        /// What is wanted.
        wanted: String,
    },
    /// The host path is not what its type says.
    #[error("hostPath type check failed: {path} {expected}")]
    HostPathType {
        /// The path.
        path: String,
        /// `is not a directory`, …
        expected: &'static str,
    },
    /// No such type.
    #[error("{0} is an invalid volume type")]
    HostPathUnknown(String),
    /// The host path leads upwards.
    #[error("invalid HostPath `{0}`: must not contain '..'")]
    HostPathBackstep(String),
    /// Fields of the pod cannot be read.
    #[error("{}", joined(.0))]
    Fields(Vec<FieldError>),
    /// An object cannot be read.
    #[error("{}", unread(.0))]
    Object(ObjectError),
    /// An object lacks a key.
    #[error("{} key: {key}", match .of {
        ObjectOf::ConfigMap => "configmap references non-existent config",
        ObjectOf::Secret => "references non-existent secret",
    })]
    NoKey {
        /// What lacks it.
        of: ObjectOf,
        /// The key.
        key: String,
    },
    /// There is no API server to read sources from.
    #[error("cannot setup projected volume {0} because kube client is not configured")]
    NotConfigured(String),
    /// A trust bundle that is not named.
    #[error("ClusterTrustBundle projection requires either name or signerName to be set")]
    NoBundleNamed,
    /// Nobody clones repositories as root any more.
    #[error(
        "git-repo volume plugin has been disabled; if necessary, it may be re-enabled by enabling the feature-gate `GitRepoVolumeDriver`"
    )]
    GitRepo,
    /// Several sources cannot be had.
    #[error("{}", joined(.0))]
    Several(Vec<SetUpError>),
    /// No mode for a file.
    #[error("no defaultMode used, not even the default value for it")]
    NoMode,
    /// Files cannot be published.
    #[error(transparent)]
    Write(#[from] super::atomic_writer::WriteError),
    /// The system refused.
    #[error("{action} {path}: {cause}")]
    Io {
        /// What was tried.
        action: &'static str,
        /// With what.
        path: String,
        /// Why not.
        cause: io::Error,
    },
}

impl SetUpError {
    fn io(action: &'static str, path: &Path) -> impl Fn(io::Error) -> Self {
        let path = path.display().to_string();
        move |cause| Self::Io { action, path: path.clone(), cause }
    }
}

type Plugin = fn(&SetUp<'_>) -> Result<MountedVolume, SetUpError>;

/// What is told of an object that cannot be read.
fn unread(error: &ObjectError) -> String {
    match error {
        ObjectError::NoClient { .. } => "not supported due to running kubelet in standalone mode".to_owned(),
        error => error.to_string(),
    }
}

/// When a volume is set up.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Again {
    /// Once; later it is only seen to that it is there.
    Once,
    /// With every turn of its pod: what it shows changes.
    EveryTurn,
}

/// A kind of volume.
pub struct Kind {
    /// Whether a volume is of it. Asked several times in each turn of a pod.
    is: fn(&api::Volume) -> bool,
    /// The plugin's full name.
    pub plugin: &'static str,
    /// Its directory below the pod's volumes.
    folder: &'static str,
    /// When it is set up.
    pub again: Again,
    set_up: Plugin,
}

/// The kinds this release sets up. Another kind is another line.
const PLUGINS: [Kind; 8] = [
    Kind::once(|v| v.empty_dir.is_some(), "kubernetes.io/empty-dir", layout::EMPTY_DIR, empty_dir::set_up),
    Kind::once(|v| v.host_path.is_some(), "kubernetes.io/host-path", "kubernetes.io~host-path", host_path::set_up),
    Kind::once(
        |v| v.git_repo.is_some(),
        "kubernetes.io/git-repo",
        "kubernetes.io~git-repo",
        |_| Err(SetUpError::GitRepo),
    ),
    Kind::once(|v| v.image.is_some(), "kubernetes.io/image", "kubernetes.io~image", image::set_up),
    Kind::every_turn(
        |v| v.downward_api.is_some(),
        "kubernetes.io/downward-api",
        layout::DOWNWARD_API,
        downward_api::set_up,
    ),
    Kind::every_turn(|v| v.config_map.is_some(), "kubernetes.io/configmap", layout::CONFIG_MAP, config_map::set_up),
    Kind::every_turn(|v| v.secret.is_some(), "kubernetes.io/secret", layout::SECRET, secret::set_up),
    Kind::every_turn(|v| v.projected.is_some(), "kubernetes.io/projected", layout::PROJECTED, projected::set_up),
];

impl Kind {
    const fn once(is: fn(&api::Volume) -> bool, plugin: &'static str, folder: &'static str, set_up: Plugin) -> Self {
        Self { is, plugin, folder, again: Again::Once, set_up }
    }

    const fn every_turn(
        is: fn(&api::Volume) -> bool,
        plugin: &'static str,
        folder: &'static str,
        set_up: Plugin,
    ) -> Self {
        Self { is, plugin, folder, again: Again::EveryTurn, set_up }
    }
}

/// The kind of a volume, where this release sets it up.
pub fn kind(volume: &api::Volume) -> Option<&'static Kind> {
    PLUGINS.iter().find(|known| (known.is)(volume))
}

/// The volume as it is, where it shows things that change and was set up before: one that cannot be
/// refreshed goes on showing what it shows.
pub fn as_it_was(request: &SetUp<'_>) -> Option<MountedVolume> {
    let known = kind(request.volume).filter(|known| known.again == Again::EveryTurn)?;
    files::published(request, known.folder)
}

/// Sets up one volume. Idempotent.
///
/// # Errors
/// For kinds that are not supported, and for what the plugin says.
pub fn set_up(request: &SetUp<'_>) -> Result<MountedVolume, VolumeError> {
    let name = &request.volume.name;
    let Some(known) = kind(request.volume) else {
        let kind = volume::kinds(request.volume).into_iter().next().unwrap_or_default();
        return Err(VolumeError::Unsupported { volume: name.clone(), kind });
    };
    let failed = |e: SetUpError| VolumeError::Failed(format!("MountVolume.SetUp failed for volume {name:?} : {e}"));
    (known.set_up)(request).map_err(failed)
}

fn joined(errors: &[impl ToString]) -> String {
    match errors {
        [one] => one.to_string(),
        all => format!("[{}]", all.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ")),
    }
}
