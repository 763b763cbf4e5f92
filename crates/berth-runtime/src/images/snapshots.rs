//! Writable layers of containers: an overlay upper directory over the image's layers, or a copy.
//!
//! Nothing is mounted here: the launch plan contains the kind of root, and the container's own process mounts it in its
//! private mount namespace. Blocking. Implements spec 09b §5.1, 09 D7.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    os::{
        fd::AsRawFd,
        unix::fs::{DirBuilderExt, MetadataExt, PermissionsExt, chown},
    },
    path::{Path, PathBuf},
    sync::{Mutex, MutexGuard, PoisonError},
};

use rustix::{
    fs::{CWD, Mode, OFlags},
    mount::{FsMountFlags, FsOpenFlags, MountAttrFlags},
};
use serde::{Deserialize, Serialize};
use tracing::{info, warn};

use super::{
    error::{ImageError, ImageErrorKind, IoContext},
    layers::{self, Layers},
    tree_copy,
    unpacker::LayerFormat,
};
use crate::store::record::{self, Durability};
use berth_shim::plan::{MountKind, RootKind};

/// How container roots are made.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Snapshotter {
    /// Overlay where supported, otherwise copies.
    #[default]
    Auto,
    /// Overlay; an error where unsupported.
    Overlay,
    /// Copies.
    Copy,
}

/// Record of a container's root.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
struct Snapshot {
    v: u64,
    /// The image's layers, bottom first.
    layers: Vec<u64>,
    /// Layers of images mounted into the container as volumes.
    #[serde(default)]
    mounted: BTreeSet<u64>,
}

/// The roots of all containers.
pub struct Snapshots {
    folder: PathBuf,
    form: LayerFormat,
    known: Mutex<BTreeMap<String, Snapshot>>,
}

impl Snapshots {
    /// Opens the roots below `$ROOT/snap`; deletes incomplete ones.
    ///
    /// # Errors
    /// The directory cannot be created or read.
    pub fn open(root: &Path, form: LayerFormat) -> Result<Self, ImageError> {
        let folder = root.join("snap");
        fs::DirBuilder::new().recursive(true).mode(0o700).create(&folder).attempt("create snapshots")?;
        let mut known = BTreeMap::new();
        for entry in fs::read_dir(&folder).attempt("list snapshots")? {
            let name = entry.attempt("list snapshots")?.file_name().to_string_lossy().into_owned();
            match record::read::<Snapshot>(&folder.join(&name).join("snap.json")) {
                Ok(Some(snapshot)) if !name.starts_with('.') => drop(known.insert(name, snapshot)),
                _ => layers::delete(&folder, &name),
            }
        }
        Ok(Self { folder, form, known: Mutex::new(known) })
    }

    fn known(&self) -> MutexGuard<'_, BTreeMap<String, Snapshot>> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Directory of all roots.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// IDs of containers that have a root.
    pub fn containers(&self) -> Vec<String> {
        self.known().keys().cloned().collect()
    }

    /// Layers used by any container.
    pub fn owned(&self) -> BTreeSet<u64> {
        let known = self.known();
        known.values().flat_map(|snapshot| snapshot.layers.iter().chain(&snapshot.mounted)).copied().collect()
    }

    /// Creates a container's root over these layers, bottom first.
    ///
    /// # Errors
    /// The container already has a root, or it cannot be created; partial results are deleted.
    pub fn prepare(&self, container: &str, numbers: &[u64], layers: &Layers) -> Result<RootKind, ImageError> {
        check(container)?;
        let folder = self.folder.join(container);
        if let Err(error) = fs::DirBuilder::new().mode(0o700).create(&folder) {
            let kind = match error.kind() {
                std::io::ErrorKind::AlreadyExists => ImageErrorKind::AlreadyExists,
                _ => ImageError::io("", &error).kind,
            };
            return Err(ImageError::new(kind, format!("create snapshot of container {container:?}: {error}")));
        }
        let snapshot = Snapshot { v: record::VERSION, layers: numbers.to_vec(), mounted: BTreeSet::new() };
        // Registered before it is filled, so that its layers are not collected.
        self.known().insert(container.to_owned(), snapshot.clone());
        let made = self.fill(&folder, &snapshot, layers);
        made.inspect_err(|_| self.release(container))?;
        self.root_for(container, layers).ok_or_else(|| ImageError::not_found("snapshot disappeared"))
    }

    fn fill(&self, folder: &Path, snapshot: &Snapshot, layers: &Layers) -> Result<(), ImageError> {
        let upper = folder.join("u");
        fs::DirBuilder::new().mode(0o755).create(&upper).attempt("create upper directory")?;
        if let Some(top) = snapshot.layers.last() {
            let top = layers.path(*top);
            match self.form {
                LayerFormat::Merged => tree_copy::copy_tree(&top, &upper, tree_copy::Budget::UNLIMITED)?,
                LayerFormat::Overlay { .. } => {
                    let stat = fs::metadata(&top).attempt("stat top layer")?;
                    chown(&upper, Some(stat.uid()), Some(stat.gid())).attempt("set owner of the root")?;
                    let mode = fs::Permissions::from_mode(stat.mode() & 0o7777);
                    fs::set_permissions(&upper, mode).attempt("set mode of the root")?;
                }
            }
        }
        fs::DirBuilder::new().mode(0o700).create(folder.join("w")).attempt("create work directory")?;
        record::write(&folder.join("snap.json"), snapshot, Durability::Unsynced).attempt("write snap.json")
    }

    /// How a container's root is mounted; `None` if it has none.
    pub fn root_for(&self, container: &str, layers: &Layers) -> Option<RootKind> {
        let snapshot = self.known().get(container).cloned()?;
        let folder = self.folder.join(container);
        Some(match self.form {
            LayerFormat::Overlay { userxattr } if !snapshot.layers.is_empty() => RootKind::Overlay {
                layers: layers.folder().to_owned(),
                lower: lower(&snapshot.layers),
                upper: folder.join("u"),
                work: folder.join("w"),
                userxattr,
            },
            _ => RootKind::Directory(folder.join("u")),
        })
    }

    /// Mount source that shows an image's layers read-only in a container; the layers are kept until the root is
    /// released.
    ///
    /// # Errors
    /// The container has no root, or its record cannot be written.
    pub fn mount_image(
        &self,
        container: &str,
        numbers: &[u64],
        sub_path: &str,
        layers: &Layers,
    ) -> Result<MountKind, ImageError> {
        let snapshot = {
            let mut known = self.known();
            let missing = || ImageError::not_found(format!("container {container:?} has no root filesystem"));
            let snapshot = known.get_mut(container).ok_or_else(missing)?;
            snapshot.mounted.extend(numbers);
            snapshot.clone()
        };
        let path = self.folder.join(container).join("snap.json");
        record::write(&path, &snapshot, Durability::Unsynced).attempt("write snap.json")?;
        let shown = match self.form {
            LayerFormat::Overlay { .. } => numbers,
            LayerFormat::Merged => numbers.split_at(numbers.len().saturating_sub(1)).1,
        };
        let (layers, sub_path) = (layers.folder().to_owned(), sub_path.to_owned());
        Ok(MountKind::Layers { layers, lower: lower(shown), sub_path })
    }

    /// Deletes a container's root; does nothing if there is none.
    pub fn release(&self, container: &str) {
        if check(container).is_err() {
            return;
        }
        if self.folder.join(container).exists() {
            layers::delete(&self.folder, container);
        }
        self.known().remove(container);
    }
}

/// Layer directories, topmost first, as overlayfs expects them.
fn lower(numbers: &[u64]) -> Vec<String> {
    numbers.iter().rev().map(|number| format!("{number}/d")).collect()
}

/// Container IDs are our own; validated nonetheless, because they become directory names.
fn check(container: &str) -> Result<(), ImageError> {
    let is_good = |b: u8| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'_');
    if !container.is_empty() && container.len() <= 128 && container.bytes().all(is_good) {
        return Ok(());
    }
    Err(ImageError::invalid(format!("invalid container id {container:?}")))
}

/// Determines whether the machine supports overlayfs, by a detached test mount.
///
/// # Errors
/// An overlay is required and not supported.
pub fn probe(root: &Path, wanted: Snapshotter) -> Result<LayerFormat, ImageError> {
    if wanted == Snapshotter::Copy {
        return Ok(LayerFormat::Merged);
    }
    let folder = root.join(format!(".probe-{:08x}", rand::random::<u32>()));
    let result = try_overlay(&folder, false).or_else(|first| try_overlay(&folder, true).map_err(|_| first));
    layers::delete(root, &folder.file_name().unwrap_or_default().to_string_lossy());
    match result {
        Ok(userxattr) => Ok(LayerFormat::Overlay { userxattr }),
        Err(error) if wanted == Snapshotter::Overlay => {
            Err(ImageError::io("snapshotter overlay is not supported here", &error))
        }
        Err(error) => {
            warn!(error = %error, "Overlayfs is not supported, copying root filesystems of containers");
            Ok(LayerFormat::Merged)
        }
    }
}

fn try_overlay(folder: &Path, userxattr: bool) -> std::io::Result<bool> {
    let open = |name: &str| -> std::io::Result<_> {
        let path = folder.join(name);
        fs::create_dir_all(&path)?;
        Ok(rustix::fs::openat(CWD, &path, OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())?)
    };
    let (lower, upper, work) = (open("l")?, open("u")?, open("w")?);
    let attribute = if userxattr { "user.overlay.opaque" } else { "trusted.overlay.opaque" };
    rustix::fs::lsetxattr(folder.join("l"), attribute, b"y", rustix::fs::XattrFlags::empty())?;
    let fs = rustix::mount::fsopen("overlay", FsOpenFlags::FSOPEN_CLOEXEC)?;
    let by_fd = |fd: &std::os::fd::OwnedFd| format!("/proc/self/fd/{}", fd.as_raw_fd());
    for (key, fd) in [("lowerdir", &lower), ("upperdir", &upper), ("workdir", &work)] {
        rustix::mount::fsconfig_set_string(&fs, key, by_fd(fd))?;
    }
    if userxattr {
        rustix::mount::fsconfig_set_flag(&fs, "userxattr")?;
    }
    rustix::mount::fsconfig_create(&fs)?;
    // Never attached: the mount ends with its descriptor.
    let mount = rustix::mount::fsmount(&fs, FsMountFlags::FSMOUNT_CLOEXEC, MountAttrFlags::empty())?;
    let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::CLOEXEC;
    rustix::fs::openat(&mount, "probe", flags, Mode::from_raw_mode(0o600))?;
    info!(userxattr, "Overlayfs is supported");
    Ok(userxattr)
}
