//! What storage needs of the API server. Standalone mode has a player that refuses.

use std::{collections::BTreeMap, sync::Arc};

use async_trait::async_trait;
use k8s_openapi::api::storage::v1::{CSIDriver, VolumeAttachment};
use tokio::sync::watch;

use berth_types::api;

/// Why it cannot be had.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum StorageError {
    /// It does not exist, or not for this node.
    #[error("{0}")]
    NotFound(String),
    /// The object was changed by somebody else meanwhile.
    #[error("{0}")]
    Conflict(String),
    /// There is no API client.
    #[error("failed to get a kubernetes client")]
    NoClient,
    /// Anything else.
    #[error("{0}")]
    Other(String),
}

/// Volumes that are attached, with their devices, as the own node says; `None` before it was read.
pub type Attached = Option<Arc<BTreeMap<String, String>>>;

/// Claims, volumes and what is known of their drivers. Each read is live, and has its deadline (spec 10 §4.8).
#[async_trait]
pub trait StorageObjects: Send + Sync + 'static {
    /// A claim.
    async fn claim(&self, namespace: &str, name: &str) -> Result<Arc<api::PersistentVolumeClaim>, StorageError>;
    /// A persistent volume.
    async fn volume(&self, name: &str) -> Result<Arc<api::PersistentVolume>, StorageError>;
    /// An attachment.
    async fn attachment(&self, name: &str) -> Result<Arc<VolumeAttachment>, StorageError>;
    /// A secret of a driver's: never from a cache.
    async fn secret(&self, namespace: &str, name: &str) -> Result<BTreeMap<String, Vec<u8>>, StorageError>;
    /// A driver, as followed; `None` where it has no object. Waits for the first list only.
    async fn driver(&self, name: &str) -> Result<Option<Arc<CSIDriver>>, StorageError>;
    /// Changes `status` of a claim; the patch is a strategic merge patch of the whole object.
    async fn patch_claim(&self, namespace: &str, name: &str, patch: String) -> Result<(), StorageError>;
    /// What is attached to this node.
    fn attached(&self) -> watch::Receiver<Attached>;
    /// Moves when the API server was reached again, or a driver's object changed: what could not be had may be now.
    fn moved(&self) -> watch::Receiver<u64>;
}
