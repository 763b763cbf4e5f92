//! Pod admission: decides whether a pod may run on this node, one file per handler.
//!
//! Pure. Implements spec 02a §6, 06 §7.
//!
//! Input: a candidate, the other active pods, facts about the node. Output: [`Admission`], possibly with
//! pods to preempt first, or the first [`AdmissionRejection`]. A new handler is a file and one line in
//! `pod_admission::HANDLERS`. Admission is stateless; `engine::allocation` calls it and stores the result.

mod apparmor;
mod declared_features;
mod eviction;
mod host_ports;
mod node_affinity;
mod pod_admission;
mod pod_level;
mod predicates;
pub mod preemption;
mod refusal;
mod resize;
mod shutdown;
pub mod sysctls;
mod taints;
#[cfg(test)]
mod tests;

pub use declared_features::missing_for_update;
pub use pod_admission::{Admission, AdmissionRules, AdmitInput, Purpose, admit, precheck};
pub use refusal::{AdmissionRejection, PredicateFailure};
