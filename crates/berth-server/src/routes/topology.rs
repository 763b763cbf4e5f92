//! Handler of `/debug/topology`: CPUs and memory by NUMA node, and their containers. Absent in kubelet.

use axum::{
    http::{StatusCode, header},
    response::{IntoResponse, Response},
};

use super::text::{coded, router_error};
use crate::ports::TopologyMapSource;

/// Responds with the document.
pub fn respond(source: &dyn TopologyMapSource) -> Response {
    match serde_json::to_vec(&source.topology()) {
        Ok(mut body) => {
            body.push(b'\n');
            let headers = [(header::CONTENT_TYPE, "application/json"), (header::X_CONTENT_TYPE_OPTIONS, "nosniff")];
            (headers, body).into_response()
        }
        Err(error) => coded(router_error(StatusCode::INTERNAL_SERVER_ERROR, &error.to_string()), "encoding"),
    }
}
