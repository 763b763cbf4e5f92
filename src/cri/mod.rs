//! One door to any runtime: the service traits, the client, deadlines, error mapping.
//!
//! Six rooms call a runtime; all of them go through [`RuntimeService`] and [`ImageService`],
//! which have an honest fake (the scripted CRI of `tests/kit`). Behaviour: spec 03a §2.

mod errors;
mod service;

pub use errors::{CriError, CriResult};
pub use service::{ExecOutput, ImageService, RuntimeService};
