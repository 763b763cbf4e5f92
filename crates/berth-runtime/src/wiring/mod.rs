//! Wires the production implementations of the ports into a runtime.

pub mod groups;
pub mod images;
pub mod network;
pub mod planner;
pub mod shims;

use std::{path::PathBuf, sync::Arc};

use tokio::{sync::oneshot, task::spawn_blocking};
use tokio_util::{sync::CancellationToken, task::TaskTracker};

use super::{
    config::EmbeddedConfig,
    errors::{RuntimeError, RuntimeResult},
    groups::CgroupfsGroups,
    images::{
        ImageStore, ImageStoreSettings, control_socket, layers::UnpackHelpers, snapshots::Snapshotter,
        unpacker::LayerLimits,
    },
    launch::{host, limits::RESOURCES},
    lost_networks, network as embedded_network,
    ports::Ports,
    recovery,
    runtime::{HostFacts, Runtime},
    store::{self, Layout},
};
use berth_metrics::{EmbeddedMetrics, EmbeddedObjects, Registry, register_embedded_objects};
use berth_sys::cgroup::{Hierarchy, systemd};

/// Path of the running executable, valid even after its file was replaced.
pub const OWN_PROGRAM: &str = "/proc/self/exe";

/// What the process around the runtime provides: host name, unpacker, tasks, and stop signal.
pub struct RuntimeEnvironment {
    /// Host name of the machine.
    pub hostname: String,
    /// Whether to create the built-in images from the shim binary.
    pub has_builtin_images: bool,
    /// Executable that unpacks layers ([`OWN_PROGRAM`]); `None`: this process unpacks them.
    pub unpacker: Option<PathBuf>,
    /// Tracker of all tasks.
    pub tasks: TaskTracker,
    /// Cancelled on shutdown; pods keep running.
    pub stop: CancellationToken,
}

/// Opens the runtime of this host with its image store. [`start`] recovers existing objects in the background.
///
/// # Errors
/// Another daemon runs, a setting is invalid, or the kernel is too old.
pub async fn open(config: EmbeddedConfig, around: RuntimeEnvironment) -> RuntimeResult<(Arc<Runtime>, ImageStore)> {
    open_counted(config, around, &Registry::new()).await
}

/// Like [`open`], with metrics in this registry.
///
/// # Errors
/// Those of [`open`].
pub async fn open_counted(
    config: EmbeddedConfig,
    around: RuntimeEnvironment,
    registry: &Registry,
) -> RuntimeResult<(Arc<Runtime>, ImageStore)> {
    let layout = Layout { root: config.root.clone(), state: config.state.clone() };
    let (host_config, first) = (config.clone(), layout.clone());
    let tasks = (around.tasks.clone(), around.stop.clone());
    let (lock, host, hierarchy, shims, boot_id) = blocking(move || {
        let lock = store::open(&first)?;
        let host =
            host::detect(&host_settings(&host_config)?).map_err(|error| RuntimeError::other(error.to_string()))?;
        let hierarchy = Hierarchy::detect().map_err(|error| RuntimeError::other(error.to_string()))?;
        let shims = shims::ShimProcesses::unpack(first, tasks)?;
        let boot_id = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
        Ok((lock, host, hierarchy, shims, boot_id.trim().to_owned()))
    })
    .await?;
    let driver = groups::driver(&config.cgroup_driver, hierarchy.version() == 2, systemd::is_running())?;
    let program = around.has_builtin_images.then(|| shims.program().to_owned());
    let metrics = EmbeddedMetrics::new(registry);
    let images = image_settings(&config, program)?;
    let helpers = UnpackHelpers { unpacker: around.unpacker.clone(), unpacks: Some(metrics.unpacks.clone()) };
    let images = ImageStore::open(ImageStoreSettings { helpers, ..images }).await?;
    let network = network(&config, &around).await?;
    let facts = HostFacts {
        boot_id: boot_id.into(),
        hostname: around.hostname.clone(),
        driver,
        has_recursive_read_only: host.has_recursive_read_only,
        has_user_namespaces: host.has_user_namespaces,
    };
    let groups = CgroupfsGroups::new(hierarchy, host.groups.clone(), config.tolerate_missing_hugetlb);
    let groups = groups::made_by(driver, groups, shims.program())?;
    let planner = planner::HostPlanner {
        host,
        hostname: around.hostname,
        layout,
        cdi: config.cdi_spec_dirs.clone(),
        longest_record: config.longest_record(),
        images: images.clone(),
    };
    let ports = Ports {
        shims: Arc::new(shims),
        images: Arc::new(images::StoredImages(images.clone())),
        planner: Arc::new(planner),
        network: Arc::new(network::HostNetworks(network.clone())),
        groups,
    };
    // Status reports the selected snapshotter, not `auto`.
    let config = EmbeddedConfig { snapshotter: images.snapshotter().to_owned(), ..config };
    let runtime = Runtime::with_lock(config, ports, facts, (around.tasks, around.stop.clone()), lock, metrics);
    count(registry, &runtime, &images, network);
    // A failed import is logged and does not prevent pods from running.
    let folder = runtime.shell.config.import_dir.clone();
    if let Err(cause) = images.import_folder(&folder).await {
        tracing::warn!(path = %folder.display(), err = %cause, "Failed to import images from the import directory");
    }
    keep_images(&runtime, &images, around.stop);
    Ok((runtime, images))
}

/// Spawns the background tasks of images: garbage collection, the import directory, the control socket.
fn keep_images(runtime: &Arc<Runtime>, images: &ImageStore, stop: CancellationToken) {
    let shell = &runtime.shell;
    let (collected, watching, folder) = (images.clone(), images.clone(), shell.config.import_dir.clone());
    let stopped = stop.clone();
    shell.spawn(async move {
        tokio::select! {
            () = collected.collector() => {}
            () = watching.watch_folder(&folder) => {}
            () = stopped.cancelled() => {}
        }
    });
    let folder = control_socket::folder(&shell.layout.state);
    shell.spawn(control_socket::serve(images.clone(), folder, shell.tasks.clone(), stop));
}

/// Opens the image store alone, where no runtime runs. The lock excludes other processes. Only for the `berth` CLI.
///
/// # Errors
/// A runtime runs, or the store cannot be opened.
pub async fn images_alone(config: &EmbeddedConfig) -> RuntimeResult<(store::Lock, ImageStore)> {
    let layout = Layout { root: config.root.clone(), state: config.state.clone() };
    let lock = blocking(move || store::open(&layout)).await?;
    let helpers = UnpackHelpers { unpacker: Some(OWN_PROGRAM.into()), unpacks: None };
    Ok((lock, ImageStore::open(ImageStoreSettings { helpers, ..image_settings(config, None)? }).await?))
}

/// Registers a collector that counts the runtime's objects on each scrape, as long as the runtime exists.
fn count(registry: &Registry, runtime: &Arc<Runtime>, images: &ImageStore, network: embedded_network::NetworkManager) {
    let (runtime, images) = (Arc::downgrade(runtime), images.clone());
    let collect = move || {
        let runtime = runtime.upgrade();
        let written = runtime.as_ref().map(|runtime| runtime.log_totals()).unwrap_or_default();
        let (layers, image_bytes) = images.layers();
        let (pulled_bytes, removed_layers, removed_blobs) = images.tally();
        EmbeddedObjects {
            pulled_bytes,
            removed: vec![("layer", removed_layers), ("blob", removed_blobs)],
            layers,
            image_bytes,
            leases: network.leased(),
            filter_reapplied: network.filter_reapplied(),
            log: (written.bytes, written.dropped, written.errors),
            ..runtime.map(|runtime| runtime.object_counts()).unwrap_or_default()
        }
    };
    register_embedded_objects(registry, Arc::new(collect));
}

/// Reports a failed recovery.
pub struct Recovery(oneshot::Receiver<RuntimeError>);

impl Recovery {
    /// Waits for a failure of the recovery and returns its cause; no call can succeed after it. Pends forever on
    /// success.
    pub async fn failed(self) -> RuntimeError {
        match self.0.await {
            Ok(cause) => RuntimeError::other(format!("embedded runtime failed to recover its state: {cause}")),
            Err(_) => std::future::pending().await,
        }
    }
}

/// Recovers existing objects in the background; calls wait for it. Then watches for lost pod networks until shutdown.
#[must_use = "a failed recovery must stop the runtime"]
pub fn start(runtime: &Arc<Runtime>) -> Recovery {
    let (sender, failed) = oneshot::channel();
    let recovering = runtime.clone();
    runtime.shell.spawn(async move {
        if let Err(cause) = recovery::recover(&recovering).await {
            let _ = sender.send(cause); // the receiver has ended
            return;
        }
        drop(sender);
        lost_networks::watch(&recovering).await;
    });
    Recovery(failed)
}

async fn blocking<R: Send + 'static>(work: impl FnOnce() -> RuntimeResult<R> + Send + 'static) -> RuntimeResult<R> {
    spawn_blocking(work).await.map_err(|error| RuntimeError::other(error.to_string()))?
}

/// Opens the pod networks and spawns their watcher.
async fn network(
    config: &EmbeddedConfig,
    around: &RuntimeEnvironment,
) -> RuntimeResult<embedded_network::NetworkManager> {
    let network = embedded_network::NetworkManager::open(network::settings(config)?).await?;
    let (kept, stop) = (network.clone(), around.stop.clone());
    around.tasks.spawn(async move { kept.run_watchers(stop).await });
    Ok(network)
}

fn image_settings(config: &EmbeddedConfig, program: Option<PathBuf>) -> RuntimeResult<ImageStoreSettings> {
    let snapshotter = match config.snapshotter.as_str() {
        "" | "auto" => Snapshotter::Auto,
        "overlay" => Snapshotter::Overlay,
        "copy" => Snapshotter::Copy,
        other => {
            return Err(RuntimeError::other(format!("embeddedRuntime.snapshotter: unknown snapshotter {other:?}")));
        }
    };
    let bounds = LayerLimits {
        bytes: config.max_layer_bytes,
        entries: config.max_layer_entries,
        ratio: config.max_compression_ratio,
    };
    let pinned = config.pinned_images.clone();
    let registries = config.registries.config_path.split(':').filter(|path| !path.is_empty()).map(PathBuf::from);
    if config.max_concurrent_downloads == 0 {
        return Err(RuntimeError::other("embeddedRuntime.maxConcurrentDownloads: invalid value 0, must be at least 1"));
    }
    Ok(ImageStoreSettings {
        root: config.root.clone(),
        snapshotter,
        bounds,
        pinned,
        registries: registries.collect(),
        idle_timeout: config.pull_progress_timeout,
        downloads: config.max_concurrent_downloads,
        keeps_compressed: config.keep_compressed_layers,
        helpers: UnpackHelpers::default(),
        program,
    })
}

fn host_settings(config: &EmbeddedConfig) -> RuntimeResult<host::LaunchSettings> {
    let limits = config.default_ulimits.iter().map(|(name, value)| limit(name, value)).collect::<RuntimeResult<_>>()?;
    Ok(host::LaunchSettings {
        restricts_oom_score_adj: config.restrict_oom_score_adj,
        limits,
        owns_devices: config.device_ownership_from_security_context,
        ignores_image_volumes: config.ignore_image_volumes,
        unprivileged_ports: config.unprivileged_ports,
        unprivileged_icmp: config.unprivileged_icmp,
        allows_32_bit: config.allow_32_bit_system_calls,
    })
}

fn limit(name: &str, value: &str) -> RuntimeResult<(u32, u64, u64)> {
    let wrong = || {
        RuntimeError::other(format!(
            "embeddedRuntime.defaultUlimits: {name}: invalid value {value:?}, expected soft:hard"
        ))
    };
    let number = RESOURCES.iter().position(|known| *known == name).ok_or_else(wrong)?;
    let (soft, hard) = value.split_once(':').unwrap_or((value, value));
    let read = |text: &str| if text == "unlimited" { Some(u64::MAX) } else { text.parse().ok() };
    let number = u32::try_from(number).map_err(|_| wrong())?;
    Ok((number, read(soft).ok_or_else(wrong)?, read(hard).ok_or_else(wrong)?))
}
