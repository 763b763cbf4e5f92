//! Handler of `/debug/devices`: devices of device plugins and their assignments. Absent in kubelet.

use axum::{
    http::{StatusCode, header},
    response::{IntoResponse, Response},
};
use serde::Serialize;

use super::text::{coded, router_error};
use crate::ports::{DeviceEntry, DeviceList};

/// Body of the response.
#[derive(Serialize)]
struct DeviceDocument {
    devices: Vec<DeviceEntry>,
}

/// Responds with the document.
pub fn respond(list: &dyn DeviceList) -> Response {
    match serde_json::to_vec(&DeviceDocument { devices: list.devices() }) {
        Ok(mut body) => {
            body.push(b'\n');
            let headers = [(header::CONTENT_TYPE, "application/json"), (header::X_CONTENT_TYPE_OPTIONS, "nosniff")];
            (headers, body).into_response()
        }
        Err(error) => coded(router_error(StatusCode::INTERNAL_SERVER_ERROR, &error.to_string()), "encoding"),
    }
}
