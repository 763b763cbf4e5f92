//! Answers that are no stream.

use axum::{
    http::{HeaderValue, StatusCode, header},
    response::Response,
};

use crate::{
    ports::streams::StreamError,
    routes::text::{coded, plain_error, router_error},
};

/// How long a runtime's one-time URLs live, and so when there may be room for another, in seconds.
const RETRY: HeaderValue = HeaderValue::from_static("60");

/// A text as the router prints errors: no newline.
pub fn bare(status: StatusCode, code: &'static str, text: &str) -> Response {
    coded(router_error(status, text), code)
}

/// A text as plain handlers print errors: a line.
pub fn line(status: StatusCode, code: &'static str, text: &str) -> Response {
    coded(plain_error(status, text), code)
}

/// What the runtime answered instead of a URL.
pub fn failed(error: &StreamError) -> Response {
    match error {
        StreamError::NotFound(text) => bare(StatusCode::NOT_FOUND, "runtime-not-found", text),
        StreamError::Exhausted(text) => busy(bare(StatusCode::TOO_MANY_REQUESTS, "runtime-busy", text)),
        StreamError::Other(text) => bare(StatusCode::INTERNAL_SERVER_ERROR, "runtime-error", text),
    }
}

/// Lets the caller know when to come again.
pub fn busy(mut response: Response) -> Response {
    response.headers_mut().insert(header::RETRY_AFTER, RETRY);
    response
}
