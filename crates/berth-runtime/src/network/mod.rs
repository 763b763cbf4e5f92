//! Pods' networks: a built-in bridge, or CNI plugins.
//!
//! ```text
//!                    ┌─► builtin ─► leases (ipam) · bridge · pod_link · firewall (rules, host_ports) ─► sys::netlink
//!  CRI ─► manager ───┤
//!                    └─► cni ─► plugins' processes
//!  keep: news of the kernel and of /etc/cni/net.d ─► mends, reloads
//! ```
//!
//! In comes a pod with the descriptor of its network namespace; out come its addresses. The leases belong to `builtin`, the
//! table of the packet filter and the machine's ports to `firewall`, what plugins did to the files of `cni`; what a pod was
//! given is also kept with its sandbox, and that is what counts after a start. No other programs are needed: neither
//! `ip` nor `nft`. Behaviour: spec 09b §10-§15.

pub mod bandwidth;
mod bridge;
pub mod builtin;
pub mod cidr;
mod cni;
mod dial;
mod errors;
mod firewall;
mod host_ports;
pub mod ipam;
mod keep;
mod leases;
mod manager;
pub mod mode;
mod names;
mod pod_link;
mod rules;
mod sandbox;

pub use cidr::Cidr;
pub use errors::NetworkError;
pub use host_ports::{PortError, PortMapping, Protocol};
pub use manager::{Network, Settings};
pub use mode::{Mode, Wanted};
pub use names::NAME;
pub use sandbox::{Attached, SandboxNetwork};
