//! Whether a pod may run on this node: one file per handler. Pure. Behaviour: spec 02a §6, 06 §7.
//!
//! In: a candidate, the other active pods, facts about the node. Out: [`Admitted`], perhaps with
//! pods that must go first, or the first [`Refusal`]. A new handler is a file and one line in
//! `admit::HANDLERS`. Nothing here keeps state; `engine::allocation` asks and remembers.

mod admit;
mod apparmor;
mod declared_features;
mod eviction;
mod host_ports;
mod node_affinity;
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

pub use admit::{AdmissionRules, AdmitInput, Admitted, Purpose, admit};
pub use declared_features::missing_for_update;
pub use refusal::{Failure, Refusal};
