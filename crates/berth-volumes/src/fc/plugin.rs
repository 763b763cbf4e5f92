//! Fibre Channel implementation of the volume plugin trait: find, mount, and detach the disk.

use std::{
    fs,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use async_trait::async_trait;
use tokio::time::{Instant, sleep};
use tracing::warn;

use super::disk::{self, Disk, PLUGIN};
use crate::{
    attachable::{
        AttachableVolumePlugin, Class, ErrorCause, FoundVolume, OpError, PublishedVolume, ReconstructedVolume, Removal,
        Usage, VolumeTraits,
    },
    claims, global_mount, local,
    machine::{self, HostOperations, KillPolicy, Work},
    rebuild,
    scsi::{Links, ScsiDisks},
    spec::{Mode, VolumeSpec},
};
use berth_ports::VolumeStats;
use berth_sys::mount_table::Mount;
use berth_types::{Pod, api, cut_at_char};

/// Timeout of one operation (spec 07 §3.1).
const LIMIT: Duration = Duration::from_secs(600);
/// How long to wait for a disk after a rescan: udev creates its link asynchronously.
const APPEARING: Duration = Duration::from_secs(5);
/// Polling interval.
const POLL_INTERVAL: Duration = Duration::from_millis(250);
/// Timeout of `multipath` and `blockdev` calls.
const FLUSH_TIMEOUT: Duration = Duration::from_secs(60);
/// Maximum bytes of program output in an error message.
const SHOWN: usize = 512;

/// Fibre Channel volume plugin.
pub struct FcPlugin {
    root: PathBuf,
    machine: Arc<dyn HostOperations>,
    blocks: ScsiDisks,
}

/// Disk found on the host.
#[derive(Clone, PartialEq, Eq, Debug)]
struct FoundDisk {
    disk: String,
    /// Multipath device that has the disk as a path.
    multipath: Option<String>,
}

fn find_disk(blocks: &ScsiDisks, disk: &Disk) -> Option<FoundDisk> {
    let links = match disk {
        Disk::Lun { .. } => Links::ByPath,
        Disk::Ids(_) => Links::ById,
    };
    // One of several paths may be down.
    let ways = blocks.links(links, |link| disk.is_named(link));
    let all: Vec<FoundDisk> = ways.iter().filter_map(|way| Some(seen(blocks, blocks.disk(way)?))).collect();
    all.iter().find(|seen| seen.multipath.is_some()).or(all.first()).cloned()
}

fn seen(blocks: &ScsiDisks, disk: String) -> FoundDisk {
    let multipath = blocks.multipath(&disk).or_else(|| disk.starts_with("dm-").then(|| disk.clone()));
    FoundDisk { disk, multipath }
}

impl FcPlugin {
    /// Creates the plugin of a node with that root directory.
    pub fn new(root: &Path, machine: Arc<dyn HostOperations>) -> Self {
        Self::with_disks(root, machine, ScsiDisks::default())
    }

    fn with_disks(root: &Path, machine: Arc<dyn HostOperations>, blocks: ScsiDisks) -> Self {
        // The mount table contains only paths without symlinks.
        let root = fs::canonicalize(root).unwrap_or_else(|_| root.to_owned());
        Self { root, machine, blocks }
    }

    fn disk(spec: &VolumeSpec) -> Result<(Disk, Option<String>), OpError> {
        disk::of(spec).map_err(OpError::failed)
    }

    async fn run_on_disks<T: Send + 'static>(
        &self,
        work: &Work,
        action: impl FnOnce(&ScsiDisks) -> T + Send + 'static,
    ) -> Result<T, OpError> {
        let blocks = self.blocks.clone();
        work.operation().blocking(move || Ok(action(&blocks))).await
    }

    async fn seen(&self, work: &Work, disk: &Disk) -> Result<Option<FoundDisk>, OpError> {
        let disk = disk.clone();
        self.run_on_disks(work, move |blocks| find_disk(blocks, &disk)).await
    }

    /// Returns the device of a disk, preferably a multipath device. If there is none, rescans all SCSI hosts.
    async fn find(&self, work: &Work, disk: &Disk) -> Result<PathBuf, OpError> {
        let is_joined = |seen: &Option<FoundDisk>| seen.as_ref().is_some_and(|seen| seen.multipath.is_some());
        let mut seen = self.seen(work, disk).await?;
        if !is_joined(&seen) {
            self.run_on_disks(work, ScsiDisks::rescan).await?;
            let until = Instant::now() + APPEARING;
            loop {
                seen = self.seen(work, disk).await?.or(seen);
                if seen.is_some() || Instant::now() >= until || work.operation().is_canceled() {
                    break;
                }
                sleep(POLL_INTERVAL).await;
            }
        }
        let seen = seen.ok_or_else(|| OpError::failed("no fc disk found"))?;
        Ok(self.blocks.device(seen.multipath.as_deref().unwrap_or(&seen.disk)))
    }

    /// Deletes the disk and all of its paths from the kernel.
    async fn detach(&self, work: &Work, disk: &Disk) -> Result<(), OpError> {
        let Some(seen) = self.seen(work, disk).await? else { return Ok(()) };
        let mut disks = vec![seen.disk];
        if let Some(joined) = seen.multipath {
            let ways = joined.clone();
            disks = self.run_on_disks(work, move |blocks| blocks.multipath_members(&ways)).await?;
            let device = self.blocks.device(&joined).display().to_string();
            let flushed =
                work.run("multipath", &["-f".to_owned(), device.clone()], KillPolicy::Within(FLUSH_TIMEOUT)).await;
            let failed = |how: &str, output: &str| {
                OpError::uncertain(format!("failed to flush multipath device {device}: {how}\n{output}"))
            };
            match flushed {
                Ok(ended) if ended.is_success() => {}
                Ok(ended) => return Err(failed(&ended.how, cut_at_char(&ended.output, SHOWN))),
                Err(error) => return Err(failed(&error.to_string(), "")),
            }
        }
        for disk in disks {
            let device = self.blocks.device(&disk).display().to_string();
            match work
                .run("blockdev", &["--flushbufs".to_owned(), device.clone()], KillPolicy::Within(FLUSH_TIMEOUT))
                .await
            {
                Ok(ended) if ended.is_success() => {}
                // No data of a pod is lost, because the file system is already unmounted.
                Ok(ended) => warn!(%device, output = %cut_at_char(&ended.output, SHOWN), "Failed to flush device"),
                Err(error) => warn!(%device, err = %error, "Failed to flush device"),
            }
            let forgotten = self.run_on_disks(work, move |blocks| blocks.delete(&disk)).await?;
            if let Err(error) = forgotten {
                return Err(OpError::uncertain(format!("fc: detachFCDisk failed. device: {device} err: {error}")));
            }
        }
        Ok(())
    }

    fn rebuilt(name: &str, directory: &Path, mode: Mode, table: &[Mount]) -> Option<ReconstructedVolume> {
        let disk = Disk::by_path(directory)?;
        let spec = api::PersistentVolumeSpec {
            volume_mode: Some(mode.as_str().to_owned()),
            fc: Some(disk.source()),
            ..api::PersistentVolumeSpec::default()
        };
        let mut volume = api::PersistentVolume { spec: Some(spec), ..api::PersistentVolume::default() };
        volume.metadata.name = Some(name.to_owned());
        let spec = VolumeSpec::persistent(Arc::new(volume), claims::unknown_claim(), false);
        Some(ReconstructedVolume { spec, traits: traits(disk.name()), label: global_mount::label(table, directory) })
    }
}

#[async_trait]
impl AttachableVolumePlugin for FcPlugin {
    fn name(&self) -> &'static str {
        PLUGIN
    }

    fn supports(&self, spec: &VolumeSpec) -> bool {
        spec.as_inline().is_some_and(|volume| volume.fc.is_some())
            || spec.volume().is_some_and(|volume| volume.fc.is_some())
    }

    async fn describe(&self, _pod: &Pod, spec: &VolumeSpec) -> Result<VolumeTraits, OpError> {
        Ok(traits(Self::disk(spec)?.0.name()))
    }

    async fn stage(&self, usage: &Usage) -> Result<(), OpError> {
        let (disk, kind) = Self::disk(&usage.spec)?;
        let work = Work::new(&self.machine, &usage.operation);
        let device = self.find(&work, &disk).await.map_err(|error| error.with_cause(ErrorCause::NotAttached))?;
        let (directory, place) = (disk.directory(&self.root, usage.mode), disk.directory(&self.root, usage.mode));
        // The directory shows a later agent what to undo.
        work.operation().blocking(move || local::make(&place)).await?;
        if usage.mode == Mode::Block {
            return Ok(());
        }
        let mounted = global_mount::stage(&work, usage, &device, &directory, kind.as_deref()).await;
        mounted.map_err(|error| OpError { class: Class::Uncertain, ..error })
    }

    async fn publish(&self, usage: &Usage) -> Result<PublishedVolume, OpError> {
        let (disk, _) = Self::disk(&usage.spec)?;
        let work = Work::new(&self.machine, &usage.operation);
        if usage.mode == Mode::Block {
            return Ok(PublishedVolume { path: self.find(&work, &disk).await?, relabel: false });
        }
        global_mount::publish(&work, PLUGIN, usage, &disk.directory(&self.root, usage.mode)).await
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
        let (disk, _) = Self::disk(&removal.spec)?;
        let directory = disk.directory(&self.root, removal.mode);
        let work = Work::new(&self.machine, &removal.operation);
        if removal.mode == Mode::Filesystem {
            global_mount::unstage(&work, &directory).await?;
        }
        self.detach(&work, &disk).await?;
        global_mount::remove_dir(&work, &directory).await
    }

    fn rebuild(&self, found: &FoundVolume) -> Result<ReconstructedVolume, String> {
        let base = disk::base(&self.root, found.mode);
        let table = self.machine.mounts().map_err(|error| error.to_string())?;
        let directory = match found.mode {
            Mode::Filesystem => {
                let shared = machine::elsewhere(&table, &found.path).into_iter().find(|other| other.starts_with(&base));
                shared.cloned().ok_or("couldn't fetch globalPDPath. failed to obtain volume spec")?
            }
            Mode::Block => global_mount::mapped(found, rebuild::children(&base).map_err(|error| error.to_string())?)?,
        };
        let understood = Self::rebuilt(&found.name, &directory, found.mode, &table);
        understood.ok_or_else(|| format!("{} is not a directory of a Fibre Channel disk", directory.display()))
    }

    fn staged(&self) -> Result<Vec<(Mode, ReconstructedVolume)>, String> {
        let table = self.machine.mounts().map_err(|error| error.to_string())?;
        let mut found = Vec::new();
        for mode in [Mode::Filesystem, Mode::Block] {
            let base = disk::base(&self.root, mode);
            let listed = rebuild::children(&base).map_err(|error| format!("listing {}: {error}", base.display()))?;
            found.extend(listed.iter().filter_map(|path| Some((mode, Self::rebuilt("", path, mode, &table)?))));
        }
        Ok(found)
    }

    fn map_dir(&self, root: &Path, spec: &VolumeSpec) -> PathBuf {
        match Self::disk(spec) {
            Ok((disk, _)) => disk.directory(root, Mode::Block),
            // Nothing was ever mapped for such a volume.
            Err(_) => disk::base(root, Mode::Block).join("none"),
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
