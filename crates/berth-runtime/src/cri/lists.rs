//! `List…` and `…Status` calls of CRI, served from memory. Implements spec 09a §1, §2.1, §3.2.

use std::{cmp::Reverse, collections::HashMap, sync::Arc};

use futures::stream::{self, BoxStream, StreamExt};
use tonic::Status;

use super::verbose_info;
use crate::{
    cri_conversions,
    errors::{ErrorKind, RuntimeError, RuntimeResult},
    runtime::{Runtime, now_ns},
    sandbox::Sandbox,
};
use berth_proto::cri;

/// Items per message of a streamed list.
const CHUNK: usize = 100;

/// Sandboxes that match the filter, newest first.
///
/// # Errors
/// The filter's ID prefix is ambiguous, or its state is unknown.
pub fn sandboxes(runtime: &Runtime, filter: Option<&cri::PodSandboxFilter>) -> RuntimeResult<Vec<cri::PodSandbox>> {
    if let Some(wanted) = filter.and_then(|filter| filter.state.as_ref()) {
        cri::PodSandboxState::try_from(wanted.state)
            .map_err(|_| RuntimeError::invalid(format!("unknown sandbox state {}", wanted.state)))?;
    }
    let pods = match filter.map(|filter| filter.id.as_str()).filter(|id| !id.is_empty()) {
        Some(id) => known(runtime.pod(id))?.into_iter().collect(),
        None => runtime.pods(),
    };
    let listed = pods.iter().map(|pod| pod.now()).filter(|sandbox| cri_conversions::is_listed(sandbox));
    let items = listed.map(|sandbox| cri_conversions::sandbox_item(&sandbox));
    let mut items: Vec<_> = items.filter(|item| cri_conversions::sandbox_fits(item, filter)).collect();
    items.sort_by_key(|item| Reverse(item.created_at));
    Ok(items)
}

/// Containers that match the filter, newest first.
///
/// # Errors
/// An ID prefix of the filter is ambiguous, or its state is unknown.
pub fn containers(runtime: &Runtime, filter: Option<&cri::ContainerFilter>) -> RuntimeResult<Vec<cri::Container>> {
    let chosen = chosen(runtime, filter)?;
    Ok(chosen
        .iter()
        .filter_map(|(sandbox, id)| sandbox.containers.get(id))
        .map(cri_conversions::container_item)
        .collect())
}

/// Snapshots of sandboxes with the IDs of their containers that match the filter, newest first.
///
/// # Errors
/// An ID prefix of the filter is ambiguous, or its state is unknown.
pub fn chosen(runtime: &Runtime, filter: Option<&cri::ContainerFilter>) -> RuntimeResult<Vec<(Arc<Sandbox>, String)>> {
    if let Some(wanted) = filter.and_then(|filter| filter.state.as_ref()) {
        cri::ContainerState::try_from(wanted.state)
            .map_err(|_| RuntimeError::invalid(format!("unknown container state {}", wanted.state)))?;
    }
    let wanted = |id: fn(&cri::ContainerFilter) -> &String| filter.map(id).filter(|id| !id.is_empty());
    let mut only = None;
    let mut pods = match wanted(|filter| &filter.pod_sandbox_id) {
        Some(id) => known(runtime.pod(id))?.into_iter().collect(),
        None => runtime.pods(),
    };
    if let Some(id) = wanted(|filter| &filter.id) {
        let Some((pod, whole)) = known(runtime.container(id))? else { return Ok(Vec::new()) };
        let sandbox = pod.now();
        pods.retain(|pod| pod.now().id() == sandbox.id());
        only = Some(whole);
    }
    let mut items = Vec::new();
    for sandbox in pods.iter().map(|pod| pod.now()).filter(|sandbox| cri_conversions::is_listed(sandbox)) {
        let those = sandbox.containers.values().filter(|c| only.as_ref().is_none_or(|only| c.id() == only));
        let those = those
            .filter(|container| cri_conversions::container_fits(&cri_conversions::container_item(container), filter));
        items.extend(those.map(|container| (container.meta.created_ns, sandbox.clone(), container.id().to_owned())));
    }
    items.sort_by_key(|(created_ns, ..)| Reverse(*created_ns));
    Ok(items.into_iter().map(|(_, sandbox, id)| (sandbox, id)).collect())
}

/// Maps not found to `None`: in a list an unknown ID is no error.
fn known<T>(found: RuntimeResult<T>) -> RuntimeResult<Option<T>> {
    match found {
        Err(error) if error.kind == ErrorKind::NotFound => Ok(None),
        other => other.map(Some),
    }
}

/// Streams a list in chunks.
pub fn in_chunks<T, R>(
    items: Vec<T>,
    message: impl Fn(Vec<T>) -> R + Send + 'static,
) -> BoxStream<'static, Result<R, Status>>
where
    T: Send + 'static,
    R: Send + 'static,
{
    let mut chunks = Vec::new();
    let mut items = items.into_iter().peekable();
    while items.peek().is_some() {
        chunks.push(Ok(message(items.by_ref().take(CHUNK).collect())));
    }
    stream::iter(chunks).boxed()
}

/// Status of a sandbox and of its containers.
///
/// # Errors
/// There is no such sandbox.
pub fn sandbox_status(
    runtime: &Runtime,
    request: &cri::PodSandboxStatusRequest,
) -> RuntimeResult<cri::PodSandboxStatusResponse> {
    let sandbox = runtime.pod(&request.pod_sandbox_id)?.now();
    let mut info = HashMap::new();
    if request.verbose {
        let details = verbose_info::sandbox(&sandbox);
        info.insert("info".to_owned(), details.to_string());
    }
    Ok(cri::PodSandboxStatusResponse {
        status: Some(cri_conversions::sandbox_status(&sandbox)),
        info,
        containers_statuses: cri_conversions::container_statuses(&sandbox),
        timestamp: now_ns(),
    })
}

/// Status of a container.
///
/// # Errors
/// There is no such container.
pub fn container_status(
    runtime: &Runtime,
    request: &cri::ContainerStatusRequest,
) -> RuntimeResult<cri::ContainerStatusResponse> {
    let (pod, id) = runtime.container(&request.container_id)?;
    let sandbox = pod.now();
    let container = sandbox.container(&id)?;
    let mut info = HashMap::new();
    if request.verbose {
        let details = verbose_info::container(&sandbox, container);
        info.insert("info".to_owned(), details.to_string());
    }
    Ok(cri::ContainerStatusResponse { status: Some(cri_conversions::container_status(container)), info })
}
