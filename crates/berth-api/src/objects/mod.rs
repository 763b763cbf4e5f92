//! Cluster implementation of [`ObjectSource`]: ConfigMaps, Secrets, tokens, and other pod references.
//!
//! Input: registered pods, and reads by the engine, the runtime, and the volumes. Output: objects from stores that
//! reflect the server, tokens, and [`ChangedPods`], the pods to resync. One reflector per ConfigMap or Secret, shared
//! by all pods; one each for services and runtime classes, and one for trust bundles once a pod requests any.
//!
//! Implements spec 02b §10.1, §10.4, §11, §12; spec 10 §4.6; spec 07 §9.1, §9.3.

mod bundles;
mod cached_object;
mod change_notifier;
mod get_strategy;
mod kinds;
mod reference_counts;
mod references;
#[cfg(test)]
mod tests;
mod trust_anchors;
mod watch_strategy;

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
    time::Duration,
};

use async_trait::async_trait;
use tokio::{
    sync::watch,
    time::{interval, timeout},
};
use tokio_util::{sync::CancellationToken, task::TaskTracker};

use super::{
    api::{ApiClient, Resource},
    pod_certificates::{CertificateDeps, PodCertificates},
    reflector::{ReflectorDeps, Selection, reflect},
    store::ReflectorStore,
    tokens::Tokens,
};
use berth_metrics::ReflectorMetrics;
use berth_ports::{
    CertificateRequest, Clock, Credential, EventSink, ObjectError, ObjectSource, PullSecret, ServiceAccount,
    TokenRequest,
};
use berth_types::{
    Pod, PodUid,
    api::{self, ConfigMap, Secret},
};
use bundles::Bundles;
use cached_object::CachedObject;
use get_strategy::TtlCache;
use k8s_openapi::api::node::v1::RuntimeClass;
use watch_strategy::{WatchCache, WatchedDeps};

pub(super) use change_notifier::ChangeNotifier;
pub use change_notifier::ChangedPods;
pub(super) use references::referenced_objects;

/// Interval at which reflectors of unread objects are stopped.
const SWEEP: Duration = Duration::from_secs(60);
/// How long the creation of a sandbox waits for the first sync of runtime classes.
const CLASSES_LIMIT: Duration = Duration::from_secs(10);

/// Change detection strategy (`configMapAndSecretChangeDetectionStrategy`).
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Strategy {
    /// Watches every referenced object.
    #[default]
    Watch,
    /// Reads an object again when its TTL has expired.
    Cache,
    /// Reads an object each time.
    Get,
}

impl Strategy {
    /// Parses the configuration value; an unknown one is the default, `Watch`.
    pub fn parse(text: &str) -> Self {
        match text {
            "Cache" => Self::Cache,
            "Get" => Self::Get,
            _ => Self::Watch,
        }
    }
}

/// Configuration of the object source.
#[derive(Clone, Debug)]
pub struct ObjectsConfig {
    /// Change detection strategy.
    pub strategy: Strategy,
    /// `syncFrequency`.
    pub sync_frequency: Duration,
    /// Gate `ClusterTrustBundleProjection`.
    pub trust_bundles: bool,
}

/// Node data that pod certificates need.
pub struct NodeCertificates {
    /// Name of this node.
    pub node: String,
    /// UID of the `Node` object; empty until it is known.
    pub uid: watch::Receiver<String>,
    /// Receives events about refused, overdue, and expired certificates.
    pub events: Arc<dyn EventSink>,
}

/// Dependencies of the object source.
pub struct ObjectsDeps {
    /// Client of the API server.
    pub api: Arc<dyn ApiClient>,
    /// Metrics of reflectors.
    pub metrics: ReflectorMetrics,
    /// Wall clock.
    pub clock: Arc<dyn Clock>,
    /// TTL of strategy `Cache`: annotation `node.alpha.kubernetes.io/ttl` of the node, otherwise 60 s.
    pub ttl: watch::Receiver<Duration>,
    /// Enables pod certificates; `None` where the gate `PodCertificateRequest` is off.
    pub certificates: Option<NodeCertificates>,
    /// Tracks the spawned tasks.
    pub tasks: TaskTracker,
    /// Stops the spawned tasks.
    pub stop: CancellationToken,
}

/// Objects of one type, by strategy.
enum ObjectReader<T> {
    Watch(WatchCache<T>),
    Cache(TtlCache<T>),
    Get(Arc<dyn ApiClient>),
}

/// Object source backed by the API server.
pub struct ApiObjects {
    config_maps: ObjectReader<ConfigMap>,
    secrets: ObjectReader<Secret>,
    services: ReflectorStore<api::Service>,
    classes: ReflectorStore<RuntimeClass>,
    tokens: Arc<Tokens>,
    /// `None` where the gate `ClusterTrustBundleProjection` is off.
    bundles: Option<Bundles>,
    /// `None` where the gate `PodCertificateRequest` is off.
    certificates: Option<PodCertificates>,
}

impl ApiObjects {
    /// Returns the object source, the receiver of pods to resync, and a future that must be polled while the source is
    /// in use (it ends with `stop`).
    pub fn new(
        config: &ObjectsConfig,
        deps: ObjectsDeps,
    ) -> (Arc<Self>, ChangedPods, impl Future<Output = ()> + Send + use<>) {
        let notifier = change_notifier::ChangeNotifier::default();
        let watched = WatchedDeps {
            api: deps.api.clone(),
            metrics: deps.metrics.clone(),
            tasks: deps.tasks.clone(),
            stop: deps.stop.clone(),
            notifier: notifier.clone(),
        };
        let reflector = || ReflectorDeps::new(deps.metrics.clone(), deps.stop.clone());
        let services = Selection::matching(Resource::SERVICES, "spec.clusterIP!=None");
        let (services, follow_services) = reflect(deps.api.clone(), services, reflector());
        let classes = Selection::all(Resource::RUNTIME_CLASSES);
        let (classes, follow_classes) = reflect(deps.api.clone(), classes, reflector());
        let tokens = Arc::new(Tokens::new(deps.api.clone(), deps.clock.clone()));
        let certificates = deps.certificates.map(|own| CertificateDeps {
            api: deps.api.clone(),
            metrics: deps.metrics.clone(),
            clock: deps.clock.clone(),
            events: own.events,
            node: own.node,
            node_uid: own.uid,
            notifier: notifier.clone(),
            tasks: deps.tasks.clone(),
            stop: deps.stop.clone(),
        });
        let objects = Arc::new(Self {
            config_maps: ObjectReader::new(config, &watched, &deps.ttl),
            secrets: ObjectReader::new(config, &watched, &deps.ttl),
            services,
            classes,
            tokens: tokens.clone(),
            bundles: config.trust_bundles.then(|| Bundles::new(watched)),
            certificates: certificates.map(PodCertificates::new),
        });
        let (swept, stop, listener) = (objects.clone(), deps.stop.clone(), notifier.subscribe());
        let upkeep = async move {
            let sweeps = async {
                let mut ticks = interval(SWEEP);
                loop {
                    ticks.tick().await;
                    swept.config_maps.sweep();
                    swept.secrets.sweep();
                }
            };
            let due = async {
                loop {
                    notifier.notify(tokens.due().await);
                }
            };
            let all = async { tokio::join!(follow_services, follow_classes, sweeps, due) };
            let _stopped = stop.run_until_cancelled(all).await;
            swept.config_maps.stop();
            swept.secrets.stop();
        };
        (objects, listener, upkeep)
    }

    /// Number of pod certificates by signer and state.
    pub fn certificate_states(&self) -> Vec<(String, &'static str, i64)> {
        self.certificates.as_ref().map(PodCertificates::states).unwrap_or_default()
    }

    async fn pull_secret(&self, namespace: &str, name: &str) -> Result<Option<PullSecret>, ObjectError> {
        let secret = self.secrets.get(namespace, name).await?;
        let key = match secret.kind() {
            "kubernetes.io/dockerconfigjson" => ".dockerconfigjson",
            "kubernetes.io/dockercfg" => ".dockercfg",
            _ => return Ok(None),
        };
        let Some(data) = secret.get(key) else { return Ok(None) };
        let coordinates = (namespace.to_owned(), name.to_owned(), secret.uid().to_owned());
        Ok(Some(PullSecret { coordinates, kind: secret.kind().to_owned(), data: data.to_vec() }))
    }
}

impl<T: kinds::ObjectKind> ObjectReader<T> {
    fn new(config: &ObjectsConfig, watched: &WatchedDeps, ttl: &watch::Receiver<Duration>) -> Self {
        match config.strategy {
            Strategy::Watch => Self::Watch(WatchCache::new(watched.clone(), config.sync_frequency)),
            Strategy::Cache => Self::Cache(TtlCache::new(watched.api.clone(), ttl.clone())),
            Strategy::Get => Self::Get(watched.api.clone()),
        }
    }

    async fn get(&self, namespace: &str, name: &str) -> Result<Arc<CachedObject<T>>, ObjectError> {
        match self {
            Self::Watch(watched) => watched.get(namespace, name).await,
            Self::Cache(cached) => cached.get(namespace, name).await,
            Self::Get(api) => get_strategy::get(api, namespace, name).await,
        }
    }

    fn register(&self, pod: &PodUid, namespace: &str, names: BTreeSet<String>) {
        match self {
            Self::Watch(watched) => watched.register(pod, namespace, names),
            Self::Cache(cached) => cached.register(pod, namespace, names),
            Self::Get(_) => {}
        }
    }

    fn unregister(&self, pod: &PodUid) {
        match self {
            Self::Watch(watched) => watched.unregister(pod),
            Self::Cache(cached) => cached.unregister(pod),
            Self::Get(_) => {}
        }
    }

    fn sweep(&self) {
        if let Self::Watch(watched) = self {
            watched.sweep();
        }
    }

    fn stop(&self) {
        if let Self::Watch(watched) = self {
            watched.stop();
        }
    }
}

#[async_trait]
impl ObjectSource for ApiObjects {
    async fn config_map(&self, namespace: &str, name: &str) -> Result<Arc<BTreeMap<String, String>>, ObjectError> {
        Ok(Arc::new(self.config_maps.get(namespace, name).await?.texts()))
    }

    async fn config_map_files(
        &self,
        namespace: &str,
        name: &str,
    ) -> Result<Arc<BTreeMap<String, Vec<u8>>>, ObjectError> {
        Ok(Arc::new(self.config_maps.get(namespace, name).await?.files()))
    }

    async fn secret(&self, namespace: &str, name: &str) -> Result<Arc<BTreeMap<String, Vec<u8>>>, ObjectError> {
        Ok(Arc::new(self.secrets.get(namespace, name).await?.files()))
    }

    fn services(&self, namespace: &str) -> Option<Vec<Arc<api::Service>>> {
        let snapshot = self.services.snapshot();
        if !snapshot.synced {
            return None;
        }
        let from = (namespace.to_owned(), String::new());
        let local = snapshot.objects.range(from..).take_while(|((of, _), _)| of == namespace);
        let mut found: Vec<Arc<api::Service>> = local.map(|(_, service)| service.clone()).collect();
        if namespace != "default" {
            found.extend(snapshot.get("default", "kubernetes").cloned());
        }
        Some(found)
    }

    async fn runtime_handler(&self, class: Option<&str>) -> Result<String, ObjectError> {
        let Some(class) = class.filter(|class| !class.is_empty()) else { return Ok(String::new()) };
        let mut classes = self.classes.clone();
        if timeout(CLASSES_LIMIT, classes.synced()).await.is_err() {
            let text = format!("failed to lookup RuntimeClass {class}: timed out waiting for the condition");
            return Err(ObjectError::Other(text));
        }
        let found = classes.get("", class).map(|class| class.handler.clone());
        found.ok_or_else(|| ObjectError::NotFound { kind: "runtimeclass.node.k8s.io", name: class.to_owned() })
    }

    async fn pull_secrets(&self, pod: &Pod) -> (Vec<PullSecret>, Vec<String>) {
        let named = pod.spec().image_pull_secrets.iter().flatten().map(|secret| secret.name.as_str());
        let (mut found, mut missing) = (Vec::new(), Vec::new());
        for name in named.filter(|name| !name.is_empty()) {
            match self.pull_secret(pod.namespace(), name).await {
                Ok(secret) => found.extend(secret),
                Err(error) => {
                    tracing::warn!(pod = %pod.object_name(), secret = name, err = %error, "Unable to retrieve pull secret");
                    missing.push(name.to_owned());
                }
            }
        }
        (found, missing)
    }

    fn register(&self, pod: &Pod) {
        let named = references::referenced_objects(pod);
        self.config_maps.register(pod.uid(), pod.namespace(), named.config_maps);
        self.secrets.register(pod.uid(), pod.namespace(), named.secrets);
    }

    fn unregister(&self, pod: &PodUid) {
        self.config_maps.unregister(pod);
        self.secrets.unregister(pod);
        self.tokens.forget(pod);
        self.bundles.iter().for_each(|bundles| bundles.forget(pod));
        self.certificates.iter().for_each(|certificates| certificates.forget(pod));
    }

    fn adopt_token(&self, pod: &Pod, ask: &TokenRequest, token: &str) {
        self.tokens.adopt(pod, ask, token);
    }

    async fn token(&self, pod: &Pod, ask: &TokenRequest) -> Result<String, ObjectError> {
        self.tokens.token(pod, ask).await.map_err(|error| ObjectError::Other(error.to_string()))
    }

    async fn service_account(&self, namespace: &str, name: &str) -> Result<ServiceAccount, ObjectError> {
        self.tokens.account(namespace, name).await.map_err(|error| ObjectError::Other(error.to_string()))
    }

    async fn trust_bundle(&self, pod: &Pod, ask: &api::ClusterTrustBundleProjection) -> Result<String, ObjectError> {
        match &self.bundles {
            Some(bundles) => bundles.of(pod.uid(), ask).await,
            None => Err(ObjectError::Other(bundles::NOT_SUPPORTED.to_owned())),
        }
    }

    async fn pod_certificate(&self, pod: &Pod, ask: &CertificateRequest) -> Result<Arc<Credential>, ObjectError> {
        match &self.certificates {
            Some(certificates) => certificates.of(pod, ask).await,
            None => Err(ObjectError::Other("unimplemented".to_owned())),
        }
    }
}
