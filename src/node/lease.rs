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
    beat::Beat,
    lease_object::{self, Holder, NAMESPACE},
    presence::expected,
    report::pause,
    rival,
};
use berth_api::{
    Store,
    api::{ApiClient, ApiError, Call, Resource, Typed},
};
use berth_metrics::NodeMetrics;
use berth_ports::{Clock, Event, EventSink, Pulse};
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
pub(super) struct LeaseKeeper {
    pub(super) api: Arc<dyn ApiClient>,
    pub(super) beat: Beat,
    pub(super) holder: Holder,
    pub(super) nodes: Store<api::Node>,
    /// Whether this node is registered.
    pub(super) registered: watch::Receiver<bool>,
    /// Changes when the API server becomes reachable again.
    pub(super) reached: watch::Receiver<u64>,
    pub(super) clock: Arc<dyn Clock>,
    pub(super) chance: Arc<dyn Fn() -> f64 + Send + Sync>,
    pub(super) metrics: NodeMetrics,
    /// Lease in the server's last response.
    pub(super) last: Option<Value>,
    /// Whether the node object was ever observed.
    pub(super) seen: bool,
    pub(super) events: Arc<dyn EventSink>,
    /// Consecutive renewals that conflicted with another writer.
    pub(super) conflicts: u32,
    /// Own renew times that the server may have stored: the last confirmed one and those of later attempts.
    pub(super) wrote: Vec<Value>,
    /// Last reported conflict with another agent.
    pub(super) rival: Option<String>,
    /// Liveness of the task.
    pub(super) pulse: Pulse,
}

/// Result of a round.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Round {
    /// The lease is renewed.
    Renewed,
    /// There is no node object that could own the lease.
    NoNode,
    /// The renewal failed; the next round retries.
    Failed,
}

impl LeaseKeeper {
    /// Renews until stopped.
    pub(super) async fn run(mut self, stop: CancellationToken) {
        tokio::select! {
            () = stop.cancelled() => {}
            () = self.live() => {}
        }
    }

    async fn live(&mut self) {
        // Whoever registers the node is about to do so.
        expected(&self.nodes, &self.holder.node, &self.registered).await;
        // 0.25 of the duration, exactly: 10 s of 40.
        let interval = Duration::from_secs(u64::try_from(self.holder.seconds).unwrap_or(40)).mul_f64(0.25);
        loop {
            self.rest_while_gone().await;
            let round = self.round().await;
            let pause = pause(interval, (self.chance)());
            self.pulse.expects(pause);
            match round {
                Round::Renewed => {
                    self.metrics.lease_renewed();
                    sleep(pause).await;
                }
                Round::NoNode => tokio::select! {
                    () = sleep(pause) => {}
                    () = self.nodes.changed() => {}
                },
                Round::Failed => {
                    error!(node = %self.holder.node, interval = ?pause, "Failed to update lease, will retry");
                    self.reached.mark_unchanged();
                    tokio::select! {
                        () = sleep(pause) => {}
                        () = moved(&mut self.reached) => {}
                    }
                }
            }
        }
    }

    fn has_node(&mut self) -> bool {
        let is_there = self.nodes.get("", &self.holder.node).is_some();
        self.seen |= is_there;
        is_there
    }

    /// Pauses while the node object does not exist after it was observed: it was deleted on purpose, and a renewed
    /// lease would keep the node alive.
    async fn rest_while_gone(&mut self) {
        let mut told = false;
        while !self.has_node() && self.seen && self.nodes.snapshot().synced {
            if !told {
                info!(node = %self.holder.node, "The node object is gone, its lease rests");
                told = true;
                self.last = None;
            }
            self.pulse.rests();
            self.nodes.changed().await;
        }
    }

    async fn round(&mut self) -> Round {
        self.pulse.expects(self.beat.step());
        if let Some(last) = self.last.take()
            && let Ok(round) = self.renew(last).await
        {
            return round;
        }
        match self.ensure().await {
            Ensured::Made => Round::Renewed,
            Ensured::NoNode => Round::NoNode,
            Ensured::There(lease) => {
                self.look_for_others(&lease);
                self.renew(lease).await.unwrap_or(Round::Failed)
            }
        }
    }

    /// Renews the lease, with retries; `Err` if all attempts failed.
    async fn renew(&mut self, mut lease: Value) -> Result<Round, ()> {
        self.adopt(&mut lease).await;
        let mut is_contended = false;
        for deadline in DEADLINES {
            self.pulse.expects(self.beat.step());
            let body = lease_object::renewed(&lease, &self.holder, self.clock.now());
            self.writes(body.pointer(RENEWED).cloned());
            let name = &self.holder.node;
            let call = Call::update(Resource::LEASES, NAMESPACE, name, body.to_string());
            match self.ask(self.beat.within(call, deadline)).await {
                Ok(lease) => {
                    self.wrote = lease.pointer(RENEWED).cloned().into_iter().collect();
                    self.last = Some(lease);
                    self.contended(is_contended);
                    return Ok(Round::Renewed);
                }
                Err(err) if err.is_conflict() => match self.ensure().await {
                    Ensured::Made => return Ok(Round::Renewed),
                    Ensured::NoNode => return Ok(Round::NoNode),
                    Ensured::There(newer) => {
                        self.look_for_others(&newer);
                        (lease, is_contended) = (newer, true);
                    }
                },
                Err(err) => error!(node = %name, %err, "Failed to update lease"),
            }
        }
        Err(())
    }

    /// Remembers a renew time that the server may store from now on.
    fn writes(&mut self, renewed: Option<Value>) {
        self.wrote.extend(renewed);
        let too_many = self.wrote.len().saturating_sub(REMEMBERED);
        self.wrote.drain(..too_many);
    }

    /// Reports a lease that another holder renews. Like kubelet, Berth renews it all the same and keeps its holder. A
    /// renew time found before our first write may be our own, from before a restart.
    fn look_for_others(&mut self, lease: &Value) {
        if self.wrote.is_empty() || lease.pointer(RENEWED).is_some_and(|at| self.wrote.contains(at)) {
            return;
        }
        if let Some(holder) = rival::holder(lease, &self.holder.node, self.clock.now()) {
            self.tell(format!("The lease of this node is held by {holder:?}: another agent runs under its name"));
        }
    }

    /// Counts consecutive renewals that conflicted with another writer, and reports them from a threshold on.
    fn contended(&mut self, is_contended: bool) {
        self.conflicts = if is_contended { self.conflicts.saturating_add(1) } else { 0 };
        if self.conflicts >= rival::CONFLICTS {
            self.tell("Somebody else renews the lease of this node, too: another agent runs under its name".to_owned());
        }
    }

    /// Logs and records an event, once per text.
    fn tell(&mut self, text: String) {
        if self.rival.as_ref() != Some(&text) {
            warn!(node = %self.holder.node, text, "The name of this node is taken");
            self.events.record(Event::node_warning(rival::REASON, text.clone()));
            self.rival = Some(text);
        }
    }

    /// Sets the node as owner of a lease without one, if the node is readable.
    async fn adopt(&self, lease: &mut Value) {
        if lease_object::lacks_owner(lease)
            && let Some(uid) = self.node_uid().await
        {
            lease_object::own(lease, &self.holder, &uid);
        }
    }

    /// Retries with back-off until the lease was read or created.
    async fn ensure(&mut self) -> Ensured {
        let mut backoff = Backoff::new(FIRST_PAUSE, LONGEST_PAUSE);
        loop {
            self.pulse.expects(self.beat.step());
            let pause = backoff.next_delay();
            match self.look_or_make().await {
                Ok(ensured) => return ensured,
                Err(err) => {
                    error!(node = %self.holder.node, %err, interval = ?pause, "Failed to ensure lease exists, will retry")
                }
            }
            self.reached.mark_unchanged();
            tokio::select! {
                () = sleep(pause) => {}
                () = moved(&mut self.registered) => {} // creation may be permitted now
                () = moved(&mut self.reached) => {}
            }
        }
    }

    async fn look_or_make(&mut self) -> Result<Ensured, ApiError> {
        let name = &self.holder.node;
        match self.ask(self.beat.on(Call::get(Resource::LEASES, NAMESPACE, name))).await {
            Ok(lease) => return Ok(Ensured::There(lease)),
            Err(err) if err.is_not_found() => {}
            Err(err) => return Err(err),
        }
        let Some(uid) = self.node_uid().await else { return Ok(Ensured::NoNode) };
        let lease = lease_object::created(&self.holder, &uid, self.clock.now());
        let call = Call::create(Resource::LEASES, NAMESPACE, lease.to_string());
        self.last = Some(self.ask(self.beat.on(call)).await?);
        Ok(Ensured::Made)
    }

    async fn ask(&self, call: Call) -> Result<Value, ApiError> {
        let answer = self.api.ask::<Value>(call).await?;
        lease_object::kept(answer).ok_or_else(|| ApiError::Malformed("the answer is no lease".to_owned()))
    }

    async fn node_uid(&self) -> Option<String> {
        // Short: a renewal that does not depend on the UID may wait for this request.
        let call = self.beat.within(Call::get(Resource::NODES, "", &self.holder.node), DEADLINES[0]);
        match self.api.ask::<Value>(call).await {
            Ok(node) => node.pointer("/metadata/uid").and_then(Value::as_str).map(str::to_owned),
            Err(err) => {
                debug!(node = %self.holder.node, %err, "No node to own the lease");
                None
            }
        }
    }
}

/// Result of reading or creating the lease.
enum Ensured {
    /// The lease exists.
    There(Value),
    /// The lease did not exist and was created, with the current renew time.
    Made,
    /// The lease does not exist, and there is no node object to own it.
    NoNode,
}

/// Waits for a change; never returns once the sender is dropped.
pub(super) async fn moved<T>(receiver: &mut watch::Receiver<T>) {
    if receiver.changed().await.is_err() {
        std::future::pending::<()>().await;
    }
}

#[cfg(test)]
mod tests;
