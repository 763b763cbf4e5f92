//! Handler of `/exec/{ns}/{pod}[/{uid}]/{container}`: streams of a new process (spec 04b §2).

use axum::{body::Body, http::Request, response::Response};

use super::streams::{self, flags};
use crate::{routing::ContainerPath, streaming::StreamingContext};

/// Prepares the command and connects the client with it.
pub async fn exec(streaming: &StreamingContext, path: &ContainerPath, request: Request<Body>) -> Response {
    let container = path.container.as_str();
    let (request, form, set) = match flags(request).await {
        Ok(read) => read,
        Err(response) => return response,
    };
    let found = match streams::pod(streaming, &path.pod) {
        Ok(found) => found,
        Err(response) => return response,
    };
    let Some(id) = streaming.pods().running(&found, container).await else {
        return streams::no_container(container);
    };
    let (request, permit) = match streams::admitted(streaming, request) {
        Ok(admitted) => admitted,
        Err(response) => return response,
    };
    let command = form.all("command").map(str::to_owned).collect();
    let url = streaming.pods().exec(&id, command, streams::set(set)).await;
    streams::connect(streaming, streams::PreparedStream { url, set, subresource: "exec" }, request, permit).await
}
