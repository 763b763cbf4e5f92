//! Client of the API server: from flags to a client certificate, its bootstrap and rotation.
//!
//! Implements spec 01 §10, §11.1.

use std::{
    path::{Path, PathBuf},
    sync::Arc,
};

use tokio::task::spawn_blocking;

use super::{
    super::composition_root::{Base, BuildError, wrong},
    bootstrap_client::FirstCertificate,
    client_factory::ClientFactory,
};
use berth_api::{
    ClientIdentity, TransportConfig,
    api::ApiClient,
    certificates::{
        ApiConnector, ClientCertificates, ClientPath, ClientSetup, Rotation,
        client::{plan, prepare_kubeconfig},
    },
    transport,
};
use berth_config::LoadedConfig;
use berth_metrics::{ApiClientMetrics, CertificateMetrics};

/// Kubeconfig, bootstrap kubeconfig, and certificate directory.
#[derive(Clone)]
pub(super) struct ClientFiles {
    rotation: Rotation,
    /// `--bootstrap-kubeconfig`; empty if not given.
    pub(super) bootstrap: PathBuf,
    /// `--kubeconfig`.
    pub(super) kubeconfig: PathBuf,
    /// `--cert-dir`: the directory of certificates.
    pub(super) directory: PathBuf,
}

impl ClientFiles {
    fn of(loaded: &LoadedConfig) -> Self {
        let flags = &loaded.flags;
        Self {
            rotation: if loaded.config.rotate_certificates { Rotation::On } else { Rotation::Off },
            bootstrap: PathBuf::from(&flags.bootstrap_kubeconfig),
            kubeconfig: PathBuf::from(&flags.kubeconfig),
            directory: PathBuf::from(&flags.cert_dir),
        }
    }
}

/// Client of the API server, and the rotation of its certificate.
pub(super) struct ClusterClient {
    /// The client that all parts use.
    pub(super) api: Arc<dyn ApiClient>,
    opener: ClientFactory,
    files: ClientFiles,
    /// Identity through which a rotated certificate is replaced; `None` if the agent does not rotate it.
    identity: Option<ClientIdentity>,
}

impl ClusterClient {
    /// Opens the client. If a first certificate is required before any request, the client waits for it, not the
    /// caller.
    ///
    /// # Errors
    /// Why the client cannot be opened, with kubelet's texts.
    pub(super) async fn open(loaded: &LoadedConfig, base: &Base, node: &str) -> Result<Self, BuildError> {
        let (files, opener) = (ClientFiles::of(loaded), ClientFactory::new(loaded, base));
        let (planning, now) = (files.clone(), base.clock.now());
        let path = spawn_blocking(move || plan(planning.rotation, &planning.bootstrap, &planning.kubeconfig, now));
        let path = path.await.map_err(wrong)?;
        let connections = ApiClientMetrics::new(&base.registry);
        let mut identity = None;
        let api: Arc<dyn ApiClient> = match path {
            ClientPath::AsIs => {
                let config = TransportConfig::from_kubeconfig(&files.kubeconfig).await.map_err(wrong)?;
                opener.node_client(config, connections).await?
            }
            ClientPath::BootstrapFirst => {
                FirstCertificate { opener: opener.clone(), files: files.clone(), connections, node: node.to_owned() }
                    .start(base)
                    .await?
            }
            ClientPath::Rotate | ClientPath::BootstrapBehind => {
                if path == ClientPath::BootstrapBehind {
                    let of = files.clone();
                    let prepared = move || prepare_kubeconfig(&of.bootstrap, &of.kubeconfig, &of.directory);
                    spawn_blocking(prepared).await.map_err(wrong)?.map_err(wrong)?;
                }
                let set = identity.insert(ClientIdentity::anonymous());
                let config = managed(&files.kubeconfig).await?.with_identity(set.clone());
                opener.node_client(config, connections).await?
            }
        };
        Ok(Self { api, opener, files, identity })
    }

    /// Starts the rotation of the client certificate, if the agent is responsible for it.
    pub(super) async fn start_certificate_rotation(&self, base: &Base, node: &str) {
        let Some(identity) = &self.identity else { return };
        let clock = base.clock.clone();
        let setup = ClientSetup {
            directory: self.files.directory.clone(),
            node: node.to_owned(),
            kubeconfig: self.files.kubeconfig.clone(),
            api: self.api.clone(),
            bootstrap: Some(self.certificates_opener()),
            sink: Arc::new(identity.clone()),
            clock: base.clock.clone(),
            metrics: CertificateMetrics::client(&base.registry, move || clock.now().as_second()),
            events: base.events.clone(),
        };
        // Metrics and events report its state.
        let _ = ClientCertificates::start(setup, base.tasks.tracker(), base.stop.child_token()).await;
    }

    /// Opens clients that request certificates without having one.
    fn certificates_opener(&self) -> ApiConnector {
        let files = &self.files;
        let path = if files.bootstrap.as_os_str().is_empty() { &files.kubeconfig } else { &files.bootstrap };
        let (opener, path) = (self.opener.clone(), path.clone());
        Arc::new(move || {
            let (opener, path) = (opener.clone(), path.clone());
            Box::pin(async move { opener.bootstrap_client(&path).await.map_err(|error| error.to_string()) })
        })
    }
}

/// Reads the cluster of a kubeconfig whose client certificate may not exist yet.
async fn managed(path: &Path) -> Result<TransportConfig, BuildError> {
    let to_error = |cause: String| BuildError(format!("invalid kubeconfig: {}: {cause}", path.display()));
    let text = tokio::fs::read_to_string(path).await.map_err(|error| to_error(error.to_string()))?;
    let base = path.parent().unwrap_or(Path::new(""));
    let transport::Kubeconfig { cluster, user } = transport::Kubeconfig::parse(&text, base).map_err(to_error)?;
    Ok(TransportConfig::new(cluster, user))
}
