//! The embedded runtime as a child process on a Unix socket, to be killed by the tests.

use std::{
    path::{Path, PathBuf},
    process::ExitCode,
    sync::Arc,
};

use berth_runtime::{
    config::{EmbeddedConfig, NetworkConfig},
    cri as services,
    images::store::verification::RepairMode,
    wiring::{self, RuntimeEnvironment},
};
use tokio_util::{sync::CancellationToken, task::TaskTracker};

use berth_testkit::embedded::in_process::has_busybox;

/// Name of the pods' bridge.
pub const BRIDGE: &str = "crash0";

/// Path of the daemon's CRI socket.
pub fn socket(place: &Path) -> PathBuf {
    place.join("cri.sock")
}

/// Runs the daemon.
pub fn run(place: &Path) -> ExitCode {
    tracing_subscriber::fmt().with_ansi(false).with_writer(std::io::stderr).init();
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build();
    runtime.expect("a runtime").block_on(serve(place));
    ExitCode::SUCCESS
}

async fn serve(place: &Path) {
    let network = NetworkConfig {
        mode: "builtin".to_owned(),
        bridge: BRIDGE.to_owned(),
        default_pod_cidr: "10.199.0.0/24,fd99:1::/64".to_owned(),
        ..NetworkConfig::default()
    };
    let config = EmbeddedConfig {
        root: place.join("root"),
        state: place.join("state"),
        import_dir: place.join("archives"),
        cgroup_driver: "cgroupfs".to_owned(),
        snapshotter: std::env::var(SNAPSHOTTER).unwrap_or_default(),
        network,
        ..EmbeddedConfig::default()
    };
    let stop = CancellationToken::new();
    let around = RuntimeEnvironment {
        hostname: "node".to_owned(),
        has_builtin_images: false,
        unpacker: None,
        tasks: TaskTracker::new(),
        stop: stop.clone(),
    };
    let (runtime, images) = wiring::open(config, around).await.expect("opened");
    if std::env::var_os(VERIFIES).is_some() {
        let verified = images.verify(RepairMode::No, Arc::default()).await.expect("looked through");
        assert_eq!(verified.findings, [], "of {} images", verified.images);
    }
    has_busybox(&images, place).await;
    let recovery = wiring::start(&runtime);
    tokio::select! {
        served = services::over_socket(&runtime, socket(place), "", stop) => served.expect("served"),
        cause = recovery.failed() => panic!("{cause}"),
    }
}

/// Environment variable that makes the daemon verify all images before it serves.
pub const VERIFIES: &str = "CRASH_VERIFIES";
/// Environment variable with the snapshotter's name.
pub const SNAPSHOTTER: &str = "CRASH_SNAPSHOTTER";
