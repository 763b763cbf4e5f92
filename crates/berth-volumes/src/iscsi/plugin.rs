//! iSCSI implementation of the volume plugin trait: attach, mount, unmount, and reconstruction.

use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use async_trait::async_trait;

use super::{
    names::{self, IscsiTarget, PLUGIN},
    record::{self, LoginRecord},
    session::Sessions,
};
use crate::{
    attachable::{
        AttachableVolumePlugin, Class, ErrorCause, FoundVolume, OpError, PublishedVolume, ReconstructedVolume, Removal,
        Usage, VolumeTraits,
    },
    claims, global_mount,
    machine::{self, HostOperations, Work},
    scsi::ScsiDisks,
    spec::{Mode, VolumeSpec},
};
use berth_ports::{StorageObjects, VolumeStats};
use berth_sys::mount_table::Mount;
use berth_types::{Pod, api};

/// Timeout of one operation (spec 07 §3.1).
const LIMIT: Duration = Duration::from_secs(600);

/// iSCSI volume plugin.
pub struct IscsiPlugin {
    root: PathBuf,
    machine: Arc<dyn HostOperations>,
    sessions: Sessions,
    storage: Arc<dyn StorageObjects>,
}

impl IscsiPlugin {
    /// Creates the plugin of a node with that root directory.
    pub fn new(root: &Path, machine: Arc<dyn HostOperations>, storage: Arc<dyn StorageObjects>) -> Self {
        Self::with_disks(root, machine, ScsiDisks::default(), storage)
    }

    pub(super) fn with_disks(
        root: &Path,
        machine: Arc<dyn HostOperations>,
        blocks: ScsiDisks,
        storage: Arc<dyn StorageObjects>,
    ) -> Self {
        // The mount table contains only paths without symlinks.
        let root = fs::canonicalize(root).unwrap_or_else(|_| root.to_owned());
        Self { root, sessions: Sessions::new(blocks), machine, storage }
    }

    fn target(spec: &VolumeSpec, namespace: &str) -> Result<IscsiTarget, OpError> {
        IscsiTarget::of(spec, namespace).map_err(OpError::failed)
    }

    async fn secret(&self, target: &IscsiTarget) -> Result<BTreeMap<String, String>, OpError> {
        let Some((namespace, name)) = target.secret.as_ref().filter(|_| target.chap.is_wanted()) else {
            return Ok(BTreeMap::new());
        };
        let found =
            self.storage.secret(namespace, name).await.map_err(|error| {
                OpError::transient(format!("Couldn't get secret {namespace}/{name} error: {error}"))
            })?;
        let text = |(key, value): (String, Vec<u8>)| Some((key, String::from_utf8(value).ok()?));
        Ok(found.into_iter().filter_map(text).collect())
    }

    fn bases(&self) -> [PathBuf; 2] {
        [Mode::Filesystem, Mode::Block].map(|mode| names::base(&self.root, mode))
    }

    async fn attach(&self, work: &Work, target: &IscsiTarget, directory: &Path) -> Result<PathBuf, OpError> {
        let secret = self.secret(target).await?;
        let (record, place) = (LoginRecord::of(target), directory.to_owned());
        let is_mounted = work.is_mounted(directory).await?;
        if !is_mounted {
            let writing = work.operation().blocking(move || {
                let written = record.write(&place);
                written.map_err(|error| OpError::failed(format!("iscsi: create {} err {error}", place.display())))
            });
            writing.await?;
        }
        let attached = self.sessions.attach(work, target, &secret).await;
        if attached.is_err() && !is_mounted {
            // Nothing is left to undo.
            self.forget(work, directory).await?;
        }
        attached
    }

    async fn forget(&self, work: &Work, directory: &Path) -> Result<(), OpError> {
        let directory = directory.to_owned();
        let removing = work.operation().blocking(move || {
            let removed = LoginRecord::remove(&directory);
            removed.map_err(|error| {
                OpError::uncertain(format!(
                    "iscsi: failed to delete the directory: {}\nError: {error}",
                    directory.display()
                ))
            })
        });
        removing.await
    }

    /// Returns the shared mount directory of a volume left by an earlier agent: another mount point of the same device.
    fn shared(&self, table: &[Mount], path: &Path) -> Result<PathBuf, String> {
        let base = names::base(&self.root, Mode::Filesystem);
        let found = machine::elsewhere(table, path).into_iter().find(|other| other.starts_with(&base));
        found.cloned().ok_or_else(|| "couldn't fetch globalPDPath. failed to obtain volume spec".to_owned())
    }

    fn rebuilt(name: &str, directory: &Path, mode: Mode, table: &[Mount]) -> Option<ReconstructedVolume> {
        let record = LoginRecord::read(directory)?;
        let lun = record.lun.parse().ok()?;
        let source = api::ISCSIPersistentVolumeSource {
            target_portal: record.target_portal.clone(),
            iqn: record.iqn.clone(),
            lun,
            // Taken from the path: this interface is in use, whatever initiator name the volume has.
            iscsi_interface: Some(names::parse(directory)?.interface),
            ..api::ISCSIPersistentVolumeSource::default()
        };
        let spec = api::PersistentVolumeSpec {
            volume_mode: Some(mode.as_str().to_owned()),
            iscsi: Some(source),
            ..api::PersistentVolumeSpec::default()
        };
        let mut volume = api::PersistentVolume { spec: Some(spec), ..api::PersistentVolume::default() };
        volume.metadata.name = Some(name.to_owned());
        let spec = VolumeSpec::persistent(Arc::new(volume), claims::unknown_claim(), false);
        Some(ReconstructedVolume {
            spec,
            traits: traits(names::name(&record.target_portal, &record.iqn, lun)),
            label: global_mount::label(table, directory),
        })
    }
}

#[async_trait]
impl AttachableVolumePlugin for IscsiPlugin {
    fn name(&self) -> &'static str {
        PLUGIN
    }

    fn supports(&self, spec: &VolumeSpec) -> bool {
        spec.as_inline().is_some_and(|volume| volume.iscsi.is_some())
            || spec.volume().is_some_and(|volume| volume.iscsi.is_some())
    }

    async fn describe(&self, pod: &Pod, spec: &VolumeSpec) -> Result<VolumeTraits, OpError> {
        Ok(traits(Self::target(spec, pod.namespace())?.name()))
    }

    async fn stage(&self, usage: &Usage) -> Result<(), OpError> {
        let target = Self::target(&usage.spec, usage.pod.namespace())?;
        let directory = target.directory(&self.root, usage.mode);
        let work = Work::new(&self.machine, &usage.operation);
        let device = self.attach(&work, &target, &directory).await;
        let device = device.map_err(|error| error.with_cause(ErrorCause::NotAttached))?;
        if usage.mode == Mode::Block {
            return Ok(());
        }
        let mounted = global_mount::stage(&work, usage, &device, &directory, target.kind.as_deref()).await;
        // The session stays until the volume is unstaged.
        mounted.map_err(|error| OpError { class: Class::Uncertain, ..error })
    }

    async fn publish(&self, usage: &Usage) -> Result<PublishedVolume, OpError> {
        let target = Self::target(&usage.spec, usage.pod.namespace())?;
        let work = Work::new(&self.machine, &usage.operation);
        if usage.mode == Mode::Block {
            return Ok(PublishedVolume { path: self.sessions.device(&work, &target).await?, relabel: false });
        }
        global_mount::publish(&work, PLUGIN, usage, &target.directory(&self.root, usage.mode)).await
    }

    async fn fullness(&self, usage: &Usage, path: &Path) -> Result<VolumeStats, OpError> {
        global_mount::fullness(usage, path).await
    }

    async fn unpublish(&self, removal: &Removal) -> Result<(), OpError> {
        match &removal.pod {
            Some((_, target)) if removal.mode == Mode::Filesystem => {
                global_mount::unpublish(&Work::new(&self.machine, &removal.operation), target).await
            }
            _ => Ok(()),
        }
    }

    async fn unstage(&self, removal: &Removal) -> Result<(), OpError> {
        // A logout needs no secret, and therefore no namespace.
        let directory = Self::target(&removal.spec, "-")?.directory(&self.root, removal.mode);
        let (at, work) = (directory.clone(), Work::new(&self.machine, &removal.operation));
        let read = move || Ok(at.symlink_metadata().is_ok().then(|| LoginRecord::read(&at)).flatten());
        let Some(record) = work.operation().blocking(read).await? else { return Ok(()) };
        if removal.mode == Mode::Filesystem {
            global_mount::unstage(&work, &directory).await?;
        }
        let detach_error = |error: OpError| {
            let directory = directory.display();
            OpError { text: format!("iscsi: failed to detach disk: {directory}\nError: {error}"), ..error }
        };
        self.sessions.detach(&work, &record, &directory, self.bases()).await.map_err(detach_error)?;
        self.forget(&work, &directory).await
    }

    fn rebuild(&self, found: &FoundVolume) -> Result<ReconstructedVolume, String> {
        let table = self.machine.mounts().map_err(|error| error.to_string())?;
        let directory = match found.mode {
            Mode::Filesystem => self.shared(&table, &found.path)?,
            Mode::Block => {
                let all = record::directories(&names::base(&self.root, Mode::Block));
                global_mount::mapped(found, all.map_err(|error| error.to_string())?)?
            }
        };
        let understood = Self::rebuilt(&found.name, &directory, found.mode, &table);
        understood.ok_or_else(|| format!("{} is not a directory of an iSCSI target", directory.display()))
    }

    fn staged(&self) -> Result<Vec<(Mode, ReconstructedVolume)>, String> {
        let table = self.machine.mounts().map_err(|error| error.to_string())?;
        let mut found = Vec::new();
        for mode in [Mode::Filesystem, Mode::Block] {
            let base = names::base(&self.root, mode);
            let listed = record::directories(&base);
            for directory in listed.map_err(|error| format!("listing {}: {error}", base.display()))? {
                let name = LoginRecord::read(&directory).map(|record| record.vol_name).unwrap_or_default();
                found.extend(Self::rebuilt(&name, &directory, mode, &table).map(|rebuilt| (mode, rebuilt)));
            }
        }
        Ok(found)
    }

    fn map_dir(&self, root: &Path, spec: &VolumeSpec) -> PathBuf {
        match Self::target(spec, "-") {
            Ok(target) => target.directory(root, Mode::Block),
            // Nothing was ever mapped for such a volume.
            Err(_) => names::base(root, Mode::Block).join("none"),
        }
    }

    fn limit(&self) -> Duration {
        LIMIT
    }
}

fn traits(volume: String) -> VolumeTraits {
    VolumeTraits {
        volume,
        label: PLUGIN.to_owned(),
        attachable: true,
        stages: true,
        mount_options: true,
        supports_mount_label: true,
        ..VolumeTraits::default()
    }
}

#[cfg(test)]
mod tests;
