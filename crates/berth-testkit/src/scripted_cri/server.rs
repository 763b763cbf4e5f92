//! gRPC server of the scripted CRI on a Unix socket, for whole-process tests and benchmarks.

use std::{path::Path, pin::Pin, sync::Arc};

use berth_cri::{CriError, CriResult, ImageService, RuntimeService};
use berth_proto::cri::{
    self,
    image_service_server::{ImageService as ImageRpc, ImageServiceServer},
    runtime_service_server::{RuntimeService as RuntimeRpc, RuntimeServiceServer},
};
use futures::{Stream, StreamExt};
use tokio::net::UnixListener;
use tokio_stream::wrappers::UnixListenerStream;
use tokio_util::sync::CancellationToken;
use tonic::{Code, Request, Response, Status, service::InterceptorLayer, transport::Server};

use super::ScriptedCri;

/// Serves runtime and image service until cancelled.
pub async fn serve(cri: Arc<ScriptedCri>, socket: &Path, cancel: CancellationToken) {
    let _ = std::fs::remove_file(socket); // may be left over from an earlier server
    let listener = UnixListener::bind(socket).expect("failed to listen on the socket");
    let rpc = Rpc(cri.clone());
    let record_trace = InterceptorLayer::new(move |request: Request<()>| {
        if let Some(parent) = request.metadata().get("traceparent").and_then(|value| value.to_str().ok()) {
            cri.record_trace(parent);
        }
        Ok(request)
    });
    Server::builder()
        .layer(record_trace)
        .add_service(RuntimeServiceServer::new(rpc.clone()))
        .add_service(ImageServiceServer::new(rpc))
        .serve_with_incoming_shutdown(UnixListenerStream::new(listener), cancel.cancelled_owned())
        .await
        .expect("the server failed");
}

/// gRPC adapter of both CRI services; tonic can serve either or both.
#[derive(Clone)]
pub struct Rpc(pub Arc<ScriptedCri>);

fn status(error: CriError) -> Status {
    match error {
        CriError::Rpc { code, message } => Status::new(code, message),
        CriError::TimedOut { .. } | CriError::ExecTimedOut { .. } => Status::deadline_exceeded(error.to_string()),
        other => Status::unknown(other.to_string()),
    }
}

fn answer<T>(result: CriResult<T>) -> Result<Response<T>, Status> {
    result.map(Response::new).map_err(status)
}

fn absent<T>(name: &str) -> Result<Response<T>, Status> {
    Err(Status::unimplemented(format!("unknown method {name} for service runtime.v1.RuntimeService")))
}

type Out<T> = Pin<Box<dyn Stream<Item = Result<T, Status>> + Send>>;

/// Methods that the scripted runtime does not implement, as an older runtime would not. Written out as `async_trait`
/// would expand them, because it does not process macro calls.
macro_rules! unknown {
    ($($name:ident($request:ty) -> $response:ty;)*) => {
        $(fn $name<'a, 'b>(
            &'a self,
            _: Request<$request>,
        ) -> Pin<Box<dyn Future<Output = Result<Response<$response>, Status>> + Send + 'b>>
        where
            'a: 'b,
            Self: 'b,
        {
            Box::pin(async { absent(stringify!($name)) })
        })*
    };
}

#[tonic::async_trait]
impl RuntimeRpc for Rpc {
    type StreamPodSandboxesStream = Out<cri::StreamPodSandboxesResponse>;
    type StreamContainersStream = Out<cri::StreamContainersResponse>;
    type StreamContainerStatsStream = Out<cri::StreamContainerStatsResponse>;
    type StreamPodSandboxStatsStream = Out<cri::StreamPodSandboxStatsResponse>;
    type StreamPodSandboxMetricsStream = Out<cri::StreamPodSandboxMetricsResponse>;
    type GetContainerEventsStream = Out<cri::ContainerEventResponse>;

    async fn version(&self, r: Request<cri::VersionRequest>) -> Result<Response<cri::VersionResponse>, Status> {
        answer(self.0.version(&r.into_inner().version).await)
    }

    async fn run_pod_sandbox(
        &self,
        r: Request<cri::RunPodSandboxRequest>,
    ) -> Result<Response<cri::RunPodSandboxResponse>, Status> {
        let r = r.into_inner();
        let id = self.0.run_pod_sandbox(r.config.unwrap_or_default(), &r.runtime_handler).await;
        answer(id.map(|pod_sandbox_id| cri::RunPodSandboxResponse { pod_sandbox_id }))
    }

    async fn stop_pod_sandbox(
        &self,
        r: Request<cri::StopPodSandboxRequest>,
    ) -> Result<Response<cri::StopPodSandboxResponse>, Status> {
        answer(self.0.stop_pod_sandbox(&r.into_inner().pod_sandbox_id).await.map(|()| Default::default()))
    }

    async fn remove_pod_sandbox(
        &self,
        r: Request<cri::RemovePodSandboxRequest>,
    ) -> Result<Response<cri::RemovePodSandboxResponse>, Status> {
        answer(self.0.remove_pod_sandbox(&r.into_inner().pod_sandbox_id).await.map(|()| Default::default()))
    }

    async fn pod_sandbox_status(
        &self,
        r: Request<cri::PodSandboxStatusRequest>,
    ) -> Result<Response<cri::PodSandboxStatusResponse>, Status> {
        answer(self.0.pod_sandbox_status(&r.into_inner().pod_sandbox_id).await)
    }

    async fn list_pod_sandbox(
        &self,
        r: Request<cri::ListPodSandboxRequest>,
    ) -> Result<Response<cri::ListPodSandboxResponse>, Status> {
        let items = self.0.list_pod_sandbox(r.into_inner().filter).await;
        answer(items.map(|items| cri::ListPodSandboxResponse { items }))
    }

    async fn create_container(
        &self,
        r: Request<cri::CreateContainerRequest>,
    ) -> Result<Response<cri::CreateContainerResponse>, Status> {
        let r = r.into_inner();
        let (config, sandbox) = (r.config.unwrap_or_default(), r.sandbox_config.unwrap_or_default());
        let id = self.0.create_container(&r.pod_sandbox_id, config, sandbox).await;
        answer(id.map(|container_id| cri::CreateContainerResponse { container_id }))
    }

    async fn start_container(
        &self,
        r: Request<cri::StartContainerRequest>,
    ) -> Result<Response<cri::StartContainerResponse>, Status> {
        answer(self.0.start_container(&r.into_inner().container_id).await.map(|()| Default::default()))
    }

    async fn stop_container(
        &self,
        r: Request<cri::StopContainerRequest>,
    ) -> Result<Response<cri::StopContainerResponse>, Status> {
        let r = r.into_inner();
        let grace = std::time::Duration::from_secs(r.timeout.max(0).unsigned_abs());
        answer(self.0.stop_container(&r.container_id, grace).await.map(|()| Default::default()))
    }

    async fn remove_container(
        &self,
        r: Request<cri::RemoveContainerRequest>,
    ) -> Result<Response<cri::RemoveContainerResponse>, Status> {
        answer(self.0.remove_container(&r.into_inner().container_id).await.map(|()| Default::default()))
    }

    async fn list_containers(
        &self,
        r: Request<cri::ListContainersRequest>,
    ) -> Result<Response<cri::ListContainersResponse>, Status> {
        let containers = self.0.list_containers(r.into_inner().filter).await;
        answer(containers.map(|containers| cri::ListContainersResponse { containers }))
    }

    async fn container_status(
        &self,
        r: Request<cri::ContainerStatusRequest>,
    ) -> Result<Response<cri::ContainerStatusResponse>, Status> {
        let status = self.0.container_status(&r.into_inner().container_id).await;
        answer(status.map(|status| cri::ContainerStatusResponse { status: Some(status), ..Default::default() }))
    }

    async fn update_container_resources(
        &self,
        r: Request<cri::UpdateContainerResourcesRequest>,
    ) -> Result<Response<cri::UpdateContainerResourcesResponse>, Status> {
        let r = r.into_inner();
        let done = self.0.update_container_resources(&r.container_id, r.linux.unwrap_or_default()).await;
        answer(done.map(|()| Default::default()))
    }

    async fn reopen_container_log(
        &self,
        r: Request<cri::ReopenContainerLogRequest>,
    ) -> Result<Response<cri::ReopenContainerLogResponse>, Status> {
        answer(self.0.reopen_container_log(&r.into_inner().container_id).await.map(|()| Default::default()))
    }

    async fn exec_sync(&self, r: Request<cri::ExecSyncRequest>) -> Result<Response<cri::ExecSyncResponse>, Status> {
        let r = r.into_inner();
        let timeout = std::time::Duration::from_secs(r.timeout.max(0).unsigned_abs());
        let response = match self.0.exec_sync(&r.container_id, &r.cmd, timeout, usize::MAX).await {
            Ok(out) => cri::ExecSyncResponse { stdout: out.stdout, stderr: out.stderr, exit_code: 0 },
            Err(CriError::Exit { code, stdout, stderr, .. }) => {
                cri::ExecSyncResponse { stdout: stdout.into_bytes(), stderr: stderr.into_bytes(), exit_code: code }
            }
            Err(error) => return Err(status(error)),
        };
        Ok(Response::new(response))
    }

    async fn status(&self, _: Request<cri::StatusRequest>) -> Result<Response<cri::StatusResponse>, Status> {
        answer(RuntimeService::status(&*self.0).await)
    }

    async fn runtime_config(
        &self,
        _: Request<cri::RuntimeConfigRequest>,
    ) -> Result<Response<cri::RuntimeConfigResponse>, Status> {
        answer(self.0.runtime_config().await)
    }

    async fn update_runtime_config(
        &self,
        r: Request<cri::UpdateRuntimeConfigRequest>,
    ) -> Result<Response<cri::UpdateRuntimeConfigResponse>, Status> {
        let network = r.into_inner().runtime_config.and_then(|config| config.network_config);
        let pod_cidr = network.map(|network| network.pod_cidr).unwrap_or_default();
        answer(self.0.update_runtime_config(&pod_cidr).await.map(|()| Default::default()))
    }

    async fn get_container_events(
        &self,
        _: Request<cri::GetEventsRequest>,
    ) -> Result<Response<Self::GetContainerEventsStream>, Status> {
        let stream = self.0.container_events().await.map_err(status)?;
        Ok(Response::new(stream.map(|event| event.map_err(status)).boxed()))
    }

    async fn list_container_stats(
        &self,
        r: Request<cri::ListContainerStatsRequest>,
    ) -> Result<Response<cri::ListContainerStatsResponse>, Status> {
        let stats = self.0.list_container_stats(r.into_inner().filter).await;
        answer(stats.map(|stats| cri::ListContainerStatsResponse { stats }))
    }

    async fn list_pod_sandbox_stats(
        &self,
        r: Request<cri::ListPodSandboxStatsRequest>,
    ) -> Result<Response<cri::ListPodSandboxStatsResponse>, Status> {
        let stats = self.0.list_pod_sandbox_stats(r.into_inner().filter).await;
        answer(stats.map(|stats| cri::ListPodSandboxStatsResponse { stats }))
    }

    async fn exec(&self, r: Request<cri::ExecRequest>) -> Result<Response<cri::ExecResponse>, Status> {
        answer(self.0.exec(r.into_inner()).await.map(|url| cri::ExecResponse { url }))
    }

    async fn attach(&self, r: Request<cri::AttachRequest>) -> Result<Response<cri::AttachResponse>, Status> {
        answer(self.0.attach(r.into_inner()).await.map(|url| cri::AttachResponse { url }))
    }

    async fn port_forward(
        &self,
        r: Request<cri::PortForwardRequest>,
    ) -> Result<Response<cri::PortForwardResponse>, Status> {
        answer(self.0.port_forward(r.into_inner()).await.map(|url| cri::PortForwardResponse { url }))
    }

    async fn checkpoint_container(
        &self,
        r: Request<cri::CheckpointContainerRequest>,
    ) -> Result<Response<cri::CheckpointContainerResponse>, Status> {
        let r = r.into_inner();
        let timeout = std::time::Duration::from_secs(r.timeout.max(0).unsigned_abs());
        let done = self.0.checkpoint_container(&r.container_id, &r.location, timeout).await;
        answer(done.map(|()| Default::default()))
    }

    unknown! {
        container_stats(cri::ContainerStatsRequest) -> cri::ContainerStatsResponse;
        pod_sandbox_stats(cri::PodSandboxStatsRequest) -> cri::PodSandboxStatsResponse;
        list_metric_descriptors(cri::ListMetricDescriptorsRequest) -> cri::ListMetricDescriptorsResponse;
        list_pod_sandbox_metrics(cri::ListPodSandboxMetricsRequest) -> cri::ListPodSandboxMetricsResponse;
        update_pod_sandbox_resources(cri::UpdatePodSandboxResourcesRequest) -> cri::UpdatePodSandboxResourcesResponse;
        stream_pod_sandboxes(cri::StreamPodSandboxesRequest) -> Self::StreamPodSandboxesStream;
        stream_containers(cri::StreamContainersRequest) -> Self::StreamContainersStream;
        stream_container_stats(cri::StreamContainerStatsRequest) -> Self::StreamContainerStatsStream;
        stream_pod_sandbox_stats(cri::StreamPodSandboxStatsRequest) -> Self::StreamPodSandboxStatsStream;
        stream_pod_sandbox_metrics(cri::StreamPodSandboxMetricsRequest) -> Self::StreamPodSandboxMetricsStream;
    }
}

#[tonic::async_trait]
impl ImageRpc for Rpc {
    type StreamImagesStream = Out<cri::StreamImagesResponse>;

    async fn list_images(
        &self,
        _: Request<cri::ListImagesRequest>,
    ) -> Result<Response<cri::ListImagesResponse>, Status> {
        answer(self.0.list_images().await.map(|images| cri::ListImagesResponse { images }))
    }

    async fn stream_images(
        &self,
        _: Request<cri::StreamImagesRequest>,
    ) -> Result<Response<Self::StreamImagesStream>, Status> {
        Err(Status::new(Code::Unimplemented, "unknown method StreamImages for service runtime.v1.ImageService"))
    }

    async fn image_status(
        &self,
        r: Request<cri::ImageStatusRequest>,
    ) -> Result<Response<cri::ImageStatusResponse>, Status> {
        let image = self.0.image_status(r.into_inner().image.unwrap_or_default()).await;
        answer(image.map(|image| cri::ImageStatusResponse { image, ..Default::default() }))
    }

    async fn pull_image(&self, r: Request<cri::PullImageRequest>) -> Result<Response<cri::PullImageResponse>, Status> {
        let r = r.into_inner();
        let image = self.0.pull_image(r.image.unwrap_or_default(), r.auth, r.sandbox_config).await;
        answer(image.map(|image_ref| cri::PullImageResponse { image_ref }))
    }

    async fn remove_image(
        &self,
        r: Request<cri::RemoveImageRequest>,
    ) -> Result<Response<cri::RemoveImageResponse>, Status> {
        answer(self.0.remove_image(r.into_inner().image.unwrap_or_default()).await.map(|()| Default::default()))
    }

    async fn image_fs_info(
        &self,
        _: Request<cri::ImageFsInfoRequest>,
    ) -> Result<Response<cri::ImageFsInfoResponse>, Status> {
        answer(self.0.image_fs_info().await)
    }
}
