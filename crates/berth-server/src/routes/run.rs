//! `/run/{ns}/{pod}[/{uid}]/{container}`: a command and what it printed (spec 04 §5.4).

use axum::{
    body::Body,
    http::{Request, header},
    response::{IntoResponse, Response},
};

use super::streams;
use crate::{
    routing::ContainerPath,
    streaming::{Streaming, failed, query::Form},
};

/// Runs the command to its end; it is given up when the client goes.
pub async fn run(streaming: &Streaming, path: &ContainerPath, request: Request<Body>) -> Response {
    let container = path.container.as_str();
    let found = match streams::pod(streaming, &path.pod) {
        Ok(found) => found,
        Err(response) => return response,
    };
    let Some(id) = streaming.pods().running(&found, container).await else {
        return streams::no_container(container);
    };
    // Held until the command has ended: it is as good as a stream.
    let _permit = match streaming.admit(&request) {
        Ok(permit) => permit,
        Err(response) => return response,
    };
    let form = Form::parse(request.uri().query().unwrap_or_default());
    let command: Vec<String> = form.first("cmd").unwrap_or_default().split(' ').map(str::to_owned).collect();
    match streaming.pods().run(&id, &command).await {
        // Whatever it printed, that is what the reference calls it.
        Ok(output) => ([(header::CONTENT_TYPE, "application/json")], output).into_response(),
        Err(error) => failed(&error),
    }
}
