//! The routes, a file per endpoint.

mod healthz;
mod metrics;
mod pods;
mod text;

use std::sync::Arc;

use axum::{
    Router,
    extract::Request,
    http::{StatusCode, header},
    middleware::{self, Next},
    response::{IntoResponse, Response},
    routing::any,
};

use super::ports::{Health, Pages};

/// What the read-only port serves (spec 04 §4, the open set as far as it is built).
pub fn read_only_router(pages: Arc<dyn Pages>, health: Arc<dyn Health>) -> Router {
    let service = Router::new()
        .route("/pods", any(pods::list))
        .route("/pods/", any(pods::list))
        .route("/metrics", any(metrics::scrape))
        .with_state(pages);
    finish(service.merge(healthz::router(health)))
}

/// What the healthz port serves: only whether the process answers.
pub fn healthz_router() -> Router {
    finish(healthz::router(Arc::new(healthz::PingOnly)))
}

fn finish(router: Router) -> Router {
    router.fallback(not_found).layer(middleware::from_fn(clean_path))
}

async fn not_found() -> Response {
    text::plain_error(StatusCode::NOT_FOUND, "404 page not found")
}

/// Sends a path that is not clean to its clean form before anything else is looked at.
async fn clean_path(request: Request, next: Next) -> Response {
    let path = request.uri().path();
    let Some(mut location) = text::cleaned(path) else { return next.run(request).await };
    if let Some(query) = request.uri().query() {
        location.push('?');
        location.push_str(query);
    }
    (StatusCode::TEMPORARY_REDIRECT, [(header::LOCATION, location)]).into_response()
}
