//! Local gRPC sockets: PodResources API, Pods API, and health checks.
//!
//! Inputs: snapshots through [`ports`](super::ports). Output: services on Unix sockets that only root can access. One
//! [`Socket`] per file; it serves until it is stopped, and retries where it could not be opened.
//! Implements spec 04b §12-13.

mod health;
mod limit;
mod pod_bytes;
mod pod_resources;
mod pod_resources_conversion;
mod pods;
mod socket;

pub use limit::RateLimit;
pub use pod_resources::{PodResourcesDeps, pod_resources};
pub use pods::PodsApi;
pub use socket::Socket;
