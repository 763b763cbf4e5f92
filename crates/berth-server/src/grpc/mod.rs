//! The gRPC sockets: who is on this machine asks what pods hold.
//!
//! In: snapshots through [`ports`](super::ports). Out: answers on unix sockets that only root can
//! reach. One [`Socket`] per file; each lives until it is stopped and opens itself again where it
//! could not be opened. Behaviour: spec 04b §12-13.

mod answers;
mod health;
mod limit;
mod pod_bytes;
mod pod_resources;
mod pods;
mod socket;

pub use limit::RateLimit;
pub use pod_resources::{PodResourcesDeps, pod_resources};
pub use pods::PodsApi;
pub use socket::Socket;
