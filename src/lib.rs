//! Berth: a node agent that is a drop-in for kubelet v1.36.
//!
//! A pod's way through the house is a ring:
//!
//! ```text
//!  manifests ─► sources ─► mux ─► sync loop ─► pod worker ─► runtime ─► (CRI)
//!                                    ▲            │  ▲                    │
//!                               housekeeping      ▼  │ wake-up            ▼
//!                                               status ◄── pod store ◄── PLEG
//! ```
//!
//! | Room | What it is for |
//! |---|---|
//! | [`cli`] | what people type: one file per command |
//! | [`agent`] | builds the parts from the configuration, starts and stops them in order |
//! | [`config`] | `KubeletConfiguration`: fields, defaults, validation, flags, drop-ins, gates |
//! | [`pod`] | the vocabulary, pure |
//! | [`sources`] | where manifests come from, and the mux |
//! | [`engine`] | who drives pods: sync loop, workers, admission, allocation, ports |
//! | [`cri`] | one door to any runtime |
//! | [`runtime`] | from plan to CRI calls |
//! | [`embedded`] | our own runtime, behind the same door |
//! | [`images`] | presence and permission of images |
//! | [`pleg`] | what really runs |
//! | [`kube`] | the API server: client, reviews |
//! | [`plugins`] | programs that register by a socket |
//! | [`logs`] | container output |
//! | [`status`] | what the API sees |
//! | [`volumes`] | what is mounted |
//! | [`resources`] | shares of the machine |
//! | [`eviction`] | who must go before the node starves |
//! | [`stats`] | what the node, its pods and their containers use |
//! | [`node`] | facts about the machine |
//! | [`server`] | who may ask us |
//! | [`metrics`] | what is counted |
//! | [`sys`] | the kernel |
//!
//! Who may import whom is a table in `ARCHITECTURE.md`, checked by `tests/it/tidy.rs`.

#![cfg_attr(test, allow(clippy::disallowed_methods, reason = "tests remove what they have made themselves"))]

pub mod agent;
pub mod cli;
pub mod config;
pub mod cri;
pub mod embedded;
pub mod engine;
pub mod eviction;
pub mod images;
pub mod kube;
pub mod logs;
pub mod metrics;
pub mod node;
pub mod pleg;
pub mod plugins;
pub mod pod;
pub mod probes;
pub mod proto;
pub mod resources;
pub mod runtime;
pub mod server;
pub mod shutdown;
pub mod sources;
pub mod stats;
pub mod status;
pub mod sys;
pub mod volumes;
