//! Refresh of CSI attach limits (`nodeAllocatableUpdatePeriodSeconds`). Implements spec 07 §5.1, §12.2.

use std::{sync::Arc, time::Duration};

use tokio::time::{sleep, timeout};
use tracing::{debug, warn};

use super::{
    attachment,
    client::deadline,
    driver::RegisteredDriver,
    drivers::{Drivers, on_node},
    plugin::Csi,
};
use crate::attachable::Usage;
use berth_ports::StorageError;

/// Minimum refresh period accepted by the API.
const SHORTEST: Duration = Duration::from_secs(10);
/// Delay after a failed read of the `CSIDriver` object.
const RETRY_DELAY: Duration = Duration::from_secs(60);

/// Refreshes the attach limit with the period of the `CSIDriver` object, while the driver is registered.
pub async fn follow(drivers: Arc<Drivers>, driver: Arc<RegisteredDriver>) {
    let (gone, stop) = (driver.gone.clone(), drivers.deps.stop.clone());
    tokio::select! {
        () = gone.cancelled() => {}
        () = stop.cancelled() => {}
        () = refresh_periodically(&drivers, &driver) => {}
    }
}

async fn refresh_periodically(drivers: &Drivers, driver: &RegisteredDriver) {
    let mut moved = drivers.deps.objects.retry_signal();
    loop {
        let Some(period) = period(drivers, &driver.name).await else {
            // Waits for a change of the object, or for the API server's return.
            if moved.changed().await.is_err() {
                return;
            }
            continue;
        };
        tokio::select! {
            () = sleep(period) => refresh(drivers, driver).await,
            // The period may have changed.
            Ok(()) = moved.changed() => {}
        }
    }
}

/// Returns the refresh period; `None` if the driver sets none, or its object cannot be read.
async fn period(drivers: &Drivers, name: &str) -> Option<Duration> {
    match drivers.deps.objects.driver(name).await {
        Ok(object) => {
            let seconds = object?.spec.node_allocatable_update_period_seconds?;
            Some(Duration::from_secs(u64::try_from(seconds).unwrap_or_default()).max(SHORTEST))
        }
        // Without an API server no object sets a period.
        Err(StorageError::NoClient) => None,
        Err(error) => {
            warn!(driver = name, err = %error, "Failed to get CSIDriver");
            sleep(RETRY_DELAY).await;
            None
        }
    }
}

impl Csi {
    /// Whether the volume is not attached because the node reached the driver's attach limit; also refreshes the limit.
    /// Always false for drivers without a refresh period.
    pub(super) async fn is_over_attach_limit(&self, usage: &Usage) -> bool {
        let volume = Self::volume(&usage.spec, usage.pod.namespace(), usage.pod.uid());
        let Ok(volume) = volume.map_err(|error| debug!(err = %error, "Not a CSI volume")) else { return false };
        let object = self.object(&volume.driver).await.ok().flatten();
        if object.and_then(|object| object.spec.node_allocatable_update_period_seconds).is_none() {
            return false;
        }
        let Ok(found) = self.deps.objects.attachment(&self.attachment(&volume)).await else { return false };
        if !attachment::is_exhausted(&found) {
            return false;
        }
        if let Ok(driver) = self.deps.drivers.get(&volume.driver) {
            // Bounds the pod's wait for a driver that hangs.
            let _refreshed = timeout(SHORTEST, refresh(&self.deps.drivers, &driver)).await;
        }
        true
    }
}

/// Refreshes the attach limit once from `NodeGetInfo`.
pub async fn refresh(drivers: &Drivers, driver: &RegisteredDriver) {
    let written = match driver.client.node_info(deadline()).await {
        Ok(answer) => drivers.deps.node.update(&on_node(&driver.name, answer)).await,
        Err(error) => Err(error.to_string()),
    };
    if let Err(error) = written {
        warn!(driver = %driver.name, err = %error, "Failed to update allocatable volume count in CSINode");
    }
}
