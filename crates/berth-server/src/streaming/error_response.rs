//! Error responses of the streaming endpoints.

use axum::{
    http::{HeaderValue, StatusCode, header},
    response::Response,
};

use crate::{
    ports::streams::StreamError,
    routes::text::{coded, plain_error, router_error},
};

/// `Retry-After` in seconds: lifetime of a runtime's one-time URLs, after which its limit frees up.
const RETRY: HeaderValue = HeaderValue::from_static("60");

/// Error in the format of the service router: no newline.
pub fn bare(status: StatusCode, code: &'static str, text: &str) -> Response {
    coded(router_error(status, text), code)
}

/// Error in the format of plain handlers: one line.
pub fn line(status: StatusCode, code: &'static str, text: &str) -> Response {
    coded(plain_error(status, text), code)
}

/// Response for an error that the runtime returned instead of a URL.
pub fn failed(error: &StreamError) -> Response {
    match error {
        StreamError::NotFound(text) => bare(StatusCode::NOT_FOUND, "runtime-not-found", text),
        StreamError::Exhausted(text) => busy(bare(StatusCode::TOO_MANY_REQUESTS, "runtime-busy", text)),
        StreamError::Other(text) => bare(StatusCode::INTERNAL_SERVER_ERROR, "runtime-error", text),
    }
}

/// Adds `Retry-After`.
pub fn busy(mut response: Response) -> Response {
    response.headers_mut().insert(header::RETRY_AFTER, RETRY);
    response
}
