//! Node status writer: builds the node status and patches it to the API server.
//!
//! ```text
//!  runtime ─┐
//!  facts   ─┤                                                   ┌─► nothing (unchanged, not due)
//!  storage ─┼─► debounce 50 ms ─► observe ─► draft (pure) ─► change ─► PATCH, up to 5 attempts
//!  network ─┤                        ▲                          └─► events
//!  node    ─┘                 10 s ──┘
//! ```
//!
//! Implements spec 05 §4.1, §4.3, §4.8, 10 §4.1.
//!
//! One task owns the last reported status. It works on the newer of the watch cache's copy and the server's last
//! response: the watch may lag behind the latter, and comparing with the stale copy would report the same status twice.

use std::{sync::Arc, time::Duration};

use serde_json::Value;
use tokio::{
    sync::watch,
    time::{Instant, sleep_until, timeout},
};
use tokio_util::sync::CancellationToken;
use tracing::{error, info, warn};

use super::{
    cluster_tasks::{ClusterConfig, NodeDeps},
    heartbeat_call::HeartbeatDeadline,
    host_network::NetworkObserver,
    lease_controller::wait_for_change,
    name_conflict,
    patch::node_patch,
    report_schedule::{ReportSchedule, StatusChange, change, jittered},
    startup_metrics::StartupMetrics,
    status::{Draft, NodeObservation, ReportedState, addresses, draft},
};
use berth_api::api::{ApiError, Call, Resource, TypedClient};
use berth_ports::{EventRecord, NodeFacts};
use berth_types::api;

/// Attempts of one status update.
const TRIES: u32 = 5;
/// Debounce: causes that arrive within this time are handled by one update.
const SETTLE: Duration = Duration::from_millis(50);
/// Minimum time between two updates that are triggered by changes, not by the timer.
const SPACING: Duration = Duration::from_millis(500);
/// Initial wait for the runtime and for storage to become ready.
const FIRST_CHECK: Duration = Duration::from_secs(2);
/// Initial wait for the result of the first runtime check: an unknown runtime state must not be reported as an error,
/// or every restart would make the node NotReady for a moment (spec 05 §4.8).
const FIRST_ANSWER: Duration = Duration::from_secs(8);
/// Substrings of runtime errors that mean "no check has completed yet".
const NOT_KNOWN: [&str; 2] = ["may not have completed yet", "has yet to be successful"];
/// Minimum time between two events about the same continuing node name conflict.
const HOUR: Duration = Duration::from_secs(3600);

/// Task that owns the last reported status of the node.
pub(super) struct StatusWriter {
    pub(super) config: Arc<ClusterConfig>,
    pub(super) deps: NodeDeps,
    pub(super) beat: HeartbeatDeadline,
    /// Set to `true` once the node is registered.
    pub(super) registered: watch::Sender<bool>,
    /// Why storage is not ready; `None` when it is ready.
    pub(super) storage: watch::Receiver<Option<String>>,
    facts: watch::Receiver<Arc<NodeFacts>>,
    network: NetworkObserver,
    /// Changes when the API server becomes reachable again.
    reached: watch::Receiver<u64>,
    memory: ReportedState,
    pub(super) start: StartupMetrics,
    /// Node in the server's last response; `None` once the watch has caught up.
    latest: Option<api::Node>,
    reports: ReportSchedule,
    last_report: Instant,
    /// Node that the server accepted, as we sent it; the server may have dropped fields it does not know.
    last_accepted: Option<api::Node>,
    /// Node that the server rejected as invalid (422).
    last_rejected: Option<api::Node>,
    /// Whether the previous update found no node object, and this was logged.
    gone: bool,
    /// When the last event about another agent with this node's name was recorded.
    conflict_reported_at: Option<Instant>,
    /// Errors of setters that were logged already.
    logged_errors: Vec<String>,
}

/// Outcome of one node status update, after all its attempts.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum UpdateResult {
    /// The server accepted or rejected the status, or no report was due.
    Fine,
    /// The node object does not exist.
    NoNode,
    /// All attempts failed; the next update retries.
    Failed,
}

impl StatusWriter {
    pub(super) fn new(
        config: Arc<ClusterConfig>,
        deps: NodeDeps,
        beat: HeartbeatDeadline,
        (registered, storage): (watch::Sender<bool>, watch::Receiver<Option<String>>),
    ) -> Self {
        Self {
            beat,
            registered,
            storage,
            facts: deps.facts.subscribe(),
            network: NetworkObserver::new(deps.network.clone()),
            reached: deps.api.reached(),
            memory: ReportedState::default(),
            start: StartupMetrics::new(deps.metrics.clone()),
            latest: None,
            reports: ReportSchedule::new(config.report_frequency),
            last_report: Instant::now(),
            last_accepted: None,
            last_rejected: None,
            gone: false,
            conflict_reported_at: None,
            logged_errors: Vec::new(),
            config,
            deps,
        }
    }

    /// Registers the node if configured, then keeps its status up to date until stopped.
    pub(super) async fn run(mut self, stop: CancellationToken) {
        tokio::select! {
            () = stop.cancelled() => {}
            () = self.run_loop() => {}
        }
    }

    async fn run_loop(&mut self) {
        let mut nodes = self.deps.nodes.clone();
        let _ = timeout(FIRST_CHECK, nodes.synced()).await;
        self.runtime_checked().await;
        if self.config.register {
            self.register().await;
        }
        let mut storage = self.storage.clone();
        let _ = timeout(FIRST_CHECK, storage.wait_for(Option::is_none)).await;
        loop {
            let began = Instant::now();
            let result = self.update().await;
            if result == UpdateResult::NoNode {
                self.deps.liveness.status.mark_idle();
                self.node_is_gone().await;
            }
            self.gone = result == UpdateResult::NoNode;
            self.wait_for_change(began, result).await;
        }
    }

    /// Waits for the first runtime check: before it, the state of the runtime is unknown.
    async fn runtime_checked(&self) {
        let mut runtime = self.deps.runtime.clone();
        let is_well = runtime.wait_for(|state| state.runtime_error.is_none() && state.network_error.is_none());
        if timeout(FIRST_CHECK, is_well).await.is_err() {
            let is_known = runtime.wait_for(|state| {
                let error = state.runtime_error.as_deref().unwrap_or_default();
                !NOT_KNOWN.iter().any(|text| error.contains(text))
            });
            let _ = timeout(FIRST_ANSWER, is_known).await;
        }
    }

    /// Waits until the next update is due or an input changes.
    async fn wait_for_change(&mut self, began: Instant, result: UpdateResult) {
        let pause = jittered(self.config.update_frequency, (self.deps.random)());
        self.deps.liveness.status.expect_within(pause);
        let next = Instant::now() + pause;
        let deps = &mut self.deps;
        let network = deps.network.clone();
        self.reached.mark_unchanged();
        tokio::select! {
            () = sleep_until(next) => return,
            () = wait_for_change(&mut self.reached), if result == UpdateResult::Failed => {}
            () = wait_for_change(&mut deps.runtime) => {}
            () = wait_for_change(&mut self.facts) => {}
            () = wait_for_change(&mut deps.runtime_version) => {}
            () = wait_for_change(&mut deps.devices) => {}
            () = wait_for_change(&mut deps.volumes_in_use) => {}
            () = wait_for_change(&mut self.storage) => {}
            () = deps.nodes.changed() => {}
            () = network.changed() => {}
        }
        sleep_until((began + SPACING).max(Instant::now() + SETTLE).min(next)).await;
    }

    async fn update(&mut self) -> UpdateResult {
        for attempt in 0..TRIES {
            self.deps.liveness.status.expect_within(self.beat.step_limit());
            let base = match self.base(attempt).await {
                Ok(base) => base,
                Err(err) if err.is_not_found() => return UpdateResult::NoNode,
                Err(err) => {
                    error!(node = %self.name(), %err, "Error updating node status, will retry");
                    continue;
                }
            };
            match self.report(&base).await {
                Ok(()) => return UpdateResult::Fine,
                Err(err) => error!(node = %self.name(), %err, "Error updating node status, will retry"),
            }
        }
        error!(node = %self.name(), err = "update node status exceeds retry count", "Unable to update node status");
        UpdateResult::Failed
    }

    /// The node to start from: the local copy on the first attempt, a GET from the server on retries.
    async fn base(&mut self, attempt: u32) -> Result<api::Node, ApiError> {
        match self.copy().filter(|_| attempt == 0) {
            Some(copy) => Ok(copy),
            None => self.deps.api.ask(self.beat.heartbeat(Call::get(Resource::NODES, "", self.name()))).await,
        }
    }

    /// The newer of the watch cache's copy and the server's last response.
    fn copy(&mut self) -> Option<api::Node> {
        let snapshot = self.deps.nodes.snapshot();
        let stored = snapshot.get("", self.name());
        let seen = stored.map_or_else(|| number(Some(&snapshot.version)), |node| version(node));
        if self.latest.as_ref().is_some_and(|latest| version(latest) <= seen) {
            self.latest = None;
        }
        self.latest.clone().or_else(|| stored.map(|node| (**node).clone()))
    }

    /// Computes the status and patches it if a report is due.
    async fn report(&mut self, base: &api::Node) -> Result<(), ApiError> {
        if let Some(why) =
            self.last_accepted.as_ref().and_then(|accepted| name_conflict::conflicting_machine(base, accepted))
        {
            self.name_is_taken(&format!("Another machine also reports status as this node: {why}"));
        }
        let Draft { node, .. } = self.draft(base).await;
        let change = change(base, &node);
        let is_due = self.reports.is_due(self.last_report.elapsed());
        if !is_due && (change != StatusChange::Urgent || self.is_already_reported(&node)) {
            self.volumes_reported(base);
            return Ok(());
        }
        let Some(patch) = node_patch(base, &node) else { return Ok(()) };
        match self.send(&patch).await {
            Ok(answer) => self.record_accepted(answer, node, change),
            Err(err) if err.is_invalid() && !is_of_another_node(&err) => {
                error!(node = %self.name(), %err, %patch, "API server rejected node status patch");
                self.refused(node, &err);
            }
            Err(err) => return Err(err),
        }
        Ok(())
    }

    /// Whether the server rejected this very status, or accepted it within the last update period: a server that
    /// drops parts of it receives it once per period, as from kubelet.
    fn is_already_reported(&self, node: &api::Node) -> bool {
        let is_same =
            |sent: &Option<api::Node>| sent.as_ref().is_some_and(|sent| change(sent, node) != StatusChange::Urgent);
        let is_fresh = self.last_report.elapsed() < self.config.update_frequency;
        is_same(&self.last_rejected) || (is_fresh && is_same(&self.last_accepted))
    }

    async fn send(&self, patch: &Value) -> Result<api::Node, ApiError> {
        let call = Call::patch(Resource::NODES, "", self.name(), patch.to_string()).sub("status");
        self.deps.api.ask(self.beat.heartbeat(call)).await
    }

    fn record_accepted(&mut self, answer: api::Node, node: api::Node, change: StatusChange) {
        self.reports.sent(change != StatusChange::Nothing, (self.deps.random)());
        self.last_report = Instant::now();
        self.last_rejected = None;
        self.start.record_status(&node, self.deps.clock.now());
        self.volumes_reported(&node);
        self.last_accepted = Some(node);
        self.latest = Some(answer);
    }

    /// Handles a rejection: the same status is not sent again until something changes; one event is recorded.
    fn refused(&mut self, node: api::Node, err: &ApiError) {
        if self.last_rejected.as_ref().is_none_or(|refused| change(refused, &node) == StatusChange::Urgent) {
            let text = format!("patch nodes {}: {err}", self.name());
            self.deps.events.record(EventRecord::node_warning("APIWriteRefused", text));
        }
        self.last_rejected = Some(node);
        self.last_report = Instant::now();
        self.reports.sent(true, (self.deps.random)());
    }

    fn volumes_reported(&self, node: &api::Node) {
        let volumes = node.status.as_ref().and_then(|status| status.volumes_in_use.as_deref());
        (self.deps.volumes_reported)(volumes.unwrap_or_default());
    }

    /// Computes the node that `base` should become now. Records each event, and logs each new setter error, once.
    pub(super) async fn draft(&mut self, base: &api::Node) -> Draft {
        self.publish_pod_cidr(base);
        let known = self.observe().await;
        let draft = draft(&self.config.status, base, &known, &mut self.memory);
        for event in &draft.events {
            self.deps.events.record(event.clone());
        }
        for err in draft.errors.iter().filter(|err| !self.logged_errors.contains(err)) {
            error!(node = %self.config.status.name, err, "Failed to set some node status fields");
        }
        self.logged_errors.clone_from(&draft.errors);
        draft
    }

    async fn observe(&mut self) -> NodeObservation {
        let settings = &self.config.status;
        let name = addresses::needs_name(settings).then_some(settings.name.as_str());
        let network = self.network.observe(name).await;
        let deps = &mut self.deps;
        NodeObservation {
            now: deps.clock.now(),
            network,
            facts: self.facts.borrow_and_update().clone(),
            runtime: deps.runtime.borrow_and_update().clone(),
            runtime_version: deps.runtime_version.borrow_and_update().clone(),
            images: (deps.images)(),
            devices: deps.devices.borrow_and_update().clone(),
            volumes_in_use: deps.volumes_in_use.borrow_and_update().clone(),
            storage_error: self.storage.borrow_and_update().clone(),
        }
    }

    fn publish_pod_cidr(&self, base: &api::Node) {
        let cidrs = base.spec.as_ref().and_then(|spec| spec.pod_cidrs.as_ref()).map(|all| all.join(","));
        if let Some(cidr) = cidrs.filter(|cidr| !cidr.is_empty()) {
            self.deps.pod_cidr.send_if_modified(|known| {
                let is_news = *known != cidr;
                *known = cidr;
                is_news
            });
        }
    }

    /// Handles a missing node object: registers the node again if configured, else warns once.
    async fn node_is_gone(&mut self) {
        self.latest = None;
        if !self.config.register || !self.config.reregister {
            if !self.gone {
                warn!(node = %self.name(), "Node object does not exist, not registering it again");
            }
            return;
        }
        info!(node = %self.name(), "Node object does not exist, registering it again");
        self.registered.send_replace(false);
        self.register().await;
    }

    /// Reports another agent with this node's name, at most once per hour.
    pub(super) fn name_is_taken(&mut self, text: &str) {
        if self.conflict_reported_at.is_none_or(|reported_at| reported_at.elapsed() >= HOUR) {
            self.conflict_reported_at = Some(Instant::now());
            warn!(node = self.name(), text, "Node name is used by another machine");
            self.deps.events.record(EventRecord::node_warning(name_conflict::REASON, text));
        }
    }

    /// Stores the node that the server returned for our own request.
    pub(super) fn adopt(&mut self, node: api::Node) {
        self.latest = Some(node);
    }

    pub(super) fn name(&self) -> &str {
        &self.config.status.name
    }
}

/// Whether the patch was rejected because the node's UID differs: the local copy is of a deleted node.
fn is_of_another_node(err: &ApiError) -> bool {
    err.status().is_some_and(|status| status.causes.iter().any(|cause| cause.field == "metadata.uid"))
}

fn version(node: &api::Node) -> u64 {
    number(node.metadata.resource_version.as_ref())
}

/// Parses a resource version. Versions of one server are comparable; an unparsable one counts as oldest (0).
fn number(version: Option<&String>) -> u64 {
    version.and_then(|version| version.parse().ok()).unwrap_or(0)
}

#[cfg(test)]
mod tests;
