//! Unpacks an image layer from its tar stream into a directory.
//!
//! [`root`] accesses the file system, always beneath the layer's directory; [`path`], [`whiteouts`], and [`limits`] are
//! pure; [`decompressor`] decompresses; [`layer`] applies the entries. The runtime runs all of that in a child process
//! ([`unpack_process`]), which drops the privileges it does not need ([`child`]). Implements spec 09b §5.2.

pub mod child;
pub mod decompressor;
pub mod layer;
pub mod limits;
pub mod path;
pub mod root;
pub mod unpack_process;
pub mod whiteouts;

pub use layer::{LayerSummary, UnpackTarget, apply, apply_in, apply_noting};
pub use limits::{LayerFormat, LayerLimits, UnpackPolicy};
