//! Handler of `/metrics`: the process-wide metrics registry (spec 08 §1, §2).

use axum::{
    http::{HeaderMap, HeaderName, HeaderValue, StatusCode, header},
    response::{IntoResponse, Response},
};

use super::text::plain_error;
use crate::ports::SnapshotPages;
use berth_metrics::exposition::{ExpositionFormat, error_body};

/// Handles `/metrics`.
pub fn scrape(pages: &dyn SnapshotPages, headers: &HeaderMap) -> Response {
    let text = |name| headers.get(name).and_then(|value| value.to_str().ok());
    let format = ExpositionFormat::negotiate(text(header::ACCEPT));
    let zipped = text(header::ACCEPT_ENCODING).is_some_and(accepts_gzip);
    let page = match pages.metrics(format, zipped) {
        Ok(page) => page,
        Err(error) => return plain_error(StatusCode::INTERNAL_SERVER_ERROR, error_body(&error).trim_end()),
    };
    let start = pages.process_start().to_string();
    let headers =
        [(header::CONTENT_TYPE, format.content_type()), (HeaderName::from_static("process-start-time-unix"), start)];
    let mut response = (headers, page).into_response();
    if zipped {
        response.headers_mut().insert(header::CONTENT_ENCODING, HeaderValue::from_static("gzip"));
    }
    response
}

/// Whether an `Accept-Encoding` header allows gzip.
pub fn accepts_gzip(header: &str) -> bool {
    header.split(',').any(|entry| {
        let mut parts = entry.split(';').map(str::trim);
        let is_gzip = parts.next().is_some_and(|name| name.eq_ignore_ascii_case("gzip") || name == "*");
        is_gzip && !parts.any(|part| matches!(part, "q=0" | "q=0.0" | "q=0.00" | "q=0.000"))
    })
}
