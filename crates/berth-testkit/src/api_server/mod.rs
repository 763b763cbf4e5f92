//! An API server on loopback for tests, true where truth matters: it refuses what a real one refuses, orders and
//! loses what a real network orders and loses, and tells afterwards what happened. Spec 10a §I.
//!
//!   wire ─► serve ─► faults ─► core (one lock: authorise, rules, store, tell who watches) ─► faults ─► answer
//!                     recorder sees all of it              └─► controllers, later
//!
//! `resources` is the list of what there is, `verbs`, `lists` and `watch` what holds for all of it, `rules` what
//! holds for each, through the seam `view`; `tables` is what kubectl prints. Tests act as user through `acts`, and break
//! things through `faults`; whoever is no test does both through `sim`.

pub mod acts;
pub mod clock;
mod cluster;
pub mod conduct;
pub mod core;
pub mod faults;
pub mod kubeconfigs;
mod lists;
mod openapi;
mod proxy;
pub mod recorder;
pub mod refusal;
pub mod resources;
pub mod reviews;
pub mod rules;
pub mod selectors;
mod serve;
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

use berth::wiring::certificates::{Authority, Issued, Validity};
use jiff::{SignedDuration, Timestamp};
use serde_json::Value;
use tokio::{net::TcpListener, runtime::Handle, sync::watch::Sender};
use tokio_util::sync::CancellationToken;

use crate::reservation::free_ports;

pub use self::{
    acts::User,
    core::{Core, Switches},
    faults::{Effect, Fault, FaultId, Trouble},
    recorder::{Logged, Requests, Seen},
    view::Refusal,
    wire::Connection,
};
use self::{
    faults::Faults,
    recorder::Recorder,
    resources::{Kind, Place},
    rules::{Job, Rules},
    view::{Later, Write},
    wire::Door,
};

/// What a restart leaves of the events.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ring {
    /// Watches go on where they were.
    Keep,
    /// Watches from before get 410.
    Wipe,
}

/// What connections and controllers share.
pub(crate) struct Shared {
    core: Mutex<Core>,
    recorder: Mutex<Recorder>,
    faults: Mutex<Faults>,
    /// What faults found for answers that are not there yet, by request.
    shapes: Mutex<HashMap<u64, Effect>>,
    door: Door,
    /// Moves with every request, answer and commit.
    changed: Sender<u64>,
    /// The server goes down: watches end, requests are refused.
    ending: Mutex<CancellationToken>,
    /// Nobody needs it any more.
    over: CancellationToken,
    runtime: Handle,
    /// How it proves itself to kubelets.
    kubelets: OnceLock<Arc<rustls::ClientConfig>>,
}

fn held<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // A test that panicked while it looked has changed nothing.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Shared {
    fn core(&self) -> MutexGuard<'_, Core> {
        held(&self.core)
    }

    fn recorder(&self) -> MutexGuard<'_, Recorder> {
        held(&self.recorder)
    }

    fn faults(&self) -> MutexGuard<'_, Faults> {
        held(&self.faults)
    }

    fn shape(&self, id: u64, effect: Effect) {
        held(&self.shapes).insert(id, effect);
    }

    fn take_shape(&self, id: u64) -> Option<Effect> {
        held(&self.shapes).remove(&id)
    }

    fn ending(&self) -> CancellationToken {
        held(&self.ending).clone()
    }

    /// Something happened.
    fn moved(&self) {
        self.changed.send_modify(|count| *count += 1);
    }

    fn is_absent(&self, path: &str) -> bool {
        self.core().switches.absent.iter().any(|absent| path.contains(absent.as_str()))
    }

    fn serves(&self, kind: &Kind, place: &Place) -> bool {
        let path = kind.path(&place.namespace, &place.name, &place.subresource);
        let whole = format!("{}/{}", kind.plural(), place.subresource);
        let absent = &self.core().switches.absent;
        !absent.iter().any(|absent| path.contains(&format!("/{absent}/")) || *absent == whole)
    }

    /// Changes the state, and sets controllers to work on what changed.
    fn act<T>(self: &Arc<Self>, change: impl FnOnce(&mut Core) -> T) -> T {
        let (outcome, later) = {
            let mut core = self.core();
            let outcome = change(&mut core);
            (outcome, core.controllers())
        };
        later.into_iter().for_each(|later| self.set_to_work(later));
        self.moved();
        outcome
    }

    fn set_to_work(self: &Arc<Self>, Later { after, job }: Later) {
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

/// How a server is started.
#[derive(Clone, Debug)]
pub struct Options {
    /// Where it listens.
    pub address: String,
    /// Of names, UIDs and chances.
    pub seed: u64,
    /// Names and addresses it is reached by, if not by where it listens.
    pub names: Vec<String>,
    /// Signs; None: a new one.
    pub authority: Option<Issued>,
}

impl Default for Options {
    fn default() -> Self {
        // Not one of the kernel's choice: while nobody listens there, others must not get it.
        let [port] = free_ports();
        Self { address: format!("127.0.0.1:{port}"), seed: 1, names: Vec::new(), authority: None }
    }
}

/// The server; gone when dropped.
pub struct ApiServer {
    address: SocketAddr,
    /// As kubeconfigs have it.
    url: String,
    shared: Arc<Shared>,
    folder: tempfile::TempDir,
    /// Signs its own certificate and those of clients.
    pub authority: Authority,
}

impl ApiServer {
    /// Answers from now on.
    pub async fn start() -> Self {
        Self::start_with(Options::default()).await
    }

    /// Answers from now on, as told.
    ///
    /// # Panics
    /// The address is somebody else's, or the authority no authority.
    pub async fn start_with(options: Options) -> Self {
        let validity = Validity::days(Timestamp::now(), 365);
        let authority = match options.authority {
            Some(own) => Authority::load(own),
            None => Authority::create("test API server", validity),
        };
        let authority = authority.expect("an authority");
        let listener = TcpListener::bind(&options.address).await.expect("a port");
        let address = listener.local_addr().expect("an address");
        let mut names = options.names;
        names.extend([address.ip().to_string(), "localhost".to_owned()]);
        let identity = authority.serving("api", &names, validity).expect("a certificate");
        let shared = Arc::new(Shared {
            core: Mutex::new(Core::new(Rules::new(authority.own().clone()), options.seed)),
            recorder: Mutex::default(),
            faults: Mutex::new(Faults::new(options.seed)),
            shapes: Mutex::default(),
            door: Door::new(identity),
            changed: Sender::new(0),
            ending: Mutex::default(),
            over: CancellationToken::new(),
            runtime: Handle::current(),
            kubelets: OnceLock::new(),
        });
        shared.act(|_| ()); // controllers see the first objects
        shared.door.listen(&shared, listener);
        let folder = tempfile::tempdir().expect("a folder");
        let url = format!("https://{}:{}", names[0], address.port());
        let server = Self { address, url, shared, folder, authority };
        server.write_kubeconfig("kubeconfig", &server.certificate_user("admin", &["system:masters"]));
        server
    }

    /// Where it listens.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Nobody listens any more; connections there are go on.
    pub async fn stop_listening(&mut self) {
        self.shared.door.stop().await;
    }

    /// It is gone: nobody listens, and all connections are cut.
    pub async fn vanish(&mut self) {
        self.go().await;
    }

    /// As [`ApiServer::vanish`]; [`ApiServer::come_back`] ends it.
    pub async fn go(&self) {
        self.shared.door.stop().await;
        self.connections().iter().for_each(|connection| connection.close());
    }

    /// It listens again, at the same port.
    pub async fn come_back(&self) {
        let listener = TcpListener::bind(self.address).await.expect("its own port");
        self.shared.door.listen(&self.shared, listener);
    }

    /// It goes down as servers do (watches end, GOAWAY), and is there again after a while.
    pub async fn restart(&self, ring: Ring, after: Duration) {
        self.shared.door.stop().await;
        self.shared.ending().cancel();
        tokio::time::sleep(after).await;
        self.connections().iter().for_each(|connection| connection.close());
        if ring == Ring::Wipe {
            self.shared.core().store.wipe();
        }
        *held(&self.shared.ending) = CancellationToken::new();
        self.come_back().await;
    }

    /// All connections, those that come included, are neither read nor written; until it is light again.
    pub fn black(&self, is_black: bool) {
        self.shared.door.is_black.store(is_black, Ordering::Relaxed);
        self.connections().iter().for_each(|connection| connection.black(is_black));
    }

    /// Open connections, oldest first.
    pub fn connections(&self) -> Vec<Arc<Connection>> {
        self.shared.door.connections()
    }

    /// Connections that ever came.
    pub fn accepted(&self) -> u64 {
        self.shared.door.accepted()
    }

    /// New connections may have so many streams (HTTP/2).
    pub fn max_streams(&self, count: u32) {
        self.shared.door.streams.store(count, Ordering::Relaxed);
    }

    /// New connections speak HTTP/1.1 only, or HTTP/2 too.
    pub fn only_http1(&self, is_old: bool) {
        self.shared.door.is_old.store(is_old, Ordering::Relaxed);
        self.shared.door.show(None);
    }

    /// Shows that certificate to new connections.
    pub fn show_certificate(&self, identity: Issued) {
        self.shared.door.show(Some(identity));
    }

    /// That goes wrong.
    pub fn fault(&self, fault: Fault) -> FaultId {
        self.shared.faults().add(fault)
    }

    /// That does not go wrong any more; who hangs in it goes on.
    pub fn clear(&self, id: FaultId) {
        self.shared.faults().clear(id);
    }

    /// Nothing goes wrong any more.
    pub fn clear_all(&self) {
        self.shared.faults().clear_all();
    }

    /// How often it went wrong.
    pub fn hits(&self, id: FaultId) -> usize {
        self.shared.faults().hits(id)
    }

    /// The next requests for that path have these troubles, one each.
    pub fn trouble(&self, path: &str, troubles: impl IntoIterator<Item = Trouble>) {
        for trouble in troubles {
            self.fault(Fault::new(trouble.into()).path(path));
        }
    }

    /// The server's clock.
    pub fn now(&self) -> Timestamp {
        self.shared.core().clock.now()
    }

    /// Somebody sets the server's clock.
    pub fn jump(&self, by: SignedDuration) {
        self.shared.core().clock.jump(by);
        self.shared.moved();
    }

    /// Turns something on or off.
    pub fn switch(&self, change: impl FnOnce(&mut Switches)) {
        change(&mut self.shared.core().switches);
    }

    /// Changes the settings of the rules.
    pub fn rules<T>(&self, change: impl FnOnce(&mut Rules) -> T) -> T {
        change(&mut self.shared.core().rules)
    }

    /// Everything that is stored.
    pub fn dump(&self) -> Value {
        self.shared.core().store.dump()
    }

    /// Stores what was dumped.
    pub fn load(&self, dump: &Value) {
        let objects = dump["items"].as_array().cloned().unwrap_or_default();
        let put = |object: Value| Some(Write::Put { resource: resources::of(&object)?.id.to_owned(), object });
        self.with(|core| core.apply(objects.into_iter().filter_map(put).collect()));
    }

    /// Changes the state itself; controllers see what changed.
    pub fn with<T>(&self, change: impl FnOnce(&mut Core) -> T) -> T {
        self.shared.act(change)
    }
}

impl Drop for ApiServer {
    fn drop(&mut self) {
        self.shared.over.cancel();
        self.shared.door.abort();
    }
}
