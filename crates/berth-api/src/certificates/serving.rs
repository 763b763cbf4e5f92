//! Rotation of a cluster-signed serving certificate (`serverTLSBootstrap`).
//!
//! Covers the addresses of the node; requests a new one when they change. No controller approves such CSRs by default,
//! so one may be pending for days: it is created once, and its key is kept for the lifetime of the agent. Implements
//! spec 01 §11.3-11.6.

use std::{
    path::{Path, PathBuf},
    sync::Arc,
};

use k8s_openapi::api::core::v1::NodeAddress;
use tokio::sync::watch;
use tokio_util::{sync::CancellationToken, task::TaskTracker};

use super::{
    manager::{CertificateManager, CertificateState, ManagerDeps},
    pair::Pair,
    store::CertificateStore,
    template::{NamesNeeded, Purpose, Template},
};
use crate::api::ApiClient;
use berth_metrics::CertificateMetrics;
use berth_ports::{Clock, EventSink};

/// Dependencies of the serving certificate manager.
pub struct ServingSetup {
    /// Certificate directory.
    pub directory: PathBuf,
    /// Name of this node.
    pub node: String,
    /// Certificate and key that seed the store (`tlsCertFile`, `tlsPrivateKeyFile`).
    pub configured: Option<(PathBuf, PathBuf)>,
    /// Client of the API server.
    pub api: Arc<dyn ApiClient>,
    /// Addresses in the node's status.
    pub addresses: watch::Receiver<Vec<NodeAddress>>,
    /// Which addresses a request requires.
    pub needed: NamesNeeded,
    /// Wall clock.
    pub clock: Arc<dyn Clock>,
    /// Metrics ([`CertificateMetrics::serving`]).
    pub metrics: CertificateMetrics,
    /// Receives events about failures.
    pub events: Arc<dyn EventSink>,
}

/// Handle of the serving certificate manager.
pub struct ServingCertificates {
    pairs: watch::Receiver<Option<Arc<Pair>>>,
    state: watch::Receiver<CertificateState>,
}

impl ServingCertificates {
    /// Path of the link to the current certificate and key; it exists once there is a certificate.
    pub fn file(directory: &Path) -> PathBuf {
        CertificateStore::new(directory, Purpose::Serving, None).link()
    }

    /// Starts the manager task. Publishes an existing pair before it returns; the task renews it until stopped.
    pub async fn start(setup: ServingSetup, tasks: &TaskTracker, stop: CancellationToken) -> Self {
        let (shown, pairs) = watch::channel(None);
        let (wanted, templates) = watch::channel(None);
        tasks.spawn(follow(setup.addresses, setup.node, setup.needed, wanted, stop.clone()));
        let parts = ManagerDeps {
            store: CertificateStore::new(&setup.directory, Purpose::Serving, setup.configured),
            seed: None,
            api: setup.api,
            bootstrap: None,
            clock: setup.clock,
            metrics: setup.metrics,
            sink: Arc::new(shown),
            events: setup.events,
        };
        let manager = CertificateManager::open(Purpose::Serving, parts, templates).await;
        let state = manager.state();
        tasks.spawn(manager.run(stop));
        Self { pairs, state }
    }

    /// Current pair; `None`: no certificate to serve with yet.
    pub fn pairs(&self) -> watch::Receiver<Option<Arc<Pair>>> {
        self.pairs.clone()
    }

    /// State of the certificate: expiry, failures, last error.
    pub fn state(&self) -> watch::Receiver<CertificateState> {
        self.state.clone()
    }
}

/// Maps node addresses to certificate templates.
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
