//! `Exec`, `Attach`, `PortForward`: checked now, met later under a URL. Behaviour: spec 09a §4.

use crate::{
    errors::RuntimeResult,
    runtime::Runtime,
    streams::{self, Ask},
};

/// Prepares a stream; the path under which it is met.
///
/// # Errors
/// What it is asked of does not run, or too many wait to be met.
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
