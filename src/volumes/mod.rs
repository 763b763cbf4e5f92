//! What is mounted.
