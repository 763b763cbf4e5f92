//! Port implementations for a node without an API server.

mod event_log;
mod manifest_objects;

use std::{
    collections::{BTreeMap, HashMap},
    sync::Arc,
};

pub use event_log::EventLog;
pub use manifest_objects::{ManifestObjects, open};

use async_trait::async_trait;
use k8s_openapi::api::storage::v1::{CSIDriver, VolumeAttachment};
use tokio::sync::watch;

use berth_ports::{
    AttachedVolumes, MirrorPodState, MirrorPods, NodeDriver, NodeDrivers, ObjectError, ObjectSource, PullSecret,
    StorageError, StorageObjects,
};
use berth_types::{Pod, PodFullName, api};

/// Object source without an API server: references fail with kubelet's error texts, no service exists.
#[derive(Clone, Copy, Debug, Default)]
pub struct NoObjects;

#[async_trait]
impl ObjectSource for NoObjects {
    async fn config_map(&self, namespace: &str, name: &str) -> Result<Arc<BTreeMap<String, String>>, ObjectError> {
        let (namespace, name) = (namespace.to_owned(), name.to_owned());
        Err(ObjectError::NoClient { kind: "configMap", namespace, name })
    }

    async fn secret(&self, namespace: &str, name: &str) -> Result<Arc<BTreeMap<String, Vec<u8>>>, ObjectError> {
        let (namespace, name) = (namespace.to_owned(), name.to_owned());
        Err(ObjectError::NoClient { kind: "secret", namespace, name })
    }

    fn services(&self, _namespace: &str) -> Option<Vec<Arc<api::Service>>> {
        Some(Vec::new())
    }

    async fn runtime_handler(&self, _class: Option<&str>) -> Result<String, ObjectError> {
        Ok(String::new())
    }

    async fn pull_secrets(&self, pod: &Pod) -> (Vec<PullSecret>, Vec<String>) {
        let named = pod.spec().image_pull_secrets.iter().flatten().map(|s| s.name.clone());
        (Vec::new(), named.filter(|name| !name.is_empty()).collect())
    }
}

/// Storage objects without an API server: claims fail, and no volume is attached.
#[derive(Clone, Copy, Debug, Default)]
pub struct NoStorage;

#[async_trait]
impl StorageObjects for NoStorage {
    async fn claim(&self, _: &str, _: &str) -> Result<Arc<api::PersistentVolumeClaim>, StorageError> {
        Err(StorageError::NoClient)
    }

    async fn volume(&self, _: &str) -> Result<Arc<api::PersistentVolume>, StorageError> {
        Err(StorageError::NoClient)
    }

    async fn attachment(&self, _: &str) -> Result<Arc<VolumeAttachment>, StorageError> {
        Err(StorageError::NoClient)
    }

    async fn secret(&self, _: &str, _: &str) -> Result<BTreeMap<String, Vec<u8>>, StorageError> {
        Err(StorageError::NoClient)
    }

    async fn driver(&self, _: &str) -> Result<Option<Arc<CSIDriver>>, StorageError> {
        Err(StorageError::NoClient)
    }

    async fn patch_claim(&self, _: &str, _: &str, _: String) -> Result<(), StorageError> {
        Err(StorageError::NoClient)
    }

    fn attached(&self) -> watch::Receiver<AttachedVolumes> {
        watch::channel(Some(Arc::default())).1
    }

    fn retry_signal(&self) -> watch::Receiver<u64> {
        watch::channel(0).1
    }
}

/// CSI drivers without Node and CSINode objects: nothing has to be written before a driver can be used.
#[derive(Clone, Copy, Debug, Default)]
pub struct NoNodeObjects;

#[async_trait]
impl NodeDrivers for NoNodeObjects {
    async fn install(&self, _: &NodeDriver) -> Result<(), String> {
        Ok(())
    }

    async fn update(&self, _: &NodeDriver) -> Result<(), String> {
        Ok(())
    }

    async fn uninstall(&self, _: &str) -> Result<(), String> {
        Ok(())
    }
}

/// Mirror pods without an API server: static pods have none.
#[derive(Clone, Copy, Debug, Default)]
pub struct NoMirrors;

impl MirrorPods for NoMirrors {
    fn ensure(&self, _pod: &Arc<Pod>) {}

    fn set_desired(&self, _names: HashMap<PodFullName, MirrorPodState>) {}
}
