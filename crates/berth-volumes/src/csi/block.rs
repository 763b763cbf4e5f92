//! CSI volumes as block devices: stage, publish, unpublish, and unstage. Implements spec 07 §12.7.

use std::{
    fs, io,
    path::{Path, PathBuf},
};

use tracing::warn;

use super::{
    client::{CallError, deadline},
    context::{self, VolumeOwnership},
    disk::{make, remove},
    paths::{BlockLayout, PLUGIN},
    plugin::{Csi, ReadyDriver},
    record::CsiVolumeRecord,
    source::CsiVolume,
};
use crate::{
    attachable::{OpError, PublishedVolume, Removal, Usage},
    spec::Mode,
};
use berth_proto::csi::{
    NodePublishVolumeRequest, NodeStageVolumeRequest, NodeUnpublishVolumeRequest, NodeUnstageVolumeRequest,
};
use berth_sys::failpoint;
use berth_types::PodUid;

impl Csi {
    pub(super) fn block(&self, spec: &str) -> Result<BlockLayout, OpError> {
        self.layout.block(spec).map_err(|error| OpError::failed(format!("{PLUGIN}: {error}")))
    }

    pub(super) fn block_target(layout: &BlockLayout, pod: &PodUid) -> Result<PathBuf, OpError> {
        layout.published(pod).map_err(|error| OpError::failed(format!("{PLUGIN}: {error}")))
    }

    /// Stages a block volume.
    pub(super) async fn stage_block(&self, usage: &Usage) -> Result<(), OpError> {
        let until = deadline();
        let volume = Self::volume(&usage.spec, usage.pod.namespace(), usage.pod.uid())?;
        let what = "blockMapper.SetUpDevice failed to get CSI client";
        let ready = self.ready(&volume.driver, until, what).await?;
        if !ready.can.stages {
            return Ok(());
        }
        let layout = self.block(&usage.spec.name)?;
        let publish_context = self.publish_context(&volume, ready.object.as_deref()).await?;
        let secrets = self.secret("NodeStageSecretRef", volume.stage_secret.as_ref()).await?;
        let request = NodeStageVolumeRequest {
            volume_id: volume.handle.clone(),
            publish_context: publish_context.into_iter().collect(),
            staging_target_path: layout.staging.display().to_string(),
            volume_capability: Some(context::capability(
                &usage.spec,
                &volume,
                Mode::Block,
                ready.can,
                VolumeOwnership::default(),
            )),
            secrets: secrets.into_iter().collect(),
            volume_context: volume.attributes.clone().into_iter().collect(),
        };
        self.write_block_record(usage, &volume, &layout, layout.staging.clone()).await?;
        failpoint::reached("csi.stage.recorded");
        let done = ready.driver.client.about(&usage.spec).stage(until, request).await;
        failpoint::reached("csi.stage.called");
        let Err(error) = done else { return Ok(()) };
        let text = format!("{PLUGIN}: blockMapper.stageVolumeForBlock failed: {error}");
        if error.is_final() && !usage.was_rebuilt {
            forget(layout, usage).await;
        }
        Err(error.about(text))
    }

    /// Writes the record of the volume, and creates the directory that the driver needs.
    async fn write_block_record(
        &self,
        usage: &Usage,
        volume: &CsiVolume,
        layout: &BlockLayout,
        directory: PathBuf,
    ) -> Result<(), OpError> {
        let record = CsiVolumeRecord { lifecycle: None, ..self.record(usage, volume) };
        let data = layout.data.clone();
        let noted = usage.operation.blocking(move || {
            make(&data).and_then(|()| record.write(&data)).and_then(|()| make(&directory)).map_err(|error| {
                OpError::failed(format!("{PLUGIN}: blockMapper failed to create dir {:?}: {error}", data.display()))
            })
        });
        noted.await
    }

    /// Publishes the device to a pod.
    pub(super) async fn publish_block(&self, usage: &Usage) -> Result<PublishedVolume, OpError> {
        let until = deadline();
        let volume = Self::volume(&usage.spec, usage.pod.namespace(), usage.pod.uid())?;
        let ready = self.ready(&volume.driver, until, "blockMapper.MapPodDevice failed to get CSI client").await?;
        let layout = self.block(&usage.spec.name)?;
        let target = Self::block_target(&layout, usage.pod.uid())?;
        let request = self.block_request(usage, &volume, &ready, (&layout, &target)).await?;
        let parent = target.parent().unwrap_or(&target).to_owned();
        self.write_block_record(usage, &volume, &layout, parent).await?;
        failpoint::reached("csi.publish.recorded");
        let done = ready.driver.client.about(&usage.spec).publish(until, request).await;
        failpoint::reached("csi.publish.called");
        done.map_err(|error: CallError| {
            error.about(format!("{PLUGIN}: blockMapper.publishVolumeForBlock failed: {error}"))
        })?;
        Ok(PublishedVolume { path: target, relabel: false })
    }

    async fn block_request(
        &self,
        usage: &Usage,
        volume: &CsiVolume,
        ready: &ReadyDriver,
        (layout, target): (&BlockLayout, &Path),
    ) -> Result<NodePublishVolumeRequest, OpError> {
        let object = ready.object.as_deref();
        let publish_context = self.publish_context(volume, object).await?;
        let secrets = self.secret("NodePublishSecretRef", volume.publish_secret.as_ref()).await?;
        let mut attributes = volume.attributes.clone();
        attributes.extend(context::pod_info(object, &usage.pod, volume.lifecycle()));
        Ok(NodePublishVolumeRequest {
            volume_id: volume.handle.clone(),
            publish_context: publish_context.into_iter().collect(),
            // Sent whether or not the driver stages.
            staging_target_path: layout.staging.display().to_string(),
            target_path: target.display().to_string(),
            volume_capability: Some(context::capability(
                &usage.spec,
                volume,
                Mode::Block,
                ready.can,
                VolumeOwnership::default(),
            )),
            readonly: usage.spec.read_only(),
            secrets: secrets.into_iter().collect(),
            volume_context: attributes.into_iter().collect(),
        })
    }

    /// Unpublishes the device from a pod.
    pub(super) async fn unpublish_block(&self, removal: &Removal, pod: &PodUid) -> Result<(), OpError> {
        let until = deadline();
        let volume = Self::volume(&removal.spec, "", pod)?;
        let layout = self.block(&removal.spec.name)?;
        let target = Self::block_target(&layout, pod)?;
        let driver = self.driver(&volume.driver, "blockMapper.UnmapPodDevice failed to get CSI client")?;
        let target_path = target.display().to_string();
        failpoint::reached("csi.unpublish.begun");
        let request = NodeUnpublishVolumeRequest { volume_id: volume.handle, target_path };
        let done = driver.client.about(&removal.spec).unpublish(until, request).await;
        done.map_err(|error| error.about(format!("{PLUGIN}: blockMapper.unpublishVolumeForBlock failed: {error}")))?;
        failpoint::reached("csi.unpublish.called");
        let removed = removal.operation.blocking(move || {
            let parent = || target.parent().map_or(Ok(()), |parent| unless_in_use(remove(parent)));
            remove_file_or_dir(&target)
                .and_then(|()| parent())
                .map_err(|error| OpError::failed(format!("{PLUGIN}: failed to remove {:?}: {error}", target.display())))
        });
        removed.await
    }

    /// Unstages the volume.
    pub(super) async fn unstage_block(&self, removal: &Removal) -> Result<(), OpError> {
        let until = deadline();
        let volume = Self::volume(&removal.spec, "", &"".into())?;
        let layout = self.block(&removal.spec.name)?;
        let staging = layout.staging.clone();
        let is_there = removal.operation.blocking(move || match staging.symlink_metadata() {
            Ok(_) => Ok(true),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
            Err(error) => Err(OpError::transient(format!("{PLUGIN}: stat {:?}: {error}", staging.display()))),
        });
        if is_there.await? {
            let driver = self.driver(&volume.driver, "blockMapper.TearDownDevice failed to get CSI client")?;
            // Transient whatever the error: nothing was attempted yet.
            let can = driver.capabilities(until).await.map_err(|error| OpError::transient(error.to_string()))?;
            if can.stages {
                let staging_target_path = layout.staging.display().to_string();
                let request = NodeUnstageVolumeRequest { volume_id: volume.handle, staging_target_path };
                failpoint::reached("csi.unstage.begun");
                let done = driver.client.about(&removal.spec).unstage(until, request).await;
                done.map_err(|error| {
                    error.about(format!("{PLUGIN}: blockMapper.unstageVolumeForBlock failed: {error}"))
                })?;
                failpoint::reached("csi.unstage.called");
            }
        }
        let cleared = removal.operation.blocking(move || {
            clear_block(&layout)
                .map_err(|error| OpError::failed(format!("{PLUGIN}: failed to clean up device files: {error}")))
        });
        cleared.await
    }
}

/// Cleans up after a final error of staging.
async fn forget(layout: BlockLayout, usage: &Usage) {
    let cleared = usage.operation.blocking(move || Ok(clear_block(&layout)));
    if let Ok(Err(error)) = cleared.await {
        warn!(volumeName = %usage.unique, err = %error, "Failed to clean up after failed NodeStageVolume");
    }
}

/// Removes the directories of a block volume, if empty; removes the record only after the staging path.
pub(super) fn clear_block(layout: &BlockLayout) -> io::Result<()> {
    remove_file_or_dir(&layout.staging)?;
    failpoint::reached("csi.unstage.unlinked");
    unless_in_use(remove(&layout.mapped))?;
    CsiVolumeRecord::remove(&layout.data)?;
    failpoint::reached("csi.unstage.forgotten");
    remove(&layout.data)?;
    unless_in_use(layout.data.parent().map_or(Ok(()), remove))
}

/// Removes what a driver may have left: an empty directory, or the file that a device was bound to.
fn remove_file_or_dir(path: &Path) -> io::Result<()> {
    match fs::symlink_metadata(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        Err(error) => Err(error),
        Ok(meta) if meta.is_dir() => remove(path),
        // The kernel rejects a bound device or mount point (`EBUSY`).
        Ok(_) => fs::remove_file(path),
    }
}

/// Ignores a directory that is not empty: other pods may still have entries in it.
fn unless_in_use(done: io::Result<()>) -> io::Result<()> {
    match done {
        Err(error) if error.kind() == io::ErrorKind::DirectoryNotEmpty => Ok(()),
        done => done,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::csi::paths::CsiLayout;

    #[test]
    fn only_what_is_empty_goes() {
        let root = tempfile::tempdir().expect("a directory");
        let layout = CsiLayout::new(root.path()).block("pv").expect("a good name");
        clear_block(&layout).expect("there is nothing");
        let record = CsiVolumeRecord { driver: "d".to_owned(), handle: "h".to_owned(), ..CsiVolumeRecord::default() };
        for directory in [&layout.data, &layout.staging, &layout.mapped] {
            make(directory).expect("made");
        }
        record.write(&layout.data).expect("written");
        fs::write(layout.staging.join("data"), "precious").expect("written");
        assert!(clear_block(&layout).is_err());
        assert!(CsiVolumeRecord::read(&layout.data).is_ok_and(|read| read.is_some()), "it can still be undone");
        fs::remove_file(layout.staging.join("data")).expect("removed");
        fs::write(layout.mapped.join("another-pod"), "").expect("written");
        clear_block(&layout).expect("what another pod has stays");
        assert!(layout.mapped.join("another-pod").exists() && !layout.data.exists());
        fs::remove_file(layout.mapped.join("another-pod")).expect("removed");
        clear_block(&layout).expect("cleared");
        assert!(layout.data.parent().is_some_and(|parent| !parent.exists()));
    }
}
