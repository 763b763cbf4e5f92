//! From a layer's tar stream to its directory.
//!
//! [`root`] touches the file system, always beneath the layer's directory; [`path`], [`whiteouts`] and [`limits`] are pure;
//! [`source`] takes the packing off a stream, [`layer`] carries it out entry by entry. The runtime has that done by a process of
//! its own ([`apart`]), which keeps nothing it does not need ([`child`]). Behaviour: spec 09b §5.2.

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
