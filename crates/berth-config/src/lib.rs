//! `KubeletConfiguration` v1beta1: fields, defaults, flags, drop-ins, validation, and feature gates.
//!
//! ```text
//!  command line ─► flags ─► settings ─┐
//!  --config ─► document ─► typed ─► defaults ─► drop-ins ─► flags again ─► validate ─► Loaded
//! ```
//!
//! The input is a command line; the output is a [`LoadedConfig`] configuration, a text to print, or a [`StartupError`] with
//! the reference's text. `loader` and `dropins` read files, and `host` reads facts of the machine; everything else is
//! pure. A loaded configuration is immutable.
//!
//! Started as `kubelet` without a configuration file, the reference's legacy defaults apply (anonymous access,
//! `AlwaysAllow`, port 10255), each with a warning; `berth run` always has a file's secure defaults.
//!
//! Implements spec 01 §1-8, §14, §20-22.

#![forbid(unsafe_code)]
#![cfg_attr(test, allow(clippy::disallowed_methods, reason = "tests remove what they have made themselves"))]

pub mod configz;
pub mod defaults;
pub mod document;
pub mod dropins;
mod errors;
pub mod eviction;
pub mod fields;
pub mod file_decoder;
pub mod flags;
mod gated_settings;
pub mod gates;
mod host;
pub mod json_decoder;
mod loader;
pub mod names;
mod notice;
pub mod text;
pub mod tls;
mod unimplemented_settings;
pub mod validation;
pub mod version;
mod watchdog;
pub mod yaml;

pub use berth_types::go_duration::{DurationError, GoDuration};
pub use errors::StartupError;
pub use fields::KubeletConfiguration;
pub use flags::{KubeletFlags, sloppy_ip};
pub use gates::FeatureGates;
pub use host::{HostFacts, has_swap};
pub use loader::{
    EMBEDDED_RUNTIME, LoadResult, LoadedConfig, Personality, StartupAction, check, help, load, read_main,
};
pub use notice::Notice;
pub use unimplemented_settings::{CONSULTED, UnimplementedSetting, unimplemented_settings};
pub use validation::startup::{NodeIps, Reservations, node_ips, reservations, reserved_memory_percent};
pub use watchdog::{WatchdogEnvironment, watchdog_timeout};
