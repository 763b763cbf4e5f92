//! Whether a pod may run on this node: one file per handler. Pure. Behaviour: spec 02a §6.
