//! Streams that end here, because the runtime is ours (spec 09a §4, 04b §3-§5).
//!
//! ```text
//!  request ─► upgrade: SPDY or WebSocket, which protocol ─┬─► spdy_command, socket_command ─► a process
//!                                                         └─► spdy_forward, socket_forward ─► ports of a pod
//! ```
//!
//! Two doors lead here. Where the agent has the runtime inside, the kubelet server hands over its client's connection
//! itself (`hand_over`): nothing is dialled, nothing copied twice. Where others call the runtime over its socket, a
//! [`listener`] on loopback meets them under one-time URLs. What is behind is a port ([`targets`]); nothing is started
//! before the client has all its streams.
//!
//! [`targets`]: crate::ports::targets

mod codec;
mod forwarding;
pub mod listener;
mod process;
mod sizes;
mod socket_command;
mod socket_forward;
mod spdy_command;
mod spdy_forward;
mod status;
#[cfg(test)]
mod tests;
mod upgrade;

use axum::{body::Body, http::Request, response::Response};

pub use upgrade::Manner;

use super::{Streaming, caps::Permit};
use crate::ports::targets::Target;

/// Serves a target to the client of a request: answers now, and goes on in the background.
pub(crate) fn hand_over(streaming: &Streaming, target: Target, request: Request<Body>, permit: Permit) -> Response {
    let config = streaming.config();
    let manner = Manner { idle: config.idle, heartbeat: config.heartbeat, knows_newest: config.terminate_web_sockets };
    let upgrade::Answer { response, work, counts_as } = upgrade::answer(target, manner, request);
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
