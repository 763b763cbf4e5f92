//! Unpublishes CSI volumes from pods and unstages them. Implements spec 07 §12.4 steps 4 and 5, §17.

use std::path::Path;

use tonic::Code;

use super::{
    client::deadline,
    disk::{CleanupError, clear, mounted},
    node_publish::{CLEANUP_STEPS, mount_point},
    paths::PLUGIN,
    plugin::Csi,
    record::{CsiVolumeRecord, Lifecycle},
    source::CsiVolume,
};
use crate::attachable::{OpError, Removal};
use berth_proto::csi::{NodeUnpublishVolumeRequest, NodeUnstageVolumeRequest};
use berth_sys::failpoint;
use berth_types::PodUid;

/// Information about a volume directory.
enum DirectoryContent {
    /// The directory does not exist.
    Nothing,
    /// Known from its record or from the request.
    Volume { driver: String, handle: String, is_inline: bool },
    /// Unknown volume, with nothing mounted.
    Empty,
}

impl Csi {
    /// Unpublishes a volume from a pod.
    pub(super) async fn unpublish_filesystem(
        &self,
        removal: &Removal,
        pod: &PodUid,
        path: &Path,
    ) -> Result<(), OpError> {
        let until = deadline();
        let (place, from_spec) = (path.to_owned(), CsiVolume::of(&removal.spec, "", pod));
        let known = removal.operation.blocking(move || known(&place, from_spec)).await?;
        match known {
            DirectoryContent::Nothing => return Ok(()),
            DirectoryContent::Empty => {}
            DirectoryContent::Volume { driver, handle, is_inline } => {
                let driver = self.driver(&driver, "Unmounter.TearDownAt failed to get CSI client")?;
                let target_path = mount_point(path).display().to_string();
                let request = NodeUnpublishVolumeRequest { volume_id: handle, target_path };
                failpoint::reached("csi.unpublish.begun");
                if let Err(error) = driver.client.about(&removal.spec).unpublish(until, request).await {
                    // The driver may delete an ephemeral volume before its unpublish.
                    if !(is_inline && error.code == Code::NotFound) {
                        return Err(error.about(format!("{PLUGIN}: Unmounter.TearDownAt failed: {error}")));
                    }
                }
                failpoint::reached("csi.unpublish.called");
            }
        }
        let place = mount_point(path);
        removal
            .operation
            .blocking(move || clear(&place, CLEANUP_STEPS).map_err(|left| cleanup_error("Unmounter.TearDownAt", &left)))
            .await
    }

    /// Unstages the volume.
    pub(super) async fn unstage_filesystem(&self, removal: &Removal) -> Result<(), OpError> {
        let until = deadline();
        let volume = Self::volume(&removal.spec, "", &"".into())?;
        let path = self.staging(&volume)?;
        let place = path.clone();
        let is_recorded = removal.operation.blocking(move || Ok(is_recorded(&place))).await?;
        if !is_recorded {
            // Nothing was started, or only the directories are left.
            return Self::forget_staging(&removal.operation, path).await;
        }
        let driver = self.driver(&volume.driver, "attacher.UnmountDevice failed to create newCsiDriverClient")?;
        // Transient whatever the error: nothing was attempted yet.
        let can = driver.capabilities(until).await.map_err(|error| OpError::transient(error.to_string()))?;
        if can.stages {
            let staging_target_path = path.display().to_string();
            let request = NodeUnstageVolumeRequest { volume_id: volume.handle, staging_target_path };
            failpoint::reached("csi.unstage.begun");
            let done = driver.client.about(&removal.spec).unstage(until, request).await;
            done.map_err(|error| error.about(format!("{PLUGIN}: attacher.UnmountDevice failed: {error}")))?;
            failpoint::reached("csi.unstage.called");
        }
        Self::forget_staging(&removal.operation, path).await
    }
}

/// An unreadable record counts as present: the driver is called to undo what it describes.
fn is_recorded(staging: &Path) -> bool {
    let directory = staging.parent().unwrap_or(staging);
    !matches!(CsiVolumeRecord::read(directory), Ok(None))
}

fn known(directory: &Path, from_spec: Option<CsiVolume>) -> Result<DirectoryContent, OpError> {
    let cause = match CsiVolumeRecord::read(directory) {
        Ok(Some(record)) => {
            let is_inline = record.lifecycle == Some(Lifecycle::Ephemeral);
            return Ok(DirectoryContent::Volume { driver: record.driver, handle: record.handle, is_inline });
        }
        Ok(None) => "no such file".to_owned(),
        Err(error) => error.to_string(),
    };
    if !directory.exists() {
        return Ok(DirectoryContent::Nothing);
    }
    if let Some(volume) = from_spec.filter(|volume| !volume.driver.is_empty()) {
        return Ok(DirectoryContent::Volume {
            driver: volume.driver,
            handle: volume.handle,
            is_inline: volume.is_inline,
        });
    }
    let failed = |cause: String| {
        let path = directory.join(super::paths::RECORD);
        let path = path.display();
        OpError::uncertain(format!("{PLUGIN}: unmounter failed to load volume data file [{path}]: {cause}"))
    };
    match mounted(&mount_point(directory)) {
        Ok(None) => Ok(DirectoryContent::Empty),
        Ok(Some(_)) => Err(failed(cause)),
        Err(error) => Err(failed(error.to_string())),
    }
}

/// Returns the error for a mount point that could not be cleaned up.
pub(super) fn cleanup_error(what: &str, left: &CleanupError) -> OpError {
    let text = format!("{PLUGIN}: {what} failed to clean mount dir: {left}");
    match left {
        CleanupError::Mounted(_) => OpError::uncertain(text),
        CleanupError::Io { .. } => OpError::failed(text),
    }
}
