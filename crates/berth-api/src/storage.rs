//! Cluster implementation of [`StorageObjects`]: claims, volumes, attachments, and CSI drivers.
//!
//! A node is authorized to read single claims, volumes, and attachments, and to watch none of them. CSI drivers are
//! watched; the own node is watched elsewhere.
//!
//! Implements spec 10 §3.3, §4.8, spec 07 §3.3.

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use async_trait::async_trait;
use k8s_openapi::api::{
    resource::v1::ResourceClaim,
    storage::v1::{CSIDriver, VolumeAttachment},
};
use serde::de::DeserializeOwned;
use tokio::{
    sync::watch,
    time::{Instant, sleep, timeout},
};
use tokio_util::sync::CancellationToken;

use super::{
    api::{ApiClient, ApiError, Call, Resource, TypedClient},
    reflector::{QuickRetry, ReflectorDeps, Selection, reflect},
    store::ReflectorStore,
};
use berth_metrics::ReflectorMetrics;
use berth_ports::{AttachedVolumes, StorageError, StorageObjects};
use berth_types::api;

/// Deadline of one read.
const READ_LIMIT: Duration = Duration::from_secs(10);
/// How long a read waits for the first sync of CSI drivers.
const DRIVERS_LIMIT: Duration = Duration::from_secs(10);

/// Storage objects backed by the API server.
pub struct ApiStorage {
    api: Arc<dyn ApiClient>,
    drivers: ReflectorStore<CSIDriver>,
    attached: watch::Receiver<AttachedVolumes>,
    moved: watch::Receiver<u64>,
}

impl ApiStorage {
    /// Returns the storage objects, and a future that must be polled while they are in use (it ends with `stop`).
    pub fn new(
        api: Arc<dyn ApiClient>,
        attached: watch::Receiver<AttachedVolumes>,
        metrics: ReflectorMetrics,
        stop: CancellationToken,
    ) -> (Arc<Self>, impl Future<Output = ()> + Send + use<>) {
        let deps = ReflectorDeps::new(metrics, stop.clone());
        let (drivers, following) = reflect(api.clone(), Selection::all(Resource::CSI_DRIVERS), deps);
        let (sender, moved) = watch::channel(0_u64);
        let (mut changed, mut reached) = (drivers.clone(), api.reached());
        let notifying = async move {
            loop {
                tokio::select! {
                    () = changed.changed() => {}
                    () = wait_until_reached(&mut reached) => {}
                }
                sender.send_modify(|times| *times = times.wrapping_add(1));
            }
        };
        let upkeep = async move {
            let _stopped = stop.run_until_cancelled(async { tokio::join!(following, notifying) }).await;
        };
        (Arc::new(Self { api, drivers, attached, moved }), upkeep)
    }

    async fn get<T: DeserializeOwned + Send>(
        &self,
        resource: Resource,
        namespace: &str,
        name: &str,
    ) -> Result<Arc<T>, StorageError> {
        let (began, mut quick) = (Instant::now(), QuickRetry::default());
        loop {
            match self.api.ask::<T>(Call::get(resource, namespace, name).within(READ_LIMIT)).await {
                Ok(found) => return Ok(Arc::new(found)),
                // The node authorizer may not have observed the pod yet.
                Err(error) if error.is_forbidden() => match quick.pause(began.elapsed()) {
                    Some(pause) => sleep(pause).await,
                    None => return Err(storage_error(&error)),
                },
                Err(error) => return Err(storage_error(&error)),
            }
        }
    }
}

async fn wait_until_reached(reached: &mut watch::Receiver<u64>) {
    if reached.changed().await.is_err() {
        std::future::pending::<()>().await;
    }
}

fn storage_error(error: &ApiError) -> StorageError {
    if error.is_not_found() {
        StorageError::NotFound(error.to_string())
    } else if error.is_conflict() {
        StorageError::Conflict(error.to_string())
    } else {
        StorageError::Other(error.to_string())
    }
}

#[async_trait]
impl StorageObjects for ApiStorage {
    async fn claim(&self, namespace: &str, name: &str) -> Result<Arc<api::PersistentVolumeClaim>, StorageError> {
        self.get(Resource::CLAIMS, namespace, name).await
    }

    async fn resource_claim(&self, namespace: &str, name: &str) -> Result<Arc<ResourceClaim>, StorageError> {
        self.get(Resource::RESOURCE_CLAIMS, namespace, name).await
    }

    async fn volume(&self, name: &str) -> Result<Arc<api::PersistentVolume>, StorageError> {
        self.get(Resource::VOLUMES, "", name).await
    }

    async fn attachment(&self, name: &str) -> Result<Arc<VolumeAttachment>, StorageError> {
        self.get(Resource::ATTACHMENTS, "", name).await
    }

    async fn secret(&self, namespace: &str, name: &str) -> Result<BTreeMap<String, Vec<u8>>, StorageError> {
        let secret: Arc<api::Secret> = self.get(Resource::SECRETS, namespace, name).await?;
        Ok(secret.data.iter().flatten().map(|(key, value)| (key.clone(), value.0.clone())).collect())
    }

    async fn driver(&self, name: &str) -> Result<Option<Arc<CSIDriver>>, StorageError> {
        let mut drivers = self.drivers.clone();
        if timeout(DRIVERS_LIMIT, drivers.synced()).await.is_err() {
            return Err(StorageError::Other("timed out waiting for the list of CSI drivers".to_owned()));
        }
        Ok(drivers.get("", name))
    }

    async fn patch_claim(&self, namespace: &str, name: &str, patch: String) -> Result<(), StorageError> {
        let call = Call::patch(Resource::CLAIMS, namespace, name, patch).sub("status").within(READ_LIMIT);
        self.api.call(call).await.map(drop).map_err(|error| storage_error(&error))
    }

    fn attached(&self) -> watch::Receiver<AttachedVolumes> {
        self.attached.clone()
    }

    fn retry_signal(&self) -> watch::Receiver<u64> {
        self.moved.clone()
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::testing::{FakeApi, event, marker, refused};
    use berth_metrics::Registry;

    #[tokio::test(start_paused = true)]
    async fn what_is_forbidden_at_first_is_asked_again() {
        let mut times = 0;
        let api = FakeApi::new(move |call| {
            times += 1;
            match (call.name.as_str(), times) {
                ("none", _) => Err(refused(404, "NotFound", "persistentvolumeclaims \"none\" not found")),
                (_, 1) => Err(refused(403, "Forbidden", "no relationship found")),
                _ => Ok(json!({"metadata": {"name": "c"}})),
            }
        });
        let drivers = api.next_watch();
        let stop = CancellationToken::new();
        let metrics = ReflectorMetrics::new(&Registry::new());
        let (storage, upkeep) = ApiStorage::new(api.clone(), watch::channel(None).1, metrics, stop.clone());
        let upkeep = tokio::spawn(upkeep);
        let claim = storage.claim("n", "c").await.expect("in the end");
        assert_eq!(claim.metadata.name.as_deref(), Some("c"));
        let missing = storage.claim("n", "none").await.expect_err("none");
        assert_eq!(missing, StorageError::NotFound("persistentvolumeclaims \"none\" not found".to_owned()));

        let mut moved = storage.retry_signal();
        let driver = json!({"apiVersion": "storage.k8s.io/v1", "kind": "CSIDriver",
            "metadata": {"name": "d", "resourceVersion": "1"}, "spec": {}});
        drivers.send(event("ADDED", driver)).expect("followed");
        drivers.send(marker("storage.k8s.io/v1", "CSIDriver", "1")).expect("followed");
        assert!(storage.driver("d").await.expect("listed").is_some());
        assert!(storage.driver("e").await.expect("listed").is_none());
        moved.changed().await.expect("received");
        stop.cancel();
        upkeep.await.expect("ends");
    }
}
