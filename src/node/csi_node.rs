//! CSINode initialization: creates the object that storage readiness requires.
//!
//! Implements spec 07 §12.2, 10 §4.8 S5, 10a §12. Kubelet gives up after six attempts and exits; here the node stays
//! NotReady and reports why. A recreated node gets a new CSINode: the old one belongs to the deleted node.

use std::{sync::Arc, time::Duration};

use serde_json::Value;
use tokio::{sync::watch, time::sleep};
use tokio_util::sync::CancellationToken;
use tracing::{debug, error, info};

use super::{
    csi_object::{CsiNodeAction, created, due},
    node_wait::wait_for_node,
};
use berth_api::{
    ReflectorStore,
    api::{ApiClient, ApiError, Call, Resource, TypedClient},
};
use berth_sys::backoff::Backoff;
use berth_types::api;

/// Storage error reported until the CSINode is initialized.
pub(super) const UNINITIALIZED: &str = "CSINode is not yet initialized";
/// Interval of polling for the API server.
const POLL: Duration = Duration::from_secs(1);
/// Delays after failures.
const BACKOFF: Backoff = Backoff::new(Duration::from_millis(30), Duration::from_secs(15)).with_factor(8.0);
/// Timeout of one request.
const DEADLINE: Duration = Duration::from_secs(10);

/// Task that initializes the CSINode.
pub(super) struct CsiNodeInitializer {
    pub(super) api: Arc<dyn ApiClient>,
    pub(super) nodes: ReflectorStore<api::Node>,
    pub(super) name: String,
    /// Whether this node is registered.
    pub(super) registered: watch::Receiver<bool>,
    /// Why storage is not ready; `None` when it is ready.
    pub(super) storage: watch::Sender<Option<String>>,
}

impl CsiNodeInitializer {
    /// Initializes the CSINode, and again for every new node of that name, until stopped.
    pub(super) async fn run(mut self, stop: CancellationToken) {
        tokio::select! {
            () = stop.cancelled() => {}
            () = self.live() => {}
        }
    }

    async fn live(&mut self) {
        let mut found = self.first_answer().await;
        wait_for_node(&self.nodes, &self.name, &self.registered).await;
        loop {
            let owner = self.initialize(found.take()).await;
            self.storage.send_if_modified(|trouble| trouble.take().is_some());
            info!(node = %self.name, "CSINode is initialized");
            while self.known_uid().is_none_or(|uid| uid == owner) {
                self.nodes.changed().await;
            }
        }
    }

    /// Polls until the API server responds with the object or with 404.
    async fn first_answer(&self) -> Option<Value> {
        loop {
            let call = Call::get(Resource::CSI_NODES, "", &self.name).query("resourceVersion", "0").within(DEADLINE);
            match self.api.ask::<Value>(call).await {
                Ok(found) => return Some(found),
                Err(err) if err.is_not_found() => return None,
                Err(err) => {
                    debug!(node = %self.name, %err, "Failed to contact API server when waiting for CSINode publishing")
                }
            }
            sleep(POLL).await;
        }
    }

    /// Retries until the object is correct; returns the UID of the node that owns it.
    async fn initialize(&mut self, mut found: Option<Value>) -> String {
        // A 404 was a response, too: the object can be created without another read.
        let mut should_read = false;
        let mut backoff = BACKOFF;
        loop {
            if should_read {
                match self.get().await {
                    Ok(answer) => found = answer,
                    Err(err) => error!(node = %self.name, %err, "Failed to read CSINode"),
                }
            }
            match self.reconcile(found.take()).await {
                Ok(uid) => return uid,
                // The node is about to be registered, and then the watch reports it.
                Err(err) if err.is_not_found() => {
                    debug!(node = %self.name, %err, "Node of CSINode not found, will retry")
                }
                Err(err) => {
                    error!(node = %self.name, %err, interval = ?backoff.peek(), "Failed to initialize CSINode, will retry")
                }
            }
            should_read = true;
            tokio::select! {
                () = sleep(backoff.peek()) => {
                    backoff.next_delay();
                }
                () = self.nodes.changed() => {}
            }
        }
    }

    async fn get(&self) -> Result<Option<Value>, ApiError> {
        match self.api.ask(Call::get(Resource::CSI_NODES, "", &self.name).within(DEADLINE)).await {
            Ok(found) => Ok(Some(found)),
            Err(err) if err.is_not_found() => Ok(None),
            Err(err) => Err(err),
        }
    }

    async fn reconcile(&self, found: Option<Value>) -> Result<String, ApiError> {
        let uid = self.uid().await?;
        let due = match found {
            None => {
                self.create(&uid).await?;
                return Ok(uid);
            }
            Some(found) => due(found, &uid),
        };
        match due {
            CsiNodeAction::Nothing => {}
            CsiNodeAction::Write(object) => {
                let call = Call::update(Resource::CSI_NODES, "", &self.name, object.to_string());
                self.api.call(call.within(DEADLINE)).await?;
            }
            CsiNodeAction::Replace => {
                let call = Call::new(berth_api::api::Verb::Delete, Resource::CSI_NODES, "", &self.name);
                self.api.call(call.within(DEADLINE)).await?;
                self.create(&uid).await?;
            }
        }
        Ok(uid)
    }

    async fn create(&self, uid: &str) -> Result<(), ApiError> {
        let call = Call::create(Resource::CSI_NODES, "", created(&self.name, uid).to_string());
        self.api.call(call.within(DEADLINE)).await.map(drop)
    }

    fn known_uid(&self) -> Option<String> {
        self.nodes.get("", &self.name).and_then(|node| node.metadata.uid.clone())
    }

    async fn uid(&self) -> Result<String, ApiError> {
        if let Some(uid) = self.known_uid() {
            return Ok(uid);
        }
        let node: api::Node = self.api.ask(Call::get(Resource::NODES, "", &self.name).within(DEADLINE)).await?;
        node.metadata.uid.ok_or_else(|| ApiError::Malformed("node object has no metadata.uid".to_owned()))
    }
}

#[cfg(test)]
mod tests;
