//! Adapter of the stats provider: cgroup names, pod directories, and the stats and metrics pages.

use std::{path::PathBuf, sync::Arc};

use async_trait::async_trait;
use bytes::Bytes;
use tracing::warn;

use crate::{
    engine::PodReader,
    node::MachineInfo,
    resources::{
        CgroupDriver,
        names::{CLASSES, PodTree},
    },
};
use berth_config::LoadedConfig;
use berth_cri::{ImageService, RuntimeService};
use berth_metrics::{Registry, StatsMetrics, StatsSource, exposition::ExpositionFormat};
use berth_ports::{ClaimedVolumes, Clock, PodObserver};
use berth_server::ports::{MetricsPage, Statistics, SummaryForm};
use berth_stats::{
    Form, HiddenMetrics, Host, MeasurementTasks, PageCompression, PodCgroupPaths, PodDirectories, PodPaths,
    StatsConfig, StatsDeps, StatsProvider, Storage, VolumePath, host,
};
use berth_types::{PodRef, PodSpec, PodUid, api};
use berth_volumes::PodLayout;

/// Upper limit of open control files: about twenty for each of 800 cgroups.
const MAX_OPEN: u64 = 16_384;

/// Dependencies of the stats pages.
pub struct StatsPagesDeps {
    /// Observed state of the pods.
    pub observer: Arc<dyn PodObserver>,
    /// Runtime service of the CRI.
    pub runtime: Arc<dyn RuntimeService>,
    /// Image service of the CRI.
    pub images: Arc<dyn ImageService>,
    /// Name of the runtime, from which the name of its process is derived.
    pub runtime_name: Arc<str>,
    /// Cgroup driver.
    pub driver: CgroupDriver,
    /// `nodeName` of the stats summary.
    pub node_name: String,
    /// Desired pods.
    pub pods: PodReader,
    /// Volumes of the pods that are bound to claims.
    pub claimed: Arc<dyn ClaimedVolumes>,
    /// Wall clock.
    pub clock: Arc<dyn Clock>,
    /// Registry of the metrics about readings.
    pub registry: Registry,
    /// Registry of the probes page.
    pub probes: Registry,
}

/// Creates the stats pages, and the surveyors that measure directories: run these until the agent stops. Blocking, but
/// reads kernel files only.
pub fn open(
    loaded: &LoadedConfig,
    machine: &MachineInfo,
    parts: StatsPagesDeps,
) -> (Arc<StatsPages>, MeasurementTasks) {
    let directories = Directories {
        root: loaded.root_directory(),
        logs: PathBuf::from(&loaded.config.pod_logs_dir),
        pods: parts.pods,
        claimed: Some(parts.claimed.clone()),
    };
    let deps = StatsDeps {
        observer: parts.observer,
        runtime: parts.runtime,
        images: parts.images,
        groups: groups(loaded, parts.driver),
        directories: Arc::new(directories),
        claimed: Some(parts.claimed),
        clock: parts.clock,
        metrics: StatsMetrics::new(&parts.registry),
    };
    let config = config(loaded, machine, parts.node_name, &parts.runtime_name);
    let (provider, surveyors) = StatsProvider::new(config, deps);
    berth_metrics::register_disk_usages(&parts.registry, Arc::new(provider.clone()));
    let started = berth_metrics::start_time_seconds().unwrap_or_default() as u64;
    (Arc::new(StatsPages { provider, probes: parts.probes, started }), surveyors)
}

fn config(loaded: &LoadedConfig, machine: &MachineInfo, node_name: String, runtime: &str) -> StatsConfig {
    let root = PathBuf::from("/");
    let cpus = u64::try_from(machine.cpus.len()).unwrap_or_default();
    let (cores, sockets) = host::topology(&root, cpus);
    let host = Host {
        booted_at: host::booted_at(&root),
        cpus,
        cores,
        sockets,
        kernel: machine.kernel_release.clone(),
        os: machine.os_image.clone(),
        machine_id: machine.machine_id.clone(),
        system_uuid: machine.system_uuid.clone(),
        boot_id: machine.boot_id.clone(),
        max_pids: machine.max_pids,
    };
    let period = loaded.config.volume_stats_agg_period;
    StatsConfig {
        node_name,
        root,
        root_directory: loaded.root_directory(),
        volume_period: (!period.is_negative()).then(|| period.std()),
        kubelet_group: loaded.config.kubelet_cgroups.clone(),
        runtime_group: loaded.flags.runtime_cgroups.clone(),
        system_group: loaded.config.system_cgroups.clone(),
        runtime_process: runtime.replace("cri-o", "crio"),
        reports_filesystems: loaded.config.local_storage_capacity_isolation,
        max_open: max_open(),
        host,
        source: if loaded.gates.enabled("PodAndContainerStatsFromCRI") {
            StatsSource::Runtime
        } else {
            StatsSource::Groups
        },
        hidden_metrics: hidden_metrics(&loaded.config.show_hidden_metrics_for_version),
    }
}

/// Whether `showHiddenMetricsForVersion` shows hidden metrics; if so, logs which one, as kubelet does.
fn hidden_metrics(shown_for_version: &str) -> HiddenMetrics {
    if shown_for_version.is_empty() {
        return HiddenMetrics::Omitted;
    }
    warn!("Hidden metrics(scrape_error) have been manually overridden, showing this very deprecated metric.");
    HiddenMetrics::Shown
}

/// Limit of open control files: a quarter of this process's `RLIMIT_NOFILE` at most; the rest is for pods and clients.
fn max_open() -> usize {
    let limit = rustix::process::getrlimit(rustix::process::Resource::Nofile).current.unwrap_or(u64::MAX);
    usize::try_from((limit / 4).min(MAX_OPEN)).unwrap_or_default()
}

/// Cgroup names of pods as configured.
pub fn groups(loaded: &LoadedConfig, driver: CgroupDriver) -> Arc<dyn PodCgroupPaths> {
    let tree = PodTree::new(&loaded.config.cgroup_root, driver).ok();
    Arc::new(Groups(tree.filter(|_| loaded.config.cgroups_per_qos)))
}

/// Cgroup names from [`crate::resources`]; empty if pods have no cgroups.
struct Groups(Option<PodTree>);

impl PodCgroupPaths for Groups {
    fn above(&self) -> Vec<String> {
        let paths = |tree: &PodTree| CLASSES.into_iter().map(|class| tree.path(&tree.qos(class))).collect();
        self.0.as_ref().map(paths).unwrap_or_default()
    }

    fn of_pod(&self, pod: &PodUid) -> Vec<String> {
        let paths = |tree: &PodTree| tree.pod_anywhere(pod).iter().map(|name| tree.path(name)).collect();
        self.0.as_ref().map(paths).unwrap_or_default()
    }
}

/// Directories of pods, from the layout of `berth_volumes`.
struct Directories {
    root: PathBuf,
    logs: PathBuf,
    pods: PodReader,
    claimed: Option<Arc<dyn ClaimedVolumes>>,
}

impl PodDirectories for Directories {
    fn of(&self, pod: &PodRef) -> PodPaths {
        let logs = format!("{}_{}_{}", pod.namespace, pod.name, pod.uid);
        // Names also come from the runtime's labels: none may lead out of the directory.
        let layout = PodLayout::new(&self.root, &pod.uid).ok().filter(|_| !logs.contains('/'));
        let Some(layout) = layout else { return PodPaths::default() };
        let known = self.pods.desired().iter().find(|known| *known.uid() == pod.uid).cloned();
        let spec = known.as_ref().map(|pod| pod.spec());
        let own = spec.into_iter().flat_map(PodSpec::volumes).filter_map(|volume| place(&layout, &volume));
        let claimed = self.claimed.iter().flat_map(|volumes| volumes.of(&pod.uid));
        let claimed = claimed.map(|own| VolumePath {
            name: own.volume,
            path: own.path,
            storage: Storage::Other,
            claim: Some(own.claim),
        });
        PodPaths {
            logs: self.logs.join(logs),
            etc_hosts: Some(layout.pod().join("etc-hosts")),
            messages: Some(layout.pod().join("containers")),
            volumes: own.chain(claimed).collect(),
        }
    }
}

/// Directory of a volume; `None` for volumes that are not in a directory of the agent.
fn place(layout: &PodLayout, volume: &api::Volume) -> Option<VolumePath> {
    let on_disk = |medium: Option<&str>| match medium {
        None | Some("") => Storage::Ephemeral,
        Some(_) => Storage::Other,
    };
    let (plugin, storage) = if let Some(empty) = &volume.empty_dir {
        ("kubernetes.io~empty-dir", on_disk(empty.medium.as_deref()))
    } else if volume.config_map.is_some() {
        ("kubernetes.io~configmap", Storage::Ephemeral)
    } else if volume.secret.is_some() {
        ("kubernetes.io~secret", Storage::Other)
    } else if volume.downward_api.is_some() {
        ("kubernetes.io~downward-api", Storage::Other)
    } else if volume.projected.is_some() {
        ("kubernetes.io~projected", Storage::Other)
    } else {
        return None;
    };
    if volume.name.contains('/') || matches!(volume.name.as_str(), "" | "." | "..") {
        return None;
    }
    let path = layout.volume(plugin, &volume.name);
    Some(VolumePath { name: volume.name.clone(), path, storage, claim: None })
}

/// Implements the server's stats and metrics pages.
pub struct StatsPages {
    provider: StatsProvider,
    probes: Registry,
    started: u64,
}

impl StatsPages {
    /// Provider of the stats.
    pub fn provider(&self) -> StatsProvider {
        self.provider.clone()
    }
}

#[async_trait]
impl Statistics for StatsPages {
    async fn summary(&self, form: SummaryForm) -> Result<Bytes, String> {
        let form = match form {
            SummaryForm::Full => Form::Full,
            SummaryForm::Short => Form::Short,
        };
        self.provider.summary(form).await
    }

    async fn metrics(&self, page: MetricsPage, format: ExpositionFormat, is_zipped: bool) -> Result<Bytes, String> {
        let compressed = if is_zipped { PageCompression::Gzip } else { PageCompression::No };
        let page = match page {
            MetricsPage::Resource => berth_stats::MetricsPage::Resource,
            MetricsPage::Cadvisor => berth_stats::MetricsPage::Cadvisor,
            MetricsPage::Probes => {
                let mut page = Vec::new();
                format.encode(self.probes.gather(), &mut page);
                return Ok(berth_stats::compressed(page.into(), compressed));
            }
        };
        self.provider.metrics(page, format, compressed).await
    }

    fn process_start(&self) -> u64 {
        self.started
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use berth_types::Pod;

    fn directories(pods: Vec<Arc<Pod>>) -> Directories {
        Directories { root: "/root".into(), logs: "/logs".into(), pods: PodReader::fixed(pods), claimed: None }
    }

    fn id(uid: &str) -> PodRef {
        PodRef { uid: uid.into(), name: "web".into(), namespace: "ns".into() }
    }

    #[test]
    fn directories_are_those_of_the_other_rooms() {
        let object = serde_json::json!({
            "metadata": {"uid": "u1", "name": "web", "namespace": "ns"},
            "spec": {"containers": [], "volumes": [
                {"name": "cache", "emptyDir": {}},
                {"name": "memory", "emptyDir": {"medium": "Memory"}},
                {"name": "settings", "configMap": {"name": "x"}},
                {"name": "host", "hostPath": {"path": "/x"}},
                {"name": "../../x", "emptyDir": {}},
            ]},
        });
        let pod = Pod::new(serde_json::from_value(object).expect("a pod")).expect("complete");
        let found = directories(vec![Arc::new(pod)]).of(&id("u1"));
        assert_eq!(found.logs, PathBuf::from("/logs/ns_web_u1"));
        assert_eq!(found.etc_hosts, Some("/root/pods/u1/etc-hosts".into()));
        let volumes: Vec<String> =
            found.volumes.iter().map(|v| format!("{} {:?}", v.path.display(), v.storage)).collect();
        assert_eq!(
            volumes,
            [
                "/root/pods/u1/volumes/kubernetes.io~empty-dir/cache Ephemeral",
                "/root/pods/u1/volumes/kubernetes.io~empty-dir/memory Other",
                "/root/pods/u1/volumes/kubernetes.io~configmap/settings Ephemeral",
            ]
        );
    }

    #[test]
    fn names_that_lead_elsewhere_have_no_directories() {
        let outside = PodRef { name: "../../etc".into(), ..id("u") };
        for pod in [outside, id("../x"), id("..")] {
            assert_eq!(directories(Vec::new()).of(&pod), PodPaths::default(), "{pod}");
        }
    }

    #[test]
    fn groups_are_named_by_the_resources_room() {
        let tree = PodTree::new("", CgroupDriver::Systemd).ok();
        let groups = Groups(tree);
        assert_eq!(groups.above()[0], "/kubepods.slice");
        assert_eq!(
            groups.of_pod(&"a-b".into())[1],
            "/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-poda_b.slice"
        );
        assert!(Groups(None).above().is_empty());
    }
}
