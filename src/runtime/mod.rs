//! From plan to CRI calls.

pub mod prepare;
pub mod request;
