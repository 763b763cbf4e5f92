//! Endpoint handlers of the kubelet API, one file per endpoint.

mod attach;
pub mod checkpoint;
pub(super) mod container_logs;
pub(super) mod devices;
mod exec;
mod file_response;
pub mod flags_v;
pub mod flagz;
pub(super) mod healthz;
pub mod log_query;
pub(super) mod metrics;
pub(super) mod metrics_page;
pub mod node_logs;
mod port_forward;
pub mod pprof;
mod run;
pub mod slis;
pub(super) mod stats_summary;
pub mod statusz;
mod streams;
pub(super) mod text;
pub(super) mod topology;
pub(super) mod why;
mod zpages;

pub use attach::attach;
pub use container_logs::FOLLOWS;
pub use exec::exec;
pub use port_forward::port_forward;
pub use run::run;

use std::sync::Arc;

use axum::{
    Router,
    extract::{Path, RawQuery},
    http::StatusCode,
    response::Response,
    routing::any,
};

use super::ports::Health;

/// Router of the healthz port: like kubelet it serves only `ping`; with `full` it also runs the checks of the main port
/// (spec 04 §11).
pub fn healthz_router(health: Arc<dyn Health>) -> Router {
    let all = move |RawQuery(query): RawQuery| {
        let health = health.clone();
        async move {
            let query = query.as_deref();
            if healthz::is_full(query) {
                healthz::all(&*health, query)
            } else {
                healthz::all(&healthz::PingOnly, query)
            }
        }
    };
    let one = |Path(name): Path<String>| async move { healthz::one(&healthz::PingOnly, &name) };
    Router::new().route("/healthz", any(all)).route("/healthz/{check}", any(one)).fallback(not_found)
}

async fn not_found() -> Response {
    text::plain_error(StatusCode::NOT_FOUND, "404 page not found")
}
