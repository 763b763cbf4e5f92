//! Publishes CSI drivers to the node object and its CSINode.
//!
//! Implements spec 07 §12.2, 10 §4.1 N6, §4.8 S5. Writes are serialized, so that drivers that register at the same time
//! do not conflict. A node that was recreated gets all drivers again.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use async_trait::async_trait;
use serde_json::Value;
use tokio::{
    sync::Semaphore,
    time::{sleep, timeout},
};
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

use super::{
    csi_entries::{Edit, add_driver, node_with, node_without, remove_driver},
    csi_object::{CsiNodeAction, created, due},
};
use berth_api::{
    ReflectorStore,
    api::{ApiClient, ApiError, Call, Resource, TypedClient, Verb},
};
use berth_ports::{NodeDriver, NodeDrivers};
use berth_sys::backoff::Backoff;
use berth_types::api;

/// Attempts of one write.
const ATTEMPTS: u32 = 4;
/// Delays between these attempts.
const BACKOFF: Backoff =
    Backoff::new(Duration::from_millis(10), Duration::from_secs(1)).with_factor(5.0).with_jitter(1.0, 1.1);
/// Timeout of one request.
const DEADLINE: Duration = Duration::from_secs(10);
/// Delay before publishing to a recreated node is retried.
const AGAIN: Duration = Duration::from_secs(5);

/// Why a write failed.
#[derive(Debug, thiserror::Error)]
enum WriteError {
    #[error("{0}")]
    Api(#[from] ApiError),
    #[error("{0}")]
    Contradiction(#[from] super::csi_entries::DriverConflict),
    #[error("exceeded the number of retries after update conflicts")]
    Restless,
}

/// Publisher of the CSI drivers of one node.
pub struct CsiDrivers {
    api: Arc<dyn ApiClient>,
    node: String,
    write_lock: Semaphore,
    known: Mutex<BTreeMap<String, NodeDriver>>,
    /// UID of the node object last read for a write.
    written_node_uid: Mutex<Option<String>>,
}

impl CsiDrivers {
    /// Creates a publisher for the node of that name.
    pub fn new(api: Arc<dyn ApiClient>, node: &str) -> Arc<Self> {
        Arc::new(Self {
            api,
            node: node.to_owned(),
            write_lock: Semaphore::new(1),
            known: Mutex::default(),
            written_node_uid: Mutex::default(),
        })
    }

    /// Publishes all known drivers to every new node object of that name, until stopped.
    pub async fn follow(self: Arc<Self>, mut nodes: ReflectorStore<api::Node>, stop: CancellationToken) {
        let live = async {
            let mut published_uid = None;
            loop {
                let uid = nodes.get("", &self.node).and_then(|node| node.metadata.uid.clone());
                if uid.is_some() && uid != published_uid && self.republish().await {
                    published_uid.clone_from(&uid);
                }
                if uid == published_uid {
                    nodes.changed().await;
                } else {
                    let _ = timeout(AGAIN, nodes.changed()).await;
                }
            }
        };
        let _stopped = stop.run_until_cancelled(live).await;
    }

    /// Publishes all known drivers again; returns whether all writes succeeded.
    async fn republish(&self) -> bool {
        let all: Vec<NodeDriver> = self.known().values().cloned().collect();
        let mut is_published = true;
        for driver in all {
            info!(node = %self.node, driver = %driver.name, "Node object was recreated, publishing CSI driver");
            if let Err(error) = self.install(&driver).await {
                warn!(node = %self.node, driver = %driver.name, err = %error, "Failed to publish CSI driver");
                is_published = false;
            }
        }
        is_published
    }

    fn known(&self) -> MutexGuard<'_, BTreeMap<String, NodeDriver>> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn written_node_uid(&self) -> Option<String> {
        self.written_node_uid.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Retries a write with back-off; a contradiction is not retried.
    async fn write<F: Future<Output = Result<(), WriteError>>>(
        &self,
        attempt: impl Fn() -> F,
    ) -> Result<(), WriteError> {
        let mut backoff = BACKOFF;
        for _ in 1..ATTEMPTS {
            match attempt().await {
                Err(WriteError::Api(_) | WriteError::Restless) => {}
                done => return done,
            }
            sleep(backoff.next_delay()).await;
        }
        attempt().await
    }

    async fn patch_node(
        &self,
        patch: impl Fn(&Value) -> Result<Option<Value>, super::csi_entries::DriverConflict>,
    ) -> Result<(), WriteError> {
        let node: Value = self.api.ask(Call::get(Resource::NODES, "", &self.node).within(DEADLINE)).await?;
        let uid = node.pointer("/metadata/uid").and_then(Value::as_str).map(str::to_owned);
        *self.written_node_uid.lock().unwrap_or_else(PoisonError::into_inner) = uid;
        let Some(patch) = patch(&node)? else { return Ok(()) };
        let call = Call::patch(Resource::NODES, "", &self.node, patch.to_string()).sub("status");
        self.api.call(call.within(DEADLINE)).await?;
        Ok(())
    }

    /// Edits the CSINode; creates it if it is missing.
    async fn edit(&self, edit: impl Fn(Value) -> Edit) -> Result<(), WriteError> {
        let call = Call::get(Resource::CSI_NODES, "", &self.node).within(DEADLINE);
        let mut found: Value = match self.api.ask(call).await {
            Ok(found) => found,
            Err(error) if error.is_not_found() => self.create().await?,
            Err(error) => return Err(error.into()),
        };
        if self.written_node_uid().is_some_and(|uid| due(found.clone(), &uid) == CsiNodeAction::Replace) {
            // The CSINode belongs to a deleted node: its entries are not valid for this one.
            let call = Call::new(Verb::Delete, Resource::CSI_NODES, "", &self.node);
            self.api.call(call.within(DEADLINE)).await?;
            found = self.create().await?;
        }
        // At most two writes: removal, then re-addition.
        for _ in 0..2 {
            let (object, is_done) = match edit(found) {
                Edit::Nothing => return Ok(()),
                Edit::Write(object) => (object, true),
                Edit::Step(object) => (object, false),
            };
            let call = Call::update(Resource::CSI_NODES, "", &self.node, object.to_string());
            found = self.api.ask(call.within(DEADLINE)).await?;
            if is_done {
                return Ok(());
            }
        }
        Err(WriteError::Restless)
    }

    async fn create(&self) -> Result<Value, ApiError> {
        let uid = self.uid().await?;
        let call = Call::create(Resource::CSI_NODES, "", created(&self.node, &uid).to_string());
        self.api.ask(call.within(DEADLINE)).await
    }

    async fn uid(&self) -> Result<String, ApiError> {
        let node: api::Node = self.api.ask(Call::get(Resource::NODES, "", &self.node).within(DEADLINE)).await?;
        node.metadata.uid.ok_or_else(|| ApiError::Malformed("node object has no metadata.uid".to_owned()))
    }

    async fn write_entry(&self, driver: &NodeDriver) -> Result<(), String> {
        let written = self.write(|| self.edit(move |found| add_driver(found, driver)));
        let failed = |error| format!("error updating CSINode object with CSI driver node info: {error}");
        written.await.map_err(failed)
    }
}

#[async_trait]
impl NodeDrivers for CsiDrivers {
    async fn install(&self, driver: &NodeDriver) -> Result<(), String> {
        if driver.max_volumes < 0 {
            warn!(driver = %driver.name, count = driver.max_volumes, "Invalid attach limit value cannot be added to CSINode object");
        }
        let _turn = self.write_lock.acquire().await;
        let failed = |error: WriteError| match error {
            WriteError::Contradiction(super::csi_entries::DriverConflict::NoNodeId) => error.to_string(),
            error => format!("error updating Node object with CSI driver node info: {error}"),
        };
        self.write(|| self.patch_node(move |node| node_with(node, driver))).await.map_err(failed)?;
        self.write_entry(driver).await?;
        self.known().insert(driver.name.clone(), driver.clone());
        Ok(())
    }

    async fn update(&self, driver: &NodeDriver) -> Result<(), String> {
        let _turn = self.write_lock.acquire().await;
        // The driver may be unregistered by now. Its node id and topology were fixed at registration; only the limit
        // changes.
        let Some(known) = self.known().get(&driver.name).cloned() else { return Ok(()) };
        let driver = NodeDriver { max_volumes: driver.max_volumes, ..known };
        self.write_entry(&driver).await?;
        self.known().insert(driver.name.clone(), driver);
        Ok(())
    }

    async fn uninstall(&self, name: &str) -> Result<(), String> {
        let _turn = self.write_lock.acquire().await;
        self.known().remove(name);
        let entry = self.write(|| self.edit(move |found| remove_driver(found, name))).await;
        entry.map_err(|error| format!("error uninstalling CSI driver from CSINode object {error}"))?;
        let annotation = self.write(|| self.patch_node(move |node| Ok(node_without(node, name)))).await;
        annotation.map_err(|error| format!("error removing CSI driver node info from Node object {error}"))
    }
}

#[cfg(test)]
mod tests;
