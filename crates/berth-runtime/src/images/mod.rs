//! Image store: pull, import, built-in images, removal; names, content, layers, records.
//!
//! ```text
//!  registry ─┐                       ┌─► layers/<n>/d ────┐
//!  archive ──┼─► content ─► unpacker ┤                    ├─► root of a container
//!  built-in ─┘   (blobs)             └─► record ─► lookup ┘
//! ```
//!
//! [`ImageStore`] owns all of it; no other code accesses its directories. Layers and records are committed so that a
//! power failure leaves them complete or absent (spec 09 §7). Implements spec 09b part I.

pub mod archive;
pub mod builtin;
pub mod catalogue;
pub mod commands;
pub mod compression;
pub mod content;
pub mod control_socket;
pub mod digest;
pub mod elf;
pub mod error;
pub mod image_details;
pub mod layers;
pub mod merged_layers;
pub mod model;
pub mod names;
pub mod platform;
pub mod progress;
pub mod record;
pub mod registry;
pub mod snapshots;
pub mod store;
pub mod tar;
pub mod tar_split;
mod tree_copy;
pub mod unpacker;
pub mod usage;
mod volume;

pub use error::{ImageError, ImageErrorKind};
pub use registry::RegistryCredentials;
pub use store::{FsInfo, FsUsage, ImageStore, ImageStoreSettings};
