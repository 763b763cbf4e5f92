//! `/pods`: every pod the agent has been told to run (spec 04 §5.2).

use std::sync::Arc;

use axum::{
    extract::State,
    http::{Method, StatusCode, header},
    response::{IntoResponse, Response},
};

use super::text::PLAIN;
use crate::server::ports::Pages;

pub async fn list(State(pages): State<Arc<dyn Pages>>, method: Method) -> Response {
    if method != Method::GET {
        let headers = [(header::ALLOW, "GET"), (header::CONTENT_TYPE, PLAIN)];
        return (StatusCode::METHOD_NOT_ALLOWED, headers, "405: Method Not Allowed").into_response();
    }
    ([(header::CONTENT_TYPE, "application/json")], pages.pods()).into_response()
}
