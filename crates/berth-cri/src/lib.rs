//! Client of the Kubernetes Container Runtime Interface (CRI): traits, deadlines, and error mapping.
//!
//! All callers use [`RuntimeService`] and [`ImageService`], which have a fake in `berth-testkit` (the scripted CRI).
//! [`connect`] creates the clients; [`probe`] checks at start-up that the runtime is supported. Other gRPC services
//! behind a socket use the same connector and error type: [`socket_channel`], [`CriError`]; plugins have a stricter
//! connector, [`plugin_socket`]. Implements spec 03a §2.

#![forbid(unsafe_code)]
#![cfg_attr(test, allow(clippy::disallowed_methods, reason = "tests remove what they have made themselves"))]

mod client;
mod client_factory;
mod connector;
mod deadlines;
mod endpoint;
mod errors;
mod image_client;
pub mod plugin_socket;
mod priority_semaphore;
mod probe;
mod reply_validation;
mod service;

pub use client::RuntimeClient;
pub use client_factory::{CriClients, CriConfig, Dial, connect, connect_over};
pub use connector::socket_channel;
pub use endpoint::{EndpointError, socket_path};
pub use errors::{CriError, CriResult, code_name};
pub use image_client::ImageClient;
pub use probe::{ProbeError, RuntimeCgroupDriver, RuntimeInfo, probe};
pub use service::{ExecOutput, ImageService, RuntimeService};
