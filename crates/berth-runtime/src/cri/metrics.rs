//! `ListMetricDescriptors` and `ListPodSandboxMetrics` of CRI. Implements spec 09a §5, 09 §11.3.

use std::{collections::BTreeMap, path::Path, sync::Arc};

use super::stats::{self, SelectedContainer};
use crate::{
    config::PAUSE,
    container::Container,
    errors::RuntimeResult,
    runtime::{Runtime, blocking},
    sandbox::Sandbox,
    stats::{
        Depth, OpenFiles, Reading,
        layer_usage::LayerUsage,
        link_counters::LinkCounterReader,
        metrics::{self, Labels, whole_seconds},
        open_files, volume,
    },
};
use berth_cadvisor::{MetricInputs, MountedFileSystem};
use berth_proto::cri;

/// Maximum number of a container's processes whose open files are counted.
const MOST_PROCESSES: usize = 1024;

/// Response to `ListMetricDescriptors`.
pub fn descriptors(runtime: &Runtime) -> Vec<cri::MetricDescriptor> {
    metrics::descriptors(runtime.ports.groups.has_pressure_stats())
}

/// Metrics of sandboxes that are ready, for `ListPodSandboxMetrics`.
///
/// # Errors
/// Reading the cgroups times out.
pub async fn sandboxes(runtime: &Arc<Runtime>) -> RuntimeResult<Vec<cri::PodSandboxMetrics>> {
    let pods: Vec<_> = runtime.pods().iter().map(|pod| pod.now()).filter(|sandbox| sandbox.is_ready()).collect();
    let running = |sandbox: &Arc<Sandbox>| {
        let running = sandbox.containers.values().filter(|container| container.running().is_ok());
        running.map(|container| (sandbox.clone(), container.id().to_owned())).collect::<Vec<_>>()
    };
    let chosen: Vec<SelectedContainer> = pods.iter().flat_map(running).collect();
    let written = stats::written(runtime, &chosen).await;
    let asked = runtime.clone();
    blocking("reading cgroups", move || {
        let mut asker = LinkCounterReader::default();
        let volume = volume::of(&asked.shell.layout.snapshots());
        Ok(pods.iter().map(|sandbox| of_sandbox(&asked, sandbox, (&mut asker, volume.as_ref()), &written)).collect())
    })
    .await
}

/// Blocking: reads cgroups and network interfaces.
fn of_sandbox(
    runtime: &Runtime,
    sandbox: &Sandbox,
    (asker, volume): (&mut LinkCounterReader, Option<&MountedFileSystem>),
    written: &BTreeMap<String, LayerUsage>,
) -> cri::PodSandboxMetrics {
    let running = sandbox.containers.values().filter(|container| container.running().is_ok());
    let container_metrics = running.map(|container| cri::ContainerMetrics {
        container_id: container.id().to_owned(),
        metrics: metrics::of_container(
            &labels(sandbox, Some(container)),
            &inputs(container, &read(runtime, container), volume, written.get(container.id())),
        ),
    });
    let container_metrics = container_metrics.collect();
    let links = sandbox.meta.netns.as_deref().and_then(|netns| asker.links(netns)).unwrap_or_default();
    cri::PodSandboxMetrics {
        pod_sandbox_id: sandbox.id().to_owned(),
        metrics: metrics::of_pod(&labels(sandbox, None), &links),
        container_metrics,
    }
}

/// Reads a container's cgroup and counts its open files. Blocking.
fn read(runtime: &Runtime, container: &Container) -> (Reading, OpenFiles) {
    let (groups, group) = (&runtime.ports.groups, &container.meta.group);
    let (mut reading, processes) = (groups.read(group, Depth::Full), groups.processes(group));
    // CRI metrics have no unknown counts.
    reading.processes = u32::try_from(processes.len()).ok();
    reading.threads.get_or_insert_default();
    (reading, open_files::count(Path::new("/proc"), processes.into_iter().take(MOST_PROCESSES)))
}

fn inputs<'a>(
    container: &Container,
    (reading, files): &'a (Reading, OpenFiles),
    volume: Option<&MountedFileSystem>,
    written: Option<&LayerUsage>,
) -> MetricInputs<'a> {
    let used = written.map(|used| used.bytes).unwrap_or_default();
    MetricInputs {
        started_at: container.running().map(|started| whole_seconds(started.at_ns)).unwrap_or_default(),
        seen_at: whole_seconds(reading.at).unsigned_abs(),
        files: Some(*files),
        writable_layer: volume.map(|volume| MountedFileSystem { used, ..volume.clone() }),
        device_names: reading.devices.iter().map(|io| volume::device_name(io.device.0, io.device.1)).collect(),
        ..MetricInputs::of(reading)
    }
}

fn labels(sandbox: &Sandbox, container: Option<&Container>) -> Labels {
    let pod = sandbox.config.metadata.clone().unwrap_or_default();
    let (namespace, pod) = (pod.namespace, pod.name);
    match container {
        Some(container) => Labels {
            container: container.config.metadata.clone().unwrap_or_default().name,
            id: container.meta.group.clone(),
            image: container.meta.image_name.clone(),
            name: container.id().to_owned(),
            namespace,
            pod,
        },
        None => Labels {
            container: String::new(),
            id: sandbox.meta.group.clone(),
            image: PAUSE.to_owned(),
            name: sandbox.id().to_owned(),
            namespace,
            pod,
        },
    }
}
