//! In-process streaming server of the embedded runtime: exec, attach, and port-forward.
//!
//! ```text
//!  request ─► upgrade: SPDY or WebSocket, subprotocol ─┬─► spdy_command, socket_command ─► a process
//!                                                      └─► spdy_forward, socket_forward ─► ports of a pod
//! ```
//!
//! There are two entry points. With the embedded runtime, the kubelet server passes the client's connection on directly
//! (`serve_target`), without a second connection or copy. Where others call the runtime over its socket, a loopback
//! [`listener`] serves them under one-time URLs. The backend is a port ([`stream_targets`]); a process starts only after the
//! client has opened all its streams. Implements spec 09a §4, 04b §3-§5.
//!
//! [`stream_targets`]: crate::ports::stream_targets

mod codec;
mod forwarding;
pub mod listener;
mod process;
mod resize_parser;
mod socket_command;
mod socket_forward;
mod spdy_command;
mod spdy_forward;
mod status;
#[cfg(test)]
mod tests;
mod upgrade;

use axum::{body::Body, http::Request, response::Response};

pub use upgrade::ServeOptions;

use super::{StreamingContext, stream_limit::Permit};
use crate::ports::stream_targets::StreamTarget;

/// Serves a target to the client of a request: responds now, and streams in a background task.
pub(crate) fn serve_target(
    streaming: &StreamingContext,
    target: StreamTarget,
    request: Request<Body>,
    permit: Permit,
) -> Response {
    let config = streaming.config();
    let manner =
        ServeOptions { idle: config.idle, heartbeat: config.heartbeat, knows_newest: config.terminate_web_sockets };
    let upgrade::UpgradeResponse { response, work, counts_as } = upgrade::respond(target, manner, request);
    if let Some(subresource) = counts_as {
        streaming.metrics().web_socket(subresource);
    }
    if let Some(work) = work {
        streaming.spawn(async move {
            work.await;
            drop(permit);
        });
    }
    response
}
