//! Pod sources: static pod files, HTTP, and API, merged into one stream of operations.
//!
//! Input: a directory or file, a URL, the API server's pods. Output: ordered, minimal operations
//! ([`PodChange`](berth_types::PodChange)) on a channel of 50. Each source is a task that owns its last
//! read state and sends full sets; the mux owns the pods of every source as sent to the engine, and
//! compares.
//!
//! Static pods (file, http) are decoded, defaulted, named, validated, and checked for references to API
//! objects here ([`decode`], [`defaults`], [`static_pod`], [`validate`], [`references`]: all pure). Pods
//! of the API come through a trait ([`ports::PodSourceFeed`]). Implements spec 02a §1-2.

mod api;
pub mod decode;
pub mod defaults;
pub mod diff;
mod file;
mod http;
mod mux;
pub mod ports;
pub mod references;
mod start;
pub mod static_pod;
pub mod validate;

pub use mux::{CHANGES_CAPACITY, Mux, SourceSender, SourceSet, WallClock};
pub use start::{RunningSources, SourcesConfig, SourcesDeps, start};

/// Manifests of this many bytes or more are rejected.
const MANIFEST_LIMIT: u64 = 10 * 1024 * 1024;
