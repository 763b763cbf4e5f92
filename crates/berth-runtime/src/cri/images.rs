//! `runtime.v1.ImageService` of CRI: translates messages to the image store and back.
//!
//! Implements spec 09b §3.

use std::sync::Arc;

use futures::stream::BoxStream;
use tonic::{Request, Response, Status, async_trait};

use super::lists;
use crate::{
    errors::{RuntimeError, RuntimeResult, outcome},
    runtime::Runtime,
};
use berth_proto::cri::{self, image_service_server::ImageService};

/// gRPC handler of the image service.
pub struct ImageCalls(pub Arc<Runtime>);

type Answer<T> = Result<Response<T>, Status>;

fn answer<T>(result: RuntimeResult<T>) -> Answer<T> {
    result.map(Response::new).map_err(Status::from)
}

#[async_trait]
impl ImageService for ImageCalls {
    type StreamImagesStream = BoxStream<'static, Result<cri::StreamImagesResponse, Status>>;

    async fn list_images(&self, request: Request<cri::ListImagesRequest>) -> Answer<cri::ListImagesResponse> {
        self.0.wait_until_ready().await;
        let images = self.0.ports.images.list(request.into_inner().filter).await;
        answer(images.map(|images| cri::ListImagesResponse { images }))
    }

    async fn stream_images(&self, request: Request<cri::StreamImagesRequest>) -> Answer<Self::StreamImagesStream> {
        self.0.wait_until_ready().await;
        let images = self.0.ports.images.list(request.into_inner().filter).await;
        answer(images.map(|images| lists::in_chunks(images, |images| cri::StreamImagesResponse { images })))
    }

    async fn image_status(&self, request: Request<cri::ImageStatusRequest>) -> Answer<cri::ImageStatusResponse> {
        self.0.wait_until_ready().await;
        answer(self.0.ports.images.status(request.into_inner()).await)
    }

    async fn pull_image(&self, request: Request<cri::PullImageRequest>) -> Answer<cri::PullImageResponse> {
        self.0.wait_until_ready().await;
        let request = request.into_inner();
        if request.image.as_ref().is_none_or(|image| image.image.is_empty()) {
            return answer(Err(RuntimeError::invalid("image name must not be empty")));
        }
        let image_ref = self.0.ports.images.pull(request).await;
        self.0.shell.metrics.pulled(outcome(&image_ref));
        answer(image_ref.map(|image_ref| cri::PullImageResponse { image_ref }))
    }

    async fn remove_image(&self, request: Request<cri::RemoveImageRequest>) -> Answer<cri::RemoveImageResponse> {
        self.0.wait_until_ready().await;
        let name = request.into_inner().image.map(|image| image.image).unwrap_or_default();
        if name.is_empty() {
            return answer(Err(RuntimeError::invalid("image name must not be empty")));
        }
        let removed = self.0.ports.images.remove(&name).await;
        answer(removed.map(|()| cri::RemoveImageResponse {}))
    }

    async fn image_fs_info(&self, _: Request<cri::ImageFsInfoRequest>) -> Answer<cri::ImageFsInfoResponse> {
        self.0.wait_until_ready().await;
        answer(self.0.ports.images.file_systems().await)
    }
}
