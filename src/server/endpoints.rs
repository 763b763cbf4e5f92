//! What answers, once it is clear who asks and what: a line per endpoint.

use std::sync::Arc;

use axum::{
    body::Body,
    http::{Request, StatusCode, header},
    response::{IntoResponse, Response},
};
use bytes::Bytes;

use super::{
    ports::{ContainerLogs, Health, Pages, RunningPods},
    routes::{container_logs, healthz, metrics, text},
    routing::{Endpoint, Plain},
};

/// The parts of the agent behind the endpoints. Listeners share them.
#[derive(Clone)]
pub struct Endpoints {
    /// Health checks.
    pub health: Arc<dyn Health>,
    /// `/pods` and `/metrics`.
    pub pages: Arc<dyn Pages>,
    /// What runs.
    pub running: Arc<dyn RunningPods>,
    /// Logs.
    pub logs: Arc<dyn ContainerLogs>,
    /// Gate `PodLogsQuerySplitStreams`.
    pub split_streams: bool,
    /// The effective configuration as `/configz` shows it.
    pub configz: Bytes,
}

impl Endpoints {
    /// A plain handler.
    pub(super) async fn plain(&self, plain: Plain, request: Request<Body>) -> Response {
        match plain {
            Plain::Healthz => healthz::all(&*self.health, request.uri().query()),
            Plain::HealthCheck(name) => healthz::one(&*self.health, &name),
            Plain::Metrics => metrics::scrape(&*self.pages, request.headers()),
            Plain::Configz => json(self.configz.clone()),
            Plain::Disabled(text) => text::plain_error(StatusCode::METHOD_NOT_ALLOWED, text),
            Plain::Cadvisor
            | Plain::Resource
            | Plain::Probes
            | Plain::Slis
            | Plain::Statusz
            | Plain::Flagz
            | Plain::Verbosity => not_built(),
        }
    }

    /// An endpoint of the service router.
    pub(super) async fn service(&self, endpoint: Endpoint, request: Request<Body>) -> Response {
        match endpoint {
            Endpoint::Pods => json_document(self.pages.pods()),
            Endpoint::RunningPods => match self.running.list().await {
                Ok(list) => json_document(list),
                Err(error) => text::router_error(StatusCode::INTERNAL_SERVER_ERROR, &error),
            },
            Endpoint::ContainerLogs(path) => {
                container_logs::read(&self.logs, self.split_streams, &path, request.uri().query()).await
            }
            Endpoint::Summary
            | Endpoint::Run(_)
            | Endpoint::Exec(_)
            | Endpoint::Attach(_)
            | Endpoint::PortForward(_)
            | Endpoint::Checkpoint(_)
            | Endpoint::Logs(_)
            | Endpoint::Pprof(_) => not_built(),
        }
    }
}

fn json(body: Bytes) -> Response {
    ([(header::CONTENT_TYPE, "application/json"), (header::X_CONTENT_TYPE_OPTIONS, "nosniff")], body).into_response()
}

fn json_document(body: Bytes) -> Response {
    ([(header::CONTENT_TYPE, "application/json")], body).into_response()
}

fn not_built() -> Response {
    text::plain_error(StatusCode::NOT_IMPLEMENTED, "not built yet")
}
