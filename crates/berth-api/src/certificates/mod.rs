//! Certificates the cluster signs for this node: the client's, by which the API server knows us,
//! and the serving one, by which its clients know us.
//!
//! ```text
//!  kubeconfig, flags ─► plan (pure) ─┬─► blocking bootstrap, then a kubeconfig
//!                                    └─► manager ─► request ─► wait ─► store ─► transport or server
//!  addresses of the node ─► template ────────┘
//! ```
//!
//! A manager is one task; it owns which pair is current and when the next is due. What is decided
//! stands in pure files: `plan`, `template`, `request`, `progress`, `schedule`, `leaf`. Files lie in the
//! certificate directory as the reference lays them out, so that either finds what the other left.
//! Behaviour: spec 01 §11, spec 10 §4.10.

mod ask;
mod bootstrap;
pub mod client;
mod key;
mod kubeconfig;
mod leaf;
mod manager;
mod pair;
mod passing;
mod plan;
mod progress;
mod request;
mod schedule;
mod serving;
mod store;
mod template;
#[cfg(test)]
mod testing;

pub use ask::AskError;
pub use bootstrap::{Bootstrap, BootstrapError, bootstrap};
pub use client::{ClientCertificates, ClientSetup};
pub(crate) use key::{element, first, pem};
pub use kubeconfig::{Cluster, Kubeconfig, KubeconfigError};
pub use manager::{CertificateState, IdentitySink, OpenApi};
pub use pair::Pair;
pub use passing::passing;
pub use plan::{BootstrapFile, ClientPath, Found, Rotation};
pub use serving::{ServingCertificates, ServingSetup};
pub use template::NamesNeeded;
