//! Joins the node to its cluster: reflectors, pod sources, and writers to the API server.

use std::{sync::Arc, time::Duration};

use tokio::sync::{mpsc, watch};
use tokio_util::sync::CancellationToken;

use super::{
    super::composition_root::{Base, BuildError, wrong},
    client::ClusterClient,
};
use crate::{
    api_source::{OfflineFeed, OfflineSettings, PodFeed},
    engine::SyncLoopCommand,
    node::own_node::{self, attached, object_ttl, uid},
    sources::ports::PodSourceFeed,
};
use berth_api::{
    ApiObjects, ApiStorage, ChangedPods, EventDeps, MirrorDeps, NodeCertificates, ObjectsConfig, ObjectsDeps, Offline,
    OfflineConfig, OfflineObjects, ReflectorDeps, ReflectorStore, Selection, StartTimes, StatusWriter,
    StatusWriterDeps, Strategy, TimedEvents,
    api::{ApiClient, Resource},
    event_recorder, mirrors, reflect,
};
use berth_config::LoadedConfig;
use berth_metrics::{ApiWriteMetrics, ReflectorMetrics, register_pod_certificates};
use berth_ports::{MirrorPods, ObjectSource, StorageObjects};
use berth_status::StatusManager;
use berth_types::{Pod, api};

/// Connects to the API server, unless in standalone mode; events are sent to it from then on.
///
/// # Errors
/// Why the node cannot join, with kubelet's texts.
pub(in crate::wiring) async fn join(
    loaded: &LoadedConfig,
    base: &mut Base,
    node: &str,
) -> Result<Option<Cluster>, BuildError> {
    if loaded.is_standalone() {
        return Ok(None);
    }
    let client = ClusterClient::open(loaded, base, node).await?;
    let recall = Recall::open(loaded, base, node).await?;
    let cluster = Cluster::follow(loaded, base, client.api.clone(), recall, node);
    client.start_certificate_rotation(base, node).await;
    if loaded.config.enable_server && loaded.config.server_tls_bootstrap {
        cluster.start_serving_certificate(loaded, base).await;
    }
    Ok(Some(cluster))
}

/// Everything that follows the API server, or reports to it.
pub(in crate::wiring) struct Cluster {
    /// Name of the node.
    pub(super) name: String,
    /// Client of the API server.
    pub(super) api: Arc<dyn ApiClient>,
    /// Reflected Node object.
    pub(super) nodes: ReflectorStore<api::Node>,
    pods: ReflectorStore<Pod>,
    objects: Arc<dyn ObjectSource>,
    storage: Arc<dyn StorageObjects>,
    changed: Option<ChangedPods>,
    /// Last-known pods, if configured.
    recall: Option<Recall>,
    mirrors: Arc<dyn MirrorPods>,
    times: Arc<StartTimes>,
    writes: ApiWriteMetrics,
}

impl Cluster {
    /// Starts the reflectors of the node, and after its first sync of its pods; sends events from then on.
    fn follow(
        loaded: &LoadedConfig,
        base: &mut Base,
        api: Arc<dyn ApiClient>,
        recall: Option<Recall>,
        name: &str,
    ) -> Self {
        let writes = ApiWriteMetrics::new(&base.registry);
        let times = Arc::new(StartTimes::new(base.statuses.clone(), base.clock.clone()));
        send_events(base, &api, &writes, &times, name);
        let metrics = ReflectorMetrics::new(&base.registry);
        let (nodes, pods) = follow_node(base, &api, &metrics, name);
        let (measuring, shown, stop) = (times.clone(), pods.clone(), base.stop.child_token());
        base.tasks.spawn(async move { measuring.run(shown, stop).await });
        let attached = of_node(base, nodes.clone(), name, attached);
        let (storage, upkeep) = ApiStorage::new(api.clone(), attached, metrics.clone(), base.stop.child_token());
        base.tasks.spawn(upkeep);
        let (objects, changed) = follow_objects(loaded, base, &api, metrics, (nodes.clone(), name));
        let objects: Arc<dyn ObjectSource> = match &recall {
            Some(recall) => Arc::new(OfflineObjects::new(objects, recall.offline.clone())),
            None => objects,
        };
        let (mirrors, writer) = mirrors(MirrorDeps {
            node: name.to_owned(),
            api: api.clone(),
            pods: pods.clone(),
            nodes: nodes.clone(),
            events: base.events.clone(),
            metrics: writes.clone(),
        });
        base.tasks.spawn(writer.run(base.stop.child_token()));
        let (name, changed, mirrors) = (name.to_owned(), Some(changed), Arc::new(mirrors));
        Self { name, api, nodes, pods, objects, storage, changed, recall, mirrors, times, writes }
    }

    /// Client of the API server.
    pub(in crate::wiring) fn api(&self) -> Arc<dyn ApiClient> {
        self.api.clone()
    }

    /// Objects that pods refer to.
    pub(in crate::wiring) fn objects(&self) -> Arc<dyn ObjectSource> {
        self.objects.clone()
    }

    /// Claims, and the storage objects behind them.
    pub(in crate::wiring) fn storage(&self) -> Arc<dyn StorageObjects> {
        self.storage.clone()
    }

    /// Source of this node's pods.
    pub(in crate::wiring) fn feed(&self) -> Box<dyn PodSourceFeed> {
        let feed = Box::new(PodFeed::new(self.pods.clone()));
        match &self.recall {
            Some(recall) => Box::new(OfflineFeed::new(feed, recall.offline.clone(), recall.patience)),
            None => feed,
        }
    }

    /// Creates and deletes mirror pods of static pods.
    pub(in crate::wiring) fn mirrors(&self) -> Arc<dyn MirrorPods> {
        self.mirrors.clone()
    }

    /// Starts writing pod statuses.
    pub(in crate::wiring) fn write_statuses(&self, base: &Base, status: Arc<StatusManager>) {
        let times = self.times.clone();
        let writer = StatusWriter::new(StatusWriterDeps {
            status,
            api: self.api.clone(),
            pods: self.pods.clone(),
            events: base.events.clone(),
            clock: base.clock.clone(),
            metrics: self.writes.clone(),
            on_written: Some(Arc::new(move |uid, status| times.written(uid, status))),
            liveness: base.liveness.of("pod-status"),
        });
        base.tasks.spawn(writer.run(base.stop.child_token()));
    }

    /// Starts to resync pods when an object that they refer to changes.
    pub(in crate::wiring) fn follow_changes(&mut self, base: &Base, commands: mpsc::Sender<SyncLoopCommand>) {
        let Some(changed) = self.changed.take() else { return };
        base.tasks.spawn(forward_resyncs(changed, commands, base.stop.child_token()));
    }
}

/// Sends events to the API server, and measures startup times of pods from them.
fn send_events(
    base: &mut Base,
    api: &Arc<dyn ApiClient>,
    writes: &ApiWriteMetrics,
    times: &Arc<StartTimes>,
    node: &str,
) {
    let (recorder, sender) = event_recorder(EventDeps {
        node: node.to_owned(),
        api: api.clone(),
        log: base.events.clone(),
        clock: base.clock.clone(),
        metrics: writes.clone(),
    });
    base.tasks.spawn(sender.run(base.stop.child_token()));
    base.events = Arc::new(TimedEvents { times: times.clone(), next: Arc::new(recorder) });
}

/// Reflects the Node object, and the node's pods once it is synced: admission reads the node, so no pod may arrive
/// before it
/// (spec 02a §1.8).
fn follow_node(
    base: &Base,
    api: &Arc<dyn ApiClient>,
    metrics: &ReflectorMetrics,
    name: &str,
) -> (ReflectorStore<api::Node>, ReflectorStore<Pod>) {
    let deps = || ReflectorDeps::new(metrics.clone(), base.stop.child_token());
    let own = Selection::matching(Resource::NODES, &format!("metadata.name={name}"));
    let (nodes, following) = reflect(api.clone(), own, deps());
    base.tasks.spawn(following);
    let ours = Selection::matching(Resource::PODS, &format!("spec.nodeName={name}"));
    let (pods, following) = reflect(api.clone(), ours, deps());
    let (mut known, stop) = (nodes.clone(), base.stop.child_token());
    base.tasks.spawn(async move {
        if stop.run_until_cancelled(known.synced()).await.is_some() {
            following.await;
        }
    });
    (nodes, pods)
}

fn follow_objects(
    loaded: &LoadedConfig,
    base: &Base,
    api: &Arc<dyn ApiClient>,
    metrics: ReflectorMetrics,
    (nodes, name): (ReflectorStore<api::Node>, &str),
) -> (Arc<dyn ObjectSource>, ChangedPods) {
    let strategy = Strategy::parse(&loaded.config.config_map_and_secret_change_detection_strategy);
    let config = ObjectsConfig {
        strategy,
        sync_frequency: loaded.config.sync_frequency.std(),
        trust_bundles: loaded.gates.enabled("ClusterTrustBundleProjection"),
    };
    let has_certificates = loaded.gates.enabled("PodCertificateRequest");
    let certificates = has_certificates.then(|| NodeCertificates {
        node: name.to_owned(),
        uid: of_node(base, nodes.clone(), name, uid),
        events: base.events.clone(),
    });
    let deps = ObjectsDeps {
        api: api.clone(),
        metrics,
        clock: base.clock.clone(),
        ttl: of_node(base, nodes, name, object_ttl),
        certificates,
        tasks: base.tasks.tracker().clone(),
        stop: base.stop.child_token(),
    };
    let (objects, changed, following) = ApiObjects::new(&config, deps);
    base.tasks.spawn(following);
    if has_certificates {
        let source = objects.clone();
        register_pod_certificates(&base.registry, move || source.certificate_states());
    }
    (objects, changed)
}

async fn forward_resyncs(mut changed: ChangedPods, commands: mpsc::Sender<SyncLoopCommand>, stop: CancellationToken) {
    loop {
        let pod = tokio::select! {
            () = stop.cancelled() => return,
            pod = changed.next() => pod,
        };
        if commands.send(SyncLoopCommand::Resync(pod)).await.is_err() {
            return;
        }
    }
}

/// Publishes a value of the own Node object, and keeps it up to date in the background.
pub(super) fn of_node<T: PartialEq + Send + Sync + 'static>(
    base: &Base,
    nodes: ReflectorStore<api::Node>,
    name: &str,
    read: fn(Option<&api::Node>) -> T,
) -> watch::Receiver<T> {
    let (value, following) = own_node::of_node(nodes, name.to_owned(), read, base.stop.child_token());
    base.tasks.spawn(following);
    value
}

/// Last-known pods.
struct Recall {
    /// The persisted pods.
    offline: Arc<Offline>,
    /// Time after the start during which the API server is waited for.
    patience: Duration,
}

impl Recall {
    /// Opens the last-known pods if the agent's own settings contain the section.
    ///
    /// # Errors
    /// The settings are invalid or unusable.
    async fn open(loaded: &LoadedConfig, base: &Base, node: &str) -> Result<Option<Self>, BuildError> {
        let Some(section) = berth_runtime::settings::section("offlinePods").map_err(BuildError)? else {
            return Ok(None);
        };
        let settings = OfflineSettings::read(section).map_err(BuildError)?;
        let config = OfflineConfig {
            file: loaded.root_directory().join("offline_pods"),
            key_file: settings.key_file.clone(),
            node: node.to_owned(),
        };
        let offline = Offline::start(config, base.tasks.tracker(), base.stop.child_token()).await.map_err(wrong)?;
        Ok(Some(Self { offline, patience: settings.patience() }))
    }
}
