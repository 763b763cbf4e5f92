//! Keeps the node's lease, by which the control plane knows that we live. Spec 05 §5, 10 §4.2.
//!
//! A task of its own on the heartbeat's connection: nothing else that goes on can delay it. It
//! outlives a shutdown of the node, and rests while the node object is gone: a lease that lives on
//! would hold up a node of the same name.

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
use berth_types::api;

/// Tries to renew before the lease is looked at anew.
const TRIES: usize = 5;
/// How long each try may take: a dead connection is found out early enough for the next one to
/// renew in time, a slow server is waited for in the end.
const DEADLINES: [Duration; TRIES] = [
    Duration::from_secs(3),
    Duration::from_secs(5),
    Duration::from_secs(10),
    Duration::from_secs(10),
    Duration::from_secs(10),
];
/// Renewals that are remembered while none of them is known to have arrived.
const REMEMBERED: usize = 2 * TRIES;
/// Where a lease says when it was renewed.
const RENEWED: &str = "/spec/renewTime";
/// First pause after a lease could not be read or made.
const FIRST_PAUSE: Duration = Duration::from_millis(200);
/// The longest one.
const LONGEST_PAUSE: Duration = Duration::from_secs(7);

/// What the lease needs.
pub(super) struct LeaseKeeper {
    pub(super) api: Arc<dyn ApiClient>,
    pub(super) beat: Beat,
    pub(super) holder: Holder,
    pub(super) nodes: Store<api::Node>,
    /// Whether this node was registered.
    pub(super) registered: watch::Receiver<bool>,
    /// Moves when the server can be reached again.
    pub(super) reached: watch::Receiver<u64>,
    pub(super) clock: Arc<dyn Clock>,
    pub(super) chance: Arc<dyn Fn() -> f64 + Send + Sync>,
    pub(super) metrics: NodeMetrics,
    /// The server's last answer.
    pub(super) last: Option<Value>,
    /// Whether the node object was ever seen.
    pub(super) seen: bool,
    pub(super) events: Arc<dyn EventSink>,
    /// Renewals in a row that met somebody else's.
    pub(super) conflicts: u32,
    /// When we have renewed it, as it may stand there: last, and in tries after that.
    pub(super) wrote: Vec<Value>,
    /// What was told of somebody else.
    pub(super) rival: Option<String>,
    /// Tells that the task lives.
    pub(super) pulse: Pulse,
}

/// What a round came to.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Round {
    /// The lease is good.
    Renewed,
    /// Nobody could be its owner.
    NoNode,
    /// It is not, and the next round tries again.
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
        // Who makes the node makes it soon.
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

    /// The node was there and was deleted: whoever did that does not want to see it alive.
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

    /// Renews with a few tries; an error where all of them failed.
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

    /// Keeps what may stand there from now on.
    fn writes(&mut self, renewed: Option<Value>) {
        self.wrote.extend(renewed);
        let too_many = self.wrote.len().saturating_sub(REMEMBERED);
        self.wrote.drain(..too_many);
    }

    /// Tells of a lease that somebody else holds and renews. It is renewed all the same, and its holder stays,
    /// as by the reference: so what is there before we have written may be our own, of before a restart.
    fn look_for_others(&mut self, lease: &Value) {
        if self.wrote.is_empty() || lease.pointer(RENEWED).is_some_and(|at| self.wrote.contains(at)) {
            return;
        }
        if let Some(holder) = rival::holder(lease, &self.holder.node, self.clock.now()) {
            self.tell(format!("The lease of this node is held by {holder:?}: another agent runs under its name"));
        }
    }

    /// Whether a renewal met somebody else's.
    fn contended(&mut self, is_contended: bool) {
        self.conflicts = if is_contended { self.conflicts.saturating_add(1) } else { 0 };
        if self.conflicts >= rival::CONFLICTS {
            self.tell("Somebody else renews the lease of this node, too: another agent runs under its name".to_owned());
        }
    }

    /// Once.
    fn tell(&mut self, text: String) {
        if self.rival.as_ref() != Some(&text) {
            warn!(node = %self.holder.node, text, "The name of this node is taken");
            self.events.record(Event::node_warning(rival::REASON, text.clone()));
            self.rival = Some(text);
        }
    }

    /// A lease that nobody owns is given to the node, if that can be read.
    async fn adopt(&self, lease: &mut Value) {
        if lease_object::lacks_owner(lease)
            && let Some(uid) = self.node_uid().await
        {
            lease_object::own(lease, &self.holder, &uid);
        }
    }

    /// Asks until there is an answer: what the lease is, or that we made it.
    async fn ensure(&mut self) -> Ensured {
        let mut pause = FIRST_PAUSE;
        loop {
            self.pulse.expects(self.beat.step());
            match self.look_or_make().await {
                Ok(ensured) => return ensured,
                Err(err) => {
                    error!(node = %self.holder.node, %err, interval = ?pause, "Failed to ensure lease exists, will retry")
                }
            }
            self.reached.mark_unchanged();
            tokio::select! {
                () = sleep(pause) => {}
                () = moved(&mut self.registered) => {} // we may now
                () = moved(&mut self.reached) => {}
            }
            pause = (pause * 2).min(LONGEST_PAUSE);
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
        // Short, because a renewal may wait for it that does not need it.
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

/// What became of looking for the lease.
enum Ensured {
    /// It is there.
    There(Value),
    /// It was not; now it is, as fresh as can be.
    Made,
    /// It is not, and there is no node to own it.
    NoNode,
}

/// Waits for a change; for ever once nobody can make one.
pub(super) async fn moved<T>(receiver: &mut watch::Receiver<T>) {
    if receiver.changed().await.is_err() {
        std::future::pending::<()>().await;
    }
}

#[cfg(test)]
mod tests;
