//! The certificate the node serves with where the cluster signs it (`serverTLSBootstrap`): for the
//! addresses the node has, asked for again when they change (spec 01 §11.3-11.6).
//!
//! Nobody approves such requests by himself, so one may lie there for days: it is asked for once, and
//! its key is kept for as long as the agent lives.

use std::{
    path::{Path, PathBuf},
    sync::Arc,
};

use k8s_openapi::api::core::v1::NodeAddress;
use tokio::sync::watch;
use tokio_util::{sync::CancellationToken, task::TaskTracker};

use super::{
    manager::{CertificateState, Manager, Parts},
    pair::Pair,
    store::Store,
    template::{NamesNeeded, Purpose, Template},
};
use crate::api::ApiClient;
use berth_metrics::CertificateMetrics;
use berth_ports::{Clock, EventSink};

/// What the manager of the serving certificate needs.
pub struct ServingSetup {
    /// The certificate directory.
    pub directory: PathBuf,
    /// The node's name.
    pub node: String,
    /// A certificate and a key to begin with (`tlsCertFile`, `tlsPrivateKeyFile`).
    pub configured: Option<(PathBuf, PathBuf)>,
    /// Whom to ask.
    pub api: Arc<dyn ApiClient>,
    /// The addresses in the node's status.
    pub addresses: watch::Receiver<Vec<NodeAddress>>,
    /// Which of them must be there.
    pub needed: NamesNeeded,
    /// The wall time.
    pub clock: Arc<dyn Clock>,
    /// What is counted ([`CertificateMetrics::serving`]).
    pub metrics: CertificateMetrics,
    /// Who hears of failures.
    pub events: Arc<dyn EventSink>,
}

/// The manager of the serving certificate.
pub struct ServingCertificates {
    pairs: watch::Receiver<Option<Arc<Pair>>>,
    state: watch::Receiver<CertificateState>,
}

impl ServingCertificates {
    /// The file that has the current certificate and its key, once there is one; a link.
    pub fn file(directory: &Path) -> PathBuf {
        Store::new(directory, Purpose::Serving, None).link()
    }

    /// Finds the pair that is there, before it returns, and keeps one good until stopped.
    pub async fn start(setup: ServingSetup, tasks: &TaskTracker, stop: CancellationToken) -> Self {
        let (shown, pairs) = watch::channel(None);
        let (wanted, templates) = watch::channel(None);
        tasks.spawn(follow(setup.addresses, setup.node, setup.needed, wanted, stop.clone()));
        let parts = Parts {
            store: Store::new(&setup.directory, Purpose::Serving, setup.configured),
            seed: None,
            api: setup.api,
            bootstrap: None,
            clock: setup.clock,
            metrics: setup.metrics,
            sink: Arc::new(shown),
            events: setup.events,
        };
        let manager = Manager::open(Purpose::Serving, parts, templates).await;
        let state = manager.state();
        tasks.spawn(manager.run(stop));
        Self { pairs, state }
    }

    /// The current pair; none: nothing can be served yet.
    pub fn pairs(&self) -> watch::Receiver<Option<Arc<Pair>>> {
        self.pairs.clone()
    }

    /// How the certificate stands.
    pub fn state(&self) -> watch::Receiver<CertificateState> {
        self.state.clone()
    }
}

/// Turns addresses into what is wanted.
async fn follow(
    mut addresses: watch::Receiver<Vec<NodeAddress>>,
    node: String,
    needed: NamesNeeded,
    wanted: watch::Sender<Option<Template>>,
    stop: CancellationToken,
) {
    loop {
        let template = Template::serving(&node, &addresses.borrow_and_update(), needed);
        wanted.send_if_modified(|last| {
            let is_new = *last != template;
            *last = template;
            is_new
        });
        tokio::select! {
            () = stop.cancelled() => return,
            changed = addresses.changed() => if changed.is_err() { return },
        }
    }
}
