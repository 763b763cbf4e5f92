//! Opens the volume manager, and its exchange of volumes in use with the Node object.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs::DirBuilder,
    os::unix::fs::DirBuilderExt,
    path::Path,
    sync::Arc,
    time::Duration,
};

use tokio::{sync::watch, time::timeout};
use tracing::warn;

use super::{
    cluster::{Cluster, NodeParts, VolumesInUse},
    composition_root::{Base, BuildError, CoreParts},
    csi, node_addresses,
};
use crate::{
    plugins::{Handlers, Watcher, WatcherDeps},
    standalone::NoStorage,
};
use berth_config::LoadedConfig;
use berth_metrics::{PluginMetrics, SelinuxMetrics, VolumeMetrics};
use berth_ports::{EventRecord, EventSink, PluginHandler, StorageObjects};
use berth_sys::{machine, selinux};
use berth_volumes::{
    AttachableVolumePlugin, CredentialStorage, FcPlugin, HostOperations, IscsiPlugin, LabelPolicy, LocalPlugin,
    NfsPlugin, PodVolumeManager, SelinuxPolicy, ThisMachine, VolumesConfig, VolumesDeps,
};

/// Event text for memory-backed volumes that can be swapped to disk (spec 05 §13.2).
const ON_DISK: &str = "The tmpfs noswap option is not supported. Memory-backed volumes (e.g. secrets, emptyDirs, etc.) \
                       might be swapped to disk and should no longer be considered secure.";

/// SELinux label of directories that are shared with containerized drivers (spec 07 §1).
const SHARED_LABEL: &str = "system_u:object_r:container_file_t:s0";
/// Timeout for labeling directories at startup, which may be on any file system.
const LABELLED: Duration = Duration::from_secs(10);

/// Volumes in use, and those of them that the API server knows (spec 07 §5.3).
#[derive(Default)]
struct VolumesInUseChannel {
    in_use: watch::Sender<Option<Vec<String>>>,
    reported: watch::Sender<Arc<BTreeSet<String>>>,
}

impl VolumesInUseChannel {
    /// The ends for the reporter of the Node object.
    fn reporter(&self) -> VolumesInUse {
        let reported = self.reported.clone();
        let report = move |volumes: &[String]| {
            let known: BTreeSet<String> = volumes.iter().cloned().collect();
            reported.send_if_modified(|before| {
                let is_news = **before != known;
                *before = Arc::new(known);
                is_news
            });
        };
        VolumesInUse { in_use: self.in_use.subscribe(), reported: Arc::new(report) }
    }
}

/// Opens the Node object, which reports volumes in use, and the volume manager. Mounts of an earlier agent are known
/// from then on.
///
/// # Errors
/// The settings of the Node object are invalid.
pub(super) async fn open(
    loaded: &LoadedConfig,
    base: &Base,
    core: &CoreParts<'_>,
    cluster: Option<&Cluster>,
) -> Result<Arc<PodVolumeManager>, BuildError> {
    let seam = VolumesInUseChannel::default();
    let facts = core.node.subscribe();
    if let Some(cluster) = cluster {
        let (facts, runtime, volumes) = (core.node.clone(), core.runtime_state.clone(), seam.reporter());
        let devices = core.allocators.devices.resources.clone();
        let devices_lost = core.allocators.devices.is_fresh;
        let node = NodeParts { facts, runtime, images: core.images.clone(), volumes, devices, devices_lost };
        let ranges = cluster.keep_node(loaded, base, core.machine, core.info, node)?;
        cluster.follow_pod_cidr(base, ranges, core.cri.clone());
    } else {
        node_addresses::publish_own(loaded, base, core.node.clone()).await?;
        node_addresses::send_pod_cidr(loaded, base, core.cri.clone()).await;
    }
    let root = &*loaded.root_directory();
    let storage = cluster.map_or_else(|| Arc::new(NoStorage) as Arc<dyn StorageObjects>, Cluster::storage);
    let deps = VolumesDeps {
        facts,
        objects: core.objects.clone(),
        events: base.events.clone(),
        clock: base.clock.clone(),
        metrics: VolumeMetrics::new(&base.registry),
        storage: storage.clone(),
        plugins: plugins(loaded, base, root, core, cluster, storage),
        labels: labels(loaded, base, root).await,
        reported: seam.reported.subscribe(),
        in_use: seam.in_use.clone(),
        tasks: base.tasks.tracker().clone(),
        stop: base.stop.child_token(),
    };
    // If this cannot be determined, no event is recorded.
    if tokio::task::spawn_blocking(berth_volumes::may_reach_disk).await.unwrap_or_default() {
        base.events.record(EventRecord::node_warning("PossibleMemoryBackedVolumesOnDisk", ON_DISK));
    }
    let config = VolumesConfig { root: root.to_owned(), credentials: CredentialStorage::of_this_process() };
    let manager = Arc::new(PodVolumeManager::new(config, deps));
    // A failure is logged there, and the rebuild is retried when it is needed.
    let _known = manager.rebuild().await;
    Ok(manager)
}

/// Plugins of attachable volumes. Also starts the watcher of plugins that register: CSI drivers, device plugins, and
/// DRA drivers, all of them with and without an API server.
fn plugins(
    loaded: &LoadedConfig,
    base: &Base,
    root: &Path,
    core: &CoreParts<'_>,
    cluster: Option<&Cluster>,
    storage: Arc<dyn StorageObjects>,
) -> Vec<Arc<dyn AttachableVolumePlugin>> {
    let machine: Arc<dyn HostOperations> = Arc::new(ThisMachine::default());
    let (csi, registration) = csi::open(loaded, base, root, core, cluster, storage.clone());
    let handlers = BTreeMap::from([
        ("CSIPlugin", registration),
        ("DRAPlugin", core.allocators.claims.plugin_handler()),
        ("DevicePlugin", core.allocators.devices.plugin_handler()),
    ]);
    watch_plugins(base, root, handlers);
    vec![
        Arc::new(LocalPlugin::new(root, base.events.clone())),
        Arc::new(NfsPlugin::new(machine.clone())),
        Arc::new(IscsiPlugin::new(root, machine.clone(), storage)),
        Arc::new(FcPlugin::new(root, machine)),
        csi,
    ]
}

/// Starts the plugin watcher: it registers plugins that create sockets in `plugins_registry`.
fn watch_plugins(base: &Base, root: &Path, handlers: BTreeMap<&'static str, Arc<dyn PluginHandler>>) {
    let watcher = Watcher::new(WatcherDeps {
        directory: root.join("plugins_registry"),
        handlers: Handlers::new(handlers),
        metrics: PluginMetrics::new(&base.registry),
        tasks: base.tasks.tracker().clone(),
    });
    base.tasks.spawn(watcher.run(base.stop.child_token()));
}

/// SELinux label policy of volumes; `None` on a machine without SELinux. With it, also labels the directories that are
/// shared with containerized drivers.
async fn labels(loaded: &LoadedConfig, base: &Base, root: &Path) -> Option<LabelPolicy> {
    if !machine::selinux_enabled() {
        return None;
    }
    let shared = ["plugins", "plugins_registry"].map(|name| root.join(name));
    let label_directories = move || {
        for directory in shared {
            let made = DirBuilder::new().recursive(true).mode(0o750).create(&directory);
            if let Err(error) = made.and_then(|()| selinux::set_label(&directory, SHARED_LABEL)) {
                warn!(path = %directory.display(), err = %error, "Unprivileged containerized plugins might not work, could not set selinux context");
            }
        }
        selinux::file_context()
    };
    let context = timeout(LABELLED, tokio::task::spawn_blocking(label_directories)).await;
    if context.is_err() {
        warn!(limit = ?LABELLED, "Timed out reading the SELinux file context: volumes are mounted without labels");
    }
    let context = context.ok()?.ok().flatten()?;
    let policy = SelinuxPolicy::new(&context, loaded.gates.enabled("SELinuxMount"))?;
    Some(LabelPolicy::new(policy, SelinuxMetrics::new(&base.registry)))
}
