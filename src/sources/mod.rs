//! Where manifests come from, and how they become one stream of operations.
//!
//! In: a directory or file, a URL, the API server's pods. Out: ordered, minimal operations
//! ([`PodChange`](berth_types::PodChange)) on a channel of 50. Each source is a task that owns what
//! it last read and sends full sets; the mux owns what the engine was told of every source and
//! compares.
//!
//! Static pods (file, http) are decoded, defaulted, named, validated and checked for references to
//! API objects here ([`decode`], [`defaults`], [`normalise`], [`validate`], [`references`]: all
//! pure). Pods of the API come through a port ([`ports::PodSourceFeed`]). Behaviour: spec 02a §1-2.

mod api;
pub mod decode;
pub mod defaults;
pub mod diff;
mod file;
mod http;
mod mux;
pub mod normalise;
pub mod ports;
pub mod references;
mod start;
pub mod validate;

pub use mux::{CHANGES_CAPACITY, Door, Mux, Now, SourceSet};
pub use start::{RunningSources, SourcesConfig, SourcesDeps, start};

/// Manifests of this many bytes or more are refused.
const MANIFEST_LIMIT: u64 = 10 * 1024 * 1024;
