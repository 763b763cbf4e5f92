//! Short CRI client for tests, over any channel and any runtime.

use berth_proto::cri::{self, image_service_client::ImageServiceClient, runtime_service_client::RuntimeServiceClient};
use tonic::{Status, transport::Channel};

use super::image::BUSYBOX;

/// Timeout of exec commands, in seconds.
const EXEC_LIMIT: i64 = 20;

/// Clients of a runtime's CRI services.
#[derive(Clone)]
pub struct Calls {
    /// Runtime service client, for calls without a method here.
    pub rpc: RuntimeServiceClient<Channel>,
    /// Image service client.
    pub images: ImageServiceClient<Channel>,
}

impl Calls {
    /// Creates clients over a channel, connected or lazy.
    pub fn over(channel: Channel) -> Self {
        Self { rpc: RuntimeServiceClient::new(channel.clone()), images: ImageServiceClient::new(channel) }
    }

    /// Runs a sandbox; returns its ID.
    pub async fn run(&self, config: &cri::PodSandboxConfig) -> Result<String, Status> {
        let request = cri::RunPodSandboxRequest { config: Some(config.clone()), runtime_handler: String::new() };
        Ok(self.rpc.clone().run_pod_sandbox(request).await?.into_inner().pod_sandbox_id)
    }

    /// Creates a container; returns its ID.
    pub async fn create(&self, sandbox: &str, config: &cri::ContainerConfig) -> Result<String, Status> {
        let (pod_sandbox_id, config) = (sandbox.to_owned(), Some(config.clone()));
        let request = cri::CreateContainerRequest { pod_sandbox_id, config, sandbox_config: None };
        Ok(self.rpc.clone().create_container(request).await?.into_inner().container_id)
    }

    /// Calls `StartContainer`; fails with the runtime's gRPC status.
    pub async fn start_container(&self, id: &str) -> Result<(), Status> {
        let request = cri::StartContainerRequest { container_id: id.to_owned() };
        self.rpc.clone().start_container(request).await.map(drop)
    }

    /// Creates and starts a container in a sandbox; returns its ID.
    pub async fn running(&self, sandbox: &str, config: &cri::ContainerConfig) -> String {
        let id = self.create(sandbox, config).await.expect("made");
        self.start_container(&id).await.expect("starts");
        id
    }

    /// Stops a container with a timeout in seconds.
    pub async fn stop_container(&self, id: &str, timeout: i64) -> Result<(), Status> {
        let request = cri::StopContainerRequest { container_id: id.to_owned(), timeout };
        self.rpc.clone().stop_container(request).await.map(drop)
    }

    /// Calls `RemoveContainer`; CRI runtimes kill a running container first.
    pub async fn remove_container(&self, id: &str) -> Result<(), Status> {
        let request = cri::RemoveContainerRequest { container_id: id.to_owned() };
        self.rpc.clone().remove_container(request).await.map(drop)
    }

    /// Stops a sandbox.
    pub async fn stop(&self, id: &str) -> Result<(), Status> {
        let request = cri::StopPodSandboxRequest { pod_sandbox_id: id.to_owned() };
        self.rpc.clone().stop_pod_sandbox(request).await.map(drop)
    }

    /// Removes a sandbox.
    pub async fn remove(&self, id: &str) -> Result<(), Status> {
        let request = cri::RemovePodSandboxRequest { pod_sandbox_id: id.to_owned() };
        self.rpc.clone().remove_pod_sandbox(request).await.map(drop)
    }

    /// Runs a script in a container; returns its standard output and exit code.
    pub async fn exec(&self, id: &str, script: &str) -> Result<(String, i32), Status> {
        let cmd = ["/bin/sh", "-c", script].map(str::to_owned).to_vec();
        let request = cri::ExecSyncRequest { container_id: id.to_owned(), cmd, timeout: EXEC_LIMIT };
        let reply = self.rpc.clone().exec_sync(request).await?.into_inner();
        Ok((String::from_utf8_lossy(&reply.stdout).into_owned(), reply.exit_code))
    }

    /// All sandboxes.
    pub async fn sandboxes(&self) -> Vec<cri::PodSandbox> {
        let reply = self.rpc.clone().list_pod_sandbox(cri::ListPodSandboxRequest::default()).await;
        reply.expect("listed").into_inner().items
    }

    /// All containers.
    pub async fn containers(&self) -> Vec<cri::Container> {
        let reply = self.rpc.clone().list_containers(cri::ListContainersRequest::default()).await;
        reply.expect("listed").into_inner().containers
    }

    /// Status of a container.
    pub async fn status(&self, id: &str) -> cri::ContainerStatus {
        let request = cri::ContainerStatusRequest { container_id: id.to_owned(), verbose: false };
        self.rpc
            .clone()
            .container_status(request)
            .await
            .expect("known")
            .into_inner()
            .status
            .expect("response without status")
    }
}

/// Configuration of a sandbox `name` in the Kubernetes namespace `ns`.
pub fn sandbox(name: &str, namespaces: cri::NamespaceOption) -> cri::PodSandboxConfig {
    let context = cri::LinuxSandboxSecurityContext { namespace_options: Some(namespaces), ..Default::default() };
    let linux = cri::LinuxPodSandboxConfig { security_context: Some(context), ..Default::default() };
    cri::PodSandboxConfig {
        metadata: Some(cri::PodSandboxMetadata {
            name: name.to_owned(),
            namespace: "ns".to_owned(),
            uid: format!("uid-{name}"),
            attempt: 0,
        }),
        linux: Some(linux),
        ..Default::default()
    }
}

/// Configuration of a container `name` that runs a script, with the given PID namespace mode.
pub fn container(name: &str, script: &str, pids: cri::NamespaceMode) -> cri::ContainerConfig {
    let options = cri::NamespaceOption { pid: pids.into(), ..Default::default() };
    let context = cri::LinuxContainerSecurityContext { namespace_options: Some(options), ..Default::default() };
    cri::ContainerConfig {
        metadata: Some(cri::ContainerMetadata { name: name.to_owned(), attempt: 0 }),
        image: Some(cri::ImageSpec { image: BUSYBOX.to_owned(), ..Default::default() }),
        command: ["/bin/sh", "-c", script].map(str::to_owned).to_vec(),
        log_path: format!("{name}.log"),
        linux: Some(cri::LinuxContainerConfig {
            resources: Some(cri::LinuxContainerResources { cpu_shares: 100, ..Default::default() }),
            security_context: Some(context),
        }),
        ..Default::default()
    }
}
