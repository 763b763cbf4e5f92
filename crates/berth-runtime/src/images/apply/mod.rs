//! Unpacks an image layer from its tar stream into a directory.
//!
//! [`root`] accesses the file system, always beneath the layer's directory; [`path`], [`whiteouts`], and [`limits`] are
//! pure; [`source`] decompresses; [`layer`] applies the entries. The runtime runs all of that in a child process
//! ([`apart`]), which drops the privileges it does not need ([`child`]). Implements spec 09b §5.2.

pub mod apart;
pub mod child;
pub mod layer;
pub mod limits;
pub mod path;
pub mod root;
pub mod source;
pub mod whiteouts;

pub use layer::{Applied, Place, apply, apply_in, apply_noting};
pub use limits::{Bounds, Form, Policy};
