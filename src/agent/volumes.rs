//! Opens the volumes, and what passes between them and the node's object.

use std::{collections::BTreeSet, path::Path, sync::Arc};

use tokio::sync::watch;

use super::{
    build::Base,
    cluster::{Cluster, VolumesTold},
    standalone::NoStorage,
};
use crate::{
    engine::ports::{Event, EventSink, NodeFacts, ObjectSource, StorageObjects},
    metrics::VolumeMetrics,
    volumes::{
        self, Credentials, DevicePlugin, FcPlugin, IscsiPlugin, LocalPlugin, Machine, Manager, NfsPlugin, ThisMachine,
        VolumesConfig, VolumesDeps,
    },
};

/// What lies in memory could be found on a disk (spec 05 §13.2).
const ON_DISK: &str = "The tmpfs noswap option is not supported. Memory-backed volumes (e.g. secrets, emptyDirs, etc.) \
                       might be swapped to disk and should no longer be considered secure.";

/// Which volumes are in use, and which of them the API server knows of (spec 07 §5.3).
#[derive(Default)]
pub(super) struct VolumeSeam {
    in_use: watch::Sender<Option<Vec<String>>>,
    reported: watch::Sender<Arc<BTreeSet<String>>>,
}

impl VolumeSeam {
    /// For who tells the API server.
    pub(super) fn told(&self) -> VolumesTold {
        let reported = self.reported.clone();
        let tell = move |volumes: &[String]| {
            let known: BTreeSet<String> = volumes.iter().cloned().collect();
            reported.send_if_modified(|before| {
                let is_news = **before != known;
                *before = Arc::new(known);
                is_news
            });
        };
        VolumesTold { in_use: self.in_use.subscribe(), reported: Arc::new(tell) }
    }

    /// The volumes; what an earlier agent left of them is known from then on.
    pub(super) async fn open(
        self,
        base: &Base,
        root: &Path,
        (facts, objects): (watch::Receiver<Arc<NodeFacts>>, Arc<dyn ObjectSource>),
        cluster: Option<&Cluster>,
    ) -> Arc<Manager> {
        let machine: Arc<dyn Machine> = Arc::new(ThisMachine::default());
        let storage = cluster.map_or_else(|| Arc::new(NoStorage) as Arc<dyn StorageObjects>, Cluster::storage);
        let mut plugins: Vec<Arc<dyn DevicePlugin>> = vec![
            Arc::new(LocalPlugin::new(root, base.events.clone())),
            Arc::new(NfsPlugin::new(machine.clone())),
            Arc::new(IscsiPlugin::new(root, machine.clone(), storage.clone())),
            Arc::new(FcPlugin::new(root, machine)),
        ];
        if let Some(cluster) = cluster {
            plugins.push(cluster.open_csi(base, root));
        }
        let deps = VolumesDeps {
            facts,
            objects,
            events: base.events.clone(),
            clock: base.clock.clone(),
            metrics: VolumeMetrics::new(&base.registry),
            storage,
            plugins,
            reported: self.reported.subscribe(),
            in_use: self.in_use.clone(),
            tasks: base.tasks.tracker().clone(),
            stop: base.stop.child_token(),
        };
        // What cannot be found out is not told.
        if tokio::task::spawn_blocking(volumes::may_reach_disk).await.unwrap_or_default() {
            base.events.record(Event::node_warning("PossibleMemoryBackedVolumesOnDisk", ON_DISK));
        }
        let config = VolumesConfig { root: root.to_owned(), credentials: Credentials::of_this_process() };
        let manager = Arc::new(Manager::new(config, deps));
        // Told where it failed, and tried again by whoever needs it.
        let _known = manager.rebuild().await;
        manager
    }
}
