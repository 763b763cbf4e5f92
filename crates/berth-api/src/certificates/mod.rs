//! Certificates of the node: TLS bootstrap and rotation of client and serving certificates.
//!
//! ```text
//!  kubeconfig, flags ─► plan (pure) ─┬─► blocking bootstrap, then a kubeconfig
//!                                    └─► manager ─► request ─► wait ─► store ─► transport or server
//!  addresses of the node ─► template ────────┘
//! ```
//!
//! A manager is one task; it owns the current pair and the time of the next renewal. Decisions are in pure files:
//! `plan`, `template`, `request`, `progress`, `schedule`, `leaf`. The layout of the certificate directory is the
//! kubelet's, so that either agent can use the other's files.
//!
//! Implements spec 01 §11, spec 10 §4.10.

mod bootstrap;
pub mod client;
mod key;
mod kubeconfig;
mod leaf;
mod manager;
mod pair;
mod plan;
mod progress;
mod request;
mod schedule;
mod scoped_client;
mod serving;
mod signing_request;
mod store;
mod template;
#[cfg(test)]
mod testing;

pub use bootstrap::{Bootstrap, BootstrapError, bootstrap};
pub use client::{ClientCertificates, ClientSetup};
pub(crate) use key::{element, first, pem};
pub use kubeconfig::{Cluster, Kubeconfig, KubeconfigError};
pub use manager::{ApiConnector, CertificateState, IdentitySink};
pub use pair::Pair;
pub use plan::{BootstrapFile, ClientPath, KubeconfigState, Rotation};
pub use scoped_client::scoped_client;
pub use serving::{ServingCertificates, ServingSetup};
pub use signing_request::SigningRequestError;
pub use template::NamesNeeded;
