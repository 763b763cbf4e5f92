//! Tests of the test API server itself: its behavior must be right before agent tests rely on it.
//!
//! Spec 10a §I, §23.

mod client;
mod conduct;
mod control_endpoint;
mod faults;
mod fixture;
mod parity;
mod rules_join;
mod storage;
mod watches;
mod wire;
