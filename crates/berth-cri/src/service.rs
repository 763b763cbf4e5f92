//! CRI service traits: runtime service and image service, with deadlines (spec 03a §2.2).
//!
//! The client implements them over gRPC, tests use a scripted state machine. Every method enforces its own deadline.

use std::{collections::HashMap, time::Duration};

use async_trait::async_trait;
use futures::stream::BoxStream;

use super::CriResult;
use berth_proto::cri;

/// Output of a command run by `ExecSync` that exited with code 0.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct ExecOutput {
    /// Standard output.
    pub stdout: Vec<u8>,
    /// Standard error.
    pub stderr: Vec<u8>,
}

/// CRI runtime service: sandboxes and containers.
///
/// Replies are validated as in spec 03a §2.2 before they are returned.
#[async_trait]
pub trait RuntimeService: Send + Sync + 'static {
    /// Name and version of the runtime.
    async fn version(&self, version: &str) -> CriResult<cri::VersionResponse>;
    /// Runtime and network conditions, handlers, and features.
    async fn status(&self) -> CriResult<cri::StatusResponse>;
    /// Cgroup driver of the runtime; `Unimplemented` on containerd before 2.0.
    async fn runtime_config(&self) -> CriResult<cri::RuntimeConfigResponse>;
    /// Sends the pod CIDR to the runtime.
    async fn update_runtime_config(&self, pod_cidr: &str) -> CriResult<()>;

    /// Creates and starts a sandbox; returns its ID.
    async fn run_pod_sandbox(&self, config: cri::PodSandboxConfig, handler: &str) -> CriResult<String>;
    /// Stops a sandbox and the containers in it. Idempotent.
    async fn stop_pod_sandbox(&self, id: &str) -> CriResult<()>;
    /// Removes a stopped sandbox. Idempotent.
    async fn remove_pod_sandbox(&self, id: &str) -> CriResult<()>;
    /// Status of one sandbox.
    async fn pod_sandbox_status(&self, id: &str) -> CriResult<cri::PodSandboxStatusResponse>;
    /// Additional information about a sandbox (verbose status): strings, mostly JSON, in runtime-specific formats.
    async fn pod_sandbox_info(&self, id: &str) -> CriResult<HashMap<String, String>>;
    /// Lists the sandboxes that match the filter.
    async fn list_pod_sandbox(&self, filter: Option<cri::PodSandboxFilter>) -> CriResult<Vec<cri::PodSandbox>>;

    /// Creates a container; returns its ID.
    async fn create_container(
        &self,
        sandbox: &str,
        config: cri::ContainerConfig,
        sandbox_config: cri::PodSandboxConfig,
    ) -> CriResult<String>;
    /// Starts a created container.
    async fn start_container(&self, id: &str) -> CriResult<()>;
    /// Stops a container; the runtime receives `grace` in whole seconds.
    async fn stop_container(&self, id: &str, grace: Duration) -> CriResult<()>;
    /// Removes a container. Idempotent.
    async fn remove_container(&self, id: &str) -> CriResult<()>;
    /// Lists the containers that match the filter.
    async fn list_containers(&self, filter: Option<cri::ContainerFilter>) -> CriResult<Vec<cri::Container>>;
    /// Status of one container.
    async fn container_status(&self, id: &str) -> CriResult<cri::ContainerStatus>;
    /// Applies new CPU, memory, and other Linux resource values to a container.
    async fn update_container_resources(&self, id: &str, linux: cri::LinuxContainerResources) -> CriResult<()>;
    /// Notifies the runtime that the resources of the pod changed.
    async fn update_pod_sandbox_resources(
        &self,
        id: &str,
        overhead: cri::LinuxContainerResources,
        resources: cri::LinuxContainerResources,
    ) -> CriResult<()>;
    /// Resource usage of the containers that match the filter.
    async fn list_container_stats(
        &self,
        filter: Option<cri::ContainerStatsFilter>,
    ) -> CriResult<Vec<cri::ContainerStats>>;
    /// Resource usage of the sandboxes that match the filter; `Unimplemented` on older runtimes.
    async fn list_pod_sandbox_stats(
        &self,
        filter: Option<cri::PodSandboxStatsFilter>,
    ) -> CriResult<Vec<cri::PodSandboxStats>>;
    /// Reopens the log file of a container, for log rotation.
    async fn reopen_container_log(&self, id: &str) -> CriResult<()>;
    /// Runs a command in a container; a `timeout` of zero means none. Returns the first `most` bytes of each output;
    /// the embedded runtime also buffers no more than that.
    async fn exec_sync(&self, id: &str, command: &[String], timeout: Duration, most: usize) -> CriResult<ExecOutput>;

    /// Prepares a command in a container; returns the one-time URL of its streams.
    async fn exec(&self, request: cri::ExecRequest) -> CriResult<String>;
    /// Prepares streams to a container's process; returns their one-time URL.
    async fn attach(&self, request: cri::AttachRequest) -> CriResult<String>;
    /// Prepares port forwarding into a sandbox; returns the one-time URL of its streams.
    async fn port_forward(&self, request: cri::PortForwardRequest) -> CriResult<String>;
    /// Writes a checkpoint of a running container to the file `location`. The runtime receives `timeout` in whole
    /// seconds, and it extends the deadline of the call; zero leaves the limit to the runtime.
    async fn checkpoint_container(&self, id: &str, location: &str, timeout: Duration) -> CriResult<()>;

    /// Stream of container events. Ends when the runtime ends it; `Unimplemented` of containerd 1.6 arrives as the
    /// error of the call or as the first item.
    async fn container_events(&self) -> CriResult<BoxStream<'static, CriResult<cri::ContainerEventResponse>>>;
}

/// CRI image service.
#[async_trait]
pub trait ImageService: Send + Sync + 'static {
    /// All images.
    async fn list_images(&self) -> CriResult<Vec<cri::Image>>;
    /// Status of an image; `None` where it is absent.
    async fn image_status(&self, image: cri::ImageSpec) -> CriResult<Option<cri::Image>>;
    /// Pulls an image; returns its reference. Has no deadline: dropping the future cancels it.
    async fn pull_image(
        &self,
        image: cri::ImageSpec,
        auth: Option<cri::AuthConfig>,
        sandbox: Option<cri::PodSandboxConfig>,
    ) -> CriResult<String>;
    /// Removes an image by ID. Idempotent.
    async fn remove_image(&self, image: cri::ImageSpec) -> CriResult<()>;
    /// Usage of the image filesystems.
    async fn image_fs_info(&self) -> CriResult<cri::ImageFsInfoResponse>;
}
