//! Exec, attach and port-forward: clients of every protocol, the server's endpoints for them, and ports to forward. The
//! same before every runtime.

pub mod clients;
pub mod endpoints;
pub mod ports;
