//! Volume plugins that only write files: one file per volume type, and the plugin table.

mod config_map;
mod downward_api;
mod empty_dir;
mod files;
mod host_path;
mod huge_pages;
mod image;
mod projected;
mod secret;
mod verified_cache;

use std::{collections::BTreeMap, io, path::Path};

use jiff::Timestamp;

use super::{
    api_objects::VolumeObjects,
    layout::{self, PodLayout},
};
pub use files::ObjectOf;
pub use projected::common_user;
pub use verified_cache::VerifiedCache;

use berth_ports::{MountedVolume, ObjectError, VolumeError};
use berth_types::{Pod, api, fieldpath::FieldError, volume};

/// Input of a plugin for setting up one volume.
pub struct SetUp<'a> {
    /// Pod that uses the volume.
    pub pod: &'a Pod,
    /// Volume from the pod spec.
    pub volume: &'a api::Volume,
    /// Paths of the pod's directories.
    pub layout: &'a PodLayout,
    /// Node allocatable by resource: the limits of containers that set none.
    pub allocatable: &'a BTreeMap<String, String>,
    /// Objects read from the API server.
    pub fetched: &'a VolumeObjects,
    /// Maximum size in bytes of memory-backed volumes with credentials; `None` keeps them on disk.
    pub memory: Option<u64>,
    /// Cache of recently verified volumes: an unchanged volume is not compared again.
    pub verified: &'a VerifiedCache,
    /// Wall-clock time.
    pub now: Timestamp,
}

/// Error of setting up a volume; becomes `MountVolume.SetUp failed for volume "x" : <text>`.
#[derive(Debug, thiserror::Error)]
pub enum SetUpError {
    /// Unknown storage medium of an `emptyDir`.
    #[error("unknown storage medium {0:?}")]
    Medium(String),
    /// Huge pages of the requested size are not available.
    #[error(transparent)]
    HugePages(#[from] huge_pages::PagesError),
    /// Huge pages of another size are already mounted.
    #[error("pagesize '{mounted}' and requested medium size '{wanted}' differ")]
    PageSize {
        /// Page size of the existing mount.
        mounted: String,
        /// Requested page size.
        wanted: String,
    },
    /// The host path does not match its declared type.
    #[error("hostPath type check failed: {path} {expected}")]
    HostPathType {
        /// Host path.
        path: String,
        /// Expectation that failed: `is not a directory`, …
        expected: &'static str,
    },
    /// Unknown host path type.
    #[error("{0} is an invalid volume type")]
    HostPathUnknown(String),
    /// The host path contains `..`.
    #[error("invalid HostPath `{0}`: must not contain '..'")]
    HostPathBackstep(String),
    /// Fields of the pod cannot be read.
    #[error("{}", joined(.0))]
    Fields(Vec<FieldError>),
    /// An API object cannot be read.
    #[error("{}", unread(.0))]
    Object(ObjectError),
    /// An object lacks a key.
    #[error("{} key: {key}", match .of {
        ObjectOf::ConfigMap => "configmap references non-existent config",
        ObjectOf::Secret => "references non-existent secret",
    })]
    NoKey {
        /// Kind of the object.
        of: ObjectOf,
        /// Missing key.
        key: String,
    },
    /// No API server is configured to read sources from.
    #[error("cannot setup projected volume {0} because kube client is not configured")]
    NotConfigured(String),
    /// A cluster trust bundle source has neither name nor signer.
    #[error("ClusterTrustBundle projection requires either name or signerName to be set")]
    NoBundleNamed,
    /// The `gitRepo` plugin is disabled: it would clone repositories as root.
    #[error(
        "git-repo volume plugin has been disabled; if necessary, it may be re-enabled by enabling the feature-gate `GitRepoVolumeDriver`"
    )]
    GitRepo,
    /// Several projected sources failed.
    #[error("{}", joined(.0))]
    Several(Vec<SetUpError>),
    /// A file has no mode.
    #[error("no defaultMode used, not even the default value for it")]
    NoMode,
    /// Files cannot be published.
    #[error(transparent)]
    Write(#[from] super::atomic_writer::WriteError),
    /// A system call failed.
    #[error("{action} {path}: {cause}")]
    Io {
        /// Attempted action.
        action: &'static str,
        /// Path that the action was applied to.
        path: String,
        /// Error of the system call.
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

/// Formats the error of an object that cannot be read.
fn unread(error: &ObjectError) -> String {
    match error {
        ObjectError::NoClient { .. } => "not supported due to running kubelet in standalone mode".to_owned(),
        error => error.to_string(),
    }
}

/// How often a volume is set up.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum SetUpFrequency {
    /// Once; later syncs only verify that it is present.
    Once,
    /// With every sync of its pod, because its content changes.
    EveryTurn,
}

/// Volume type and its plugin.
pub struct VolumeType {
    /// Whether a volume is of this type. Called several times in each sync of a pod.
    is: fn(&api::Volume) -> bool,
    /// Full plugin name.
    pub plugin: &'static str,
    /// Plugin directory below the pod's `volumes`.
    folder: &'static str,
    /// How often it is set up.
    pub again: SetUpFrequency,
    set_up: Plugin,
}

/// Volume types that this release sets up, one line each.
const PLUGINS: [VolumeType; 8] = [
    VolumeType::once(|v| v.empty_dir.is_some(), "kubernetes.io/empty-dir", layout::EMPTY_DIR, empty_dir::set_up),
    VolumeType::once(
        |v| v.host_path.is_some(),
        "kubernetes.io/host-path",
        "kubernetes.io~host-path",
        host_path::set_up,
    ),
    VolumeType::once(
        |v| v.git_repo.is_some(),
        "kubernetes.io/git-repo",
        "kubernetes.io~git-repo",
        |_| Err(SetUpError::GitRepo),
    ),
    VolumeType::once(|v| v.image.is_some(), "kubernetes.io/image", "kubernetes.io~image", image::set_up),
    VolumeType::every_turn(
        |v| v.downward_api.is_some(),
        "kubernetes.io/downward-api",
        layout::DOWNWARD_API,
        downward_api::set_up,
    ),
    VolumeType::every_turn(
        |v| v.config_map.is_some(),
        "kubernetes.io/configmap",
        layout::CONFIG_MAP,
        config_map::set_up,
    ),
    VolumeType::every_turn(|v| v.secret.is_some(), "kubernetes.io/secret", layout::SECRET, secret::set_up),
    VolumeType::every_turn(|v| v.projected.is_some(), "kubernetes.io/projected", layout::PROJECTED, projected::set_up),
];

impl VolumeType {
    const fn once(is: fn(&api::Volume) -> bool, plugin: &'static str, folder: &'static str, set_up: Plugin) -> Self {
        Self { is, plugin, folder, again: SetUpFrequency::Once, set_up }
    }

    const fn every_turn(
        is: fn(&api::Volume) -> bool,
        plugin: &'static str,
        folder: &'static str,
        set_up: Plugin,
    ) -> Self {
        Self { is, plugin, folder, again: SetUpFrequency::EveryTurn, set_up }
    }
}

/// Returns the plugin of a volume, if this release supports its type.
pub fn kind(volume: &api::Volume) -> Option<&'static VolumeType> {
    PLUGINS.iter().find(|known| (known.is)(volume))
}

/// Returns the existing volume, where its content changes and it was set up before: a volume that cannot be refreshed
/// keeps its last content.
pub fn last_published(request: &SetUp<'_>) -> Option<MountedVolume> {
    let known = kind(request.volume).filter(|known| known.again == SetUpFrequency::EveryTurn)?;
    files::published(request, known.folder)
}

/// Sets up one volume. Idempotent.
///
/// # Errors
/// If the volume type is not supported, or its plugin fails.
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
