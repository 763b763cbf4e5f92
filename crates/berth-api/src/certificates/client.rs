//! Client certificate of the node: choice of bootstrap path, and rotation manager (spec 01 §11).

use std::{
    path::{Path, PathBuf},
    sync::Arc,
};

use jiff::Timestamp;
use tokio::sync::watch;
use tokio_util::{sync::CancellationToken, task::TaskTracker};
use tracing::{error, info};

use super::{
    kubeconfig::{self, Kubeconfig, KubeconfigError},
    manager::{ApiConnector, CertificateManager, CertificateState, IdentitySink, ManagerDeps, Seed},
    plan::{self, BootstrapFile, ClientPath, KubeconfigState, Rotation},
    store::CertificateStore,
    template::{Purpose, Template},
};
use crate::api::ApiClient;
use berth_metrics::CertificateMetrics;
use berth_ports::{Clock, EventSink};

/// Chooses the bootstrap path; reads the kubeconfig. `bootstrap` is empty without `--bootstrap-kubeconfig`.
pub fn plan(rotation: Rotation, bootstrap: &Path, kubeconfig: &Path, now: Timestamp) -> ClientPath {
    let given = match bootstrap {
        path if path.as_os_str().is_empty() => BootstrapFile::NotGiven,
        path if path.exists() => BootstrapFile::Given,
        _ => BootstrapFile::Missing,
    };
    let found = kubeconfig::classify(kubeconfig, now);
    match (rotation, given, found) {
        (_, BootstrapFile::NotGiven, _) => {}
        (Rotation::Off, _, KubeconfigState::Valid) => info!("Kubeconfig exists and is valid, skipping bootstrap"),
        (Rotation::On, BootstrapFile::Missing, KubeconfigState::Unproven) => error!(
            kubeconfig = %kubeconfig.display(),
            bootstrap = %bootstrap.display(),
            "No valid client certificate and no bootstrap kubeconfig found; \
             retrying until one of them exists"
        ),
        _ => {}
    }
    plan::plan(rotation, given, found)
}

/// Writes the kubeconfig that [`ClientPath::BootstrapBehind`] continues with: the cluster of the bootstrap kubeconfig,
/// and the paths of the manager's files, which need not exist yet. Blocking.
///
/// # Errors
/// The bootstrap kubeconfig is unusable, or the kubeconfig cannot be written.
pub fn prepare_kubeconfig(bootstrap: &Path, kubeconfig: &Path, directory: &Path) -> Result<(), KubeconfigError> {
    let cluster = Kubeconfig::read(bootstrap)?.cluster;
    kubeconfig::write(kubeconfig, &cluster, &CertificateStore::new(directory, Purpose::Client, None).link())?;
    info!("Client rotation is on, will bootstrap in background");
    Ok(())
}

/// Dependencies of the client certificate manager.
pub struct ClientSetup {
    /// Certificate directory.
    pub directory: PathBuf,
    /// Name of this node.
    pub node: String,
    /// Kubeconfig in use: its pair serves where the directory has none.
    pub kubeconfig: PathBuf,
    /// Client for requests with a valid certificate: the one that `sink` updates.
    pub api: Arc<dyn ApiClient>,
    /// Opens a client for requests without a valid certificate: on the bootstrap kubeconfig, else on the kubeconfig
    /// itself with the credentials in it.
    pub bootstrap: Option<ApiConnector>,
    /// Receives each new pair: the transport.
    pub sink: Arc<dyn IdentitySink>,
    /// Wall clock.
    pub clock: Arc<dyn Clock>,
    /// Metrics ([`CertificateMetrics::client`]).
    pub metrics: CertificateMetrics,
    /// Receives events about failures.
    pub events: Arc<dyn EventSink>,
}

/// Handle of the client certificate manager.
pub struct ClientCertificates {
    state: watch::Receiver<CertificateState>,
}

impl ClientCertificates {
    /// Starts the manager task. Publishes an existing pair before it returns; the task renews it until stopped.
    pub async fn start(setup: ClientSetup, tasks: &TaskTracker, stop: CancellationToken) -> Self {
        let kubeconfig = setup.kubeconfig;
        let seed: Seed = Arc::new(move || Kubeconfig::read(&kubeconfig).ok()?.pair());
        let parts = ManagerDeps {
            store: CertificateStore::new(&setup.directory, Purpose::Client, None),
            seed: Some(seed),
            api: setup.api,
            bootstrap: setup.bootstrap,
            clock: setup.clock,
            metrics: setup.metrics,
            sink: setup.sink,
            events: setup.events,
        };
        let (_, templates) = watch::channel(Some(Template::client(&setup.node)));
        let manager = CertificateManager::open(Purpose::Client, parts, templates).await;
        let state = manager.state();
        tasks.spawn(manager.run(stop));
        Self { state }
    }

    /// State of the certificate: expiry, failures, last error.
    pub fn state(&self) -> watch::Receiver<CertificateState> {
        self.state.clone()
    }
}
