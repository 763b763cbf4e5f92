//! What the runtime tells of usage: writable layers and images. Two calls and a look at the file
//! systems they lie on, each with a deadline. Behaviour: spec 04b §7.2.

use std::{
    collections::{BTreeSet, HashMap},
    path::Path,
    sync::Arc,
    time::Duration,
};

use tokio::time::timeout;
use tracing::debug;

use super::{
    disk::FileSystem,
    summary::{LayerUsage, RuntimeReport, RuntimeUsage},
};
use crate::{
    cri::{ImageService, RuntimeService},
    proto::cri,
};

/// How long one call to the runtime may take.
const CALL_LIMIT: Duration = Duration::from_secs(10);
/// How long a look at file systems may take.
const DISK_LIMIT: Duration = Duration::from_secs(5);

/// Asks for everything; what does not answer is absent.
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

fn container(stats: cri::ContainerStats) -> Option<(crate::pod::ContainerId, RuntimeUsage)> {
    let id = stats.attributes?.id;
    let value = |value: Option<cri::UInt64Value>| value.map(|v| v.value);
    let usage = RuntimeUsage {
        cpu: stats.cpu.map(|cpu| (cpu.timestamp, value(cpu.usage_core_nano_seconds))),
        memory: stats
            .memory
            .map(|memory| (memory.timestamp, value(memory.usage_bytes), value(memory.working_set_bytes))),
        layer: stats.writable_layer.as_ref().map(layer),
    };
    Some((id.into(), usage))
}

fn layer(usage: &cri::FilesystemUsage) -> LayerUsage {
    LayerUsage {
        at: usage.timestamp,
        used: usage.used_bytes.map(|v| v.value),
        inodes_used: usage.inodes_used.map(|v| v.value),
        mountpoint: usage.fs_id.as_ref().map(|id| id.mountpoint.clone()).unwrap_or_default(),
    }
}

/// The file systems that hold the mount points of a report.
async fn filesystems(report: &RuntimeReport) -> HashMap<String, FileSystem> {
    let layers = report.containers.values().filter_map(|usage| usage.layer.as_ref());
    let all = layers.chain(&report.images).chain(&report.layers);
    let points: BTreeSet<String> =
        all.map(|layer| layer.mountpoint.clone()).filter(|point| !point.is_empty()).collect();
    let look = tokio::task::spawn_blocking(move || {
        points
            .into_iter()
            .filter_map(|point| Some((FileSystem::of(Path::new(&point)).ok()?, point)))
            .collect::<Vec<_>>()
    });
    let found = timeout(DISK_LIMIT, look).await.ok().and_then(Result::ok).unwrap_or_default();
    found.into_iter().map(|(fs, point)| (point, fs)).collect()
}

/// The image a sandbox runs, from the runtime's verbose account of it; empty where it does not tell.
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
        assert_eq!(
            (id.as_str(), usage),
            ("c1", RuntimeUsage { cpu: Some((5, Some(7))), memory: None, layer: Some(layer) })
        );
        assert_eq!(container(cri::ContainerStats::default()), None);
    }

    #[test]
    fn a_sandbox_tells_its_image() {
        let info = |text: &str| HashMap::from([("info".to_owned(), text.to_owned())]);
        assert_eq!(sandbox_image(&info(r#"{"pid":1,"image":"registry/pause:3.10"}"#)), "registry/pause:3.10");
        for odd in ["", "{", "{}", r#"{"image":1}"#, "[]"] {
            assert_eq!(sandbox_image(&info(odd)), "", "{odd}");
        }
        assert_eq!(sandbox_image(&HashMap::new()), "");
    }
}
