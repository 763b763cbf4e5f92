//! Berth: a node agent that is a drop-in for kubelet v1.36.
//!
//! ```text
//!  manifests ─► sources ─► mux ─► sync loop ─► pod worker ─► runtime ─► (CRI)
//!                                    ▲            │  ▲                    │
//!                               housekeeping      ▼  │ wake-up            ▼
//!                                               status ◄── pod store ◄── PLEG
//! ```
//!
//! | Module | Purpose |
//! |---|---|
//! | [`cli`] | command line: one file per command |
//! | [`wiring`] | builds the parts from the configuration, starts and stops them in order |
//! | [`sources`] | manifests from files, HTTP, and the API server; the mux that merges them |
//! | [`api_source`] | pods of the API server as a source; last-known pods while it is unreachable |
//! | [`engine`] | sync loop, pod workers, admission, allocation, housekeeping |
//! | [`runtime`] | runtime manager: turns a pod's plan into CRI calls |
//! | [`images`] | image manager: pulls, pull credentials, garbage collection |
//! | [`pleg`] | pod lifecycle event generator: observations of the runtime |
//! | [`probes`] | liveness, readiness, and startup probes |
//! | [`plugins`] | plugin watcher: registration of drivers by their sockets |
//! | [`logs`] | container logs: reading, rotation, compression |
//! | [`resources`] | pod cgroups and their values |
//! | [`eviction`] | eviction manager: thresholds, ranking, reclaim |
//! | [`shutdown`] | graceful node shutdown |
//! | [`node`] | node object: registration, status, lease; OOM watcher |
//! | [`serving`] | server ports, backed by snapshots of engine, status manager, PLEG, and statistics |
//! | [`diagnostics`] | what a pod is waiting for: `/debug/why`, `berth why` |
//! | [`certificates`] | certificates of a standalone node: CA, administrator, serving pair |
//! | [`standalone`] | ConfigMaps and Secrets from a directory; port implementations without an API server |
//! | [`logging`] | the agent's own log |
//! | `watchdog`, `task_supervisor` | systemd notifications; tasks whose panic stops the agent |
//!
//! Everything self-contained is a crate under `crates/`; `docs/architecture.md` lists them and defines which module may
//! import which crate (checked by `tests/it/tidy.rs`).

#![forbid(unsafe_code)]
#![cfg_attr(test, allow(clippy::disallowed_methods, reason = "tests remove what they have made themselves"))]

pub mod api_source;
pub mod certificates;
pub mod cli;
pub mod diagnostics;
pub mod engine;
pub mod eviction;
pub mod images;
pub mod logging;
pub mod logs;
pub mod node;
pub mod pleg;
pub mod plugins;
pub mod probes;
pub mod resources;
pub mod runtime;
pub mod serving;
pub mod shutdown;
pub mod sources;
pub mod standalone;
mod task_supervisor;
mod watchdog;
pub mod wiring;
