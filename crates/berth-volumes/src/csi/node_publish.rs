//! Publishes a CSI volume to a pod: directory, record, NodePublishVolume, and `fsGroup`.
//!
//! Implements spec 07 §12.4 step 3, §12.5.

use std::path::{Path, PathBuf};

use tracing::warn;

use super::{
    client::{CallError, deadline},
    context::{self, VolumeOwnership},
    disk::{clear, make, mounted, uncertain_if_mounted},
    fs_group::{self, Access},
    paths::PLUGIN,
    plugin::{Csi, ReadyDriver},
    record::CsiVolumeRecord,
    source::CsiVolume,
};
use crate::{
    attachable::{FsGroup, OpError, PublishedVolume, Usage},
    group_ownership,
    spec::Mode,
};
use berth_proto::csi::NodePublishVolumeRequest;
use berth_sys::failpoint;

/// Names of the cleanup steps, reported to `failpoint::reached`.
pub(super) const CLEANUP_STEPS: [&str; 3] =
    ["csi.unpublish.unlinked", "csi.unpublish.forgotten", "csi.unpublish.removed"];

/// Returns the mount point in the volume's directory.
pub(super) fn mount_point(volume: &Path) -> PathBuf {
    volume.join("mount")
}

impl Csi {
    /// Returns the record that a later agent needs for the volume.
    pub(super) fn record(&self, usage: &Usage, volume: &CsiVolume) -> CsiVolumeRecord {
        CsiVolumeRecord {
            driver: volume.driver.clone(),
            handle: volume.handle.clone(),
            spec: usage.spec.name.clone(),
            node: self.node.clone(),
            attachment: self.attachment(volume),
            lifecycle: Some(volume.lifecycle()),
            label: usage.label.clone().unwrap_or_default(),
        }
    }

    /// Publishes a volume as a directory.
    pub(super) async fn publish_filesystem(&self, usage: &Usage) -> Result<PublishedVolume, OpError> {
        let until = deadline();
        let volume = Self::volume(&usage.spec, usage.pod.namespace(), usage.pod.uid())?;
        let ready = self.ready(&volume.driver, until, "mounter.SetUpAt failed to get CSI client").await?;
        context::check_lifecycle_mode(ready.object.as_deref(), &volume.driver, volume.lifecycle()).map_err(
            |error| {
                OpError::transient(format!("{PLUGIN}: mounter.SetupAt failed to check volume lifecycle mode: {error}"))
            },
        )?;
        let gives = self.group_to_apply(usage, &volume, &ready)?;
        let request = self.publish_request(usage, &volume, &ready).await?;
        let (target, record) = (usage.target.clone(), self.record(usage, &volume));
        let noted = usage.operation.blocking(move || {
            make(&target).and_then(|()| record.write(&target)).map_err(|error| {
                let path = target.display();
                OpError::failed(format!("{PLUGIN}: mounter.SetupAt failed to create dir {path:?}: {error}"))
            })
        });
        noted.await?;
        failpoint::reached("csi.publish.recorded");
        let done = ready.driver.client.about(&usage.spec).publish(until, request).await;
        failpoint::reached("csi.publish.called");
        if let Err(error) = done {
            return Err(self.not_published(usage, error).await);
        }
        let relabel = apply_group(usage, &volume.label(), gives).await?;
        failpoint::reached("csi.publish.settled");
        Ok(PublishedVolume { path: mount_point(&usage.target), relabel })
    }

    /// Returns the group that this agent must apply to the volume, if any.
    fn group_to_apply(
        &self,
        usage: &Usage,
        volume: &CsiVolume,
        ready: &ReadyDriver,
    ) -> Result<Option<FsGroup>, OpError> {
        let access = Access {
            modes: usage.spec.access_modes(),
            read_only: usage.spec.read_only(),
            driver_applies: ready.can.sets_group,
        };
        let Some(group) = usage.group else { return Ok(None) };
        let is_ours = fs_group::must_apply(ready.object.as_deref(), volume, access).map_err(|error| {
            OpError::transient(format!("{PLUGIN}: mounter.SetupAt failed to check fsGroup policy: {error}"))
        })?;
        Ok(is_ours.then_some(group))
    }

    async fn publish_request(
        &self,
        usage: &Usage,
        volume: &CsiVolume,
        ready: &ReadyDriver,
    ) -> Result<NodePublishVolumeRequest, OpError> {
        let object = ready.object.as_deref();
        let publish_context = self.publish_context(volume, object).await?;
        let mut secrets = self.secret("NodePublishSecretRef", volume.publish_secret.as_ref()).await?;
        // The map is a copy, so that the additions affect this call only.
        let mut attributes = volume.attributes.clone();
        attributes.extend(context::pod_info(object, &usage.pod, volume.lifecycle()));
        if let Some(tokens) = self.tokens(object, &usage.pod).await? {
            let among = if context::keeps_tokens_secret(object) { &mut secrets } else { &mut attributes };
            among.insert(context::TOKENS.to_owned(), tokens);
        }
        let is_staged = ready.can.stages && !volume.is_inline;
        let staging = if is_staged { self.staging(volume)?.display().to_string() } else { String::new() };
        let whose = VolumeOwnership::of(usage);
        Ok(NodePublishVolumeRequest {
            volume_id: volume.handle.clone(),
            publish_context: publish_context.into_iter().collect(),
            staging_target_path: staging,
            target_path: mount_point(&usage.target).display().to_string(),
            volume_capability: Some(context::capability(&usage.spec, volume, Mode::Filesystem, ready.can, whose)),
            readonly: usage.spec.read_only(),
            secrets: secrets.into_iter().collect(),
            volume_context: attributes.into_iter().collect(),
        })
    }

    /// Cleans up after a final error, unless the pod had the volume before; otherwise keeps everything.
    async fn not_published(&self, usage: &Usage, error: CallError) -> OpError {
        if error.is_final() && !usage.is_republish && !usage.was_rebuilt {
            let path = mount_point(&usage.target);
            match usage.operation.blocking(move || Ok(clear(&path, CLEANUP_STEPS))).await {
                Ok(Ok(())) => {}
                Ok(Err(left)) => {
                    warn!(volumeName = %usage.unique, err = %left, "Failed to clean up after failed NodePublishVolume");
                    return uncertain_if_mounted(&left, error.about(error.to_string()));
                }
                // The cleanup did not run.
                Err(_) => return OpError::uncertain(error.to_string()),
            }
        }
        error.about(error.to_string())
    }
}

/// Applies the group to the published volume; returns whether the runtime may relabel it.
async fn apply_group(usage: &Usage, label: &str, group: Option<FsGroup>) -> Result<bool, OpError> {
    // The volume is published by now: any failure must be undone by unpublishing.
    let failed = |what: &str, error: &dyn std::fmt::Display| {
        OpError::uncertain(format!("{PLUGIN}: mounter.SetupAt failed to {what}: {error}"))
    };
    let path = mount_point(&usage.target);
    let place = path.clone();
    let mount =
        usage.operation.blocking(move || mounted(&place).map_err(|error| OpError::uncertain(error.to_string())));
    let mount = mount.await.map_err(|error| failed("query for SELinux support", &error))?;
    if let Some(of) = group {
        group_ownership::apply_fs_group(usage, label, path, of)
            .await
            .map_err(|error| failed("apply fsGroup", &error))?;
    }
    // The label of the mount applies to every file.
    let is_labelled = usage.label.is_some();
    Ok(!is_labelled && mount.is_some_and(|mount| mount.options.split(',').any(|option| option == "seclabel")))
}
