//! `ContainerStats`, `PodSandboxStats`, and their lists of CRI. Implements spec 09a §5.
//!
//! Everything is read on the blocking pool during the call, except writable-layer usage, which a background walk
//! counts.

use std::{collections::BTreeMap, path::Path, sync::Arc};

use super::lists;
use crate::{
    container::Container,
    cri_conversions,
    errors::{ErrorKind, RuntimeError, RuntimeResult},
    runtime::{Runtime, blocking, now_ns},
    sandbox::Sandbox,
    stats::{Depth, Reading, cri_messages, layer_usage::LayerUsage, link_counters::LinkCounterReader},
};
use berth_proto::cri;
use berth_sys::netlink::counters::LinkCounters;

/// A sandbox snapshot and the ID of one of its containers.
pub(super) type SelectedContainer = (Arc<Sandbox>, String);

/// Response to `ContainerStats`.
///
/// # Errors
/// There is no such container.
pub async fn container(runtime: &Arc<Runtime>, id: &str) -> RuntimeResult<cri::ContainerStats> {
    let (pod, id) = runtime.container(id)?;
    let results = of_containers(runtime, vec![(pod.now(), id.clone())]).await?;
    results.into_iter().next().ok_or_else(|| RuntimeError::no_container(&id))
}

/// Response to `ListContainerStats`, newest first.
///
/// # Errors
/// An ID prefix of the filter is ambiguous.
pub async fn containers(
    runtime: &Arc<Runtime>,
    filter: Option<cri::ContainerStatsFilter>,
) -> RuntimeResult<Vec<cri::ContainerStats>> {
    let filter = filter.map(|filter| cri::ContainerFilter {
        id: filter.id,
        pod_sandbox_id: filter.pod_sandbox_id,
        label_selector: filter.label_selector,
        state: None,
    });
    let chosen = lists::chosen(runtime, filter.as_ref())?;
    of_containers(runtime, chosen).await
}

async fn of_containers(
    runtime: &Arc<Runtime>,
    chosen: Vec<SelectedContainer>,
) -> RuntimeResult<Vec<cri::ContainerStats>> {
    let written = written(runtime, &chosen).await;
    let (asked, reading) = (runtime.clone(), chosen.clone());
    let readings = blocking("reading cgroups", move || {
        Ok(reading.iter().map(|(sandbox, id)| read(&asked, sandbox.containers.get(id))).collect::<Vec<_>>())
    })
    .await?;
    let known = chosen.iter().zip(readings);
    let results = known.filter_map(|((sandbox, id), reading)| Some((sandbox.containers.get(id)?, reading)));
    Ok(results.map(|(container, reading)| stats(runtime, container, reading.as_ref(), &written)).collect())
}

/// Reads a container's cgroup; `None` if it does not run. Blocking.
fn read(runtime: &Runtime, container: Option<&Container>) -> Option<Reading> {
    let container = container.filter(|container| container.running().is_ok())?;
    Some(runtime.ports.groups.read(&container.meta.group, Depth::Summary))
}

/// Writable-layer usage of the containers, as far as it is counted.
pub(super) async fn written(runtime: &Runtime, chosen: &[SelectedContainer]) -> BTreeMap<String, LayerUsage> {
    let ids: Vec<String> = chosen.iter().map(|(_, id)| id.clone()).collect();
    runtime.layers.used(&runtime.shell, &runtime.ports.images, &ids).await
}

fn stats(
    runtime: &Runtime,
    container: &Container,
    reading: Option<&Reading>,
    written: &BTreeMap<String, LayerUsage>,
) -> cri::ContainerStats {
    let results = reading.map(|reading| cri_messages::container(reading, rate(runtime, container.id(), reading)));
    let mountpoint = runtime.shell.layout.snapshots().display().to_string();
    cri::ContainerStats {
        attributes: Some(attributes(container)),
        writable_layer: written.get(container.id()).map(|used| cri_messages::written(used, &mountpoint)),
        ..results.unwrap_or_default()
    }
}

fn rate(runtime: &Runtime, id: &str, reading: &Reading) -> Option<u64> {
    reading.cpu.and_then(|cpu| runtime.meter.rate(id, reading.at, cpu.times.usage_ns))
}

fn attributes(container: &Container) -> cri::ContainerAttributes {
    cri::ContainerAttributes {
        id: container.id().to_owned(),
        metadata: container.config.metadata.clone(),
        labels: container.config.labels.clone(),
        annotations: container.config.annotations.clone(),
    }
}

/// Response to `PodSandboxStats`.
///
/// # Errors
/// There is no such sandbox, or it is not ready.
pub async fn sandbox(runtime: &Arc<Runtime>, id: &str) -> RuntimeResult<cri::PodSandboxStats> {
    let sandbox = runtime.pod(id)?.now();
    if !sandbox.is_ready() {
        let text = format!("sandbox container \"{}\" is not running", sandbox.id());
        return Err(RuntimeError::new(ErrorKind::Unavailable, text));
    }
    let results = of_sandboxes(runtime, vec![sandbox]).await?;
    results.into_iter().next().ok_or_else(|| RuntimeError::no_sandbox(id))
}

/// Response to `ListPodSandboxStats`: sandboxes that are ready, newest first.
///
/// # Errors
/// The filter's ID prefix is ambiguous.
pub async fn sandboxes(
    runtime: &Arc<Runtime>,
    filter: Option<cri::PodSandboxStatsFilter>,
) -> RuntimeResult<Vec<cri::PodSandboxStats>> {
    let ready = cri::PodSandboxStateValue { state: cri::PodSandboxState::SandboxReady.into() };
    let filter = filter.unwrap_or_default();
    let (id, label_selector) = (filter.id, filter.label_selector);
    let filter = cri::PodSandboxFilter { id, label_selector, state: Some(ready) };
    let chosen = lists::sandboxes(runtime, Some(&filter))?;
    // A sandbox removed in the meantime is omitted.
    let chosen = chosen.iter().filter_map(|item| runtime.pod(&item.id).ok()).map(|pod| pod.now()).collect();
    of_sandboxes(runtime, chosen).await
}

/// Raw statistics of a sandbox.
struct SandboxReading {
    pod: Reading,
    containers: BTreeMap<String, Reading>,
    links: Option<Vec<LinkCounters>>,
    at_ns: i64,
}

async fn of_sandboxes(runtime: &Arc<Runtime>, chosen: Vec<Arc<Sandbox>>) -> RuntimeResult<Vec<cri::PodSandboxStats>> {
    let containers = |sandbox: &Arc<Sandbox>| {
        let sandbox = sandbox.clone();
        sandbox.containers.keys().map(|id| (sandbox.clone(), id.clone())).collect::<Vec<_>>()
    };
    let all: Vec<SelectedContainer> = chosen.iter().flat_map(containers).collect();
    let written = written(runtime, &all).await;
    let (asked, reading) = (runtime.clone(), chosen.clone());
    let readings = blocking("reading cgroups", move || {
        let mut asker = LinkCounterReader::default();
        Ok(reading.iter().map(|sandbox| read_sandbox(&asked, sandbox, &mut asker)).collect::<Vec<_>>())
    })
    .await?;
    let results = chosen.iter().zip(readings).map(|(sandbox, read)| sandbox_stats(runtime, sandbox, &read, &written));
    Ok(results.collect())
}

/// Blocking: reads cgroups and network interfaces.
fn read_sandbox(runtime: &Runtime, sandbox: &Sandbox, asker: &mut LinkCounterReader) -> SandboxReading {
    let containers = sandbox.containers.iter();
    let containers = containers.filter_map(|(id, container)| Some((id.clone(), read(runtime, Some(container))?)));
    let containers: BTreeMap<String, Reading> = containers.collect();
    let read_group = |group: &str| runtime.ports.groups.read(group, Depth::Summary);
    let pod = match pod_group(sandbox) {
        Some(group) => read_group(&group),
        None => containers.values().fold(read_group(&sandbox.meta.group), |sum, one| sum.with(one)),
    };
    let links = sandbox.meta.netns.as_deref().and_then(|netns: &Path| asker.links(netns));
    SandboxReading { pod, containers, links, at_ns: now_ns() }
}

/// The pod's cgroup, parent of its containers'; `None` if pods share one.
fn pod_group(sandbox: &Sandbox) -> Option<String> {
    let parent = sandbox.config.linux.as_ref().map_or("", |linux| linux.cgroup_parent.as_str());
    let above = Path::new(&sandbox.meta.group).parent().filter(|_| !parent.is_empty())?;
    Some(above.display().to_string())
}

fn sandbox_stats(
    runtime: &Runtime,
    sandbox: &Sandbox,
    read: &SandboxReading,
    written: &BTreeMap<String, LayerUsage>,
) -> cri::PodSandboxStats {
    let id = sandbox.id();
    let threads = read.containers.values().filter_map(|reading| reading.threads);
    let process = cri::ProcessUsage {
        timestamp: read.at_ns,
        process_count: cri_messages::value(threads.fold(0, |sum, (threads, _)| sum.saturating_add(threads))),
    };
    let containers = sandbox.containers.values().map(|one| stats(runtime, one, read.containers.get(one.id()), written));
    let linux = cri::LinuxPodSandboxStats {
        cpu: cri_messages::cpu(&read.pod, rate(runtime, id, &read.pod)),
        memory: cri_messages::memory(&read.pod),
        network: read.links.as_ref().map(|links| cri_messages::network(read.at_ns, links)),
        process: Some(process),
        containers: containers.collect(),
        io: cri_messages::io(&read.pod),
    };
    let item = cri_conversions::sandbox_item(sandbox);
    let (labels, annotations) = (item.labels, item.annotations);
    let attributes = cri::PodSandboxAttributes { id: item.id, metadata: item.metadata, labels, annotations };
    cri::PodSandboxStats { attributes: Some(attributes), linux: Some(linux), windows: None }
}
