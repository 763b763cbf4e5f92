//! Types generated from `proto/`.
#![allow(missing_docs, reason = "generated from the published field tables")]
#![allow(clippy::all, reason = "generated code")]

/// The container runtime interface, `runtime.v1`.
pub mod cri {
    tonic::include_proto!("runtime.v1");
}

/// containerd's native events service.
pub mod containerd_events {
    tonic::include_proto!("containerd.services.events.v1");
}
