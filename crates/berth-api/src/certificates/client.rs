//! The certificate by which the API server knows this node: which way it comes, and the manager that
//! keeps it good (spec 01 §11).

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
    manager::{CertificateState, IdentitySink, Manager, OpenApi, Parts, Seed},
    plan::{self, BootstrapFile, ClientPath, Found, Rotation},
    store::Store,
    template::{Purpose, Template},
};
use crate::api::ApiClient;
use berth_metrics::CertificateMetrics;
use berth_ports::{Clock, EventSink};

/// Decides which way is gone; reads the kubeconfig for that. `bootstrap` is empty where
/// `--bootstrap-kubeconfig` is not given.
pub fn plan(rotation: Rotation, bootstrap: &Path, kubeconfig: &Path, now: Timestamp) -> ClientPath {
    let given = match bootstrap {
        path if path.as_os_str().is_empty() => BootstrapFile::NotGiven,
        path if path.exists() => BootstrapFile::Given,
        _ => BootstrapFile::Missing,
    };
    let found = kubeconfig::look(kubeconfig, now);
    match (rotation, given, found) {
        (_, BootstrapFile::NotGiven, _) => {}
        (Rotation::Off, _, Found::Valid) => info!("Kubeconfig exists and is valid, skipping bootstrap"),
        (Rotation::On, BootstrapFile::Missing, Found::Unproven) => error!(
            kubeconfig = %kubeconfig.display(),
            bootstrap = %bootstrap.display(),
            "There is no client certificate that holds, and no bootstrap kubeconfig to get one with; \
             both are looked for again and again"
        ),
        _ => {}
    }
    plan::plan(rotation, given, found)
}

/// Writes the kubeconfig that [`ClientPath::BootstrapBehind`] goes on with: the cluster of the bootstrap,
/// and the manager's files, which need not be there yet. Blocking.
///
/// # Errors
/// The bootstrap's kubeconfig cannot be used, or ours not be written.
pub fn prepare_kubeconfig(bootstrap: &Path, kubeconfig: &Path, directory: &Path) -> Result<(), KubeconfigError> {
    let cluster = Kubeconfig::read(bootstrap)?.cluster;
    kubeconfig::write(kubeconfig, &cluster, &Store::new(directory, Purpose::Client, None).link())?;
    info!("Client rotation is on, will bootstrap in background");
    Ok(())
}

/// What the manager of the client's certificate needs.
pub struct ClientSetup {
    /// The certificate directory.
    pub directory: PathBuf,
    /// The node's name.
    pub node: String,
    /// The kubeconfig in use: a pair in it is used where the directory has none.
    pub kubeconfig: PathBuf,
    /// Whom to ask with a certificate that holds: the client that `sink` changes.
    pub api: Arc<dyn ApiClient>,
    /// Opens whom to ask without one: on the bootstrap's kubeconfig, and without a bootstrap on the
    /// kubeconfig itself, with the credentials that stand in it.
    pub bootstrap: Option<OpenApi>,
    /// The transport.
    pub sink: Arc<dyn IdentitySink>,
    /// The wall time.
    pub clock: Arc<dyn Clock>,
    /// What is counted ([`CertificateMetrics::client`]).
    pub metrics: CertificateMetrics,
    /// Who hears of failures.
    pub events: Arc<dyn EventSink>,
}

/// The manager of the client's certificate.
pub struct ClientCertificates {
    state: watch::Receiver<CertificateState>,
}

impl ClientCertificates {
    /// Shows the pair that is there, before it returns, and keeps one good until stopped.
    pub async fn start(setup: ClientSetup, tasks: &TaskTracker, stop: CancellationToken) -> Self {
        let kubeconfig = setup.kubeconfig;
        let seed: Seed = Arc::new(move || Kubeconfig::read(&kubeconfig).ok()?.pair());
        let parts = Parts {
            store: Store::new(&setup.directory, Purpose::Client, None),
            seed: Some(seed),
            api: setup.api,
            bootstrap: setup.bootstrap,
            clock: setup.clock,
            metrics: setup.metrics,
            sink: setup.sink,
            events: setup.events,
        };
        let (_, templates) = watch::channel(Some(Template::client(&setup.node)));
        let manager = Manager::open(Purpose::Client, parts, templates).await;
        let state = manager.state();
        tasks.spawn(manager.run(stop));
        Self { state }
    }

    /// How the certificate stands.
    pub fn state(&self) -> watch::Receiver<CertificateState> {
        self.state.clone()
    }
}
