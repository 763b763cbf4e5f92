//! How many volumes the node takes, asked again where the driver's object says so. Spec 07 §5.1, §12.2.

use std::{sync::Arc, time::Duration};

use tokio::time::{sleep, timeout};
use tracing::{debug, warn};

use super::{
    attachment,
    client::deadline,
    driver::Driver,
    drivers::{Drivers, on_node},
    plugin::Csi,
};
use crate::device::Usage;

/// The shortest period that the API takes.
const SHORTEST: Duration = Duration::from_secs(10);
/// The object is looked for again after this, where it cannot be had.
const LOOK: Duration = Duration::from_secs(60);

/// Asks as often as the driver's object says, for as long as the driver is registered.
pub async fn follow(drivers: Arc<Drivers>, driver: Arc<Driver>) {
    let (gone, stop) = (driver.gone.clone(), drivers.deps.stop.clone());
    tokio::select! {
        () = gone.cancelled() => {}
        () = stop.cancelled() => {}
        () = live(&drivers, &driver) => {}
    }
}

async fn live(drivers: &Drivers, driver: &Driver) {
    let mut moved = drivers.deps.objects.moved();
    loop {
        let Some(period) = period(drivers, &driver.name).await else {
            // The object changes, or the server comes back.
            if moved.changed().await.is_err() {
                return;
            }
            continue;
        };
        tokio::select! {
            () = sleep(period) => refresh(drivers, driver).await,
            // The period may be another one now.
            Ok(()) = moved.changed() => {}
        }
    }
}

/// `None` where the driver does not want to be asked.
async fn period(drivers: &Drivers, name: &str) -> Option<Duration> {
    match drivers.deps.objects.driver(name).await {
        Ok(object) => {
            let seconds = object?.spec.node_allocatable_update_period_seconds?;
            Some(Duration::from_secs(u64::try_from(seconds).unwrap_or_default()).max(SHORTEST))
        }
        Err(error) => {
            warn!(driver = name, err = %error, "Failed to read the object of a CSI driver");
            sleep(LOOK).await;
            None
        }
    }
}

impl Csi {
    /// Whether the volume is not attached because the node takes no more of the driver's; how many those are is asked
    /// again then, where its object says that this changes.
    pub(super) async fn is_beyond(&self, usage: &Usage) -> bool {
        let volume = Self::volume(&usage.spec, usage.pod.namespace(), usage.pod.uid());
        let Ok(volume) = volume.map_err(|error| debug!(err = %error, "No CSI volume")) else { return false };
        let object = self.object(&volume.driver).await.ok().flatten();
        if object.and_then(|object| object.spec.node_allocatable_update_period_seconds).is_none() {
            return false;
        }
        let Ok(found) = self.deps.objects.attachment(&self.attachment(&volume)).await else { return false };
        if !attachment::is_exhausted(&found) {
            return false;
        }
        if let Ok(driver) = self.deps.drivers.get(&volume.driver) {
            // The pod does not wait for a driver that hangs.
            let _told = timeout(SHORTEST, refresh(&self.deps.drivers, &driver)).await;
        }
        true
    }
}

/// Asks once, and writes what the driver says.
pub async fn refresh(drivers: &Drivers, driver: &Driver) {
    let written = match driver.client.node_info(deadline()).await {
        Ok(answer) => drivers.deps.node.update(&on_node(&driver.name, answer)).await,
        Err(error) => Err(error.to_string()),
    };
    if let Err(error) = written {
        warn!(driver = %driver.name, err = %error, "Failed to update how many volumes the node takes");
    }
}
