//! Node lease controller: creates and renews the `Lease` that serves as the node's heartbeat.
//!
//! Implements spec 05 §5, 10 §4.2. A task of its own on the heartbeat's connection, so that no other work delays it. It
//! outlives a node shutdown. It pauses while the node object does not exist: a renewed lease would block a new node of
//! the same name.

use std::{sync::Arc, time::Duration};

use serde_json::Value;
use tokio::{sync::watch, time::sleep};
use tokio_util::sync::CancellationToken;
use tracing::{debug, error, info, warn};

use super::{
    heartbeat_call::HeartbeatDeadline,
    lease_object::{self, Holder, NAMESPACE},
    name_conflict,
    node_wait::wait_for_node,
    report_schedule::jittered,
};
use berth_api::{
    ReflectorStore,
    api::{ApiClient, ApiError, Call, Resource, TypedClient},
};
use berth_metrics::NodeMetrics;
use berth_ports::{Clock, EventRecord, EventSink, TaskLiveness};
use berth_sys::backoff::Backoff;
use berth_types::api;

/// Attempts to renew before the lease is read again.
const TRIES: usize = 5;
/// Timeout of each attempt: short enough at first to detect a dead connection and still renew in time, longer at
/// the end for a slow server.
const DEADLINES: [Duration; TRIES] = [
    Duration::from_secs(3),
    Duration::from_secs(5),
    Duration::from_secs(10),
    Duration::from_secs(10),
    Duration::from_secs(10),
];
/// Maximum own renew times remembered while none of them is confirmed.
const REMEMBERED: usize = 2 * TRIES;
/// JSON pointer of a lease's renew time.
const RENEWED: &str = "/spec/renewTime";
/// Initial back-off after the lease could not be read or created.
const FIRST_PAUSE: Duration = Duration::from_millis(200);
/// Maximum back-off.
const LONGEST_PAUSE: Duration = Duration::from_secs(7);

/// Task that renews the node lease, with its dependencies and state.
pub(super) struct LeaseController {
    pub(super) api: Arc<dyn ApiClient>,
    pub(super) beat: HeartbeatDeadline,
    pub(super) holder: Holder,
    pub(super) nodes: ReflectorStore<api::Node>,
    /// Whether this node is registered.
    pub(super) registered: watch::Receiver<bool>,
    /// Changes when the API server becomes reachable again.
    pub(super) reached: watch::Receiver<u64>,
    pub(super) clock: Arc<dyn Clock>,
    pub(super) random: Arc<dyn Fn() -> f64 + Send + Sync>,
    pub(super) metrics: NodeMetrics,
    /// Lease in the server's last response.
    pub(super) last: Option<Value>,
    /// Whether the node object was ever observed.
    pub(super) node_observed: bool,
    pub(super) events: Arc<dyn EventSink>,
    /// Consecutive renewals that conflicted with another writer.
    pub(super) conflicts: u32,
    /// Own renew times that the server may have stored: the last confirmed one and those of later attempts.
    pub(super) own_renew_times: Vec<Value>,
    /// Last reported conflict with another agent.
    pub(super) reported_conflict: Option<String>,
    /// Liveness of the task.
    pub(super) liveness: TaskLiveness,
}

/// Result of a round.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum RenewalResult {
    /// The lease is renewed.
    Renewed,
    /// There is no node object that could own the lease.
    NoNode,
    /// The renewal failed; the next round retries.
    Failed,
}

impl LeaseController {
    /// Renews until stopped.
    pub(super) async fn run(mut self, stop: CancellationToken) {
        tokio::select! {
            () = stop.cancelled() => {}
            () = self.run_loop() => {}
        }
    }

    async fn run_loop(&mut self) {
        // Whoever registers the node is about to do so.
        wait_for_node(&self.nodes, &self.holder.node, &self.registered).await;
        // 0.25 of the duration, exactly: 10 s of 40.
        let interval = Duration::from_secs(u64::try_from(self.holder.seconds).unwrap_or(40)).mul_f64(0.25);
        loop {
            self.pause_while_node_missing().await;
            let round = self.round().await;
            let pause = jittered(interval, (self.random)());
            self.liveness.expect_within(pause);
            match round {
                RenewalResult::Renewed => {
                    self.metrics.lease_renewed();
                    sleep(pause).await;
                }
                RenewalResult::NoNode => tokio::select! {
                    () = sleep(pause) => {}
                    () = self.nodes.changed() => {}
                },
                RenewalResult::Failed => {
                    error!(node = %self.holder.node, interval = ?pause, "Failed to update lease, will retry");
                    self.reached.mark_unchanged();
                    tokio::select! {
                        () = sleep(pause) => {}
                        () = wait_for_change(&mut self.reached) => {}
                    }
                }
            }
        }
    }

    fn has_node(&mut self) -> bool {
        let is_there = self.nodes.get("", &self.holder.node).is_some();
        self.node_observed |= is_there;
        is_there
    }

    /// Pauses while the node object does not exist after it was observed: it was deleted on purpose, and a renewed
    /// lease would keep the node alive.
    async fn pause_while_node_missing(&mut self) {
        let mut is_logged = false;
        while !self.has_node() && self.node_observed && self.nodes.snapshot().synced {
            if !is_logged {
                info!(node = %self.holder.node, "Node object does not exist, pausing lease renewal");
                is_logged = true;
                self.last = None;
            }
            self.liveness.mark_idle();
            self.nodes.changed().await;
        }
    }

    async fn round(&mut self) -> RenewalResult {
        self.liveness.expect_within(self.beat.step_limit());
        if let Some(last) = self.last.take()
            && let Ok(round) = self.renew(last).await
        {
            return round;
        }
        match self.ensure().await {
            LeaseLookup::Made => RenewalResult::Renewed,
            LeaseLookup::NoNode => RenewalResult::NoNode,
            LeaseLookup::There(lease) => {
                self.check_holder(&lease);
                self.renew(lease).await.unwrap_or(RenewalResult::Failed)
            }
        }
    }

    /// Renews the lease, with retries; `Err` if all attempts failed.
    async fn renew(&mut self, mut lease: Value) -> Result<RenewalResult, ()> {
        self.adopt(&mut lease).await;
        let mut is_contended = false;
        for deadline in DEADLINES {
            self.liveness.expect_within(self.beat.step_limit());
            let body = lease_object::renewed(&lease, &self.holder, self.clock.now());
            self.remember_renew_time(body.pointer(RENEWED).cloned());
            let name = &self.holder.node;
            let call = Call::update(Resource::LEASES, NAMESPACE, name, body.to_string());
            match self.ask(self.beat.within(call, deadline)).await {
                Ok(lease) => {
                    self.own_renew_times = lease.pointer(RENEWED).cloned().into_iter().collect();
                    self.last = Some(lease);
                    self.record_conflict(is_contended);
                    return Ok(RenewalResult::Renewed);
                }
                Err(err) if err.is_conflict() => match self.ensure().await {
                    LeaseLookup::Made => return Ok(RenewalResult::Renewed),
                    LeaseLookup::NoNode => return Ok(RenewalResult::NoNode),
                    LeaseLookup::There(newer) => {
                        self.check_holder(&newer);
                        (lease, is_contended) = (newer, true);
                    }
                },
                Err(err) => error!(node = %name, %err, "Failed to update lease"),
            }
        }
        Err(())
    }

    /// Remembers a renew time that the server may store from now on.
    fn remember_renew_time(&mut self, renewed: Option<Value>) {
        self.own_renew_times.extend(renewed);
        let too_many = self.own_renew_times.len().saturating_sub(REMEMBERED);
        self.own_renew_times.drain(..too_many);
    }

    /// Reports a lease that another holder renews. Like kubelet, Berth renews it all the same and keeps its holder. A
    /// renew time found before our first write may be our own, from before a restart.
    fn check_holder(&mut self, lease: &Value) {
        if self.own_renew_times.is_empty() || lease.pointer(RENEWED).is_some_and(|at| self.own_renew_times.contains(at))
        {
            return;
        }
        if let Some(holder) = name_conflict::holder(lease, &self.holder.node, self.clock.now()) {
            self.report_conflict(format!(
                "The lease of this node is held by {holder:?}: another agent uses this node name"
            ));
        }
    }

    /// Counts consecutive renewals that conflicted with another writer, and reports them from a threshold on.
    fn record_conflict(&mut self, is_contended: bool) {
        self.conflicts = if is_contended { self.conflicts.saturating_add(1) } else { 0 };
        if self.conflicts >= name_conflict::CONFLICTS {
            self.report_conflict(
                "The lease of this node is also renewed by another client: another agent uses this node name"
                    .to_owned(),
            );
        }
    }

    /// Logs and records an event, once per text.
    fn report_conflict(&mut self, text: String) {
        if self.reported_conflict.as_ref() != Some(&text) {
            warn!(node = %self.holder.node, text, "Node name is used by another agent");
            self.events.record(EventRecord::node_warning(name_conflict::REASON, text.clone()));
            self.reported_conflict = Some(text);
        }
    }

    /// Sets the node as owner of a lease without one, if the node is readable.
    async fn adopt(&self, lease: &mut Value) {
        if lease_object::lacks_owner(lease)
            && let Some(uid) = self.node_uid().await
        {
            lease_object::set_owner(lease, &self.holder, &uid);
        }
    }

    /// Retries with back-off until the lease was read or created.
    async fn ensure(&mut self) -> LeaseLookup {
        let mut backoff = Backoff::new(FIRST_PAUSE, LONGEST_PAUSE);
        loop {
            self.liveness.expect_within(self.beat.step_limit());
            let pause = backoff.next_delay();
            match self.get_or_create().await {
                Ok(ensured) => return ensured,
                Err(err) => {
                    error!(node = %self.holder.node, %err, interval = ?pause, "Failed to ensure lease exists, will retry")
                }
            }
            self.reached.mark_unchanged();
            tokio::select! {
                () = sleep(pause) => {}
                () = wait_for_change(&mut self.registered) => {} // creation may be permitted now
                () = wait_for_change(&mut self.reached) => {}
            }
        }
    }

    async fn get_or_create(&mut self) -> Result<LeaseLookup, ApiError> {
        let name = &self.holder.node;
        match self.ask(self.beat.heartbeat(Call::get(Resource::LEASES, NAMESPACE, name))).await {
            Ok(lease) => return Ok(LeaseLookup::There(lease)),
            Err(err) if err.is_not_found() => {}
            Err(err) => return Err(err),
        }
        let Some(uid) = self.node_uid().await else { return Ok(LeaseLookup::NoNode) };
        let lease = lease_object::created(&self.holder, &uid, self.clock.now());
        let call = Call::create(Resource::LEASES, NAMESPACE, lease.to_string());
        self.last = Some(self.ask(self.beat.heartbeat(call)).await?);
        Ok(LeaseLookup::Made)
    }

    async fn ask(&self, call: Call) -> Result<Value, ApiError> {
        let answer = self.api.ask::<Value>(call).await?;
        lease_object::without_managed_fields(answer)
            .ok_or_else(|| ApiError::Malformed("response is not a Lease object".to_owned()))
    }

    async fn node_uid(&self) -> Option<String> {
        // Short: a renewal that does not depend on the UID may wait for this request.
        let call = self.beat.within(Call::get(Resource::NODES, "", &self.holder.node), DEADLINES[0]);
        match self.api.ask::<Value>(call).await {
            Ok(node) => node.pointer("/metadata/uid").and_then(Value::as_str).map(str::to_owned),
            Err(err) => {
                debug!(node = %self.holder.node, %err, "Failed to get node when trying to set owner ref to the node lease");
                None
            }
        }
    }
}

/// Result of reading or creating the lease.
enum LeaseLookup {
    /// The lease exists.
    There(Value),
    /// The lease did not exist and was created, with the current renew time.
    Made,
    /// The lease does not exist, and there is no node object to own it.
    NoNode,
}

/// Waits for a change; never returns once the sender is dropped.
pub(super) async fn wait_for_change<T>(receiver: &mut watch::Receiver<T>) {
    if receiver.changed().await.is_err() {
        std::future::pending::<()>().await;
    }
}

#[cfg(test)]
mod tests;
