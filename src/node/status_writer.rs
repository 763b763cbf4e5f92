//! Keeps the node's status true on the API server. Spec 05 §4.1, §4.3, §4.8, 10 §4.1.
//!
//! ```text
//!  runtime ─┐
//!  facts   ─┤                                              ┌─► nothing (unchanged, not due)
//!  storage ─┼─► settle 50 ms ─► look ─► draft (pure) ─► change ─► PATCH, up to 5 tries
//!  network ─┤                     ▲                        └─► events
//!  node    ─┘              10 s ──┘
//! ```
//!
//! One task owns what was told. It works on the newest of the watch's copy and the server's last
//! answer: the watch may not have brought the latter yet, and what was told a moment ago would be
//! told again.

use std::{sync::Arc, time::Duration};

use serde_json::Value;
use tokio::{
    sync::watch,
    time::{Instant, sleep_until, timeout},
};
use tokio_util::sync::CancellationToken;
use tracing::{error, info, warn};

use super::{
    beat::Beat,
    cluster::{ClusterConfig, NodeDeps},
    host_network::Watched,
    lease::moved,
    patch::node_patch,
    report::{Change, Reports, change, pause},
    rival,
    startup::Start,
    status::{Draft, Known, Memory, addresses, draft},
};
use berth_api::api::{ApiError, Call, Resource, Typed};
use berth_ports::{Event, NodeFacts};
use berth_types::api;

/// Tries of one update.
const TRIES: u32 = 5;
/// How long causes are gathered before one look at all of them.
const SETTLE: Duration = Duration::from_millis(50);
/// Least time between two updates that nobody's clock asked for.
const SPACING: Duration = Duration::from_millis(500);
/// How long a runtime and storage that are well are waited for at first.
const FIRST_CHECK: Duration = Duration::from_secs(2);
/// How long is waited where nobody can tell yet: what is not known shall not be told as wrong, or
/// every restart would make a node unready for a moment (spec 05 §4.8).
const FIRST_ANSWER: Duration = Duration::from_secs(8);
/// What says so.
const NOT_KNOWN: [&str; 2] = ["may not have completed yet", "has yet to be successful"];
/// Between two times that something is told that goes on.
const HOUR: Duration = Duration::from_secs(3600);

/// Owns what was told of the node.
pub(super) struct StatusWriter {
    pub(super) config: Arc<ClusterConfig>,
    pub(super) deps: NodeDeps,
    pub(super) beat: Beat,
    /// Whether this node was registered.
    pub(super) registered: watch::Sender<bool>,
    /// Why storage is not ready.
    pub(super) storage: watch::Receiver<Option<String>>,
    facts: watch::Receiver<Arc<NodeFacts>>,
    network: Watched,
    /// Moves when the server can be reached again.
    reached: watch::Receiver<u64>,
    memory: Memory,
    pub(super) start: Start,
    /// The server's last answer.
    latest: Option<api::Node>,
    reports: Reports,
    last_report: Instant,
    /// What the server took, as we wrote it; it may have dropped what it does not know.
    told: Option<api::Node>,
    /// What the server would not take (422).
    refused: Option<api::Node>,
    /// Whether it was said that there is no node.
    gone: bool,
    /// When it was last told that somebody else reports as this node.
    rival: Option<Instant>,
    /// Setters' errors that were logged.
    said: Vec<String>,
}

/// What an update came to.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Told {
    /// The server has it, or did not need it.
    Fine,
    /// There is no node.
    NoNode,
    /// The next look tries again.
    Failed,
}

impl StatusWriter {
    pub(super) fn new(
        config: Arc<ClusterConfig>,
        deps: NodeDeps,
        beat: Beat,
        (registered, storage): (watch::Sender<bool>, watch::Receiver<Option<String>>),
    ) -> Self {
        Self {
            beat,
            registered,
            storage,
            facts: deps.facts.subscribe(),
            network: Watched::new(deps.network.clone()),
            reached: deps.api.reached(),
            memory: Memory::default(),
            start: Start::new(deps.metrics.clone()),
            latest: None,
            reports: Reports::new(config.report_frequency),
            last_report: Instant::now(),
            told: None,
            refused: None,
            gone: false,
            rival: None,
            said: Vec::new(),
            config,
            deps,
        }
    }

    /// Registers the node if that is wanted, then keeps its status true until stopped.
    pub(super) async fn run(mut self, stop: CancellationToken) {
        tokio::select! {
            () = stop.cancelled() => {}
            () = self.live() => {}
        }
    }

    async fn live(&mut self) {
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
            let told = self.update().await;
            if told == Told::NoNode {
                self.deps.pulses.status.rests();
                self.node_is_gone().await;
            }
            self.gone = told == Told::NoNode;
            self.rest(began, told).await;
        }
    }

    /// Nothing is known of the runtime before its first check.
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

    /// Until it is time, or something moved.
    async fn rest(&mut self, began: Instant, told: Told) {
        let pause = pause(self.config.update_frequency, (self.deps.chance)());
        self.deps.pulses.status.expects(pause);
        let next = Instant::now() + pause;
        let deps = &mut self.deps;
        let network = deps.network.clone();
        self.reached.mark_unchanged();
        tokio::select! {
            () = sleep_until(next) => return,
            () = moved(&mut self.reached), if told == Told::Failed => {}
            () = moved(&mut deps.runtime) => {}
            () = moved(&mut self.facts) => {}
            () = moved(&mut deps.runtime_version) => {}
            () = moved(&mut deps.devices) => {}
            () = moved(&mut deps.volumes_in_use) => {}
            () = moved(&mut self.storage) => {}
            () = deps.nodes.changed() => {}
            () = network.changed() => {}
        }
        sleep_until((began + SPACING).max(Instant::now() + SETTLE).min(next)).await;
    }

    async fn update(&mut self) -> Told {
        for attempt in 0..TRIES {
            self.deps.pulses.status.expects(self.beat.step());
            let base = match self.base(attempt).await {
                Ok(base) => base,
                Err(err) if err.is_not_found() => return Told::NoNode,
                Err(err) => {
                    error!(node = %self.name(), %err, "Error updating node status, will retry");
                    continue;
                }
            };
            match self.tell(&base).await {
                Ok(()) => return Told::Fine,
                Err(err) => error!(node = %self.name(), %err, "Error updating node status, will retry"),
            }
        }
        error!(node = %self.name(), err = "update node status exceeds retry count", "Unable to update node status");
        Told::Failed
    }

    /// The node to work on: what is known at first, what the server says after that failed.
    async fn base(&mut self, attempt: u32) -> Result<api::Node, ApiError> {
        match self.copy().filter(|_| attempt == 0) {
            Some(copy) => Ok(copy),
            None => self.deps.api.ask(self.beat.on(Call::get(Resource::NODES, "", self.name()))).await,
        }
    }

    /// The newer one of the watch's copy and the last answer.
    fn copy(&mut self) -> Option<api::Node> {
        let snapshot = self.deps.nodes.snapshot();
        let stored = snapshot.get("", self.name());
        let seen = stored.map_or_else(|| number(Some(&snapshot.version)), |node| version(node));
        if self.latest.as_ref().is_some_and(|latest| version(latest) <= seen) {
            self.latest = None;
        }
        self.latest.clone().or_else(|| stored.map(|node| (**node).clone()))
    }

    /// Looks, and tells what has to be told of it.
    async fn tell(&mut self, base: &api::Node) -> Result<(), ApiError> {
        if let Some(why) = self.told.as_ref().and_then(|told| rival::another(base, told)) {
            self.name_is_taken(&format!("Another machine reports as this node, too: {why}"));
        }
        let Draft { node, .. } = self.draft(base).await;
        let change = change(base, &node);
        let is_due = self.reports.is_due(self.last_report.elapsed());
        if !is_due && (change != Change::Something || self.is_said(&node)) {
            self.volumes_reported(base);
            return Ok(());
        }
        let Some(patch) = node_patch(base, &node) else { return Ok(()) };
        match self.send(&patch).await {
            Ok(answer) => self.told(answer, node, change),
            Err(err) if err.is_invalid() && !is_of_another_node(&err) => {
                error!(node = %self.name(), %err, %patch, "The API server refuses the node status");
                self.refused(node, &err);
            }
            Err(err) => return Err(err),
        }
        Ok(())
    }

    /// Whether the server refused just that, or took it a moment ago: one that does not keep all
    /// of it is told once a period, as by the reference.
    fn is_said(&self, node: &api::Node) -> bool {
        let is_same =
            |said: &Option<api::Node>| said.as_ref().is_some_and(|said| change(said, node) != Change::Something);
        let is_fresh = self.last_report.elapsed() < self.config.update_frequency;
        is_same(&self.refused) || (is_fresh && is_same(&self.told))
    }

    async fn send(&self, patch: &Value) -> Result<api::Node, ApiError> {
        let call = Call::patch(Resource::NODES, "", self.name(), patch.to_string()).sub("status");
        self.deps.api.ask(self.beat.on(call)).await
    }

    fn told(&mut self, answer: api::Node, node: api::Node, change: Change) {
        self.reports.sent(change != Change::Nothing, (self.deps.chance)());
        self.last_report = Instant::now();
        self.refused = None;
        self.start.told(&node, self.deps.clock.now());
        self.volumes_reported(&node);
        self.told = Some(node);
        self.latest = Some(answer);
    }

    /// It will not be taken the next time either: told once, and tried again once something moved.
    fn refused(&mut self, node: api::Node, err: &ApiError) {
        if self.refused.as_ref().is_none_or(|refused| change(refused, &node) == Change::Something) {
            let text = format!("patch nodes {}: {err}", self.name());
            self.deps.events.record(Event::node_warning("APIWriteRefused", text));
        }
        self.refused = Some(node);
        self.last_report = Instant::now();
        self.reports.sent(true, (self.deps.chance)());
    }

    fn volumes_reported(&self, node: &api::Node) {
        let volumes = node.status.as_ref().and_then(|status| status.volumes_in_use.as_deref());
        (self.deps.volumes_reported)(volumes.unwrap_or_default());
    }

    /// What `base` should become, as of now. Events are told, each once.
    pub(super) async fn draft(&mut self, base: &api::Node) -> Draft {
        self.tell_pod_cidr(base);
        let known = self.known().await;
        let draft = draft(&self.config.status, base, &known, &mut self.memory);
        for event in &draft.events {
            self.deps.events.record(event.clone());
        }
        for err in draft.errors.iter().filter(|err| !self.said.contains(err)) {
            error!(node = %self.config.status.name, err, "Failed to set some node status fields");
        }
        self.said.clone_from(&draft.errors);
        draft
    }

    async fn known(&mut self) -> Known {
        let settings = &self.config.status;
        let name = addresses::needs_name(settings).then_some(settings.name.as_str());
        let network = self.network.look(name).await;
        let deps = &mut self.deps;
        Known {
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

    fn tell_pod_cidr(&self, base: &api::Node) {
        let cidrs = base.spec.as_ref().and_then(|spec| spec.pod_cidrs.as_ref()).map(|all| all.join(","));
        if let Some(cidr) = cidrs.filter(|cidr| !cidr.is_empty()) {
            self.deps.pod_cidr.send_if_modified(|known| {
                let is_news = *known != cidr;
                *known = cidr;
                is_news
            });
        }
    }

    /// The server says that there is no such node.
    async fn node_is_gone(&mut self) {
        self.latest = None;
        if !self.config.register || !self.config.reregister {
            if !self.gone {
                warn!(node = %self.name(), "There is no node object; it is not made again");
            }
            return;
        }
        info!(node = %self.name(), "The node object is gone, it is registered again");
        self.registered.send_replace(false);
        self.register().await;
    }

    /// Somebody else lives under our name: told, but not more often than once an hour.
    pub(super) fn name_is_taken(&mut self, text: &str) {
        if self.rival.is_none_or(|told| told.elapsed() >= HOUR) {
            self.rival = Some(Instant::now());
            warn!(node = self.name(), text, "The name of this node is taken");
            self.deps.events.record(Event::node_warning(rival::REASON, text));
        }
    }

    /// The server has this node, as of our own request.
    pub(super) fn adopt(&mut self, node: api::Node) {
        self.latest = Some(node);
    }

    pub(super) fn name(&self) -> &str {
        &self.config.status.name
    }
}

/// The patch met a node of another UID: the copy was of one that is gone.
fn is_of_another_node(err: &ApiError) -> bool {
    err.status().is_some_and(|status| status.causes.iter().any(|cause| cause.field == "metadata.uid"))
}

fn version(node: &api::Node) -> u64 {
    number(node.metadata.resource_version.as_ref())
}

/// Versions of one server are comparable; what is no number is older than all.
fn number(version: Option<&String>) -> u64 {
    version.and_then(|version| version.parse().ok()).unwrap_or(0)
}

#[cfg(test)]
mod tests;
