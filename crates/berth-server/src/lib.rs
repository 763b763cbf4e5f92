//! Kubelet HTTP API server: listeners, request pipeline, authentication, and endpoints.
//!
//! ```text
//!  listeners ─► pipeline: routing (outer) ─► auth ─► routing (service) ─► endpoints ─► routes/*
//! ```
//!
//! The server owns no pod state; it reads snapshots through its own [`ports`] and never calls a pod worker. Implements
//! spec 04, 04b, spec 01 §7.1.

#![forbid(unsafe_code)]
#![cfg_attr(test, allow(clippy::disallowed_methods, reason = "tests remove what they have made themselves"))]

pub mod auth;
mod auth_filter;
mod body;
mod connection;
mod connection_budget;
mod endpoints;
pub mod grpc;
mod listeners;
mod pipeline;
pub mod ports;
pub mod routes;
pub mod routing;
mod server_span;
pub mod streaming;
pub mod tls;

pub use auth_filter::AuthFilter;
pub use endpoints::{Endpoints, Tools};
pub use listeners::{BoundListener, ListenerService, TlsSource, bind, serve, serve_persistently};
pub use pipeline::{AuthLayer, ListenerContext, Peer, RequestAuthorizer, RequestMetricsGuard};
pub use routes::{FOLLOWS, attach, exec, healthz_router, port_forward, run};
pub use streaming::CallerLimit;
