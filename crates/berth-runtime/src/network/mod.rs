//! Pod networks: a built-in bridge network, or CNI plugins.
//!
//! ```text
//!                    ┌─► builtin ─► leases (ipam) · bridge · pod_link · firewall (rules, host_ports) ─► sys::netlink
//!  CRI ─► manager ───┤
//!                    └─► cni ─► plugin processes
//!  keep: events of the kernel and of /etc/cni/net.d ─► repair, reload
//! ```
//!
//! Input: a pod with the descriptor of its network namespace; output: its addresses. `builtin` owns the leases,
//! `firewall` the nf_tables table and the host ports, the cache files of `cni` record what plugins did. The sandbox
//! record also stores a pod's network, and that is authoritative after a start. Needs no external programs: neither
//! `ip` nor `nft`. Implements spec 09b §10-§15.

pub mod bandwidth;
mod bridge;
pub mod builtin;
pub mod cidr;
mod cni;
mod errors;
mod firewall;
mod host_ports;
pub mod ipam;
mod leases;
mod loopback_dialer;
mod manager;
pub mod mode;
mod names;
mod pod_link;
mod rules;
mod sandbox;
mod watchers;

pub use cidr::Cidr;
pub use errors::NetworkError;
pub use host_ports::{PortError, PortMapping, TransportProtocol};
pub use manager::{NetworkManager, NetworkSettings};
pub use mode::{ConfiguredMode, Mode};
pub use names::NAME;
pub use sandbox::{PodNetwork, SandboxNetwork};
