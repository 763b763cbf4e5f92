//! From plan to CRI calls.

pub mod request;
