//! Node registration: creates the node object or reconciles an existing one.
//!
//! Implements spec 05 §4.2, 10 §4.1.

use std::time::Duration;

use tokio::time::sleep;
use tracing::{error, info, warn};

use super::{
    facts_publisher, initial_node::initial, name_conflict, node_reconciler::reconcile, patch::node_patch,
    status_writer::StatusWriter,
};
use berth_api::api::{ApiError, Call, Resource, TypedClient};
use berth_ports::EventRecord;
use berth_sys::backoff::Backoff;
use berth_types::api;

/// Delays before attempts, the first one included.
const BACKOFF: Backoff = Backoff::new(Duration::from_millis(100), Duration::from_secs(7));
/// Timeout of one request.
const DEADLINE: Duration = Duration::from_secs(30);

impl StatusWriter {
    /// Retries with back-off until the node is registered.
    pub(super) async fn register(&mut self) {
        let mut backoff = BACKOFF;
        let mut reported = String::new();
        loop {
            self.wait_for_attempt(&mut backoff).await;
            self.start.attempted(self.deps.clock.now());
            match self.try_to_register().await {
                Ok(node) => {
                    self.adopt(node);
                    self.registered.send_replace(true);
                    return;
                }
                Err(err) => {
                    error!(node = self.name(), %err, "Unable to register node with API server");
                    // A rejected object needs an operator: each error is recorded as one event.
                    if err.is_invalid() && reported != err.to_string() {
                        reported = err.to_string();
                        let text = format!("create nodes {}: {err}", self.name());
                        self.deps.events.record(EventRecord::node_warning("APIWriteRefused", text));
                    }
                }
            }
        }
    }

    /// Waits for the next attempt. If the watch syncs meanwhile (the node had no certificate before), the back-off starts
    /// again.
    async fn wait_for_attempt(&self, backoff: &mut Backoff) {
        let mut nodes = self.deps.nodes.clone();
        let was_synced = nodes.snapshot().synced;
        tokio::select! {
            biased;
            () = sleep(backoff.next_delay()) => {}
            () = nodes.synced(), if !was_synced => backoff.reset(),
        }
    }

    async fn try_to_register(&mut self) -> Result<api::Node, ApiError> {
        let ours = self.draft(&initial(&self.config.status, &self.config.origin)).await.node;
        // Pods that already run need the node's facts, with or without an API server.
        if self.deps.nodes.get("", self.name()).is_none() {
            facts_publisher::publish(&self.deps.facts, &ours);
        }
        let body = serde_json::to_vec(&ours).map_err(|err| ApiError::Malformed(err.to_string()))?;
        match self.deps.api.ask::<api::Node>(Call::create(Resource::NODES, "", body).within(DEADLINE)).await {
            Ok(node) => {
                info!(node = self.name(), "Successfully registered node");
                self.start.created(self.deps.clock.now());
                Ok(node)
            }
            Err(err) if err.is_already_exists() || err.is_conflict() || err.is_forbidden() => {
                self.reconcile(&ours, err).await
            }
            Err(err) => Err(err),
        }
    }

    /// Reconciles the existing node. Also used if creating it is forbidden: then it must exist.
    async fn reconcile(&mut self, ours: &api::Node, refusal: ApiError) -> Result<api::Node, ApiError> {
        let get = Call::get(Resource::NODES, "", self.name()).within(DEADLINE);
        let existing: api::Node = self.deps.api.ask(get).await.map_err(|err| {
            warn!(node = self.name(), %err, "Unable to register node with API server, error getting existing node");
            refusal
        })?;
        if let Some(why) = name_conflict::conflicting_machine(&existing, ours) {
            match name_conflict::is_alive(&existing) {
                true => self.name_is_taken(&format!("Another machine recently reported status as this node: {why}")),
                false => info!(node = self.name(), why, "Node object belongs to another machine, taking it over"),
            }
        }
        let wanted = reconcile(&existing, ours, self.config.devices_lost);
        let Some(patch) = node_patch(&existing, &wanted) else { return Ok(existing) };
        info!(node = self.name(), "Node was previously registered");
        let call = Call::patch(Resource::NODES, "", self.name(), patch.to_string()).sub("status");
        self.deps.api.ask(call.within(DEADLINE)).await
    }
}

#[cfg(test)]
mod tests;
