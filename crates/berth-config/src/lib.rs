//! `KubeletConfiguration` v1beta1: fields, defaults, validation, flags, drop-ins, feature gates, configz.
//!
//! ```text
//!  command line ─► flags ─► settings ─┐
//!  --config ─► document ─► typed ─► defaults ─► drop-ins ─► flags again ─► validate ─► Loaded
//! ```
//!
//! In comes a command line; out comes a [`Loaded`] configuration, a text to print, or a
//! [`StartupError`] with the reference's words. `load` and `dropins` read files and `host` looks at
//! the machine; everything else is pure. Nobody changes a configuration once it is loaded.
//!
//! Called as `kubelet` and without a file, the reference's legacy defaults hold (anonymous callers,
//! `AlwaysAllow`, port 10255), each with a warning; `berth run` has a file's secure defaults always.
//!
//! Behaviour: spec 01 §1-8, §14, §20-22.

#![forbid(unsafe_code)]
#![cfg_attr(test, allow(clippy::disallowed_methods, reason = "tests remove what they have made themselves"))]

pub mod configz;
pub mod decode;
pub mod defaults;
pub mod document;
pub mod dropins;
mod duration;
mod effective;
mod errors;
pub mod eviction;
pub mod fields;
pub mod flags;
pub mod gates;
mod host;
mod load;
pub mod names;
mod notice;
pub mod text;
pub mod tls;
pub mod typed;
pub mod validate;
pub mod version;
mod watchdog;
pub mod yaml;

pub use duration::{DurationError, GoDuration};
pub use effective::{CONSULTED, NotYet, not_yet_effective};
pub use errors::StartupError;
pub use fields::KubeletConfiguration;
pub use flags::{KubeletFlags, sloppy_ip};
pub use gates::FeatureGates;
pub use host::{HostFacts, has_swap};
pub use load::{EMBEDDED_RUNTIME, Loaded, Loading, Personality, Request, check, help, load, read_main};
pub use notice::Notice;
pub use validate::start::{NodeIps, Reservations, node_ips, reservations};
pub use watchdog::{WatchdogEnvironment, watchdog_timeout};
