//! Handler of `/run/{ns}/{pod}[/{uid}]/{container}`: runs a command, returns its output (spec 04 §5.4).

use axum::{
    body::Body,
    http::{Request, header},
    response::{IntoResponse, Response},
};

use super::streams;
use crate::{
    routing::ContainerPath,
    streaming::{StreamingContext, failed, query::QueryForm},
};

/// Runs the command to completion; canceled when the client disconnects.
pub async fn run(streaming: &StreamingContext, path: &ContainerPath, request: Request<Body>) -> Response {
    let container = path.container.as_str();
    let found = match streams::pod(streaming, &path.pod) {
        Ok(found) => found,
        Err(response) => return response,
    };
    let Some(id) = streaming.pods().running(&found, container).await else {
        return streams::no_container(container);
    };
    // Kept until the command has ended: it counts as a stream.
    let _permit = match streaming.admit(&request) {
        Ok(permit) => permit,
        Err(response) => return response,
    };
    let form = QueryForm::parse(request.uri().query().unwrap_or_default());
    let command: Vec<String> = form.first("cmd").unwrap_or_default().split(' ').map(str::to_owned).collect();
    match streaming.pods().run(&id, &command).await {
        // kubelet always uses this content type, whatever the output is.
        Ok(output) => ([(header::CONTENT_TYPE, "application/json")], output).into_response(),
        Err(error) => failed(&error),
    }
}
