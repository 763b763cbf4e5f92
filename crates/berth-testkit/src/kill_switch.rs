//! Simulates `kill -9` of an in-process agent by cutting its access to runtime and state files.
//!
//! Once cut, no new call is made and no pending call returns. Calls that are already in progress in the runtime
//! continue. A fuse cuts the access between any two steps of the agent: before or after one of its next calls.

use std::{
    collections::HashMap,
    io,
    path::Path,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use async_trait::async_trait;
use berth_cri::{CriResult, ExecOutput, ImageService, RuntimeService};
use berth_ports::StateFile;
use berth_proto::cri;
use futures::{StreamExt, stream::BoxStream};
use tokio_util::sync::CancellationToken;

use super::{port_fakes::MemoryFile, scripted_cri::ScriptedCri};

/// Call at which an agent is killed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum KillPoint {
    /// Answers that many calls; the next one is not made.
    Before(u32),
    /// Answers that many calls; the next one is carried out, but its response is lost.
    After(u32),
}

/// Access of one agent to the runtime and the state files, which outlive it.
#[derive(Clone)]
pub struct KillSwitch {
    cri: Arc<ScriptedCri>,
    cut: CancellationToken,
    fuse: Arc<Mutex<ArmedKillPoint>>,
}

/// Active fuse, and the number of fuses before it: a call that started under a replaced fuse does not cut.
#[derive(Default)]
struct ArmedKillPoint {
    fuse: Option<KillPoint>,
    before: u64,
}

impl KillSwitch {
    /// Creates access to `cri`.
    pub fn new(cri: Arc<ScriptedCri>) -> Self {
        Self { cri, cut: CancellationToken::new(), fuse: Arc::default() }
    }

    /// Cuts the access: every call from now on stays pending.
    pub fn cut(&self) {
        self.cut.cancel();
    }

    /// Whether the access is cut.
    pub fn is_cut(&self) -> bool {
        self.cut.is_cancelled()
    }

    /// Sets or removes the fuse.
    pub fn set_fuse(&self, fuse: Option<KillPoint>) {
        let mut laid = self.laid();
        *laid = ArmedKillPoint { fuse, before: laid.before + 1 };
    }

    fn laid(&self) -> MutexGuard<'_, ArmedKillPoint> {
        self.fuse.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Counts a call; returns the fuse that fires at it, and the generation of that fuse.
    fn count_call(&self) -> Option<(KillPoint, u64)> {
        let mut laid = self.laid();
        match laid.fuse.as_mut()? {
            KillPoint::Before(0) | KillPoint::After(0) => Some((laid.fuse.take()?, laid.before)),
            KillPoint::Before(left) | KillPoint::After(left) => {
                *left -= 1;
                None
            }
        }
    }

    /// Wraps a state file so that the agent reads and writes it through this access.
    pub fn file(&self, file: Arc<MemoryFile>) -> Arc<dyn StateFile> {
        Arc::new(LeashedFile { leash: self.clone(), file })
    }

    async fn through<T>(&self, call: impl Future<Output = T>) -> T {
        let due = self.count_call();
        if matches!(due, Some((KillPoint::Before(_), _))) {
            self.cut();
        }
        let answer = tokio::select! {
            biased;
            () = self.cut.cancelled() => std::future::pending().await,
            answer = call => answer,
        };
        if due.is_some_and(|(_, fuse)| fuse == self.laid().before) {
            self.cut();
            std::future::pending::<()>().await;
        }
        answer
    }
}

struct LeashedFile {
    leash: KillSwitch,
    file: Arc<MemoryFile>,
}

#[async_trait]
impl StateFile for LeashedFile {
    fn path(&self) -> &Path {
        self.file.path()
    }
    async fn read(&self) -> io::Result<Option<Vec<u8>>> {
        self.leash.through(self.file.read()).await
    }
    async fn replace(&self, content: Vec<u8>) -> io::Result<()> {
        self.leash.through(self.file.replace(content)).await
    }
}

#[async_trait]
impl RuntimeService for KillSwitch {
    async fn version(&self, version: &str) -> CriResult<cri::VersionResponse> {
        self.through(self.cri.version(version)).await
    }
    async fn status(&self) -> CriResult<cri::StatusResponse> {
        self.through(RuntimeService::status(&*self.cri)).await
    }
    async fn runtime_config(&self) -> CriResult<cri::RuntimeConfigResponse> {
        self.through(self.cri.runtime_config()).await
    }
    async fn update_runtime_config(&self, pod_cidr: &str) -> CriResult<()> {
        self.through(self.cri.update_runtime_config(pod_cidr)).await
    }
    async fn run_pod_sandbox(&self, config: cri::PodSandboxConfig, handler: &str) -> CriResult<String> {
        self.through(self.cri.run_pod_sandbox(config, handler)).await
    }
    async fn stop_pod_sandbox(&self, id: &str) -> CriResult<()> {
        self.through(self.cri.stop_pod_sandbox(id)).await
    }
    async fn remove_pod_sandbox(&self, id: &str) -> CriResult<()> {
        self.through(self.cri.remove_pod_sandbox(id)).await
    }
    async fn pod_sandbox_status(&self, id: &str) -> CriResult<cri::PodSandboxStatusResponse> {
        self.through(self.cri.pod_sandbox_status(id)).await
    }
    async fn pod_sandbox_info(&self, id: &str) -> CriResult<HashMap<String, String>> {
        self.through(self.cri.pod_sandbox_info(id)).await
    }
    async fn list_pod_sandbox(&self, filter: Option<cri::PodSandboxFilter>) -> CriResult<Vec<cri::PodSandbox>> {
        self.through(self.cri.list_pod_sandbox(filter)).await
    }
    async fn create_container(
        &self,
        sandbox: &str,
        config: cri::ContainerConfig,
        sandbox_config: cri::PodSandboxConfig,
    ) -> CriResult<String> {
        self.through(self.cri.create_container(sandbox, config, sandbox_config)).await
    }
    async fn start_container(&self, id: &str) -> CriResult<()> {
        self.through(self.cri.start_container(id)).await
    }
    async fn stop_container(&self, id: &str, grace: Duration) -> CriResult<()> {
        self.through(self.cri.stop_container(id, grace)).await
    }
    async fn remove_container(&self, id: &str) -> CriResult<()> {
        self.through(self.cri.remove_container(id)).await
    }
    async fn list_containers(&self, filter: Option<cri::ContainerFilter>) -> CriResult<Vec<cri::Container>> {
        self.through(self.cri.list_containers(filter)).await
    }
    async fn container_status(&self, id: &str) -> CriResult<cri::ContainerStatus> {
        self.through(self.cri.container_status(id)).await
    }
    async fn update_container_resources(&self, id: &str, linux: cri::LinuxContainerResources) -> CriResult<()> {
        self.through(self.cri.update_container_resources(id, linux)).await
    }
    async fn update_pod_sandbox_resources(
        &self,
        id: &str,
        overhead: cri::LinuxContainerResources,
        resources: cri::LinuxContainerResources,
    ) -> CriResult<()> {
        self.through(self.cri.update_pod_sandbox_resources(id, overhead, resources)).await
    }
    async fn list_container_stats(
        &self,
        filter: Option<cri::ContainerStatsFilter>,
    ) -> CriResult<Vec<cri::ContainerStats>> {
        self.through(self.cri.list_container_stats(filter)).await
    }
    async fn list_pod_sandbox_stats(
        &self,
        filter: Option<cri::PodSandboxStatsFilter>,
    ) -> CriResult<Vec<cri::PodSandboxStats>> {
        self.through(self.cri.list_pod_sandbox_stats(filter)).await
    }
    async fn reopen_container_log(&self, id: &str) -> CriResult<()> {
        self.through(self.cri.reopen_container_log(id)).await
    }
    async fn exec_sync(&self, id: &str, command: &[String], timeout: Duration, most: usize) -> CriResult<ExecOutput> {
        self.through(self.cri.exec_sync(id, command, timeout, most)).await
    }
    async fn exec(&self, request: cri::ExecRequest) -> CriResult<String> {
        self.through(self.cri.exec(request)).await
    }
    async fn attach(&self, request: cri::AttachRequest) -> CriResult<String> {
        self.through(self.cri.attach(request)).await
    }
    async fn port_forward(&self, request: cri::PortForwardRequest) -> CriResult<String> {
        self.through(self.cri.port_forward(request)).await
    }
    async fn checkpoint_container(&self, id: &str, location: &str, timeout: Duration) -> CriResult<()> {
        self.through(self.cri.checkpoint_container(id, location, timeout)).await
    }
    async fn container_events(&self) -> CriResult<BoxStream<'static, CriResult<cri::ContainerEventResponse>>> {
        let events = self.through(self.cri.container_events()).await?;
        let next = |(mut events, leash): (BoxStream<'static, _>, Self)| async move {
            let event = leash.through(events.next()).await?;
            Some((event, (events, leash)))
        };
        Ok(futures::stream::unfold((events, self.clone()), next).boxed())
    }
}

#[async_trait]
impl ImageService for KillSwitch {
    async fn list_images(&self) -> CriResult<Vec<cri::Image>> {
        self.through(self.cri.list_images()).await
    }
    async fn image_status(&self, image: cri::ImageSpec) -> CriResult<Option<cri::Image>> {
        self.through(self.cri.image_status(image)).await
    }
    async fn pull_image(
        &self,
        image: cri::ImageSpec,
        auth: Option<cri::AuthConfig>,
        sandbox: Option<cri::PodSandboxConfig>,
    ) -> CriResult<String> {
        self.through(self.cri.pull_image(image, auth, sandbox)).await
    }
    async fn remove_image(&self, image: cri::ImageSpec) -> CriResult<()> {
        self.through(self.cri.remove_image(image)).await
    }
    async fn image_fs_info(&self) -> CriResult<cri::ImageFsInfoResponse> {
        self.through(self.cri.image_fs_info()).await
    }
}
