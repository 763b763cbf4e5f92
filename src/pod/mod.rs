//! The vocabulary of pods: identities, the shared specification, what a runtime showed. Pure.

mod id;
pub mod observed;
pub mod quantity;
pub mod spec;

pub use id::{ContainerId, PodFullName, PodRef, PodUid, SandboxId};
pub use spec::{ContainerKind, MalformedPod, Pod, PodSource, RestartPolicy};

/// The API types this agent speaks (Kubernetes v1.36).
pub use k8s_openapi::api::core::v1 as api;
