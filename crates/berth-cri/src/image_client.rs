//! CRI client for the image service, on its own channel (spec 03a §2.1-2.2).

use async_trait::async_trait;
use tonic::{Code, transport::Channel};

use super::{
    CriError, CriResult, ImageService,
    client::{ListStreaming, MAX_MESSAGE},
    deadlines::{Caller, Limit, request_with_span},
    reply_validation,
};
use berth_metrics::RuntimeOperation as Op;
use berth_proto::cri::{self, image_service_client::ImageServiceClient};

/// Client of `runtime.v1.ImageService`. Cheap to share; calls run concurrently.
pub struct ImageClient {
    channel: Channel,
    caller: Caller,
    streaming: ListStreaming,
}

impl ImageClient {
    pub(super) fn new(channel: Channel, caller: Caller, list_streaming: bool) -> Self {
        Self { channel, caller, streaming: ListStreaming::new(list_streaming) }
    }

    fn rpc(&self) -> ImageServiceClient<Channel> {
        ImageServiceClient::new(self.channel.clone()).max_decoding_message_size(MAX_MESSAGE)
    }
}

#[async_trait]
impl ImageService for ImageClient {
    async fn list_images(&self) -> CriResult<Vec<cri::Image>> {
        if self.streaming.wanted() {
            let mut rpc = self.rpc();
            let (span, request) =
                request_with_span("runtime.v1.ImageService/StreamImages", cri::StreamImagesRequest::default());
            let stream = async move { rpc.stream_images(request).await };
            let chunks = self.streaming.collect(&self.caller, Op::ListImages, span, stream, |c| c.images);
            if let Some(answer) = chunks.await {
                return answer;
            }
        }
        let mut rpc = self.rpc();
        let send = |r| async move { rpc.list_images(r).await };
        Ok(self.caller.call(Op::ListImages, Limit::Once, cri::ListImagesRequest::default(), send).await?.images)
    }

    async fn image_status(&self, image: cri::ImageSpec) -> CriResult<Option<cri::Image>> {
        let name = image.image.clone();
        let mut rpc = self.rpc();
        let send = |r| async move { rpc.image_status(r).await };
        let request = cri::ImageStatusRequest { image: Some(image), verbose: false };
        reply_validation::image(self.caller.call(Op::ImageStatus, Limit::Once, request, send).await?.image, &name)
    }

    async fn pull_image(
        &self,
        image: cri::ImageSpec,
        auth: Option<cri::AuthConfig>,
        sandbox: Option<cri::PodSandboxConfig>,
    ) -> CriResult<String> {
        let name = image.image.clone();
        let mut rpc = self.rpc();
        let send = |r| async move { rpc.pull_image(r).await };
        let request = cri::PullImageRequest { image: Some(image), auth, sandbox_config: sandbox };
        match self.caller.call(Op::PullImage, Limit::Never, request, send).await {
            Ok(reply) => reply_validation::image_ref(reply.image_ref, &name),
            // Events and waiting messages show the runtime's message without the gRPC prefix.
            Err(CriError::Rpc { code: Code::Unknown, message }) => Err(CriError::Invalid(message)),
            Err(error) => Err(error),
        }
    }

    async fn remove_image(&self, image: cri::ImageSpec) -> CriResult<()> {
        let mut rpc = self.rpc();
        let send = |r| async move { rpc.remove_image(r).await };
        let request = cri::RemoveImageRequest { image: Some(image) };
        self.caller.call(Op::RemoveImage, Limit::Once, request, send).await.map(drop)
    }

    async fn image_fs_info(&self) -> CriResult<cri::ImageFsInfoResponse> {
        let mut rpc = self.rpc();
        let send = |r| async move { rpc.image_fs_info(r).await };
        self.caller.call(Op::ImageFsInfo, Limit::Once, cri::ImageFsInfoRequest {}, send).await
    }
}
