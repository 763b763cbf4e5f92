//! `runtime.v1.RuntimeService` of CRI: translates messages to calls and back.

use std::sync::Arc;

use futures::stream::BoxStream;
use tonic::{Request, Response, Status, async_trait};

use super::{
    container, container_start, container_stop, container_update, exec_sync, info, lists, metrics, sandbox,
    sandbox_stop, stats, streams,
};
use crate::{
    errors::{RuntimeError, RuntimeResult},
    events::Events,
    runtime::Runtime,
    streams::StreamRequest,
};
use berth_proto::{
    OUTPUT_LIMIT,
    cri::{self, runtime_service_server::RuntimeService},
};

/// gRPC handler of the runtime service.
pub struct RuntimeCalls {
    /// The runtime that serves the calls.
    pub runtime: Arc<Runtime>,
    /// Prefix of streaming URLs.
    pub streams: Arc<str>,
}

type Answer<T> = Result<Response<T>, Status>;
type Chunks<T> = BoxStream<'static, Result<T, Status>>;

fn answer<T>(result: RuntimeResult<T>) -> Answer<T> {
    result.map(Response::new).map_err(Status::from)
}

/// Uses the text of a gRPC server without the method, because clients match it.
fn absent<T>(method: &str) -> Answer<T> {
    Err(Status::unimplemented(format!("method {method} not implemented")))
}

impl RuntimeCalls {
    /// Waits until recovery after a restart has completed.
    async fn ready(&self) -> &Arc<Runtime> {
        self.runtime.wait_until_ready().await;
        &self.runtime
    }

    /// The URL of a prepared stream.
    async fn stream(&self, ask: RuntimeResult<StreamRequest>) -> RuntimeResult<String> {
        let path = streams::prepare(self.ready().await, ask?)?;
        Ok(format!("{}{path}", self.streams))
    }
}

#[async_trait]
impl RuntimeService for RuntimeCalls {
    type StreamPodSandboxesStream = Chunks<cri::StreamPodSandboxesResponse>;
    type StreamContainersStream = Chunks<cri::StreamContainersResponse>;
    type StreamContainerStatsStream = Chunks<cri::StreamContainerStatsResponse>;
    type StreamPodSandboxStatsStream = Chunks<cri::StreamPodSandboxStatsResponse>;
    type StreamPodSandboxMetricsStream = Chunks<cri::StreamPodSandboxMetricsResponse>;
    type GetContainerEventsStream = Events;

    async fn version(&self, _: Request<cri::VersionRequest>) -> Answer<cri::VersionResponse> {
        answer(Ok(info::version()))
    }

    async fn status(&self, request: Request<cri::StatusRequest>) -> Answer<cri::StatusResponse> {
        answer(Ok(info::status(&self.runtime, request.into_inner().verbose).await))
    }

    async fn runtime_config(&self, _: Request<cri::RuntimeConfigRequest>) -> Answer<cri::RuntimeConfigResponse> {
        answer(Ok(info::config(self.ready().await)))
    }

    async fn update_runtime_config(
        &self,
        request: Request<cri::UpdateRuntimeConfigRequest>,
    ) -> Answer<cri::UpdateRuntimeConfigResponse> {
        let network = request.into_inner().runtime_config.and_then(|config| config.network_config);
        let ranges = network.map(|network| network.pod_cidr).unwrap_or_default();
        if ranges.is_empty() {
            return answer(Ok(cri::UpdateRuntimeConfigResponse {}));
        }
        let set = self.ready().await.ports.network.set_ranges(&ranges).await;
        answer(set.map(|()| cri::UpdateRuntimeConfigResponse {}))
    }

    async fn run_pod_sandbox(&self, request: Request<cri::RunPodSandboxRequest>) -> Answer<cri::RunPodSandboxResponse> {
        let request = request.into_inner();
        let Some(config) = request.config else {
            return answer(Err(RuntimeError::invalid("sandbox config must include metadata")));
        };
        let id = sandbox::run(self.ready().await, config, request.runtime_handler).await;
        answer(id.map(|pod_sandbox_id| cri::RunPodSandboxResponse { pod_sandbox_id }))
    }

    async fn stop_pod_sandbox(
        &self,
        request: Request<cri::StopPodSandboxRequest>,
    ) -> Answer<cri::StopPodSandboxResponse> {
        let stopped = sandbox_stop::stop(self.ready().await, &request.into_inner().pod_sandbox_id).await;
        answer(stopped.map(|()| cri::StopPodSandboxResponse {}))
    }

    async fn remove_pod_sandbox(
        &self,
        request: Request<cri::RemovePodSandboxRequest>,
    ) -> Answer<cri::RemovePodSandboxResponse> {
        let removed = sandbox_stop::remove(self.ready().await, &request.into_inner().pod_sandbox_id).await;
        answer(removed.map(|()| cri::RemovePodSandboxResponse {}))
    }

    async fn pod_sandbox_status(
        &self,
        request: Request<cri::PodSandboxStatusRequest>,
    ) -> Answer<cri::PodSandboxStatusResponse> {
        answer(lists::sandbox_status(self.ready().await, request.get_ref()))
    }

    async fn list_pod_sandbox(
        &self,
        request: Request<cri::ListPodSandboxRequest>,
    ) -> Answer<cri::ListPodSandboxResponse> {
        let items = lists::sandboxes(self.ready().await, request.get_ref().filter.as_ref());
        answer(items.map(|items| cri::ListPodSandboxResponse { items }))
    }

    async fn stream_pod_sandboxes(
        &self,
        request: Request<cri::StreamPodSandboxesRequest>,
    ) -> Answer<Self::StreamPodSandboxesStream> {
        let items = lists::sandboxes(self.ready().await, request.get_ref().filter.as_ref());
        let chunk = |pod_sandboxes| cri::StreamPodSandboxesResponse { pod_sandboxes };
        answer(items.map(|items| lists::in_chunks(items, chunk)))
    }

    async fn create_container(
        &self,
        request: Request<cri::CreateContainerRequest>,
    ) -> Answer<cri::CreateContainerResponse> {
        let id = container::create(self.ready().await, request.into_inner()).await;
        answer(id.map(|container_id| cri::CreateContainerResponse { container_id }))
    }

    async fn start_container(
        &self,
        request: Request<cri::StartContainerRequest>,
    ) -> Answer<cri::StartContainerResponse> {
        let started = container_start::start(self.ready().await, &request.into_inner().container_id).await;
        answer(started.map(|()| cri::StartContainerResponse {}))
    }

    async fn stop_container(&self, request: Request<cri::StopContainerRequest>) -> Answer<cri::StopContainerResponse> {
        let request = request.into_inner();
        let stopped = container_stop::stop(self.ready().await, &request.container_id, request.timeout).await;
        answer(stopped.map(|()| cri::StopContainerResponse {}))
    }

    async fn remove_container(
        &self,
        request: Request<cri::RemoveContainerRequest>,
    ) -> Answer<cri::RemoveContainerResponse> {
        let removed = container_stop::remove(self.ready().await, &request.into_inner().container_id).await;
        answer(removed.map(|()| cri::RemoveContainerResponse {}))
    }

    async fn list_containers(
        &self,
        request: Request<cri::ListContainersRequest>,
    ) -> Answer<cri::ListContainersResponse> {
        let containers = lists::containers(self.ready().await, request.get_ref().filter.as_ref());
        answer(containers.map(|containers| cri::ListContainersResponse { containers }))
    }

    async fn stream_containers(
        &self,
        request: Request<cri::StreamContainersRequest>,
    ) -> Answer<Self::StreamContainersStream> {
        let items = lists::containers(self.ready().await, request.get_ref().filter.as_ref());
        let chunk = |containers| cri::StreamContainersResponse { containers };
        answer(items.map(|items| lists::in_chunks(items, chunk)))
    }

    async fn container_status(
        &self,
        request: Request<cri::ContainerStatusRequest>,
    ) -> Answer<cri::ContainerStatusResponse> {
        answer(lists::container_status(self.ready().await, request.get_ref()))
    }

    async fn update_container_resources(
        &self,
        request: Request<cri::UpdateContainerResourcesRequest>,
    ) -> Answer<cri::UpdateContainerResourcesResponse> {
        let request = request.into_inner();
        let linux = request.linux.unwrap_or_default();
        let changed = container_update::update(self.ready().await, &request.container_id, linux).await;
        answer(changed.map(|()| cri::UpdateContainerResourcesResponse {}))
    }

    async fn update_pod_sandbox_resources(
        &self,
        request: Request<cri::UpdatePodSandboxResourcesRequest>,
    ) -> Answer<cri::UpdatePodSandboxResourcesResponse> {
        let changed = container_update::update_sandbox(self.ready().await, request.into_inner()).await;
        answer(changed.map(|()| cri::UpdatePodSandboxResourcesResponse {}))
    }

    async fn reopen_container_log(
        &self,
        request: Request<cri::ReopenContainerLogRequest>,
    ) -> Answer<cri::ReopenContainerLogResponse> {
        let opened = container_update::reopen_log(self.ready().await, &request.into_inner().container_id).await;
        answer(opened.map(|()| cri::ReopenContainerLogResponse {}))
    }

    async fn exec_sync(&self, request: Request<cri::ExecSyncRequest>) -> Answer<cri::ExecSyncResponse> {
        let most = request.metadata().get(OUTPUT_LIMIT).and_then(|value| value.to_str().ok()?.parse().ok());
        answer(exec_sync::exec_sync(self.ready().await, request.into_inner(), most).await)
    }

    async fn get_container_events(&self, _: Request<cri::GetEventsRequest>) -> Answer<Self::GetContainerEventsStream> {
        answer(Ok(self.ready().await.shell.hub.subscribe()))
    }

    async fn exec(&self, request: Request<cri::ExecRequest>) -> Answer<cri::ExecResponse> {
        let url = self.stream(StreamRequest::exec(request.into_inner())).await;
        answer(url.map(|url| cri::ExecResponse { url }))
    }

    async fn attach(&self, request: Request<cri::AttachRequest>) -> Answer<cri::AttachResponse> {
        let url = self.stream(StreamRequest::attach(request.into_inner())).await;
        answer(url.map(|url| cri::AttachResponse { url }))
    }

    async fn port_forward(&self, request: Request<cri::PortForwardRequest>) -> Answer<cri::PortForwardResponse> {
        let url = self.stream(StreamRequest::forward(request.into_inner())).await;
        answer(url.map(|url| cri::PortForwardResponse { url }))
    }

    async fn container_stats(
        &self,
        request: Request<cri::ContainerStatsRequest>,
    ) -> Answer<cri::ContainerStatsResponse> {
        let stats = stats::container(self.ready().await, &request.into_inner().container_id).await;
        answer(stats.map(|stats| cri::ContainerStatsResponse { stats: Some(stats) }))
    }

    async fn list_container_stats(
        &self,
        request: Request<cri::ListContainerStatsRequest>,
    ) -> Answer<cri::ListContainerStatsResponse> {
        let stats = stats::containers(self.ready().await, request.into_inner().filter).await;
        answer(stats.map(|stats| cri::ListContainerStatsResponse { stats }))
    }

    async fn stream_container_stats(
        &self,
        request: Request<cri::StreamContainerStatsRequest>,
    ) -> Answer<Self::StreamContainerStatsStream> {
        let stats = stats::containers(self.ready().await, request.into_inner().filter).await;
        let chunk = |container_stats| cri::StreamContainerStatsResponse { container_stats };
        answer(stats.map(|stats| lists::in_chunks(stats, chunk)))
    }

    async fn pod_sandbox_stats(
        &self,
        request: Request<cri::PodSandboxStatsRequest>,
    ) -> Answer<cri::PodSandboxStatsResponse> {
        let stats = stats::sandbox(self.ready().await, &request.into_inner().pod_sandbox_id).await;
        answer(stats.map(|stats| cri::PodSandboxStatsResponse { stats: Some(stats) }))
    }

    async fn list_pod_sandbox_stats(
        &self,
        request: Request<cri::ListPodSandboxStatsRequest>,
    ) -> Answer<cri::ListPodSandboxStatsResponse> {
        let stats = stats::sandboxes(self.ready().await, request.into_inner().filter).await;
        answer(stats.map(|stats| cri::ListPodSandboxStatsResponse { stats }))
    }

    async fn stream_pod_sandbox_stats(
        &self,
        request: Request<cri::StreamPodSandboxStatsRequest>,
    ) -> Answer<Self::StreamPodSandboxStatsStream> {
        let stats = stats::sandboxes(self.ready().await, request.into_inner().filter).await;
        let chunk = |pod_sandbox_stats| cri::StreamPodSandboxStatsResponse { pod_sandbox_stats };
        answer(stats.map(|stats| lists::in_chunks(stats, chunk)))
    }

    async fn list_metric_descriptors(
        &self,
        _: Request<cri::ListMetricDescriptorsRequest>,
    ) -> Answer<cri::ListMetricDescriptorsResponse> {
        let descriptors = metrics::descriptors(self.ready().await);
        answer(Ok(cri::ListMetricDescriptorsResponse { descriptors }))
    }

    async fn list_pod_sandbox_metrics(
        &self,
        _: Request<cri::ListPodSandboxMetricsRequest>,
    ) -> Answer<cri::ListPodSandboxMetricsResponse> {
        let pod_metrics = metrics::sandboxes(self.ready().await).await;
        answer(pod_metrics.map(|pod_metrics| cri::ListPodSandboxMetricsResponse { pod_metrics }))
    }

    async fn stream_pod_sandbox_metrics(
        &self,
        _: Request<cri::StreamPodSandboxMetricsRequest>,
    ) -> Answer<Self::StreamPodSandboxMetricsStream> {
        let pod_metrics = metrics::sandboxes(self.ready().await).await;
        let chunk = |pod_sandbox_metrics| cri::StreamPodSandboxMetricsResponse { pod_sandbox_metrics };
        answer(pod_metrics.map(|pod_metrics| lists::in_chunks(pod_metrics, chunk)))
    }

    async fn checkpoint_container(
        &self,
        _: Request<cri::CheckpointContainerRequest>,
    ) -> Answer<cri::CheckpointContainerResponse> {
        absent("CheckpointContainer")
    }
}
