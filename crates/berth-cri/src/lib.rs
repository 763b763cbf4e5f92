//! One door to any runtime: the service traits, the client, deadlines, error mapping.
//!
//! Six rooms call a runtime; all of them go through [`RuntimeService`] and [`ImageService`],
//! which have an honest fake (the scripted CRI of `berth-testkit`). [`connect`] prepares the clients,
//! [`probe`] checks at start-up that the runtime is one we can work with. Other gRPC services behind a socket are
//! reached and told of in the same way: [`socket_channel`], [`CriError`]. Behaviour: spec 03a §2.

#![forbid(unsafe_code)]
#![cfg_attr(test, allow(clippy::disallowed_methods, reason = "tests remove what they have made themselves"))]

mod client;
mod connect;
mod connector;
mod deadlines;
mod direct;
mod endpoint;
mod errors;
mod gate;
mod image_client;
mod probe;
mod service;
mod validate;

pub use client::RuntimeClient;
pub use connect::{Connection, CriConfig, Dial, connect, connect_over};
pub use connector::socket_channel;
pub use endpoint::{EndpointError, socket_path};
pub use errors::{CriError, CriResult, code_name};
pub use image_client::ImageClient;
pub use probe::{ProbeError, RuntimeCgroupDriver, RuntimeInfo, probe};
pub use service::{ExecOutput, ImageService, RuntimeService};
