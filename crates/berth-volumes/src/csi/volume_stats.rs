//! Usage statistics and health of CSI volumes from NodeGetVolumeStats. Implements spec 07 §12.8.

use tokio::time::Instant;

use super::{node_publish::mount_point, paths::PLUGIN, plugin::Csi};
use crate::{
    attachable::{ErrorCause, OpError, Usage},
    spec::Mode,
};
use berth_ports::{VolumeCondition, VolumeStats};
use berth_proto::csi::{NodeGetVolumeStatsRequest, VolumeUsage, volume_usage::Unit};
use berth_types::cut_at_char;

/// Maximum bytes of a driver's message about an abnormal volume.
const MAX_MESSAGE: usize = 1024;

impl Csi {
    /// Queries the driver for the statistics of a volume.
    pub(super) async fn volume_stats(&self, usage: &Usage, until: Instant) -> Result<VolumeStats, OpError> {
        let volume = Self::volume(&usage.spec, usage.pod.namespace(), usage.pod.uid())?;
        let ready = self.ready(&volume.driver, until, "metricsCsi.GetMetrics failed to get CSI client").await?;
        if !ready.can.reports_stats {
            let text = format!("{PLUGIN}: driver {} does not support volume stats", volume.driver);
            return Err(OpError::failed(text).with_cause(ErrorCause::Unsupported));
        }
        let (path, staging) = match usage.mode {
            Mode::Filesystem => (mount_point(&usage.target), self.staging(&volume)?),
            Mode::Block => {
                let layout = self.block(&usage.spec.name)?;
                (Self::block_target(&layout, usage.pod.uid())?, layout.staging)
            }
        };
        let is_staged = ready.can.stages && !volume.is_inline;
        let request = NodeGetVolumeStatsRequest {
            volume_id: volume.handle.clone(),
            volume_path: path.display().to_string(),
            staging_target_path: if is_staged { staging.display().to_string() } else { String::new() },
        };
        let response = ready.driver.client.about(&usage.spec).stats(until, request).await;
        let response =
            response.map_err(|error| error.about(format!("{PLUGIN}: failed to get volume stats: {error}")))?;
        if response.usage.is_empty() {
            return Err(OpError::failed(format!("{PLUGIN}: failed to get usage from response. usage is nil")));
        }
        // A driver with the capability that reports no condition reports a healthy volume.
        let condition = (self.deps.asks_health && ready.can.reports_condition).then(|| {
            let condition = response.volume_condition.unwrap_or_default();
            VolumeCondition {
                is_abnormal: condition.abnormal,
                message: cut_at_char(&condition.message, MAX_MESSAGE).to_owned(),
            }
        });
        Ok(VolumeStats { condition, ..full(&volume.driver, &response.usage) })
    }
}

/// Converts the statistics; missing and negative values are 0.
fn full(driver: &str, usages: &[VolumeUsage]) -> VolumeStats {
    let mut found = VolumeStats { source: driver.to_owned(), ..VolumeStats::default() };
    let number = |value: i64| u64::try_from(value).unwrap_or_default();
    for one in usages {
        let (total, free, used) = (number(one.total), number(one.available), number(one.used));
        match Unit::try_from(one.unit) {
            Ok(Unit::Bytes) => (found.capacity, found.available, found.used) = (total, free, used),
            Ok(Unit::Inodes) => (found.inodes, found.inodes_free, found.inodes_used) = (total, free, used),
            Ok(Unit::Unknown) | Err(_) => {}
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unknown_units_are_ignored() {
        let usage = |unit: i32, total| VolumeUsage { unit, total, available: total - 1, used: 1 };
        let usages = [usage(Unit::Bytes.into(), 100), usage(Unit::Inodes.into(), 10), usage(0, 7), usage(9, 7)];
        let expected = VolumeStats {
            source: "d".to_owned(),
            capacity: 100,
            available: 99,
            used: 1,
            inodes: 10,
            inodes_free: 9,
            inodes_used: 1,
            condition: None,
        };
        assert_eq!(full("d", &usages), expected);
        assert_eq!(full("d", &[usage(Unit::Bytes.into(), -5)]).capacity, 0);
    }
}
