//! A node of a cluster: what follows the API server, and what is reported to it.
//!
//! In: the client. Out: the pods of this node as a source, the objects they refer to, the Node object,
//! statuses and events. Everything waits for the API server by itself: nothing here delays a static pod.
//! Behaviour: spec 10, spec 01 §9.

mod client;
mod feed;
mod node;

use std::{path::PathBuf, sync::Arc, time::Duration};

use tokio::sync::{mpsc, watch};
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

use self::feed::PodFeed;
pub(super) use self::{
    client::{Client, ClientDeps},
    node::NodeParts,
};
use super::{
    build::{Base, BuildError, wrong},
    offline::{OfflineFeed, OfflineSettings},
    settings,
};
use crate::{
    config::Loaded,
    cri::RuntimeService,
    embedded,
    engine::{
        Command,
        ports::{MirrorPods, ObjectSource},
    },
    kube::{
        ApiObjects, ChangedPods, EventDeps, MirrorDeps, ObjectsConfig, ObjectsDeps, Offline, OfflineConfig,
        OfflineObjects, ReflectorDeps, Selection, StartTimes, StatusWriter, StatusWriterDeps, Store, Strategy,
        TimedEvents,
        api::{ApiClient, Resource},
        certificates::{NamesNeeded, ServingCertificates, ServingSetup},
        event_recorder, mirrors, reflect,
    },
    metrics::{ApiWriteMetrics, CertificateMetrics, ReflectorMetrics},
    pod::api,
    sources::ports::PodSourceFeed,
    status::StatusManager,
};

/// Follows the API server, if there is one; events go there from now on.
///
/// # Errors
/// What stands in the way, in the reference's words.
pub(super) async fn join(loaded: &Loaded, base: &mut Base, node: &str) -> Result<Option<Cluster>, BuildError> {
    if loaded.is_standalone() {
        return Ok(None);
    }
    let (registry, tasks, stop) = (base.registry.clone(), base.tasks.clone(), base.stop.clone());
    let deps = ClientDeps { loaded, registry: &registry, tasks: &tasks, stop: &stop, clock: base.clock.clone(), node };
    let client = Client::open(&deps).await?;
    let cluster = Cluster::open(loaded, base, client.api.clone(), node).await?;
    client.keep_certificate(&deps, base.events.clone()).await;
    if loaded.config.enable_server && loaded.config.server_tls_bootstrap {
        cluster.keep_serving_pair(loaded, base).await;
    }
    Ok(Some(cluster))
}

/// What follows the API server.
pub(super) struct Cluster {
    name: String,
    api: Arc<dyn ApiClient>,
    writes: ApiWriteMetrics,
    nodes: Store<api::Node>,
    pods: Store<api::Pod>,
    objects: Arc<dyn ObjectSource>,
    /// Last-known pods, where that is wanted.
    offline: Option<(Arc<Offline>, Duration)>,
    changed: Option<ChangedPods>,
    times: Arc<StartTimes>,
    mirrors: Arc<dyn MirrorPods>,
}

impl Cluster {
    /// Follows the node, and once it is known the node's pods; sends events from now on.
    ///
    /// # Errors
    /// What the agent's own settings say of offline pods cannot be used.
    pub(super) async fn open(
        loaded: &Loaded,
        base: &mut Base,
        api: Arc<dyn ApiClient>,
        name: &str,
    ) -> Result<Self, BuildError> {
        let writes = ApiWriteMetrics::new(&base.registry);
        let (recorder, sender) = event_recorder(EventDeps {
            node: name.to_owned(),
            api: api.clone(),
            log: base.events.clone(),
            clock: base.clock.clone(),
            metrics: writes.clone(),
        });
        base.tasks.spawn(sender.run(base.stop.child_token()));
        let times = Arc::new(StartTimes::new(base.statuses.clone(), base.clock.clone()));
        base.events = Arc::new(TimedEvents { times: times.clone(), next: Arc::new(recorder) });
        let metrics = ReflectorMetrics::new(&base.registry);
        let deps = || ReflectorDeps::new(metrics.clone(), base.stop.child_token());
        let own = Selection::matching(Resource::NODES, &format!("metadata.name={name}"));
        let (nodes, following) = reflect(api.clone(), own, deps());
        base.tasks.spawn(following);
        let ours = Selection::matching(Resource::PODS, &format!("spec.nodeName={name}"));
        let (pods, following) = reflect(api.clone(), ours, deps());
        let mut known = nodes.clone();
        let stop = base.stop.child_token();
        base.tasks.spawn(async move {
            // Admission asks about the node: no pod comes before it (spec 02a §1.8).
            if stop.run_until_cancelled(known.synced()).await.is_some() {
                following.await;
            }
        });
        let strategy = Strategy::parse(&loaded.config.config_map_and_secret_change_detection_strategy);
        let config = ObjectsConfig { strategy, sync_frequency: loaded.config.sync_frequency.std() };
        let (objects, changed, following) = ApiObjects::new(
            &config,
            ObjectsDeps {
                api: api.clone(),
                metrics,
                clock: base.clock.clone(),
                ttl: watch::channel(Duration::from_secs(60)).1,
                tasks: base.tasks.clone(),
                stop: base.stop.child_token(),
            },
        );
        base.tasks.spawn(following);
        let offline = offline(loaded, base, name).await?;
        let objects: Arc<dyn ObjectSource> = match &offline {
            Some((offline, _)) => Arc::new(OfflineObjects::new(objects, offline.clone())),
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
        let (measuring, shown, stop) = (times.clone(), pods.clone(), base.stop.child_token());
        base.tasks.spawn(async move { measuring.run(shown, stop).await });
        let mirrors = Arc::new(mirrors);
        let (name, changed) = (name.to_owned(), Some(changed));
        Ok(Self { name, api, writes, nodes, pods, objects, offline, changed, times, mirrors })
    }

    /// The way to the API server.
    pub(super) fn api(&self) -> Arc<dyn ApiClient> {
        self.api.clone()
    }

    /// The objects that pods refer to.
    pub(super) fn objects(&self) -> Arc<dyn ObjectSource> {
        self.objects.clone()
    }

    /// The pods of this node.
    pub(super) fn feed(&self) -> Box<dyn PodSourceFeed> {
        let feed = Box::new(PodFeed::new(self.pods.clone()));
        match &self.offline {
            Some((offline, patience)) => Box::new(OfflineFeed::new(feed, offline.clone(), *patience)),
            None => feed,
        }
    }

    /// Who keeps mirrors of static pods.
    pub(super) fn mirrors(&self) -> Arc<dyn MirrorPods> {
        self.mirrors.clone()
    }

    /// Writes statuses from now on.
    pub(super) fn write_statuses(&self, base: &Base, status: Arc<StatusManager>) {
        let times = self.times.clone();
        let writer = StatusWriter::new(StatusWriterDeps {
            status,
            api: self.api.clone(),
            pods: self.pods.clone(),
            events: base.events.clone(),
            clock: base.clock.clone(),
            metrics: self.writes.clone(),
            on_written: Some(Arc::new(move |uid, status| times.written(uid, status))),
        });
        base.tasks.spawn(writer.run(base.stop.child_token()));
    }
}

impl Cluster {
    /// Tells the runtime the node's ranges as they come.
    pub(super) fn tell_ranges(&self, base: &Base, ranges: watch::Receiver<String>, cri: Arc<dyn RuntimeService>) {
        base.tasks.spawn(tell_ranges(ranges, cri, base.stop.child_token()));
    }

    /// Pods look again when what they refer to changes, from now on.
    pub(super) fn follow_changes(&mut self, base: &Base, commands: mpsc::Sender<Command>) {
        let Some(changed) = self.changed.take() else { return };
        base.tasks.spawn(poke(changed, commands, base.stop.child_token()));
    }
}

/// Last-known pods, where the agent's own settings ask for them (section `offlinePods`).
async fn offline(loaded: &Loaded, base: &Base, node: &str) -> Result<Option<(Arc<Offline>, Duration)>, BuildError> {
    let Some(section) = embedded::settings::section("offlinePods").map_err(BuildError)? else { return Ok(None) };
    let settings = OfflineSettings::read(section).map_err(BuildError)?;
    let config = OfflineConfig {
        file: settings::root(loaded).join("offline_pods"),
        key_file: settings.key_file.clone(),
        node: node.to_owned(),
    };
    let offline = Offline::start(config, &base.tasks, base.stop.child_token()).await.map_err(wrong)?;
    Ok(Some((offline, settings.patience())))
}

/// Tells the runtime which addresses the cluster gave to the pods of this node.
async fn tell_ranges(mut ranges: watch::Receiver<String>, cri: Arc<dyn RuntimeService>, stop: CancellationToken) {
    loop {
        let range = ranges.borrow_and_update().clone();
        if !range.is_empty() {
            match cri.update_runtime_config(&range).await {
                Ok(()) => info!(podCIDR = range, "Told the runtime the addresses of this node's pods"),
                Err(err) => warn!(%err, podCIDR = range, "The runtime does not take the addresses of this node's pods"),
            }
        }
        tokio::select! {
            () = stop.cancelled() => return,
            moved = ranges.changed() => if moved.is_err() { return },
        }
    }
}

async fn poke(mut changed: ChangedPods, commands: mpsc::Sender<Command>, stop: CancellationToken) {
    loop {
        let pod = tokio::select! {
            () = stop.cancelled() => return,
            pod = changed.next() => pod,
        };
        if commands.send(Command::Poke(pod)).await.is_err() {
            return;
        }
    }
}

impl Cluster {
    /// Has the cluster sign the pair we serve with, from now on (`serverTLSBootstrap`, spec 01 §11.6).
    pub(super) async fn keep_serving_pair(&self, loaded: &Loaded, base: &Base) {
        let config = &loaded.config;
        let given = !config.tls_cert_file.is_empty() && !config.tls_private_key_file.is_empty();
        let clock = base.clock.clone();
        let setup = ServingSetup {
            directory: PathBuf::from(&loaded.flags.cert_dir),
            node: self.name.clone(),
            configured: given
                .then(|| (PathBuf::from(&config.tls_cert_file), PathBuf::from(&config.tls_private_key_file))),
            api: self.api.clone(),
            addresses: self.addresses(base),
            needed: if loaded.gates.enabled("AllowDNSOnlyNodeCSR") { NamesNeeded::Any } else { NamesNeeded::Ip },
            clock: base.clock.clone(),
            metrics: CertificateMetrics::serving(&base.registry, move || clock.now().as_second()),
            events: base.events.clone(),
        };
        // The server follows the file; metrics and events tell the rest.
        let _ = ServingCertificates::start(setup, &base.tasks, base.stop.child_token()).await;
    }
}
