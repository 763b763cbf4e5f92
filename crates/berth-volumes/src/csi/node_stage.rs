//! Stages a CSI volume on the node: directory, record, and NodeStageVolume.
//!
//! Implements spec 07 §12.4 step 2.

use std::path::PathBuf;

use tracing::warn;

use super::{
    client::{CallError, deadline},
    context::{self, VolumeOwnership},
    disk::{clear, make, uncertain_if_mounted},
    node_unpublish::cleanup_error,
    paths::PLUGIN,
    plugin::Csi,
    record::CsiVolumeRecord,
    source::CsiVolume,
};
use crate::{
    attachable::{OpError, Usage},
    operation::Operation,
    spec::Mode,
};
use berth_proto::csi::NodeStageVolumeRequest;
use berth_sys::failpoint;

/// Names of the cleanup steps, reported to `failpoint::reached`.
const BACK: [&str; 3] = ["csi.unstage.unlinked", "csi.unstage.forgotten", "csi.unstage.removed"];

impl Csi {
    /// Returns the staging path of the volume.
    pub(super) fn staging(&self, volume: &CsiVolume) -> Result<PathBuf, OpError> {
        let path = self.layout.staging(&volume.driver, &volume.handle);
        path.map_err(|error| OpError::failed(format!("{PLUGIN}: {error}")))
    }

    /// Stages a volume that pods mount as a directory.
    pub(super) async fn stage_filesystem(&self, usage: &Usage) -> Result<(), OpError> {
        let until = deadline();
        let volume = Self::volume(&usage.spec, usage.pod.namespace(), usage.pod.uid())?;
        let what = "attacher.MountDevice failed to create newCsiDriverClient";
        let ready = self.ready(&volume.driver, until, what).await?;
        if !ready.can.stages {
            return Ok(());
        }
        let path = self.staging(&volume)?;
        let publish_context = self.publish_context(&volume, ready.object.as_deref()).await?;
        let secrets = self.secret("NodeStageSecretRef", volume.stage_secret.as_ref()).await?;
        let whose = VolumeOwnership::of(usage);
        let request = NodeStageVolumeRequest {
            volume_id: volume.handle.clone(),
            publish_context: publish_context.into_iter().collect(),
            staging_target_path: path.display().to_string(),
            volume_capability: Some(context::capability(&usage.spec, &volume, Mode::Filesystem, ready.can, whose)),
            secrets: secrets.into_iter().collect(),
            volume_context: volume.attributes.clone().into_iter().collect(),
        };
        let label = usage.label.clone().unwrap_or_default();
        let record = CsiVolumeRecord {
            driver: volume.driver.clone(),
            handle: volume.handle.clone(),
            label,
            ..CsiVolumeRecord::default()
        };
        let place = path.clone();
        let noted = usage.operation.blocking(move || {
            let written = make(&place).and_then(|()| place.parent().map_or(Ok(()), |parent| record.write(parent)));
            written.map_err(|error| {
                let path = place.display();
                OpError::failed(format!("{PLUGIN}: attacher.MountDevice failed to create dir {path:?}: {error}"))
            })
        });
        noted.await?;
        failpoint::reached("csi.stage.recorded");
        let done = ready.driver.client.about(&usage.spec).stage(until, request).await;
        failpoint::reached("csi.stage.called");
        match done {
            Ok(()) => Ok(()),
            Err(error) => Err(self.not_staged(usage, path, error).await),
        }
    }

    /// Cleans up after a final error; otherwise keeps everything, so that the stage can be undone.
    async fn not_staged(&self, usage: &Usage, path: PathBuf, error: CallError) -> OpError {
        if error.is_final() && !usage.was_rebuilt {
            match usage.operation.blocking(move || Ok(clear(&path, BACK))).await {
                Ok(Ok(())) => {}
                Ok(Err(left)) => {
                    warn!(volumeName = %usage.unique, err = %left, "Failed to clean up after failed NodeStageVolume");
                    return uncertain_if_mounted(&left, error.about(error.to_string()));
                }
                // The cleanup did not run.
                Err(_) => return OpError::uncertain(error.to_string()),
            }
        }
        error.about(error.to_string())
    }

    /// Removes the remains of a staged volume.
    pub(super) async fn forget_staging(operation: &Operation, path: PathBuf) -> Result<(), OpError> {
        operation
            .blocking(move || clear(&path, BACK).map_err(|left| cleanup_error("attacher.UnmountDevice", &left)))
            .await
    }
}
