//! Local volume plugin: a directory or block device of the node as a persistent volume.
//!
//! Implements spec 07 §7.6.

use std::{
    fs::{self, DirBuilder},
    io,
    os::unix::fs::{DirBuilderExt, FileTypeExt},
    path::{Path, PathBuf},
    sync::Arc,
};

use async_trait::async_trait;
use rustix::{
    io::Errno,
    mount::{MountFlags, UnmountFlags, mount_bind, mount_remount, unmount},
};

use super::{
    attachable::{
        AttachableVolumePlugin, Expansion, FoundVolume, FsGroup, OpError, PublishedVolume, ReconstructedVolume,
        Removal, Usage, VolumeTraits,
    },
    file_system, global_mount, group_ownership,
    machine::{HostOperations, ThisMachine, Work},
    operation::Operation,
    rebuild,
    spec::{Mode, VolumeSpec},
};
use berth_ports::{EventRecord, EventSink, VolumeStats};
use berth_sys::{mount, mount_table};
use berth_types::{Pod, api};

const NAME: &str = "kubernetes.io/local-volume";
/// Default file system type for a blank device.
const DEFAULT_KIND: &str = "ext4";

/// Local volume plugin.
pub struct LocalPlugin {
    /// Directory of the file systems mounted for all pods.
    mounts: PathBuf,
    /// Directory of the global map paths of block devices.
    devices: PathBuf,
    machine: Arc<dyn HostOperations>,
    events: Arc<dyn EventSink>,
}

/// File type of a local path.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum LocalPathKind {
    Directory,
    Device,
}

/// Returns a formatter for errors before any change: they prove nothing about the existing state.
fn io_error(action: &str, path: &Path) -> impl Fn(io::Error) -> OpError {
    let path = path.display().to_string();
    move |cause| OpError::transient(format!("{action} {path}: {cause}"))
}

fn kind_of(path: &Path) -> Result<LocalPathKind, OpError> {
    let found = fs::metadata(path).map_err(io_error("stat", path))?.file_type();
    match (found.is_dir(), found.is_block_device()) {
        (true, _) => Ok(LocalPathKind::Directory),
        (_, true) => Ok(LocalPathKind::Device),
        _ => Err(OpError::transient("only directory and block device are supported")),
    }
}

/// Returns the path of the volume on the node.
fn path_of(spec: &VolumeSpec) -> Result<PathBuf, OpError> {
    let path =
        spec.volume().and_then(|volume| volume.local.as_ref()).map(|local| local.path.as_str()).unwrap_or_default();
    if path.is_empty() {
        return Err(OpError::transient("failed to get the path of a local volume"));
    }
    if Path::new(path).components().any(|part| part == std::path::Component::ParentDir) {
        return Err(OpError::transient(format!("invalid path: {path} must not contain '..'")));
    }
    Ok(PathBuf::from(path))
}

fn is_mounted(path: &Path) -> Result<bool, OpError> {
    let table = mount_table::read().map_err(io_error("reading mount table for", path))?;
    Ok(table.iter().any(|mount| mount.target == path))
}

pub(super) fn make(path: &Path) -> Result<(), OpError> {
    DirBuilder::new().recursive(true).mode(0o750).create(path).map_err(io_error("creating", path))
}

/// Maximum mounts stacked on one mount point that are unmounted.
const STACKED: usize = 16;

fn take_down(path: &Path) -> Result<(), OpError> {
    for _ in 0..STACKED {
        if !is_mounted(path)? {
            break;
        }
        match unmount(path, UnmountFlags::NOFOLLOW) {
            Ok(()) => {}
            // Another mount hides it, or it is not a mount: removing the directory fails below if so.
            Err(Errno::INVAL | Errno::NOENT) => break,
            Err(e) => {
                let path = path.display();
                return Err(OpError::failed(format!("unmount failed: {e}\nUnmounting arguments: {path}\nOutput: ")));
            }
        }
    }
    match fs::remove_dir(path) {
        Err(e) if e.kind() != io::ErrorKind::NotFound => Err(io_error("removing", path)(e)),
        _ => Ok(()),
    }
}

impl LocalPlugin {
    /// Creates the plugin of a node with that root directory.
    pub fn new(root: &Path, events: Arc<dyn EventSink>) -> Self {
        let root = fs::canonicalize(root).unwrap_or_else(|_| root.to_owned());
        Self {
            mounts: root.join("plugins").join(NAME).join("mounts"),
            devices: root.join("plugins").join(NAME.replace('/', "~")).join("volumeDevices"),
            machine: Arc::new(ThisMachine::default()),
            events,
        }
    }

    fn global(&self, spec: &VolumeSpec) -> PathBuf {
        self.mounts.join(&spec.name)
    }

    async fn kind(operation: &Operation, spec: &VolumeSpec) -> Result<(PathBuf, LocalPathKind), OpError> {
        let path = path_of(spec)?;
        operation.blocking(move || kind_of(&path).map(|kind| (path, kind))).await
    }

    async fn bind(&self, usage: &Usage, source: PathBuf) -> Result<PublishedVolume, OpError> {
        let (target, read_only) = (usage.target.clone(), usage.spec.read_only());
        let options = usage.spec.mount_options();
        let is_new = usage.operation.blocking(move || {
            make(&target)?;
            if is_mounted(&target)? {
                return Ok(false);
            }
            mount_bind(&source, &target).map_err(|e| undo(&target, io_error("bind mounting at", &target)(e.into())))?;
            restrict(&target, read_only, &options).map_err(|e| undo(&target, e))?;
            Ok(true)
        });
        let is_new = is_new.await?;
        let group = usage.group.filter(|_| !usage.has_other_users && !usage.is_republish && !read_only);
        if let Some(of) = group {
            // An earlier agent's bind mount has the right group if its root shows that: the root is changed last.
            let was_given = !is_new && usage.was_rebuilt;
            let of = FsGroup { on_root_mismatch: of.on_root_mismatch || was_given, ..of };
            group_ownership::apply_fs_group(usage, NAME, usage.target.clone(), of).await?;
        }
        Ok(PublishedVolume { path: usage.target.clone(), relabel: true })
    }

    /// Records an event if another pod already uses the volume with a different group.
    async fn record_group_mismatch(&self, usage: &Usage) {
        use std::os::unix::fs::MetadataExt;
        let (Some(wanted), Ok(path)) = (usage.group.filter(|_| usage.has_other_users), path_of(&usage.spec)) else {
            return;
        };
        let reading = usage.operation.blocking(move || {
            let found = fs::metadata(&path).map_err(io_error("stat", &path))?;
            Ok(found.gid())
        });
        let Ok(found) = reading.await else { return };
        if found != wanted.group {
            let text = format!(
                "The requested fsGroup is {}, but the volume {} has GID {found}. The volume may not be shareable.",
                wanted.group, usage.spec.name,
            );
            self.events.record(EventRecord::warning(usage.pod.id(), "AlreadyMountedVolume", text));
        }
    }
}

/// Cleans up after a failure; the error is final if nothing is left, otherwise uncertain.
fn undo(target: &Path, error: OpError) -> OpError {
    match take_down(target) {
        Ok(()) => OpError::failed(error.text),
        Err(left) => OpError::uncertain(format!("{}; {}", error.text, left.text)),
    }
}

/// Applies mount options to a bind mount by remounting it: a bind mount call takes none.
pub(super) fn restrict(target: &Path, read_only: bool, options: &[String]) -> Result<(), OpError> {
    let mut flags = MountFlags::BIND;
    flags.set(MountFlags::RDONLY, read_only);
    for option in options {
        match option.as_str() {
            "ro" => flags |= MountFlags::RDONLY,
            "nodev" => flags |= MountFlags::NODEV,
            "noexec" => flags |= MountFlags::NOEXEC,
            "nosuid" => flags |= MountFlags::NOSUID,
            "noatime" => flags |= MountFlags::NOATIME,
            "nodiratime" => flags |= MountFlags::NODIRATIME,
            "relatime" => flags |= MountFlags::RELATIME,
            "" | "bind" | "rw" | "defaults" => {}
            other => return Err(OpError::failed(format!("mount option {other:?} is not supported for bind mounts"))),
        }
    }
    if flags == MountFlags::BIND {
        return Ok(());
    }
    // A remount replaces all flags, so that those inherited from the source must be repeated.
    let flags = flags | mount::inherited(target).map_err(io_error("stat", target))?;
    mount_remount(target, flags, c"").map_err(|e| io_error("remounting", target)(e.into()))
}

#[async_trait]
impl AttachableVolumePlugin for LocalPlugin {
    fn name(&self) -> &'static str {
        NAME
    }

    fn supports(&self, spec: &VolumeSpec) -> bool {
        spec.volume().is_some_and(|volume| volume.local.is_some())
    }

    async fn describe(&self, _pod: &Pod, spec: &VolumeSpec) -> Result<VolumeTraits, OpError> {
        Ok(traits(&spec.name))
    }

    async fn stage(&self, usage: &Usage) -> Result<(), OpError> {
        if usage.mode == Mode::Block {
            return Ok(());
        }
        let (path, kind) = Self::kind(&usage.operation, &usage.spec).await?;
        if kind == LocalPathKind::Directory {
            return Ok(());
        }
        let (global, place) = (self.global(&usage.spec), self.global(&usage.spec));
        let is_there = usage.operation.blocking(move || {
            make(&place)?;
            is_mounted(&place)
        });
        if is_there.await? {
            return Ok(());
        }
        let local = usage.spec.volume().and_then(|volume| volume.local.as_ref());
        let filesystem = local.and_then(|local| local.fs_type.as_deref()).filter(|kind| !kind.is_empty());
        let options = usage.spec.mount_options();
        let kind = filesystem.unwrap_or(DEFAULT_KIND);
        let work = Work::new(&self.machine, &usage.operation);
        file_system::format_and_mount(&work, &path, &global, kind, &options, usage.spec.read_only()).await
    }

    async fn publish(&self, usage: &Usage) -> Result<PublishedVolume, OpError> {
        let (path, kind) = Self::kind(&usage.operation, &usage.spec).await?;
        match (usage.mode, kind) {
            (Mode::Block, LocalPathKind::Device) => Ok(PublishedVolume { path, relabel: false }),
            (Mode::Block, LocalPathKind::Directory) => {
                Err(OpError::transient("volumeMode Block requires a block device, found a directory"))
            }
            (Mode::Filesystem, kind) => {
                self.record_group_mismatch(usage).await;
                let source = if kind == LocalPathKind::Directory { path } else { self.global(&usage.spec) };
                self.bind(usage, source).await
            }
        }
    }

    async fn unpublish(&self, removal: &Removal) -> Result<(), OpError> {
        let Some((_, target)) = removal.pod.clone().filter(|_| removal.mode == Mode::Filesystem) else { return Ok(()) };
        removal.operation.blocking(move || take_down(&target)).await
    }

    async fn unstage(&self, removal: &Removal) -> Result<(), OpError> {
        if removal.mode == Mode::Block {
            return Ok(());
        }
        // The agent only mounts below its own directory.
        let global = self.global(&removal.spec);
        removal.operation.blocking(move || take_down(&global)).await
    }

    async fn expand(&self, expansion: &Expansion) -> Result<u64, OpError> {
        let (spec, operation) = (&expansion.usage.spec, &expansion.usage.operation);
        let (path, kind) = Self::kind(operation, spec).await?;
        if kind == LocalPathKind::Device && expansion.usage.mode == Mode::Filesystem {
            file_system::grow(&Work::new(&self.machine, operation), &path, &self.global(spec)).await?;
        }
        Ok(expansion.to)
    }

    async fn fullness(&self, usage: &Usage, path: &Path) -> Result<VolumeStats, OpError> {
        global_mount::fullness(usage, path).await
    }

    fn rebuild(&self, found: &FoundVolume) -> Result<ReconstructedVolume, String> {
        let mode = Some(found.mode.as_str().to_owned());
        // The path on the node is not needed: only the agent's own directories are torn down.
        let spec = api::PersistentVolumeSpec {
            volume_mode: mode,
            local: Some(api::LocalVolumeSource::default()),
            ..api::PersistentVolumeSpec::default()
        };
        let mut volume = api::PersistentVolume { spec: Some(spec), ..api::PersistentVolume::default() };
        volume.metadata.name = Some(found.name.clone());
        let spec = VolumeSpec::persistent(Arc::new(volume), super::claims::unknown_claim(), false);
        Ok(ReconstructedVolume { spec, traits: traits(&found.name), label: None })
    }

    fn staged(&self) -> Result<Vec<(Mode, ReconstructedVolume)>, String> {
        let mut found = Vec::new();
        for (place, mode) in [(&self.mounts, Mode::Filesystem), (&self.devices, Mode::Block)] {
            let listed = rebuild::children(place);
            for path in listed.map_err(|error| format!("listing {}: {error}", place.display()))? {
                let Some(name) = path.file_name().and_then(|name| name.to_str()).map(str::to_owned) else { continue };
                found.push((mode, self.rebuild(&FoundVolume { pod: "".into(), name, mode, path })?));
            }
        }
        Ok(found)
    }
}

fn traits(volume: &str) -> VolumeTraits {
    VolumeTraits {
        volume: volume.to_owned(),
        label: NAME.to_owned(),
        stages: true,
        mount_options: true,
        expands: true,
        ..VolumeTraits::default()
    }
}

#[cfg(test)]
mod tests;
