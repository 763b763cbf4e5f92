//! Makes the CSINode object, without which storage is not ready. Spec 07 §12.2, 10 §4.8 S5, 10a §12.
//!
//! The reference gives up after six tries and exits; here the node stays unready and says why. A
//! node that was made anew gets its CSINode anew too: the old one goes with the old node.

use std::{sync::Arc, time::Duration};

use serde_json::Value;
use tokio::{sync::watch, time::sleep};
use tokio_util::sync::CancellationToken;
use tracing::{debug, error, info};

use super::{
    csi_object::{Due, created, due},
    presence::expected,
};
use berth_api::{
    Store,
    api::{ApiClient, ApiError, Call, Resource, Typed},
};
use berth_types::api;

/// What the node says until then.
pub(super) const UNINITIALIZED: &str = "CSINode is not yet initialized";
/// Pause between two questions whether the server is there.
const POLL: Duration = Duration::from_secs(1);
/// First pause after a failure, how fast it grows, and the longest one.
const FIRST_PAUSE: Duration = Duration::from_millis(30);
const GROWTH: u32 = 8;
const LONGEST_PAUSE: Duration = Duration::from_secs(15);
/// How long one request may take.
const DEADLINE: Duration = Duration::from_secs(10);

/// What making the object needs.
pub(super) struct CsiNode {
    pub(super) api: Arc<dyn ApiClient>,
    pub(super) nodes: Store<api::Node>,
    pub(super) name: String,
    /// Whether this node was registered.
    pub(super) registered: watch::Receiver<bool>,
    /// Why storage is not ready.
    pub(super) storage: watch::Sender<Option<String>>,
}

impl CsiNode {
    /// Makes it, and makes it again for every new node of that name, until stopped.
    pub(super) async fn run(mut self, stop: CancellationToken) {
        tokio::select! {
            () = stop.cancelled() => {}
            () = self.live() => {}
        }
    }

    async fn live(&mut self) {
        let mut found = self.first_answer().await;
        expected(&self.nodes, &self.name, &self.registered).await;
        loop {
            let owner = self.settle(found.take()).await;
            self.storage.send_if_modified(|trouble| trouble.take().is_some());
            info!(node = %self.name, "CSINode is initialized");
            while self.known_uid().is_none_or(|uid| uid == owner) {
                self.nodes.changed().await;
            }
        }
    }

    /// The server is there once it says what there is, or that there is nothing.
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

    /// Tries until the object is right; the UID of the node it belongs to.
    async fn settle(&mut self, mut found: Option<Value>) -> String {
        // A 404 was an answer too: what to do with it is known without asking again.
        let mut look = false;
        let mut pause = FIRST_PAUSE;
        loop {
            if look {
                match self.get().await {
                    Ok(answer) => found = answer,
                    Err(err) => error!(node = %self.name, %err, "Failed to read CSINode"),
                }
            }
            match self.make_right(found.take()).await {
                Ok(uid) => return uid,
                // It is made soon, and then the watch says so.
                Err(err) if err.is_not_found() => debug!(node = %self.name, %err, "No node to own a CSINode"),
                Err(err) => {
                    error!(node = %self.name, %err, interval = ?pause, "Failed to initialize CSINode, will retry")
                }
            }
            look = true;
            tokio::select! {
                () = sleep(pause) => pause = (pause * GROWTH).min(LONGEST_PAUSE),
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

    async fn make_right(&self, found: Option<Value>) -> Result<String, ApiError> {
        let uid = self.uid().await?;
        let due = match found {
            None => {
                self.create(&uid).await?;
                return Ok(uid);
            }
            Some(found) => due(found, &uid),
        };
        match due {
            Due::Nothing => {}
            Due::Write(object) => {
                let call = Call::update(Resource::CSI_NODES, "", &self.name, object.to_string());
                self.api.call(call.within(DEADLINE)).await?;
            }
            Due::Replace => {
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
        node.metadata.uid.ok_or_else(|| ApiError::Malformed("a node without a UID".to_owned()))
    }
}

#[cfg(test)]
mod tests;
