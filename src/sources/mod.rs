//! Pod sources: static pod files, HTTP, and API, merged into one stream of operations.
//!
//! Input: a directory or file, a URL, the API server's pods. Output: ordered, minimal operations
//! ([`PodChange`](berth_types::PodChange)) on a channel of 50. Each source is a task that owns its last
//! read state and sends full sets; the mux owns the pods of every source as sent to the engine, and
//! compares.
//!
//! Static pods (file, http) are decoded, defaulted, named, validated, and checked for references to API
//! objects here ([`manifest_decoder`], [`defaults`], [`static_pod`], [`validation`], [`references`]: all pure). Pods
//! of the API come through a trait ([`ports::PodSourceFeed`]). Implements spec 02a §1-2.

mod api;
pub mod defaults;
pub mod diff;
mod file;
mod http;
pub mod manifest_decoder;
mod mux;
mod pod_sources;
pub mod ports;
pub mod references;
pub mod static_pod;
pub mod validation;

pub use mux::{CHANGES_CAPACITY, Mux, SourceSender, SourceSet, WallClock};
pub use pod_sources::{RunningSources, SourcesConfig, SourcesDeps, start};

/// Manifests of this many bytes or more are rejected.
const MANIFEST_LIMIT: u64 = 10 * 1024 * 1024;
