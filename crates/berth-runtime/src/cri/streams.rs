//! `Exec`, `Attach`, and `PortForward` of CRI: validates, returns a streaming URL.
//!
//! Implements spec 09a §4.

use crate::{
    errors::RuntimeResult,
    runtime::Runtime,
    streams::{self, Ask},
};

/// Prepares a stream; returns its URL path.
///
/// # Errors
/// The container or sandbox does not run, or too many requests are in flight.
pub fn prepare(runtime: &Runtime, ask: Ask) -> RuntimeResult<String> {
    match &ask {
        Ask::Exec { container, .. } => {
            let (pod, id) = runtime.container(container)?;
            pod.now().container(&id)?.running()?;
            streams::has_place(&pod, &id)?;
        }
        Ask::Attach { container, .. } => {
            let (pod, id) = runtime.container(container)?;
            pod.now().container(&id)?.running()?;
        }
        Ask::Forward { sandbox, .. } => runtime.pod(sandbox)?.now().ready()?,
    }
    runtime.streams.keep(ask)
}
