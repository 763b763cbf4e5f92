//! Container logs as real files: reading, following, rotation, links, and removal.

mod reading;
mod rotation;

use std::{fs, io::Write, path::PathBuf, sync::Arc};

use berth::logs::{LogManager, LogsConfig, LogsDeps};
use berth_cri::RuntimeService;
use berth_proto::cri;
use berth_testkit::{clock::TokioClock, scripted_cri::ScriptedCri};
use berth_types::{ContainerId, PodRef};

/// A running container `main` of pod `web` that logs to a directory of the test.
struct Fixture {
    cri: Arc<ScriptedCri>,
    manager: Arc<LogManager>,
    id: ContainerId,
    log: PathBuf,
    root: tempfile::TempDir,
}

/// Identity of the pod.
fn who() -> PodRef {
    PodRef { uid: "uid-web".into(), name: "web".into(), namespace: "default".into() }
}

/// A log line in CRI format.
fn line(text: &str) -> String {
    format!("2026-01-01T00:00:00.5Z stdout F {text}\n")
}

impl Fixture {
    async fn new(config: LogsConfig) -> Self {
        let root = tempfile::tempdir().expect("a directory");
        let cri = ScriptedCri::new(Arc::new(TokioClock::new()));
        let metadata = cri::PodSandboxMetadata {
            name: "web".into(),
            namespace: "default".into(),
            uid: "uid-web".into(),
            attempt: 0,
        };
        let pods = root.path().join("pods");
        let sandbox_config = cri::PodSandboxConfig {
            metadata: Some(metadata),
            log_directory: pods.join("default_web_uid-web").display().to_string(),
            ..Default::default()
        };
        let sandbox = cri.run_pod_sandbox(sandbox_config.clone(), "").await.expect("a sandbox");
        let container = cri::ContainerConfig {
            metadata: Some(cri::ContainerMetadata { name: "main".into(), attempt: 0 }),
            image: Some(cri::ImageSpec { image: "busybox:1".into(), ..Default::default() }),
            log_path: "main/0.log".into(),
            ..Default::default()
        };
        let id = cri.create_container(&sandbox, container, sandbox_config).await.expect("a container");
        cri.start_container(&id).await.expect("started");
        let log = pods.join("default_web_uid-web/main/0.log");
        fs::create_dir_all(log.parent().expect("a parent")).expect("created");
        fs::write(&log, "").expect("created");
        let config = LogsConfig { pod_logs_dir: pods, links_dir: root.path().join("containers"), ..config };
        let deps = LogsDeps { cri: cri.clone(), clock: Arc::new(TokioClock::new()) };
        let manager = LogManager::new(deps, config);
        manager.create_directories().await.expect("created");
        Self { cri, manager, id: id.as_str().into(), log, root }
    }

    /// Appends to the log.
    fn write(&self, text: &str) {
        let mut file = fs::OpenOptions::new().append(true).create(true).open(&self.log).expect("opened");
        file.write_all(text.as_bytes()).expect("written");
    }
}
