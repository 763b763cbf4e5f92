//! Plain CRI client that does only what an agent must do: the runtime's own share of the time.
//!
//! Its requests cost the runtime as much as those of an agent: a cgroup parent, resources, a sandbox under seccomp,
//! masked paths, and the files that every container gets mounted.

use std::{path::Path, sync::Arc, time::Duration};

use anyhow::{Context, Result, ensure};
use berth_cri::{CriConfig, RuntimeClient, RuntimeService};
use berth_metrics::Registry;
use berth_proto::cri;
use futures::{StreamExt, TryStreamExt, stream};

use crate::manifest;

/// Concurrent pod starts.
const AT_ONCE: usize = 4;

/// Plain CRI client.
#[derive(Clone)]
pub struct Raw {
    runtime: Arc<RuntimeClient>,
    logs: Arc<tempfile::TempDir>,
}

impl Raw {
    /// Creates a client that connects on first use.
    pub fn new(socket: &Path) -> Result<Self> {
        let config = CriConfig {
            endpoint: format!("unix://{}", socket.display()),
            image_endpoint: String::new(),
            request_timeout: Duration::from_secs(120),
            list_streaming: false,
        };
        let connection = berth_cri::connect(&config, &Registry::new())?;
        Ok(Self { runtime: connection.runtime, logs: Arc::new(tempfile::tempdir()?) })
    }

    /// Starts one pod.
    pub async fn start(&self, name: &str) -> Result<()> {
        let logs = self.logs.path().join(name);
        std::fs::create_dir_all(logs.join("c0"))?;
        for file in FILES {
            std::fs::write(logs.join(file), "")?;
        }
        let sandbox = sandbox(name, &logs);
        let id = self.runtime.run_pod_sandbox(sandbox.clone(), "").await?;
        let container = self.runtime.create_container(&id, container(&logs), sandbox).await?;
        Ok(self.runtime.start_container(&container).await?)
    }

    /// Starts many pods concurrently.
    pub async fn start_all(&self, names: &[String]) -> Result<()> {
        let starts = names.iter().map(|name| self.start(name));
        stream::iter(starts).buffer_unordered(AT_ONCE).try_collect().await
    }

    /// Stops and removes all sandboxes and containers.
    pub async fn remove_all(&self) -> Result<()> {
        let containers = self.runtime.list_containers(None).await?;
        let sandboxes = self.runtime.list_pod_sandbox(None).await?;
        let removals = sandboxes.iter().map(|sandbox| {
            let of_sandbox = containers.iter().filter(|c| c.pod_sandbox_id == sandbox.id).map(|c| c.id.clone());
            self.remove(&sandbox.id, of_sandbox.collect())
        });
        stream::iter(removals).buffer_unordered(AT_ONCE).try_collect().await
    }

    async fn remove(&self, sandbox: &str, containers: Vec<String>) -> Result<()> {
        for container in &containers {
            self.runtime.stop_container(container, Duration::from_secs(1)).await?;
        }
        self.runtime.stop_pod_sandbox(sandbox).await?;
        for container in &containers {
            self.runtime.remove_container(container).await?;
        }
        Ok(self.runtime.remove_pod_sandbox(sandbox).await?)
    }

    /// Waits until the runtime lists no container and no sandbox.
    pub async fn until_empty(&self, limit: Duration) -> Result<()> {
        let deadline = std::time::Instant::now() + limit;
        loop {
            let sandboxes = self.runtime.list_pod_sandbox(None).await?.len();
            let containers = self.runtime.list_containers(None).await?.len();
            if sandboxes + containers == 0 {
                return Ok(());
            }
            let left = || format!("{sandboxes} sandboxes and {containers} containers left after {limit:?}");
            ensure!(std::time::Instant::now() < deadline, left());
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }

    /// Ids of running containers.
    pub async fn running(&self) -> Result<Vec<String>> {
        let running = cri::ContainerState::ContainerRunning as i32;
        let containers = self.runtime.list_containers(None).await?;
        Ok(containers.into_iter().filter(|c| c.state == running).map(|c| c.id).collect())
    }

    /// Runs a command in a container.
    pub async fn exec(&self, container: &str, command: &[&str]) -> Result<()> {
        let command: Vec<String> = command.iter().map(|&part| part.to_owned()).collect();
        Ok(self.runtime.exec_sync(container, &command, Duration::from_secs(10), usize::MAX).await.map(drop)?)
    }

    /// Stops a container with a grace period of 10 s.
    pub async fn stop(&self, container: &str) -> Result<()> {
        Ok(self.runtime.stop_container(container, Duration::from_secs(10)).await?)
    }

    /// Number of sandboxes, and of running containers.
    pub async fn count(&self) -> Result<(usize, usize)> {
        let containers = self.runtime.list_containers(None).await?;
        let running = cri::ContainerState::ContainerRunning as i32;
        let running = containers.iter().filter(|c| c.state == running).count();
        Ok((self.runtime.list_pod_sandbox(None).await?.len(), running))
    }

    /// Waits until that many containers run.
    pub async fn until_running(&self, count: usize, limit: Duration) -> Result<()> {
        let wait = async {
            while self.count().await?.1 != count {
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
            Ok(())
        };
        tokio::time::timeout(limit, wait)
            .await
            .with_context(|| format!("timed out waiting for {count} running containers"))?
    }
}

fn sandbox(name: &str, logs: &Path) -> cri::PodSandboxConfig {
    let node = cri::NamespaceMode::Node as i32;
    let options = cri::NamespaceOption {
        network: node,
        pid: cri::NamespaceMode::Container as i32,
        ipc: cri::NamespaceMode::Pod as i32,
        ..Default::default()
    };
    cri::PodSandboxConfig {
        metadata: Some(cri::PodSandboxMetadata {
            name: manifest::full_name(name),
            namespace: "default".to_owned(),
            uid: format!("uid-{name}"),
            attempt: 0,
        }),
        log_directory: logs.display().to_string(),
        linux: Some(cri::LinuxPodSandboxConfig {
            cgroup_parent: "/bench-raw".to_owned(),
            security_context: Some(cri::LinuxSandboxSecurityContext {
                namespace_options: Some(options),
                seccomp: Some(cri::SecurityProfile {
                    profile_type: cri::security_profile::ProfileType::RuntimeDefault as i32,
                    localhost_ref: String::new(),
                }),
                ..Default::default()
            }),
            ..Default::default()
        }),
        ..Default::default()
    }
}

/// Files that an agent mounts into every container.
const FILES: [&str; 2] = ["hosts", "termination-log"];
const INSIDE: [&str; 2] = ["/etc/hosts", "/dev/termination-log"];
/// Masked paths of an unprivileged container.
const MASKED: [&str; 12] = [
    "/proc/asound",
    "/proc/acpi",
    "/proc/interrupts",
    "/proc/kcore",
    "/proc/keys",
    "/proc/latency_stats",
    "/proc/timer_list",
    "/proc/timer_stats",
    "/proc/sched_debug",
    "/proc/scsi",
    "/sys/firmware",
    "/sys/devices/virtual/powercap",
];
const READ_ONLY: [&str; 5] = ["/proc/bus", "/proc/fs", "/proc/irq", "/proc/sys", "/proc/sysrq-trigger"];

fn container(logs: &Path) -> cri::ContainerConfig {
    let owned = |paths: &[&str]| paths.iter().map(|&path| path.to_owned()).collect::<Vec<_>>();
    let mounts = FILES.iter().zip(INSIDE).map(|(file, inside)| cri::Mount {
        container_path: inside.to_owned(),
        host_path: logs.join(file).display().to_string(),
        ..Default::default()
    });

    cri::ContainerConfig {
        metadata: Some(cri::ContainerMetadata { name: "c0".to_owned(), attempt: 0 }),
        image: Some(cri::ImageSpec { image: "docker.io/library/busybox:1".to_owned(), ..Default::default() }),
        command: manifest::COMMAND.iter().map(|&part| part.to_owned()).collect(),
        log_path: "c0/0.log".to_owned(),
        mounts: mounts.collect(),
        linux: Some(cri::LinuxContainerConfig {
            resources: Some(cri::LinuxContainerResources { cpu_shares: 2, oom_score_adj: 1000, ..Default::default() }),
            security_context: Some(cri::LinuxContainerSecurityContext {
                masked_paths: owned(&MASKED),
                readonly_paths: owned(&READ_ONLY),
                namespace_options: Some(cri::NamespaceOption {
                    network: cri::NamespaceMode::Node as i32,
                    pid: cri::NamespaceMode::Container as i32,
                    ..Default::default()
                }),
                ..Default::default()
            }),
        }),
        ..Default::default()
    }
}
