//! Handler of `/attach/{ns}/{pod}[/{uid}]/{container}`: streams of the main process (spec 04b §2).

use axum::{
    body::Body,
    http::{Request, StatusCode},
    response::Response,
};

use super::streams::{self, flags};
use crate::{
    routing::ContainerPath,
    streaming::{StreamingContext, bare, query::RequestedStreams},
};

/// Prepares the streams and connects the client with them.
///
/// The container's specification decides whether there is a terminal; the client's flag is ignored.
pub async fn attach(streaming: &StreamingContext, path: &ContainerPath, request: Request<Body>) -> Response {
    let container = path.container.as_str();
    let (request, _, wanted) = match flags(request).await {
        Ok(read) => read,
        Err(response) => return response,
    };
    let found = match streams::pod(streaming, &path.pod) {
        Ok(found) => found,
        Err(response) => return response,
    };
    let spec = found.container(container).map(|(_, spec)| spec.tty.unwrap_or(false));
    let running = streaming.pods().running(&found, container).await;
    let (Some(tty), Some(id)) = (spec, running) else {
        let text = format!("container {container} not found in pod {}_{}", found.name(), found.namespace());
        return bare(StatusCode::INTERNAL_SERVER_ERROR, "container-not-found", &text);
    };
    let (request, permit) = match streams::admitted(streaming, request) {
        Ok(admitted) => admitted,
        Err(response) => return response,
    };
    let set = RequestedStreams { tty, ..wanted };
    let url = streaming.pods().attach(&id, streams::set(set)).await;
    streams::connect(streaming, streams::PreparedStream { url, set, subresource: "attach" }, request, permit).await
}
