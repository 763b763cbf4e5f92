//! The roles a runtime plays. The client implements them over gRPC, tests by a scripted
//! state machine. Every method has its own deadline inside (spec 03a §2.2).

use std::{collections::HashMap, time::Duration};

use async_trait::async_trait;
use futures::stream::BoxStream;

use super::CriResult;
use berth_proto::cri;

/// What a command run by `ExecSync` printed; its exit code was 0.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct ExecOutput {
    /// Standard output.
    pub stdout: Vec<u8>,
    /// Standard error.
    pub stderr: Vec<u8>,
}

/// Sandboxes and containers.
///
/// Replies are validated as spec 03a §2.2 says before they are returned.
#[async_trait]
pub trait RuntimeService: Send + Sync + 'static {
    /// Name and version of the runtime.
    async fn version(&self, version: &str) -> CriResult<cri::VersionResponse>;
    /// Runtime and network conditions, handlers, features.
    async fn status(&self) -> CriResult<cri::StatusResponse>;
    /// The cgroup driver; `Unimplemented` on containerd before 2.0.
    async fn runtime_config(&self) -> CriResult<cri::RuntimeConfigResponse>;
    /// Tells the runtime the pod CIDR.
    async fn update_runtime_config(&self, pod_cidr: &str) -> CriResult<()>;

    /// Creates and starts a sandbox; returns its id.
    async fn run_pod_sandbox(&self, config: cri::PodSandboxConfig, handler: &str) -> CriResult<String>;
    /// Stops a sandbox and what runs in it. Idempotent.
    async fn stop_pod_sandbox(&self, id: &str) -> CriResult<()>;
    /// Removes a stopped sandbox. Idempotent.
    async fn remove_pod_sandbox(&self, id: &str) -> CriResult<()>;
    /// Status of one sandbox.
    async fn pod_sandbox_status(&self, id: &str) -> CriResult<cri::PodSandboxStatusResponse>;
    /// What the runtime tells of a sandbox beside its status: texts, mostly JSON, that each runtime spells its own way.
    async fn pod_sandbox_info(&self, id: &str) -> CriResult<HashMap<String, String>>;
    /// Sandboxes that pass the filter.
    async fn list_pod_sandbox(&self, filter: Option<cri::PodSandboxFilter>) -> CriResult<Vec<cri::PodSandbox>>;

    /// Creates a container; returns its id.
    async fn create_container(
        &self,
        sandbox: &str,
        config: cri::ContainerConfig,
        sandbox_config: cri::PodSandboxConfig,
    ) -> CriResult<String>;
    /// Starts a created container.
    async fn start_container(&self, id: &str) -> CriResult<()>;
    /// Stops a container; `grace` in whole seconds goes to the runtime.
    async fn stop_container(&self, id: &str, grace: Duration) -> CriResult<()>;
    /// Removes a container. Idempotent.
    async fn remove_container(&self, id: &str) -> CriResult<()>;
    /// Containers that pass the filter.
    async fn list_containers(&self, filter: Option<cri::ContainerFilter>) -> CriResult<Vec<cri::Container>>;
    /// Status of one container.
    async fn container_status(&self, id: &str) -> CriResult<cri::ContainerStatus>;
    /// Changes the resources of a container.
    async fn update_container_resources(&self, id: &str, linux: cri::LinuxContainerResources) -> CriResult<()>;
    /// Tells the runtime that the pod's resources changed.
    async fn update_pod_sandbox_resources(
        &self,
        id: &str,
        overhead: cri::LinuxContainerResources,
        resources: cri::LinuxContainerResources,
    ) -> CriResult<()>;
    /// Usage of the containers that pass the filter.
    async fn list_container_stats(
        &self,
        filter: Option<cri::ContainerStatsFilter>,
    ) -> CriResult<Vec<cri::ContainerStats>>;
    /// Usage of the sandboxes that pass the filter; `Unimplemented` on older runtimes.
    async fn list_pod_sandbox_stats(
        &self,
        filter: Option<cri::PodSandboxStatsFilter>,
    ) -> CriResult<Vec<cri::PodSandboxStats>>;
    /// Opens the log file of a container anew.
    async fn reopen_container_log(&self, id: &str) -> CriResult<()>;
    /// Runs a command in a container; `timeout` zero means none. Of each of its outputs the first `most` bytes are
    /// returned; our own runtime keeps no more than these.
    async fn exec_sync(&self, id: &str, command: &[String], timeout: Duration, most: usize) -> CriResult<ExecOutput>;

    /// Prepares a command in a container; returns the URL at which its streams are met, once.
    async fn exec(&self, request: cri::ExecRequest) -> CriResult<String>;
    /// Prepares streams to a container's process; returns the URL at which they are met, once.
    async fn attach(&self, request: cri::AttachRequest) -> CriResult<String>;
    /// Prepares connections into a sandbox's network; returns the URL at which they are met, once.
    async fn port_forward(&self, request: cri::PortForwardRequest) -> CriResult<String>;
    /// Writes a checkpoint of a running container to the file `location`. `timeout` in whole seconds
    /// goes to the runtime and stretches the call's deadline; zero leaves the limit to the runtime.
    async fn checkpoint_container(&self, id: &str, location: &str, timeout: Duration) -> CriResult<()>;

    /// The stream of container events. Ends when the runtime ends it; `Unimplemented` on
    /// containerd 1.6 arrives as the call's error or the first item.
    async fn container_events(&self) -> CriResult<BoxStream<'static, CriResult<cri::ContainerEventResponse>>>;
}

/// Images.
#[async_trait]
pub trait ImageService: Send + Sync + 'static {
    /// All images.
    async fn list_images(&self) -> CriResult<Vec<cri::Image>>;
    /// One image; `None` where it is absent.
    async fn image_status(&self, image: cri::ImageSpec) -> CriResult<Option<cri::Image>>;
    /// Pulls an image; returns its reference. Has no deadline: cancel by dropping.
    async fn pull_image(
        &self,
        image: cri::ImageSpec,
        auth: Option<cri::AuthConfig>,
        sandbox: Option<cri::PodSandboxConfig>,
    ) -> CriResult<String>;
    /// Removes an image by id. Idempotent.
    async fn remove_image(&self, image: cri::ImageSpec) -> CriResult<()>;
    /// Usage of the image filesystems.
    async fn image_fs_info(&self) -> CriResult<cri::ImageFsInfoResponse>;
}
