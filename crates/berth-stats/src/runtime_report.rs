//! CRI statistics: writable layers, images, containers without a readable cgroup, and pods.
//!
//! Pods are queried only where the runtime is the source of statistics. Every call and the reading of file systems
//! have a timeout. Implements spec 04b §7.2.

use std::{
    collections::{BTreeSet, HashMap},
    path::Path,
    sync::Arc,
    time::Duration,
};

use tokio::time::timeout;
use tracing::debug;

use super::{
    cgroup_files::{Pressure, PressureStats},
    disk::FileSystem,
    network::{DirectionCounters, LinkCounters, NetworkInterfaces},
    summary::{
        CpuStats, LayerUsage, MemoryStats, NetworkStats, Resources, RuntimePod, RuntimeReport, RuntimeUsage, SwapStats,
    },
};
use berth_cri::{ImageService, RuntimeService};
use berth_proto::cri;
use berth_types::{ContainerId, SandboxId};

/// Timeout of one CRI call.
const CALL_LIMIT: Duration = Duration::from_secs(10);
/// Timeout of reading file systems.
const DISK_LIMIT: Duration = Duration::from_secs(5);

/// Queries container statistics and image file systems; what fails or times out is absent from the report.
pub async fn ask(runtime: Arc<dyn RuntimeService>, images: Arc<dyn ImageService>) -> Arc<RuntimeReport> {
    let containers = timeout(CALL_LIMIT, runtime.list_container_stats(None));
    let image_fs = timeout(CALL_LIMIT, images.image_fs_info());
    let (containers, image_fs) = tokio::join!(containers, image_fs);
    let mut report = RuntimeReport::default();
    match containers {
        Ok(Ok(stats)) => report.containers = stats.into_iter().filter_map(container).collect(),
        Ok(Err(error)) => debug!(err = %error, "Failed to list container stats"),
        Err(_) => debug!("Listing container stats timed out"),
    }
    match image_fs {
        Ok(Ok(info)) => {
            report.images = info.image_filesystems.first().map(layer);
            report.layers = info.container_filesystems.first().map(layer);
        }
        Ok(Err(error)) => debug!(err = %error, "Failed to get image file system info"),
        Err(_) => debug!("Image file system info timed out"),
    }
    report.filesystems = filesystems(&report).await;
    Arc::new(report)
}

/// Queries pod statistics; empty where the runtime does not implement the call.
///
/// # Errors
/// The call fails or times out.
pub async fn pods(runtime: Arc<dyn RuntimeService>) -> Result<Arc<HashMap<SandboxId, RuntimePod>>, String> {
    match timeout(CALL_LIMIT, runtime.list_pod_sandbox_stats(None)).await {
        Ok(Ok(stats)) => Ok(Arc::new(stats.into_iter().filter_map(pod).collect())),
        Ok(Err(error)) if error.is_unimplemented() => Ok(Arc::default()),
        Ok(Err(error)) => Err(error.to_string()),
        Err(_) => Err("timed out waiting for the runtime".to_owned()),
    }
}

fn pod(stats: cri::PodSandboxStats) -> Option<(SandboxId, RuntimePod)> {
    let id = stats.attributes?.id;
    let linux = stats.linux?;
    let pod = RuntimePod {
        usage: resources(linux.cpu.as_ref(), linux.memory.as_ref(), None, linux.io.as_ref()),
        network: linux.network.as_ref().map(network),
        processes: linux.process.and_then(|process| value(process.process_count)),
        containers: linux.containers.into_iter().filter_map(container).collect(),
    };
    Some((id.into(), pod))
}

fn container(stats: cri::ContainerStats) -> Option<(ContainerId, RuntimeUsage)> {
    let id = stats.attributes?.id;
    let usage = resources(stats.cpu.as_ref(), stats.memory.as_ref(), stats.swap.as_ref(), stats.io.as_ref());
    Some((id.into(), RuntimeUsage { usage, layer: stats.writable_layer.as_ref().map(layer) }))
}

fn value(value: Option<cri::UInt64Value>) -> Option<u64> {
    value.map(|v| v.value)
}

fn resources(
    cpu: Option<&cri::CpuUsage>,
    memory: Option<&cri::MemoryUsage>,
    swap: Option<&cri::SwapUsage>,
    io: Option<&cri::IoUsage>,
) -> Resources {
    Resources {
        cpu: cpu.map(|cpu| CpuStats {
            at: cpu.timestamp,
            usage_nano_cores: value(cpu.usage_nano_cores),
            usage_core_nano_seconds: Some(value(cpu.usage_core_nano_seconds).unwrap_or_default()),
            psi: cpu.psi.as_ref().map(stalls),
        }),
        memory: memory.map(|memory| MemoryStats {
            at: memory.timestamp,
            available: value(memory.available_bytes),
            usage: value(memory.usage_bytes),
            working_set: Some(value(memory.working_set_bytes).unwrap_or_default()),
            rss: value(memory.rss_bytes),
            page_faults: value(memory.page_faults),
            major_page_faults: value(memory.major_page_faults),
            psi: memory.psi.as_ref().map(stalls),
        }),
        io: io.and_then(|io| Some((io.timestamp, stalls(io.psi.as_ref()?)))),
        swap: swap.map(|swap| SwapStats {
            at: swap.timestamp,
            available: value(swap.swap_available_bytes),
            usage: value(swap.swap_usage_bytes),
        }),
    }
}

fn stalls(psi: &cri::PsiStats) -> PressureStats {
    let line = |data: &Option<cri::PsiData>| {
        let data = data.unwrap_or_default();
        Pressure { total: data.total, avg10: data.avg10, avg60: data.avg60, avg300: data.avg300 }
    };
    PressureStats { some: line(&psi.some), full: line(&psi.full) }
}

/// Converts CRI network usage; the default interface comes first and is the primary one.
fn network(usage: &cri::NetworkUsage) -> NetworkStats {
    let direction = |bytes, errors| DirectionCounters {
        bytes: value(bytes).unwrap_or_default(),
        errors: value(errors).unwrap_or_default(),
        ..DirectionCounters::default()
    };
    let interface = |usage: &cri::NetworkInterfaceUsage| LinkCounters {
        name: usage.name.clone(),
        received: direction(usage.rx_bytes, usage.rx_errors),
        sent: direction(usage.tx_bytes, usage.tx_errors),
    };
    let primary = usage.default_interface.as_ref();
    let is_other = |other: &&cri::NetworkInterfaceUsage| primary.is_none_or(|primary| primary.name != other.name);
    let interfaces = primary.into_iter().chain(usage.interfaces.iter().filter(is_other)).map(interface).collect();
    let network = NetworkInterfaces { interfaces, primary: primary.map(|_| 0) };
    NetworkStats { at: usage.timestamp, network }
}

fn layer(usage: &cri::FilesystemUsage) -> LayerUsage {
    LayerUsage {
        at: usage.timestamp,
        used: usage.used_bytes.map(|v| v.value),
        inodes_used: usage.inodes_used.map(|v| v.value),
        mountpoint: usage.fs_id.as_ref().map(|id| id.mountpoint.clone()).unwrap_or_default(),
    }
}

/// Reads the file systems that contain the mount points of a report.
async fn filesystems(report: &RuntimeReport) -> HashMap<String, FileSystem> {
    let layers = report.containers.values().filter_map(|usage| usage.layer.as_ref());
    let all = layers.chain(&report.images).chain(&report.layers);
    let points: BTreeSet<String> =
        all.map(|layer| layer.mountpoint.clone()).filter(|point| !point.is_empty()).collect();
    let read = tokio::task::spawn_blocking(move || {
        points
            .into_iter()
            .filter_map(|point| Some((FileSystem::of(Path::new(&point)).ok()?, point)))
            .collect::<Vec<_>>()
    });
    let found = timeout(DISK_LIMIT, read).await.ok().and_then(Result::ok).unwrap_or_default();
    found.into_iter().map(|(fs, point)| (point, fs)).collect()
}

/// Image of a sandbox, from the runtime's verbose status; empty where it is absent.
pub fn sandbox_image(info: &HashMap<String, String>) -> String {
    let image = info.get("info").and_then(|text| {
        let info: serde_json::Value = serde_json::from_str(text).ok()?;
        Some(info.get("image")?.as_str()?.to_owned())
    });
    image.unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_the_runtime_leaves_out_is_absent() {
        let value = |value| Some(cri::UInt64Value { value });
        let attributes = Some(cri::ContainerAttributes { id: "c1".to_owned(), ..Default::default() });
        let stats = cri::ContainerStats {
            attributes,
            cpu: Some(cri::CpuUsage { timestamp: 5, usage_core_nano_seconds: value(7), ..Default::default() }),
            writable_layer: Some(cri::FilesystemUsage { timestamp: 6, used_bytes: value(8), ..Default::default() }),
            ..Default::default()
        };
        let (id, usage) = container(stats).expect("known");
        let layer = LayerUsage { at: 6, used: Some(8), ..LayerUsage::default() };
        let cpu = CpuStats { at: 5, usage_core_nano_seconds: Some(7), ..CpuStats::default() };
        let expected = Resources { cpu: Some(cpu), ..Resources::default() };
        assert_eq!((id.as_str(), usage), ("c1", RuntimeUsage { usage: expected, layer: Some(layer) }));
        assert_eq!(container(cri::ContainerStats::default()), None);
    }

    #[test]
    fn a_pod_as_the_runtime_reports_it() {
        let value = |value| Some(cri::UInt64Value { value });
        let line = |total| Some(cri::PsiData { total, avg10: 1.5, ..Default::default() });
        let psi = Some(cri::PsiStats { some: line(9), full: line(4) });
        let interface = |name: &str, bytes| cri::NetworkInterfaceUsage {
            name: name.to_owned(),
            rx_bytes: value(bytes),
            ..Default::default()
        };
        let stats = cri::PodSandboxStats {
            attributes: Some(cri::PodSandboxAttributes { id: "s1".to_owned(), ..Default::default() }),
            linux: Some(cri::LinuxPodSandboxStats {
                cpu: Some(cri::CpuUsage { timestamp: 1, usage_nano_cores: value(2), psi, ..Default::default() }),
                network: Some(cri::NetworkUsage {
                    timestamp: 3,
                    default_interface: Some(interface("eth0", 5)),
                    interfaces: vec![interface("eth0", 5), interface("net1", 6)],
                }),
                process: Some(cri::ProcessUsage { timestamp: 1, process_count: value(8) }),
                ..Default::default()
            }),
            ..Default::default()
        };
        let (id, usage) = pod(stats).expect("known");
        assert_eq!((id.as_str(), usage.processes), ("s1", Some(8)));
        let cpu = usage.usage.cpu.expect("received");
        assert_eq!(
            (cpu.usage_nano_cores, cpu.psi.map(|psi| (psi.some.total, psi.full.total))),
            (Some(2), Some((9, 4)))
        );
        let network = usage.network.expect("received");
        let names: Vec<(&str, u64)> =
            network.network.interfaces.iter().map(|i| (i.name.as_str(), i.received.bytes)).collect();
        assert_eq!((network.at, network.network.primary, names), (3, Some(0), vec![("eth0", 5), ("net1", 6)]));
        assert_eq!(pod(cri::PodSandboxStats::default()), None);
    }

    #[test]
    fn a_sandbox_has_its_image() {
        let info = |text: &str| HashMap::from([("info".to_owned(), text.to_owned())]);
        assert_eq!(sandbox_image(&info(r#"{"pid":1,"image":"registry/pause:3.10"}"#)), "registry/pause:3.10");
        for odd in ["", "{", "{}", r#"{"image":1}"#, "[]"] {
            assert_eq!(sandbox_image(&info(odd)), "", "{odd}");
        }
        assert_eq!(sandbox_image(&HashMap::new()), "");
    }
}
