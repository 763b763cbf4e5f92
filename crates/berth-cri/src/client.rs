//! CRI client for the runtime service (sandboxes, containers), over a Unix socket (spec 03a §2.1-2.2).

use std::{
    collections::HashMap,
    sync::atomic::{AtomicBool, Ordering},
    time::Duration,
};

use async_trait::async_trait;
use futures::{
    StreamExt, TryStreamExt,
    stream::{self, BoxStream},
};
use tonic::{Code, Status, Streaming, transport::Channel};

use super::{
    CriError, CriResult, ExecOutput, RuntimeService,
    deadlines::{Caller, Limit, record_status, request_with_span},
    priority_semaphore::{Priority, PrioritySemaphore},
    reply_validation,
};
use berth_metrics::RuntimeOperation as Op;
use berth_otel::Span;
use berth_proto::{
    OUTPUT_LIMIT,
    cri::{self, runtime_service_client::RuntimeServiceClient},
};

/// Maximum size of a received message, in bytes.
pub(super) const MAX_MESSAGE: usize = 16 << 20;

/// Client of `runtime.v1.RuntimeService`. Cheap to share; calls run concurrently.
pub struct RuntimeClient {
    channel: Channel,
    caller: Caller,
    gate: PrioritySemaphore,
    streaming: ListStreaming,
}

impl RuntimeClient {
    pub(super) fn new(channel: Channel, caller: Caller, list_streaming: bool) -> Self {
        Self { channel, caller, gate: PrioritySemaphore::of_machine(), streaming: ListStreaming::new(list_streaming) }
    }

    fn rpc(&self) -> RuntimeServiceClient<Channel> {
        RuntimeServiceClient::new(self.channel.clone()).max_decoding_message_size(MAX_MESSAGE)
    }
}

#[async_trait]
impl RuntimeService for RuntimeClient {
    async fn version(&self, version: &str) -> CriResult<cri::VersionResponse> {
        let request = cri::VersionRequest { version: version.to_owned() };
        let mut rpc = self.rpc();
        self.caller.call(Op::Version, Limit::Once, request, |r| async move { rpc.version(r).await }).await
    }

    async fn status(&self) -> CriResult<cri::StatusResponse> {
        let request = cri::StatusRequest { verbose: false };
        let mut rpc = self.rpc();
        let reply = self.caller.call(Op::Status, Limit::Once, request, |r| async move { rpc.status(r).await });
        reply_validation::status(reply.await?)
    }

    async fn runtime_config(&self) -> CriResult<cri::RuntimeConfigResponse> {
        let request = cri::RuntimeConfigRequest::default();
        let mut rpc = self.rpc();
        self.caller.call(Op::RuntimeConfig, Limit::Once, request, |r| async move { rpc.runtime_config(r).await }).await
    }

    async fn update_runtime_config(&self, pod_cidr: &str) -> CriResult<()> {
        let network = cri::NetworkConfig { pod_cidr: pod_cidr.to_owned() };
        let request = cri::UpdateRuntimeConfigRequest {
            runtime_config: Some(cri::RuntimeConfig { network_config: Some(network) }),
        };
        let mut rpc = self.rpc();
        let send = |r| async move { rpc.update_runtime_config(r).await };
        self.caller.call(Op::UpdateRuntimeConfig, Limit::Once, request, send).await.map(drop)
    }

    async fn run_pod_sandbox(&self, config: cri::PodSandboxConfig, handler: &str) -> CriResult<String> {
        let name = config.metadata.as_ref().map(|meta| meta.name.clone()).unwrap_or_default();
        let request = cri::RunPodSandboxRequest { config: Some(config), runtime_handler: handler.to_owned() };
        let mut rpc = self.rpc();
        let send = |r| async move { rpc.run_pod_sandbox(r).await };
        let call = || self.caller.call(Op::RunPodSandbox, Limit::Twice, request, send);
        let reply = self.gate.pass(Priority::Sandbox, call).await?;
        reply_validation::sandbox_id(reply.pod_sandbox_id, &name)
    }

    async fn stop_pod_sandbox(&self, id: &str) -> CriResult<()> {
        let request = cri::StopPodSandboxRequest { pod_sandbox_id: id.to_owned() };
        let mut rpc = self.rpc();
        let send = |r| async move { rpc.stop_pod_sandbox(r).await };
        self.caller.call(Op::StopPodSandbox, Limit::Once, request, send).await.map(drop)
    }

    async fn remove_pod_sandbox(&self, id: &str) -> CriResult<()> {
        let request = cri::RemovePodSandboxRequest { pod_sandbox_id: id.to_owned() };
        let mut rpc = self.rpc();
        let send = |r| async move { rpc.remove_pod_sandbox(r).await };
        self.caller.call(Op::RemovePodSandbox, Limit::Once, request, send).await.map(drop)
    }

    async fn pod_sandbox_status(&self, id: &str) -> CriResult<cri::PodSandboxStatusResponse> {
        let request = cri::PodSandboxStatusRequest { pod_sandbox_id: id.to_owned(), verbose: false };
        let mut rpc = self.rpc();
        let send = |r| async move { rpc.pod_sandbox_status(r).await };
        reply_validation::sandbox_status(self.caller.call(Op::PodSandboxStatus, Limit::Once, request, send).await?)
    }

    async fn pod_sandbox_info(&self, id: &str) -> CriResult<HashMap<String, String>> {
        let request = cri::PodSandboxStatusRequest { pod_sandbox_id: id.to_owned(), verbose: true };
        let mut rpc = self.rpc();
        let send = |r| async move { rpc.pod_sandbox_status(r).await };
        Ok(self.caller.call(Op::PodSandboxStatus, Limit::Once, request, send).await?.info)
    }

    async fn list_pod_sandbox(&self, filter: Option<cri::PodSandboxFilter>) -> CriResult<Vec<cri::PodSandbox>> {
        if self.streaming.wanted() {
            let mut rpc = self.rpc();
            let request = cri::StreamPodSandboxesRequest { filter: filter.clone() };
            let (span, request) = request_with_span("runtime.v1.RuntimeService/StreamPodSandboxes", request);
            let stream = async move { rpc.stream_pod_sandboxes(request).await };
            let chunks = self.streaming.collect(&self.caller, Op::ListPodSandbox, span, stream, |c| c.pod_sandboxes);
            if let Some(answer) = chunks.await {
                return answer;
            }
        }
        let mut rpc = self.rpc();
        let send = |r| async move { rpc.list_pod_sandbox(r).await };
        let request = cri::ListPodSandboxRequest { filter };
        Ok(self.caller.call(Op::ListPodSandbox, Limit::Once, request, send).await?.items)
    }

    async fn create_container(
        &self,
        sandbox: &str,
        config: cri::ContainerConfig,
        sandbox_config: cri::PodSandboxConfig,
    ) -> CriResult<String> {
        let name = config.metadata.as_ref().map(|meta| meta.name.clone()).unwrap_or_default();
        let request = cri::CreateContainerRequest {
            pod_sandbox_id: sandbox.to_owned(),
            config: Some(config),
            sandbox_config: Some(sandbox_config),
        };
        let mut rpc = self.rpc();
        let send = |r| async move { rpc.create_container(r).await };
        let call = || self.caller.call(Op::CreateContainer, Limit::Once, request, send);
        let reply = self.gate.pass(Priority::Create, call).await?;
        reply_validation::container_id(reply.container_id, &name)
    }

    async fn start_container(&self, id: &str) -> CriResult<()> {
        let request = cri::StartContainerRequest { container_id: id.to_owned() };
        let mut rpc = self.rpc();
        let send = |r| async move { rpc.start_container(r).await };
        let call = || self.caller.call(Op::StartContainer, Limit::Once, request, send);
        self.gate.pass(Priority::Start, call).await.map(drop)
    }

    async fn stop_container(&self, id: &str, grace: Duration) -> CriResult<()> {
        let request = cri::StopContainerRequest { container_id: id.to_owned(), timeout: whole_seconds(grace) };
        let mut rpc = self.rpc();
        let send = |r| async move { rpc.stop_container(r).await };
        self.caller.call(Op::StopContainer, Limit::Plus(grace), request, send).await.map(drop)
    }

    async fn remove_container(&self, id: &str) -> CriResult<()> {
        let request = cri::RemoveContainerRequest { container_id: id.to_owned() };
        let mut rpc = self.rpc();
        let send = |r| async move { rpc.remove_container(r).await };
        self.caller.call(Op::RemoveContainer, Limit::Once, request, send).await.map(drop)
    }

    async fn list_containers(&self, filter: Option<cri::ContainerFilter>) -> CriResult<Vec<cri::Container>> {
        if self.streaming.wanted() {
            let mut rpc = self.rpc();
            let request = cri::StreamContainersRequest { filter: filter.clone() };
            let (span, request) = request_with_span("runtime.v1.RuntimeService/StreamContainers", request);
            let stream = async move { rpc.stream_containers(request).await };
            let chunks = self.streaming.collect(&self.caller, Op::ListContainers, span, stream, |c| c.containers);
            if let Some(answer) = chunks.await {
                return answer;
            }
        }
        let mut rpc = self.rpc();
        let send = |r| async move { rpc.list_containers(r).await };
        let request = cri::ListContainersRequest { filter };
        Ok(self.caller.call(Op::ListContainers, Limit::Once, request, send).await?.containers)
    }

    async fn container_status(&self, id: &str) -> CriResult<cri::ContainerStatus> {
        let request = cri::ContainerStatusRequest { container_id: id.to_owned(), verbose: false };
        let mut rpc = self.rpc();
        let send = |r| async move { rpc.container_status(r).await };
        reply_validation::container_status(self.caller.call(Op::ContainerStatus, Limit::Once, request, send).await?)
    }

    async fn update_container_resources(&self, id: &str, linux: cri::LinuxContainerResources) -> CriResult<()> {
        let request = cri::UpdateContainerResourcesRequest {
            container_id: id.to_owned(),
            linux: Some(linux),
            ..Default::default()
        };
        let mut rpc = self.rpc();
        let send = |r| async move { rpc.update_container_resources(r).await };
        self.caller.call(Op::UpdateContainerResources, Limit::Once, request, send).await.map(drop)
    }

    async fn update_pod_sandbox_resources(
        &self,
        id: &str,
        overhead: cri::LinuxContainerResources,
        resources: cri::LinuxContainerResources,
    ) -> CriResult<()> {
        let request = cri::UpdatePodSandboxResourcesRequest {
            pod_sandbox_id: id.to_owned(),
            overhead: Some(overhead),
            resources: Some(resources),
        };
        let mut rpc = self.rpc();
        let send = |r| async move { rpc.update_pod_sandbox_resources(r).await };
        self.caller.call(Op::UpdatePodSandboxResources, Limit::Once, request, send).await.map(drop)
    }

    async fn list_container_stats(
        &self,
        filter: Option<cri::ContainerStatsFilter>,
    ) -> CriResult<Vec<cri::ContainerStats>> {
        let request = cri::ListContainerStatsRequest { filter };
        let mut rpc = self.rpc();
        let send = |r| async move { rpc.list_container_stats(r).await };
        Ok(self.caller.call(Op::ListContainerStats, Limit::Once, request, send).await?.stats)
    }

    async fn list_pod_sandbox_stats(
        &self,
        filter: Option<cri::PodSandboxStatsFilter>,
    ) -> CriResult<Vec<cri::PodSandboxStats>> {
        let request = cri::ListPodSandboxStatsRequest { filter };
        let mut rpc = self.rpc();
        let send = |r| async move { rpc.list_pod_sandbox_stats(r).await };
        Ok(self.caller.call(Op::ListPodSandboxStats, Limit::Once, request, send).await?.stats)
    }

    async fn reopen_container_log(&self, id: &str) -> CriResult<()> {
        let request = cri::ReopenContainerLogRequest { container_id: id.to_owned() };
        let mut rpc = self.rpc();
        let send = |r| async move { rpc.reopen_container_log(r).await };
        self.caller.call(Op::ReopenContainerLog, Limit::Once, request, send).await.map(drop)
    }

    async fn exec_sync(&self, id: &str, command: &[String], timeout: Duration, most: usize) -> CriResult<ExecOutput> {
        let limit = if timeout.is_zero() { Limit::Never } else { Limit::Plus(timeout) };
        let request = cri::ExecSyncRequest {
            container_id: id.to_owned(),
            cmd: command.to_vec(),
            timeout: whole_seconds(timeout),
        };
        let mut rpc = self.rpc();
        let send = |mut request: tonic::Request<cri::ExecSyncRequest>| {
            request.metadata_mut().insert(OUTPUT_LIMIT, most.into());
            async move {
                // A new connection does not know the server's limit of streams yet, and probes come in bursts.
                for _ in 1..ATTEMPTS {
                    match rpc.exec_sync(copy(&request)).await {
                        Err(status) if is_refused(&status) => {}
                        answer => return answer,
                    }
                }
                rpc.exec_sync(request).await
            }
        };
        let answer = self.caller.call(Op::ExecSync, limit, request, send).await.map(|mut reply| {
            // Runtimes without support for the limit return everything.
            reply.stdout.truncate(most);
            reply.stderr.truncate(most);
            reply
        });
        match answer {
            Ok(reply) if reply.exit_code == 0 => Ok(ExecOutput { stdout: reply.stdout, stderr: reply.stderr }),
            Ok(reply) => Err(CriError::Exit {
                command: command.join(" "),
                code: reply.exit_code,
                stdout: String::from_utf8_lossy(&reply.stdout).into_owned(),
                stderr: String::from_utf8_lossy(&reply.stderr).into_owned(),
            }),
            Err(error) if error.is_timeout() => {
                Err(CriError::ExecTimedOut { command: command.join(" "), limit: timeout })
            }
            Err(error) => Err(error),
        }
    }

    async fn exec(&self, request: cri::ExecRequest) -> CriResult<String> {
        let mut rpc = self.rpc();
        let send = |r| async move { rpc.exec(r).await };
        reply_validation::url(self.caller.call(Op::Exec, Limit::Once, request, send).await?.url)
    }

    async fn attach(&self, request: cri::AttachRequest) -> CriResult<String> {
        let mut rpc = self.rpc();
        let send = |r| async move { rpc.attach(r).await };
        reply_validation::url(self.caller.call(Op::Attach, Limit::Once, request, send).await?.url)
    }

    async fn port_forward(&self, request: cri::PortForwardRequest) -> CriResult<String> {
        let mut rpc = self.rpc();
        let send = |r| async move { rpc.port_forward(r).await };
        reply_validation::url(self.caller.call(Op::PortForward, Limit::Once, request, send).await?.url)
    }

    async fn checkpoint_container(&self, id: &str, location: &str, timeout: Duration) -> CriResult<()> {
        let request = cri::CheckpointContainerRequest {
            container_id: id.to_owned(),
            location: location.to_owned(),
            timeout: whole_seconds(timeout),
        };
        let mut rpc = self.rpc();
        let send = |r| async move { rpc.checkpoint_container(r).await };
        self.caller.call(Op::CheckpointContainer, Limit::AtLeast(timeout), request, send).await.map(drop)
    }

    async fn container_events(&self) -> CriResult<BoxStream<'static, CriResult<cri::ContainerEventResponse>>> {
        let mut rpc = self.rpc();
        let send = |r| async move { rpc.get_container_events(r).await };
        let request = cri::GetEventsRequest::default();
        let stream: Streaming<_> = self.caller.call(Op::GetContainerEvents, Limit::Never, request, send).await?;
        Ok(stream.map_err(CriError::from).boxed())
    }
}

/// Attempts of a call whose stream the server refuses.
const ATTEMPTS: u32 = 3;

/// Whether the server refused the stream of a call (HTTP/2 `REFUSED_STREAM`): it processed nothing of it, so that the
/// call can be repeated.
fn is_refused(status: &Status) -> bool {
    let first = std::error::Error::source(status);
    let mut causes = std::iter::successors(first, |error| error.source());
    causes.any(|error| {
        error.downcast_ref::<h2::Error>().is_some_and(|error| error.reason() == Some(h2::Reason::REFUSED_STREAM))
    })
}

/// A request with the same message and metadata.
fn copy<M: Clone>(request: &tonic::Request<M>) -> tonic::Request<M> {
    let mut copy = tonic::Request::new(request.get_ref().clone());
    copy.metadata_mut().clone_from(request.metadata());
    copy
}

/// CRI durations are whole seconds, truncated.
fn whole_seconds(duration: Duration) -> i64 {
    i64::try_from(duration.as_secs()).unwrap_or(i64::MAX)
}

/// Whether list calls use streaming; the first `Unimplemented` disables it permanently.
pub(super) struct ListStreaming {
    wanted: AtomicBool,
}

impl ListStreaming {
    pub(super) fn new(wanted: bool) -> Self {
        Self { wanted: AtomicBool::new(wanted) }
    }

    pub(super) fn wanted(&self) -> bool {
        self.wanted.load(Ordering::Relaxed)
    }

    /// Collects all chunks of a list within one deadline; `None` where the runtime does not implement the call
    /// (reported on the first receive) and the caller must use the unary call.
    pub(super) async fn collect<C: Send + 'static, T: Send>(
        &self,
        caller: &Caller,
        operation: Op,
        span: Span,
        begin: impl Future<Output = Result<tonic::Response<Streaming<C>>, Status>>,
        items: impl Fn(C) -> Vec<T>,
    ) -> Option<CriResult<Vec<T>>> {
        let work = async {
            let stream = match begin.await {
                Ok(reply) => reply.into_inner().left_stream(),
                Err(status) => stream::once(async { Err(status) }).right_stream(),
            };
            let all = stream.try_fold(Vec::new(), |mut all, chunk| {
                all.extend(items(chunk));
                async { Ok(all) }
            });
            match all.await {
                Err(status) if status.code() == Code::Unimplemented => Ok(None),
                answer => Ok(Some(answer?)),
            }
        };
        let answer = caller.bounded(operation, Limit::Once.of(caller.timeout), work).await;
        match answer {
            Ok(Some(all)) => {
                record_status(&span, None);
                Some(Ok(all))
            }
            Ok(None) => {
                let message = "the runtime does not implement the stream".to_owned();
                record_status(&span, Some(&CriError::Rpc { code: Code::Unimplemented, message }));
                self.wanted.store(false, Ordering::Relaxed);
                None
            }
            Err(error) => {
                record_status(&span, Some(&error));
                Some(Err(error))
            }
        }
    }
}
