//! Reflectors, object managers, tokens, and API volumes against the test API server.
//!
//! Covers its ordering, its rejections, and its faults. Spec 10 §3, §4.6-4.7; spec 07 §7-9.

mod events;
mod objects;
mod reflectors;
