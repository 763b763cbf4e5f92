//! `ClusterTrustBundle` cache for projected volumes (spec 07 §9.3, spec 10 §4 (B1)).
//!
//! Most clusters do not use trust bundles, and many do not serve them: a reflector starts with the first request, in
//! the newest API version that the server has. A server without trust bundles is queried once per process.

use std::{
    collections::BTreeSet,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use k8s_openapi::{
    api::certificates::{v1alpha1, v1beta1},
    apimachinery::pkg::apis::meta::v1::APIResourceList,
};
use tokio::{sync::OnceCell, time::timeout};

use super::{
    trust_anchors::{Bundle, anchors},
    watch_strategy::WatchedDeps,
};
use crate::{
    api::{ApiError, Call, Resource, TypedClient},
    reflector::{ReflectedObject, ReflectorDeps, Selection, reflect},
    store::ReflectorStore,
};
use berth_ports::ObjectError;
use berth_types::{PodUid, api::ClusterTrustBundleProjection};

/// Timeout of the API discovery request, and of the wait for the first sync.
const LIMIT: Duration = Duration::from_secs(10);
const PLURAL: &str = "clustertrustbundles";
/// Error text when trust bundles are unavailable: the gate is off, or the server does not serve them.
pub const NOT_SUPPORTED: &str = "ClusterTrustBundle projection is not supported in static kubelet mode";

/// Reflected bundles, in the API version that the server has.
enum BundleStore {
    Beta(ReflectorStore<v1beta1::ClusterTrustBundle>),
    Alpha(ReflectorStore<v1alpha1::ClusterTrustBundle>),
}

/// Trust bundle cache.
pub struct Bundles {
    deps: WatchedDeps,
    followed: OnceCell<Option<BundleStore>>,
    /// Pods that requested a bundle.
    users: Arc<Mutex<BTreeSet<PodUid>>>,
}

fn locked(users: &Mutex<BTreeSet<PodUid>>) -> MutexGuard<'_, BTreeSet<PodUid>> {
    users.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Bundles {
    /// Returns an inactive cache; the first request starts the reflector.
    pub fn new(deps: WatchedDeps) -> Self {
        Self { deps, followed: OnceCell::new(), users: Arc::default() }
    }

    /// Certificates that a pod's projection selects, PEM; the pod is notified when any bundle changes.
    ///
    /// # Errors
    /// Trust bundles are unavailable or not synced, or the projection cannot be resolved.
    pub async fn of(&self, pod: &PodUid, ask: &ClusterTrustBundleProjection) -> Result<String, ObjectError> {
        locked(&self.users).insert(pod.clone());
        let followed = self.followed.get_or_try_init(|| self.follow()).await;
        let followed = followed.map_err(|error| ObjectError::Other(error.to_string()))?;
        match followed {
            None => Err(ObjectError::Other(NOT_SUPPORTED.to_owned())),
            Some(BundleStore::Beta(store)) => {
                let view = |bundle: &v1beta1::ClusterTrustBundle| Bundle {
                    name: bundle.metadata.name.clone().unwrap_or_default(),
                    signer: bundle.spec.signer_name.clone(),
                    labels: bundle.metadata.labels.clone().unwrap_or_default(),
                    text: bundle.spec.trust_bundle.clone(),
                };
                read(store, ask, view).await
            }
            Some(BundleStore::Alpha(store)) => {
                let view = |bundle: &v1alpha1::ClusterTrustBundle| Bundle {
                    name: bundle.metadata.name.clone().unwrap_or_default(),
                    signer: bundle.spec.signer_name.clone(),
                    labels: bundle.metadata.labels.clone().unwrap_or_default(),
                    text: bundle.spec.trust_bundle.clone(),
                };
                read(store, ask, view).await
            }
        }
    }

    /// Removes a pod from the notified pods.
    pub fn forget(&self, pod: &PodUid) {
        locked(&self.users).remove(pod);
    }

    async fn follow(&self) -> Result<Option<BundleStore>, ApiError> {
        if self.has(Resource::CERTIFICATES_V1BETA1).await? {
            return Ok(Some(BundleStore::Beta(self.start(Resource::TRUST_BUNDLES))));
        }
        if self.has(Resource::CERTIFICATES_V1ALPHA1).await? {
            return Ok(Some(BundleStore::Alpha(self.start(Resource::TRUST_BUNDLES_ALPHA))));
        }
        tracing::info!("API server does not serve ClusterTrustBundles");
        Ok(None)
    }

    /// Whether an API version of the group serves trust bundles.
    async fn has(&self, version: Resource) -> Result<bool, ApiError> {
        match self.deps.api.ask::<APIResourceList>(Call::get(version, "", "").within(LIMIT)).await {
            Ok(list) => Ok(list.resources.iter().any(|resource| resource.name == PLURAL)),
            Err(error) if error.is_not_found() => Ok(false),
            Err(error) => Err(error),
        }
    }

    fn start<T: ReflectedObject>(&self, resource: Resource) -> ReflectorStore<T> {
        let deps = ReflectorDeps::new(self.deps.metrics.clone(), self.deps.stop.clone());
        let (store, following) = reflect(self.deps.api.clone(), Selection::all(resource), deps);
        let (mut changes, users, notifier) = (store.clone(), self.users.clone(), self.deps.notifier.clone());
        let stop = self.deps.stop.clone();
        let notifying = async move {
            loop {
                changes.changed().await;
                notifier.notify(locked(&users).iter().cloned());
            }
        };
        self.deps.tasks.spawn(async move {
            let _stopped = stop.run_until_cancelled(async { tokio::join!(following, notifying) }).await;
        });
        store
    }
}

async fn read<T: ReflectedObject>(
    store: &ReflectorStore<T>,
    ask: &ClusterTrustBundleProjection,
    view: impl Fn(&T) -> Bundle,
) -> Result<String, ObjectError> {
    let mut store = store.clone();
    if timeout(LIMIT, store.synced()).await.is_err() {
        let text = "failed to sync ClusterTrustBundle cache: timed out waiting for the condition";
        return Err(ObjectError::Other(text.to_owned()));
    }
    let snapshot = store.snapshot();
    let bundles = snapshot.objects.values().map(|bundle| view(bundle));
    anchors(ask, bundles).map_err(|error| ObjectError::Other(error.to_string()))
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};
    use tokio_util::{sync::CancellationToken, task::TaskTracker};

    use super::*;
    use crate::{
        objects::change_notifier::ChangeNotifier,
        testing::{FakeApi, event, marker, refused},
    };
    use berth_metrics::{ReflectorMetrics, Registry};

    /// Fake server that serves bundles in this version.
    fn server(version: &'static str) -> Arc<FakeApi> {
        FakeApi::new(move |call| {
            if call.resource.plural != format!("apis/certificates.k8s.io/{version}") {
                return Err(refused(404, "NotFound", "the server could not find the requested resource"));
            }
            Ok(json!({"apiVersion": "v1", "kind": "APIResourceList", "groupVersion": "x", "resources": [
                {"name": PLURAL, "kind": "ClusterTrustBundle", "namespaced": false, "singularName": "", "verbs": []}]}))
        })
    }

    fn bundles(api: &Arc<FakeApi>) -> (Bundles, ChangeNotifier) {
        let notifier = ChangeNotifier::default();
        let deps = WatchedDeps {
            api: api.clone(),
            metrics: ReflectorMetrics::new(&Registry::new()),
            tasks: TaskTracker::new(),
            stop: CancellationToken::new(),
            notifier: notifier.clone(),
        };
        (Bundles::new(deps), notifier)
    }

    fn bundle(version: &str, text: &str, at: &str) -> Value {
        json!({"apiVersion": format!("certificates.k8s.io/{version}"), "kind": "ClusterTrustBundle",
            "metadata": {"name": "b", "uid": "b", "resourceVersion": at}, "spec": {"trustBundle": text}})
    }

    fn pem(content: &str) -> String {
        format!("-----BEGIN CERTIFICATE-----\n{content}\n-----END CERTIFICATE-----\n")
    }

    fn named(name: &str) -> ClusterTrustBundleProjection {
        serde_json::from_value(json!({"name": name, "path": "p"})).expect("a projection")
    }

    #[tokio::test(start_paused = true)]
    async fn the_newest_version_is_reflected_and_pods_are_notified_of_changes() {
        for version in ["v1beta1", "v1alpha1"] {
            let api = server(version);
            let events = api.next_watch();
            events.send(event("ADDED", bundle(version, &pem("AQ=="), "1"))).expect("it listens");
            let marker = marker(&format!("certificates.k8s.io/{version}"), "ClusterTrustBundle", "1");
            events.send(marker).expect("it listens");
            let (bundles, notifier) = bundles(&api);
            let pod = PodUid::from("u");
            assert_eq!(bundles.of(&pod, &named("b")).await, Ok(pem("AQ==")), "{version}");
            let missing = bundles.of(&pod, &named("c")).await.map_err(|error| error.to_string());
            assert_eq!(missing, Err("clustertrustbundle.certificates.k8s.io \"c\" not found".to_owned()));
            let mut changed_pods = notifier.subscribe();
            events.send(event("MODIFIED", bundle(version, &pem("Ag=="), "2"))).expect("it listens");
            loop {
                let next = timeout(Duration::from_secs(60), changed_pods.next()).await.expect("received");
                assert_eq!(next, pod);
                if bundles.of(&pod, &named("b")).await == Ok(pem("Ag==")) {
                    break;
                }
            }
            bundles.forget(&pod);
            assert!(locked(&bundles.users).is_empty());
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_server_without_bundles_is_asked_once() {
        let api = server("v2");
        let (bundles, _) = bundles(&api);
        for _ in 0..2 {
            let refused = bundles.of(&"u".into(), &named("b")).await.map_err(|error| error.to_string());
            assert_eq!(refused, Err(NOT_SUPPORTED.to_owned()));
        }
        assert_eq!(api.calls().len(), 2, "each version once");
    }

    #[tokio::test(start_paused = true)]
    async fn a_server_that_is_away_is_asked_again() {
        let api = FakeApi::new(|_| Err(refused(503, "ServiceUnavailable", "not now")));
        let (bundles, _) = bundles(&api);
        for count in 1..=2 {
            bundles.of(&"u".into(), &named("b")).await.expect_err("away");
            assert_eq!(api.calls().len(), count);
        }
    }
}
