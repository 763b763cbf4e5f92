//! gRPC health checking service for the local sockets.
//!
//! kubelet has none; clients that do not know it are not affected. It is not rate-limited: a call reveals nothing and
//! costs little.

use std::pin::Pin;

use futures::Stream;
use tonic::{Request, Response, Status, async_trait};

use berth_proto::health::{
    HealthCheckRequest, HealthCheckResponse,
    health_check_response::ServingStatus,
    health_server::{Health, HealthServer},
};

/// Health service for these services, and for the socket as a whole.
pub fn health(services: &'static [&'static str]) -> HealthServer<impl Health> {
    HealthServer::new(HealthService(services))
}

struct HealthService(&'static [&'static str]);

#[async_trait]
impl Health for HealthService {
    type WatchStream = Pin<Box<dyn Stream<Item = Result<HealthCheckResponse, Status>> + Send>>;

    async fn check(&self, request: Request<HealthCheckRequest>) -> Result<Response<HealthCheckResponse>, Status> {
        let service = request.into_inner().service;
        if !service.is_empty() && !self.0.contains(&service.as_str()) {
            return Err(Status::not_found("unknown service"));
        }
        Ok(Response::new(HealthCheckResponse { status: ServingStatus::Serving.into() }))
    }

    /// A service is healthy until the socket closes, so there is nothing to watch.
    async fn watch(&self, _request: Request<HealthCheckRequest>) -> Result<Response<Self::WatchStream>, Status> {
        Err(Status::unimplemented("Watch is not supported: use Check"))
    }
}
