//! One small process per pod that outlives the agent: it holds namespaces, stdio and logs, reaps, and records how
//! containers ended. Behaviour: spec 09 §2, 09a §10-§14.

pub mod plan;
