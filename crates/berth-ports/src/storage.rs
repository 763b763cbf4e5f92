//! Port of storage objects: claims, volumes, attachments, CSI drivers, and their secrets.
//!
//! Standalone mode has an implementation that refuses every call.

use std::{collections::BTreeMap, sync::Arc};

use async_trait::async_trait;
use k8s_openapi::api::{
    resource::v1::ResourceClaim,
    storage::v1::{CSIDriver, VolumeAttachment},
};
use tokio::sync::watch;

use berth_types::api;

/// Why a storage object is unavailable.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum StorageError {
    /// The object does not exist, or not for this node.
    #[error("{0}")]
    NotFound(String),
    /// The object was modified concurrently.
    #[error("{0}")]
    Conflict(String),
    /// There is no API client.
    #[error("failed to get a kubernetes client")]
    NoClient,
    /// Anything else.
    #[error("{0}")]
    Other(String),
}

/// Attached volumes and their device paths from the own Node's status; `None` before the first read.
pub type AttachedVolumes = Option<Arc<BTreeMap<String, String>>>;

/// Reads storage objects. Each read is live and has its own deadline (spec 10 §4.8).
#[async_trait]
pub trait StorageObjects: Send + Sync + 'static {
    /// A PersistentVolumeClaim.
    async fn claim(&self, namespace: &str, name: &str) -> Result<Arc<api::PersistentVolumeClaim>, StorageError>;
    /// A ResourceClaim of dynamic resource allocation.
    async fn resource_claim(&self, _namespace: &str, _name: &str) -> Result<Arc<ResourceClaim>, StorageError> {
        Err(StorageError::NoClient)
    }
    /// A PersistentVolume.
    async fn volume(&self, name: &str) -> Result<Arc<api::PersistentVolume>, StorageError>;
    /// A VolumeAttachment.
    async fn attachment(&self, name: &str) -> Result<Arc<VolumeAttachment>, StorageError>;
    /// A Secret of a driver, never from a cache.
    async fn secret(&self, namespace: &str, name: &str) -> Result<BTreeMap<String, Vec<u8>>, StorageError>;
    /// A CSIDriver from the watch cache; `None` if it has no object. Waits for the first list only.
    async fn driver(&self, name: &str) -> Result<Option<Arc<CSIDriver>>, StorageError>;
    /// Patches the `status` of a claim; `patch` is a strategic merge patch of the whole object.
    async fn patch_claim(&self, namespace: &str, name: &str, patch: String) -> Result<(), StorageError>;
    /// Volumes attached to this node.
    fn attached(&self) -> watch::Receiver<AttachedVolumes>;
    /// Changes when the API server is reachable again or a CSIDriver changes: a failed read may succeed now.
    fn retry_signal(&self) -> watch::Receiver<u64>;
}
