//! Test API server on loopback with realistic validation, ordering, and failure modes.
//!
//! Refuses what a real API server refuses, orders and loses what a real network orders and loses, and records every
//! request for later inspection. Implements spec 10a §I.
//!
//! ```text
//! wire ─► serve ─► faults ─► core (one lock: authorize, rules, store, notify watchers) ─► faults ─► response
//!                   recorder sees all of it              └─► controllers, later
//! ```
//!
//! `resources` is the table of resources; `verbs`, `lists`, and `watch` implement what is common to all of them,
//! `rules` what is specific to each, through the interface `view`; `tables` renders what kubectl prints. Tests act as
//! users through `in_process_client` and inject failures through `faults`; other processes do both through `sim`.

pub mod clock;
mod cluster;
pub mod conformance;
pub mod core;
pub mod faults;
pub mod in_process_client;
pub mod kubeconfigs;
mod lists;
mod openapi;
mod proxy;
pub mod recorder;
pub mod refusal;
mod request_pipeline;
pub mod resources;
pub mod reviews;
pub mod rules;
pub mod selectors;
pub mod sim;
mod store;
mod tables;
mod verbs;
pub mod view;
mod watch;
pub mod wire;

use std::{
    collections::HashMap,
    net::SocketAddr,
    sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, atomic::Ordering},
    time::Duration,
};

use berth::certificates::{Authority, CertificatePair, Validity};
use jiff::{SignedDuration, Timestamp};
use serde_json::Value;
use tokio::{net::TcpListener, runtime::Handle, sync::watch::Sender};
use tokio_util::sync::CancellationToken;

use crate::reservation::free_ports;

pub use self::{
    core::{Core, Switches},
    faults::{Effect, Fault, FaultId, SimpleFault},
    in_process_client::User,
    recorder::{ConditionContext, RecordedRequest, Requests},
    view::Refusal,
    wire::Connection,
};
use self::{
    faults::Faults,
    recorder::Recorder,
    resources::{Kind, ObjectPath},
    rules::{Job, Rules},
    view::{DelayedJob, Write},
    wire::TestListener,
};

/// Effect of a restart on the event ring.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ring {
    /// Watches resume where they were.
    Keep,
    /// Watches from before the restart get 410.
    Wipe,
}

/// State shared by connections and controllers.
pub(crate) struct ServerState {
    core: Mutex<Core>,
    recorder: Mutex<Recorder>,
    faults: Mutex<Faults>,
    /// Response-shaping fault effects that wait for their response, by request ID.
    shapes: Mutex<HashMap<u64, Effect>>,
    listener: TestListener,
    /// Counter that changes with every request, response, and commit.
    changed: Sender<u64>,
    /// Cancelled while the server shuts down: watches end, requests are refused.
    ending: Mutex<CancellationToken>,
    /// Cancelled when the server is dropped.
    over: CancellationToken,
    runtime: Handle,
    /// TLS client configuration for connections to kubelets.
    kubelets: OnceLock<Arc<rustls::ClientConfig>>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // Recovers from poisoning: a test that panicked while it read has changed nothing.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl ServerState {
    fn core(&self) -> MutexGuard<'_, Core> {
        lock(&self.core)
    }

    fn recorder(&self) -> MutexGuard<'_, Recorder> {
        lock(&self.recorder)
    }

    fn faults(&self) -> MutexGuard<'_, Faults> {
        lock(&self.faults)
    }

    fn shape(&self, id: u64, effect: Effect) {
        lock(&self.shapes).insert(id, effect);
    }

    fn take_shape(&self, id: u64) -> Option<Effect> {
        lock(&self.shapes).remove(&id)
    }

    fn ending(&self) -> CancellationToken {
        lock(&self.ending).clone()
    }

    /// Notifies waiters of a request, response, or commit.
    fn notify(&self) {
        self.changed.send_modify(|count| *count += 1);
    }

    fn is_absent(&self, path: &str) -> bool {
        self.core().switches.absent.iter().any(|absent| path.contains(absent.as_str()))
    }

    fn serves(&self, kind: &Kind, place: &ObjectPath) -> bool {
        let path = kind.path(&place.namespace, &place.name, &place.subresource);
        let whole = format!("{}/{}", kind.plural(), place.subresource);
        let absent = &self.core().switches.absent;
        !absent.iter().any(|absent| path.contains(&format!("/{absent}/")) || *absent == whole)
    }

    /// Changes the state and starts controllers for the changes.
    fn act<T>(self: &Arc<Self>, change: impl FnOnce(&mut Core) -> T) -> T {
        let (outcome, later) = {
            let mut core = self.core();
            let outcome = change(&mut core);
            (outcome, core.controllers())
        };
        later.into_iter().for_each(|later| self.schedule(later));
        self.notify();
        outcome
    }

    fn schedule(self: &Arc<Self>, DelayedJob { after, job }: DelayedJob) {
        let shared = self.clone();
        self.runtime.spawn(async move {
            tokio::select! {
                () = shared.over.cancelled() => {}
                () = tokio::time::sleep(after) => shared.work(&job),
            }
        });
    }

    fn work(self: &Arc<Self>, job: &Job) {
        self.act(|core| {
            let writes = rules::run(core, job);
            core.apply(writes);
        });
    }
}

/// Configuration of a server.
#[derive(Clone, Debug)]
pub struct Options {
    /// Listen address, `host:port`.
    pub address: String,
    /// Seed of names, UIDs, and probabilities.
    pub seed: u64,
    /// Additional DNS names and addresses in the serving certificate; the first one is the host in kubeconfigs.
    pub names: Vec<String>,
    /// Certificate authority; `None` creates one.
    pub authority: Option<CertificatePair>,
}

impl Default for Options {
    fn default() -> Self {
        // Not a port chosen by the kernel: while the server does not listen, no other process must get it.
        let [port] = free_ports();
        Self { address: format!("127.0.0.1:{port}"), seed: 1, names: Vec::new(), authority: None }
    }
}

/// Running server; drop stops it and closes its connections.
pub struct ApiServer {
    address: SocketAddr,
    /// Server URL in kubeconfigs.
    url: String,
    shared: Arc<ServerState>,
    folder: tempfile::TempDir,
    /// Signs the server's certificate and those of clients.
    pub authority: Authority,
}

impl ApiServer {
    /// Starts a server with default options.
    pub async fn start() -> Self {
        Self::start_with(Options::default()).await
    }

    /// Starts a server with these options.
    ///
    /// # Panics
    /// The address is in use, or the authority is invalid.
    pub async fn start_with(options: Options) -> Self {
        let validity = Validity::days(Timestamp::now(), 365);
        let authority = match options.authority {
            Some(own) => Authority::load(own),
            None => Authority::create("test API server", validity),
        };
        let authority = authority.expect("failed to create the CA");
        let listener = TcpListener::bind(&options.address).await.expect("failed to listen on the port");
        let address = listener.local_addr().expect("failed to get the local address");
        let mut names = options.names;
        names.extend([address.ip().to_string(), "localhost".to_owned()]);
        let identity = authority.serving("api", &names, validity).expect("failed to issue serving certificate");
        let shared = Arc::new(ServerState {
            core: Mutex::new(Core::new(Rules::new(authority.own().clone()), options.seed)),
            recorder: Mutex::default(),
            faults: Mutex::new(Faults::new(options.seed)),
            shapes: Mutex::default(),
            listener: TestListener::new(identity),
            changed: Sender::new(0),
            ending: Mutex::default(),
            over: CancellationToken::new(),
            runtime: Handle::current(),
            kubelets: OnceLock::new(),
        });
        shared.act(|_| ()); // runs controllers for the initial objects
        shared.listener.listen(&shared, listener);
        let folder = tempfile::tempdir().expect("failed to create temporary directory");
        let url = format!("https://{}:{}", names[0], address.port());
        let server = Self { address, url, shared, folder, authority };
        server.write_kubeconfig("kubeconfig", &server.certificate_user("admin", &["system:masters"]));
        server
    }

    /// Listen address.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Stops accepting connections; open connections stay.
    pub async fn stop_listening(&mut self) {
        self.shared.listener.stop().await;
    }

    /// Takes the server away: stops listening and closes all connections.
    pub async fn vanish(&mut self) {
        self.take_offline().await;
    }

    /// Same as [`ApiServer::vanish`] on a shared reference; [`ApiServer::bring_online`] ends it.
    pub async fn take_offline(&self) {
        self.shared.listener.stop().await;
        self.connections().iter().for_each(|connection| connection.close());
    }

    /// Listens again on the same port.
    pub async fn bring_online(&self) {
        let listener = TcpListener::bind(self.address).await.expect("failed to listen on the previous port");
        self.shared.listener.listen(&self.shared, listener);
    }

    /// Restarts gracefully (watches end, GOAWAY), with a downtime of `after`.
    pub async fn restart(&self, ring: Ring, after: Duration) {
        self.shared.listener.stop().await;
        self.shared.ending().cancel();
        tokio::time::sleep(after).await;
        self.connections().iter().for_each(|connection| connection.close());
        if ring == Ring::Wipe {
            self.shared.core().store.wipe();
        }
        *lock(&self.shared.ending) = CancellationToken::new();
        self.bring_online().await;
    }

    /// Turns all connections, present and new, into black holes (neither read nor written), or back.
    pub fn set_black_hole(&self, is_black: bool) {
        self.shared.listener.is_black_hole.store(is_black, Ordering::Relaxed);
        self.connections().iter().for_each(|connection| connection.set_black_hole(is_black));
    }

    /// Open connections, oldest first.
    pub fn connections(&self) -> Vec<Arc<Connection>> {
        self.shared.listener.connections()
    }

    /// Number of connections accepted so far.
    pub fn accepted(&self) -> u64 {
        self.shared.listener.accepted()
    }

    /// Sets the maximum of concurrent HTTP/2 streams of new connections.
    pub fn max_streams(&self, count: u32) {
        self.shared.listener.streams.store(count, Ordering::Relaxed);
    }

    /// Restricts new connections to HTTP/1.1, or offers HTTP/2 too.
    pub fn only_http1(&self, is_old: bool) {
        self.shared.listener.is_http1_only.store(is_old, Ordering::Relaxed);
        self.shared.listener.show(None);
    }

    /// Sets the serving certificate of new connections.
    pub fn show_certificate(&self, identity: CertificatePair) {
        self.shared.listener.show(Some(identity));
    }

    /// Adds a fault.
    pub fn fault(&self, fault: Fault) -> FaultId {
        self.shared.faults().add(fault)
    }

    /// Removes a fault; requests that hang in it continue.
    pub fn clear(&self, id: FaultId) {
        self.shared.faults().clear(id);
    }

    /// Removes all faults.
    pub fn clear_all(&self) {
        self.shared.faults().clear_all();
    }

    /// Number of times that a fault happened.
    pub fn hits(&self, id: FaultId) -> usize {
        self.shared.faults().hits(id)
    }

    /// Adds one fault each for the next requests of that path.
    pub fn trouble(&self, path: &str, troubles: impl IntoIterator<Item = SimpleFault>) {
        for trouble in troubles {
            self.fault(Fault::new(trouble.into()).path(path));
        }
    }

    /// Current time of the server's clock.
    pub fn now(&self) -> Timestamp {
        self.shared.core().clock.now()
    }

    /// Adjusts the server's clock.
    pub fn jump(&self, by: SignedDuration) {
        self.shared.core().clock.jump(by);
        self.shared.notify();
    }

    /// Changes the behavior switches.
    pub fn switch(&self, change: impl FnOnce(&mut Switches)) {
        change(&mut self.shared.core().switches);
    }

    /// Changes the settings of the rules.
    pub fn rules<T>(&self, change: impl FnOnce(&mut Rules) -> T) -> T {
        change(&mut self.shared.core().rules)
    }

    /// Dumps all stored objects.
    pub fn dump(&self) -> Value {
        self.shared.core().store.dump()
    }

    /// Stores the objects of a dump.
    pub fn load(&self, dump: &Value) {
        let objects = dump["items"].as_array().cloned().unwrap_or_default();
        let put = |object: Value| Some(Write::Put { resource: resources::of(&object)?.id.to_owned(), object });
        self.with(|core| core.apply(objects.into_iter().filter_map(put).collect()));
    }

    /// Changes the state directly; controllers react to the changes.
    pub fn with<T>(&self, change: impl FnOnce(&mut Core) -> T) -> T {
        self.shared.act(change)
    }
}

impl Drop for ApiServer {
    fn drop(&mut self) {
        self.shared.over.cancel();
        self.shared.listener.abort();
    }
}
