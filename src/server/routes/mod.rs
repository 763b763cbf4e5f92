//! The endpoints, a file for each.

pub(super) mod container_logs;
pub(super) mod healthz;
pub(super) mod metrics;
pub(super) mod text;

use axum::{
    Router,
    extract::{Path, RawQuery},
    http::StatusCode,
    response::Response,
    routing::any,
};

/// What the healthz port serves: only whether the process answers.
pub fn healthz_router() -> Router {
    let all = |RawQuery(query): RawQuery| async move { healthz::all(&healthz::PingOnly, query.as_deref()) };
    let one = |Path(name): Path<String>| async move { healthz::one(&healthz::PingOnly, &name) };
    Router::new().route("/healthz", any(all)).route("/healthz/{check}", any(one)).fallback(not_found)
}

async fn not_found() -> Response {
    text::plain_error(StatusCode::NOT_FOUND, "404 page not found")
}
