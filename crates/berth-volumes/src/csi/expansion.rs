//! Node-side expansion of CSI volumes through NodeExpandVolume. Implements spec 07 §4.5, §12.8.

use super::{
    client::deadline,
    context::{self, VolumeOwnership},
    paths::PLUGIN,
    plugin::Csi,
};
use crate::{
    attachable::{ErrorCause, Expansion, OpError},
    spec::Mode,
};
use berth_proto::csi::{CapacityRange, NodeExpandVolumeRequest};

impl Csi {
    /// Calls the driver to expand the published volume; returns the size in bytes.
    pub(super) async fn expand_volume(&self, expansion: &Expansion) -> Result<u64, OpError> {
        let until = deadline();
        let Expansion { usage, path, to, .. } = expansion;
        let volume = Self::volume(&usage.spec, usage.pod.namespace(), usage.pod.uid())?;
        let ready = self.ready(&volume.driver, until, "Expander.NodeExpand failed to get CSI client").await?;
        if !ready.can.expands {
            let text =
                format!("{PLUGIN}: Expander.NodeExpand: driver {} does not support node expansion", volume.driver);
            return Err(OpError::failed(text).with_cause(ErrorCause::Unsupported));
        }
        let secrets = self.secret("NodeExpandSecretRef", volume.expand_secret.as_ref()).await?;
        let staging = match usage.mode {
            _ if !ready.can.stages => String::new(),
            Mode::Filesystem => self.staging(&volume)?.display().to_string(),
            Mode::Block => self.block(&usage.spec.name)?.staging.display().to_string(),
        };
        let required_bytes = i64::try_from(*to).unwrap_or(i64::MAX);
        let whose = VolumeOwnership::of(usage);
        let request = NodeExpandVolumeRequest {
            volume_id: volume.handle.clone(),
            volume_path: path.display().to_string(),
            capacity_range: Some(CapacityRange { required_bytes, limit_bytes: 0 }),
            staging_target_path: staging,
            volume_capability: Some(context::capability(&usage.spec, &volume, usage.mode, ready.can, whose)),
            secrets: secrets.into_iter().collect(),
        };
        let done = ready.driver.client.about(&usage.spec).expand(until, request).await;
        let size = done.map_err(|error| {
            error.about(format!("{PLUGIN}: Expander.NodeExpand failed to expand the volume : {error}"))
        })?;
        // A driver that reports no size has reached the requested one.
        Ok(u64::try_from(size).ok().filter(|size| *size > 0).unwrap_or(*to))
    }
}
