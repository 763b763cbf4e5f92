//! `Exec`, `Attach`, and `PortForward` of CRI: validates, returns a streaming URL.
//!
//! Implements spec 09a §4.

use crate::{
    errors::RuntimeResult,
    runtime::Runtime,
    streams::{self, StreamRequest},
};

/// Prepares a stream; returns its URL path.
///
/// # Errors
/// The container or sandbox does not run, or too many requests are in flight.
pub fn prepare(runtime: &Runtime, ask: StreamRequest) -> RuntimeResult<String> {
    match &ask {
        StreamRequest::Exec { container, .. } => {
            let (pod, id) = runtime.container(container)?;
            pod.now().container(&id)?.running()?;
            streams::check_exec_limit(&pod, &id)?;
        }
        StreamRequest::Attach { container, .. } => {
            let (pod, id) = runtime.container(container)?;
            pod.now().container(&id)?.running()?;
        }
        StreamRequest::Forward { sandbox, .. } => runtime.pod(sandbox)?.now().ready()?,
    }
    runtime.streams.keep(ask)
}
