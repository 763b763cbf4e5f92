//! Opens the volumes, and what passes between them and the node's object.

use std::{collections::BTreeSet, fs::DirBuilder, os::unix::fs::DirBuilderExt, path::Path, sync::Arc, time::Duration};

use tokio::{sync::watch, time::timeout};
use tracing::warn;

use super::{
    build::Base,
    cluster::{Cluster, VolumesTold},
};
use crate::standalone::NoStorage;
use berth_config::Loaded;
use berth_metrics::{SelinuxMetrics, VolumeMetrics};
use berth_ports::{Event, EventSink, NodeFacts, ObjectSource, StorageObjects};
use berth_sys::{machine, selinux};
use berth_volumes::{
    Credentials, DevicePlugin, FcPlugin, IscsiPlugin, Labels, LocalPlugin, Machine, Manager, NfsPlugin, Policy,
    ThisMachine, VolumesConfig, VolumesDeps,
};

/// What lies in memory could be found on a disk (spec 05 §13.2).
const ON_DISK: &str = "The tmpfs noswap option is not supported. Memory-backed volumes (e.g. secrets, emptyDirs, etc.) \
                       might be swapped to disk and should no longer be considered secure.";

/// The label of directories that are shared with drivers in containers (spec 07 §1).
const SHARED_LABEL: &str = "system_u:object_r:container_file_t:s0";
/// How long the start waits for labels of directories that may lie anywhere.
const LABELLED: Duration = Duration::from_secs(10);

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
        loaded: &Loaded,
        base: &Base,
        (facts, objects): (watch::Receiver<Arc<NodeFacts>>, Arc<dyn ObjectSource>),
        cluster: Option<&Cluster>,
    ) -> Arc<Manager> {
        let root = &*loaded.root_directory();
        let machine: Arc<dyn Machine> = Arc::new(ThisMachine::default());
        let storage = cluster.map_or_else(|| Arc::new(NoStorage) as Arc<dyn StorageObjects>, Cluster::storage);
        let mut plugins: Vec<Arc<dyn DevicePlugin>> = vec![
            Arc::new(LocalPlugin::new(root, base.events.clone())),
            Arc::new(NfsPlugin::new(machine.clone())),
            Arc::new(IscsiPlugin::new(root, machine.clone(), storage.clone())),
            Arc::new(FcPlugin::new(root, machine)),
        ];
        if let Some(cluster) = cluster {
            plugins.push(cluster.open_csi(loaded, base, root));
        }
        let labels = labels(loaded, base, root).await;
        let deps = VolumesDeps {
            facts,
            objects,
            events: base.events.clone(),
            clock: base.clock.clone(),
            metrics: VolumeMetrics::new(&base.registry),
            storage,
            plugins,
            labels,
            reported: self.reported.subscribe(),
            in_use: self.in_use.clone(),
            tasks: base.tasks.tracker().clone(),
            stop: base.stop.child_token(),
        };
        // What cannot be found out is not told.
        if tokio::task::spawn_blocking(berth_volumes::may_reach_disk).await.unwrap_or_default() {
            base.events.record(Event::node_warning("PossibleMemoryBackedVolumesOnDisk", ON_DISK));
        }
        let config = VolumesConfig { root: root.to_owned(), credentials: Credentials::of_this_process() };
        let manager = Arc::new(Manager::new(config, deps));
        // Told where it failed, and tried again by whoever needs it.
        let _known = manager.rebuild().await;
        manager
    }
}

/// Who decides on labels of volumes; nobody on a machine without SELinux. There, drivers in containers have to get at
/// what this agent shares with them, too.
async fn labels(loaded: &Loaded, base: &Base, root: &Path) -> Option<Labels> {
    if !machine::selinux_enabled() {
        return None;
    }
    let shared = ["plugins", "plugins_registry"].map(|name| root.join(name));
    let look = move || {
        for directory in shared {
            let made = DirBuilder::new().recursive(true).mode(0o750).create(&directory);
            if let Err(error) = made.and_then(|()| selinux::set_label(&directory, SHARED_LABEL)) {
                warn!(path = %directory.display(), err = %error, "Unprivileged containerized plugins might not work, could not set selinux context");
            }
        }
        selinux::file_context()
    };
    let context = timeout(LABELLED, tokio::task::spawn_blocking(look)).await;
    if context.is_err() {
        warn!(limit = ?LABELLED, "SELinux does not answer: volumes are not mounted with labels");
    }
    let context = context.ok()?.ok().flatten()?;
    let policy = Policy::new(&context, loaded.gates.enabled("SELinuxMount"))?;
    Some(Labels::new(policy, SelinuxMetrics::new(&base.registry)))
}
