//! Handler of `/portForward/{ns}/{pod}[/{uid}]`: connections into a pod's network (spec 04b §2).

use axum::{
    body::Body,
    http::{Request, StatusCode},
    response::Response,
};

use super::streams;
use crate::{
    ports::streams::Sandbox,
    routing::PodPath,
    streaming::{
        StreamingContext, bare, failed, query, server::serve_target, upgrade_protocol, upgrade_proxy, websocket,
    },
};

/// Prepares port forwarding and connects the client with it.
pub async fn port_forward(streaming: &StreamingContext, path: &PodPath, request: Request<Body>) -> Response {
    let upgrade = upgrade_protocol::forward(request.headers(), streaming.config().terminate_web_sockets);
    // SPDY clients name the port of each connection.
    let mut ports = Vec::new();
    if upgrade == upgrade_protocol::ForwardUpgrade::WebSocket {
        let form = query::QueryForm::parse(request.uri().query().unwrap_or_default());
        ports = match query::ports(&form) {
            Ok(ports) => ports,
            Err(error) => return bare(StatusCode::BAD_REQUEST, "bad-port", &error.to_string()),
        };
    }
    let found = match streams::pod(streaming, path) {
        Ok(found) => found,
        Err(response) => return response,
    };
    let sandbox = match streaming.pods().sandbox(&found).await {
        Sandbox::Newest(sandbox) => sandbox,
        Sandbox::NotRunning => {
            let text = format!("pod not found (\"{}_{}\")", found.name(), found.namespace());
            return bare(StatusCode::INTERNAL_SERVER_ERROR, "pod-not-running", &text);
        }
        Sandbox::None => {
            let pod = format!("{}_{}({})", found.name(), found.namespace(), found.uid());
            let text = format!("failed to find sandboxID for pod {pod}");
            return bare(StatusCode::INTERNAL_SERVER_ERROR, "sandbox-not-found", &text);
        }
    };
    let (request, permit) = match streams::admitted(streaming, request) {
        Ok(admitted) => admitted,
        Err(response) => return response,
    };
    let url = match streaming.pods().port_forward(&sandbox, &ports).await {
        Ok(url) => url,
        Err(error) => return failed(&error),
    };
    match streaming.here(&url) {
        Some(Ok(target)) => return serve_target(streaming, target, request, permit),
        Some(Err(gone)) => return *gone,
        None => {}
    }
    match upgrade {
        upgrade_protocol::ForwardUpgrade::Tunnel => websocket::tunnel(streaming, &url, request, permit).await,
        _ => upgrade_proxy::splice(streaming, &url, request, permit).await,
    }
}
