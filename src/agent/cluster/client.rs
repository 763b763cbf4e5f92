//! From flags to a client of the API server: which certificate we show, and how we come to it
//! (spec 01 §10, §11.1).

use std::{
    path::{Path, PathBuf},
    sync::Arc,
};

use tokio::task::spawn_blocking;
use tokio_util::{sync::CancellationToken, task::TaskTracker};

use super::super::build::{BuildError, wrong};
use crate::{
    config::Loaded,
    engine::ports::{Clock, EventSink},
    kube::{
        Identity, Rate, Rates, Transport, TransportConfig, TransportDeps,
        api::ApiClient,
        certificates::{
            Bootstrap, ClientCertificates, ClientPath, ClientSetup, Kubeconfig, OpenApi, Rotation, bootstrap,
            client::{plan, prepare_kubeconfig},
            passing,
        },
        transport, user_agent,
    },
    metrics::{ApiClientMetrics, CertificateMetrics, Registry, RestClientMetrics},
};

/// Requests per second and at once for certificates, with a token that many nodes may share (spec 10 §2.1).
const BOOTSTRAP_RATE: (i32, i32) = (5, 10);

/// What is needed to reach the API server.
#[derive(Clone)]
pub(in crate::agent) struct ClientDeps<'a> {
    /// The configuration.
    pub(in crate::agent) loaded: &'a Loaded,
    /// Where families are registered.
    pub(in crate::agent) registry: &'a Registry,
    /// Where tasks are spawned.
    pub(in crate::agent) tasks: &'a TaskTracker,
    /// Ends them.
    pub(in crate::agent) stop: &'a CancellationToken,
    /// Tells the time.
    pub(in crate::agent) clock: Arc<dyn Clock>,
    /// The node's name.
    pub(in crate::agent) node: &'a str,
}

/// The way to the API server, and who sees to our certificate.
pub(in crate::agent) struct Client {
    /// Everything is asked through it.
    pub(in crate::agent) api: Arc<Transport>,
    requests: RestClientMetrics,
    /// The certificate is replaced while we run: through this.
    identity: Option<Identity>,
}

impl Client {
    /// Opens the client. With a bootstrap that must come first, returns when it has come.
    ///
    /// # Errors
    /// What stands in the way, in the reference's words.
    pub(in crate::agent) async fn open(deps: &ClientDeps<'_>) -> Result<Self, BuildError> {
        let files = Files::of(deps.loaded);
        let requests = RestClientMetrics::new(deps.registry);
        let (planning, now) = (files.clone(), deps.clock.now());
        let path = spawn_blocking(move || plan(planning.rotation, &planning.bootstrap, &planning.kubeconfig, now));
        let path = path.await.map_err(wrong)?;
        match path {
            ClientPath::AsIs | ClientPath::Rotate => {}
            ClientPath::BootstrapFirst => first_certificate(deps, &files, &requests).await?,
            ClientPath::BootstrapBehind => {
                let of = files.clone();
                let prepared = move || prepare_kubeconfig(&of.bootstrap, &of.kubeconfig, &of.directory);
                spawn_blocking(prepared).await.map_err(wrong)?.map_err(wrong)?;
            }
        }
        let is_managed = matches!(path, ClientPath::Rotate | ClientPath::BootstrapBehind);
        let identity = is_managed.then(Identity::nobody);
        let config = match &identity {
            Some(identity) => managed(&files.kubeconfig).await?.identified(identity.clone()),
            None => TransportConfig::from_kubeconfig(&files.kubeconfig).await.map_err(wrong)?,
        };
        let config = config.called(called(deps.loaded)).at(rates(deps.loaded));
        let api = open(config, deps, &requests, ApiClientMetrics::new(deps.registry)).await?;
        Ok(Self { api, requests, identity })
    }

    /// Keeps our certificate good from now on, where that is our affair.
    pub(in crate::agent) async fn keep_certificate(&self, deps: &ClientDeps<'_>, events: Arc<dyn EventSink>) {
        let Some(identity) = &self.identity else { return };
        let (files, clock) = (Files::of(deps.loaded), deps.clock.clone());
        let setup = ClientSetup {
            directory: files.directory.clone(),
            node: deps.node.to_owned(),
            kubeconfig: files.kubeconfig.clone(),
            api: self.api.clone(),
            bootstrap: Some(self.opener(deps, &files)),
            sink: Arc::new(identity.clone()),
            clock: deps.clock.clone(),
            metrics: CertificateMetrics::client(deps.registry, move || clock.now().as_second()),
            events,
        };
        // Its state is told by its metrics and events.
        let _ = ClientCertificates::start(setup, deps.tasks, deps.stop.child_token()).await;
    }

    /// Opens whom to ask for a certificate without having one.
    fn opener(&self, deps: &ClientDeps<'_>, files: &Files) -> OpenApi {
        let path = if files.bootstrap.as_os_str().is_empty() { &files.kubeconfig } else { &files.bootstrap };
        let opened = Opened {
            path: path.clone(),
            agent: called(deps.loaded),
            requests: self.requests.clone(),
            tasks: deps.tasks.clone(),
            stop: deps.stop.clone(),
            clock: deps.clock.clone(),
        };
        Arc::new(move || {
            let opened = opened.clone();
            Box::pin(async move { opened.open().await.map_err(|error| error.to_string()) })
        })
    }
}

/// The files a client is made of.
#[derive(Clone)]
struct Files {
    rotation: Rotation,
    bootstrap: PathBuf,
    kubeconfig: PathBuf,
    directory: PathBuf,
}

impl Files {
    fn of(loaded: &Loaded) -> Self {
        let flags = &loaded.flags;
        Self {
            rotation: if loaded.config.rotate_certificates { Rotation::On } else { Rotation::Off },
            bootstrap: PathBuf::from(&flags.bootstrap_kubeconfig),
            kubeconfig: PathBuf::from(&flags.kubeconfig),
            directory: PathBuf::from(&flags.cert_dir),
        }
    }
}

/// A client on a kubeconfig that is only there for certificates.
#[derive(Clone)]
struct Opened {
    path: PathBuf,
    agent: String,
    requests: RestClientMetrics,
    tasks: TaskTracker,
    stop: CancellationToken,
    clock: Arc<dyn Clock>,
}

impl Opened {
    async fn open(self) -> Result<Arc<dyn ApiClient>, BuildError> {
        let rate = Rate::of(BOOTSTRAP_RATE.0, BOOTSTRAP_RATE.1);
        let config = TransportConfig::from_kubeconfig(&self.path).await.map_err(wrong)?.called(self.agent);
        let config = config.at(Rates { certificates: Some(rate), ..Rates::default() });
        let stop = self.stop.child_token();
        let deps = TransportDeps {
            clock: self.clock,
            requests: self.requests,
            // Its connections are few and short-lived: the families are those of the node's own client.
            connections: ApiClientMetrics::new(&Registry::new()),
            stop: stop.clone(),
        };
        let (api, task) = Transport::open(config, deps).await.map_err(wrong)?;
        self.tasks.spawn(task);
        Ok(passing(api, stop))
    }
}

/// The cluster of a kubeconfig whose client certificate may not be there yet.
async fn managed(path: &Path) -> Result<TransportConfig, BuildError> {
    let told = |cause: String| BuildError(format!("invalid kubeconfig: {}: {cause}", path.display()));
    let text = tokio::fs::read_to_string(path).await.map_err(|error| told(error.to_string()))?;
    let base = path.parent().unwrap_or(Path::new(""));
    let transport::Kubeconfig { cluster, user } = transport::Kubeconfig::parse(&text, base).map_err(told)?;
    Ok(TransportConfig::new(cluster, user))
}

async fn first_certificate(
    deps: &ClientDeps<'_>,
    files: &Files,
    requests: &RestClientMetrics,
) -> Result<(), BuildError> {
    let path = files.bootstrap.clone();
    let cluster = spawn_blocking(move || Kubeconfig::read(&path)).await.map_err(wrong)?.map_err(wrong)?.cluster;
    let opened = Opened {
        path: files.bootstrap.clone(),
        agent: called(deps.loaded),
        requests: requests.clone(),
        tasks: deps.tasks.clone(),
        stop: deps.stop.clone(),
        clock: deps.clock.clone(),
    };
    let setup = Bootstrap {
        directory: files.directory.clone(),
        node: deps.node.to_owned(),
        cluster,
        kubeconfig: files.kubeconfig.clone(),
        api: opened.open().await?,
        clock: deps.clock.clone(),
    };
    bootstrap(setup).await.map_err(wrong)
}

async fn open(
    config: TransportConfig,
    deps: &ClientDeps<'_>,
    requests: &RestClientMetrics,
    connections: ApiClientMetrics,
) -> Result<Arc<Transport>, BuildError> {
    let own = TransportDeps {
        clock: deps.clock.clone(),
        requests: requests.clone(),
        connections,
        stop: deps.stop.child_token(),
    };
    let (api, task) = Transport::open(config, own).await.map_err(wrong)?;
    deps.tasks.spawn(task);
    Ok(api)
}

fn rates(loaded: &Loaded) -> Rates {
    let config = &loaded.config;
    Rates {
        main: Rate::of(config.kube_api_qps, config.kube_api_burst),
        events: Rate::of(config.event_record_qps, config.event_burst),
        certificates: None,
    }
}

/// Our `User-Agent`.
fn called(loaded: &Loaded) -> String {
    let program = std::env::args().next().unwrap_or_default();
    user_agent(&program, &loaded.version, "")
}
