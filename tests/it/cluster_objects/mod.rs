//! What follows and reads objects of a cluster (reflectors, object managers, tokens, the volumes they fill), before the
//! test API server: its order, its refusals and its troubles. Spec 10 §3, §4.6-4.7; spec 07 §7-9.

mod events;
mod objects;
mod reflectors;
