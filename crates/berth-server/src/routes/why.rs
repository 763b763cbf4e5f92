//! Handler of `/debug/why/{namespace}/{pod}`: diagnostics of a pod's state. Absent in kubelet.

use axum::{
    http::{StatusCode, header},
    response::{IntoResponse, Response},
};

use super::text::{coded, router_error};
use crate::{ports::PodDiagnostics, routing::PodPath};

/// Responds with the document.
pub fn respond(pods: &dyn PodDiagnostics, path: &PodPath) -> Response {
    match pods.why(&path.namespace, &path.pod) {
        Some(body) => {
            let headers = [(header::CONTENT_TYPE, "application/json"), (header::X_CONTENT_TYPE_OPTIONS, "nosniff")];
            (headers, body).into_response()
        }
        None => {
            let text = format!("pod \"{}/{}\" not found on this node", path.namespace, path.pod);
            coded(router_error(StatusCode::NOT_FOUND, &text), "not-found")
        }
    }
}
