//! Pod types: identities, the shared spec, resources, and runtime observations. Pure.

#![forbid(unsafe_code)]
#![cfg_attr(test, allow(clippy::disallowed_methods, reason = "tests remove what they have made themselves"))]

pub mod cpu;
mod cpu_set;
pub mod env;
pub mod env_file;
pub mod expansion;
pub mod fieldpath;
pub mod go_bool;
pub mod go_duration;
pub mod hash;
pub mod hostname;
mod id;
pub mod memory_qos;
pub mod names;
pub mod node_selector;
pub mod observation;
mod operation;
mod pod_spec;
pub mod qos;
pub mod quantity;
pub mod resource_state;
pub mod resources;
pub mod restart_decision;
pub mod service_env;
pub mod spec;
pub mod volume;

pub use cpu_set::{CpuSet, CpuSetError};
pub use id::{ContainerId, PodFullName, PodRef, PodUid, SandboxId};
pub use operation::{Operation, PodChange};
pub use pod_spec::PodSpec;
pub use spec::{ContainerKind, MalformedPod, Pod, PodSource, RestartPolicy};

/// Kubernetes API types, v1.36.
pub use k8s_openapi::api::core::v1 as api;

/// Returns the longest prefix of a text that has at most `max` bytes and ends at a character boundary.
pub fn cut_at_char(text: &str, max: usize) -> &str {
    let end = (0..=max.min(text.len())).rev().find(|&end| text.is_char_boundary(end)).unwrap_or(0);
    text.get(..end).unwrap_or_default()
}
