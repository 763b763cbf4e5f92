//! Opens the image manager with its garbage collection.

use std::sync::Arc;

use super::{
    cluster::Cluster,
    composition_root::{Base, BuildError, wrong},
    settings,
};
use crate::images::{self, ImagesDeps};
use berth_config::LoadedConfig;
use berth_cri::CriClients;

/// Opens the image manager and starts its background tasks.
///
/// # Errors
/// Image records or the configuration of credential plugins cannot be read.
pub(super) async fn open_images(
    loaded: &LoadedConfig,
    base: &Base,
    connection: &CriClients,
    cluster: Option<&Cluster>,
) -> Result<Arc<images::ImageManager>, BuildError> {
    let gives_tokens = loaded.gates.enabled("KubeletServiceAccountTokenForCredentialProviders");
    let deps = ImagesDeps {
        images: connection.images.clone(),
        runtime: connection.runtime.clone(),
        events: base.events.clone(),
        clock: base.clock.clone(),
        registry: base.registry.clone(),
        room: Arc::new(images::statvfs_disk_space),
        on_pull: Arc::new(|_, _| {}),
        accounts: cluster.filter(|_| gives_tokens).map(Cluster::objects),
    };
    let images = images::ImageManager::new(deps, settings::images(loaded)).await.map_err(wrong)?;
    let (running, stop) = (images.clone(), base.stop.child_token());
    base.tasks.spawn(async move { running.run(stop).await });
    Ok(images)
}
