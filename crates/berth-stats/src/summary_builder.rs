//! Builds the stats summary from a snapshot, runtime statistics, and disk measurements. Pure.
//!
//! A missing input omits its fields, not the summary; subtractions saturate at 0. Implements spec 04b §7.2.

use std::{collections::HashMap, path::PathBuf};

use jiff::Timestamp;

use super::{
    disk::{FileSystem, Usage},
    disk_measurer::Measurement,
    network::NetworkInterfaces,
    pods::ReportedContainer,
    reader::CgroupObservation,
    reading::WallNs,
    snapshot::{PodUsage, Snapshot},
    summary::{
        ContainerStats, CpuStats, Form, FsStats, LayerUsage, MemoryStats, NetworkStats, NodeStats, PodPaths, PodStats,
        Resources, RuntimePod, RuntimeReport, RuntimeUsage, Seconds, StatsSummary, Storage, SwapStats, VolumePath,
        VolumeStats,
    },
};
use berth_types::{PodUid, SandboxId};

/// Readings, file systems, and runtime statistics of one pass.
pub struct SummaryInputs<'a> {
    /// Requested extent.
    pub form: Form,
    /// Node name.
    pub node: &'a str,
    /// Boot time of the machine.
    pub booted_at: Seconds,
    /// Snapshot of the cgroups.
    pub snapshot: &'a Snapshot,
    /// Container statistics and image file systems of the runtime.
    pub runtime: Option<&'a RuntimeReport>,
    /// Pod statistics of the runtime, where it is the configured source.
    pub runtime_pods: &'a HashMap<SandboxId, RuntimePod>,
    /// Known disk measurements by path.
    pub measured: &'a HashMap<PathBuf, Measurement>,
    /// Directories of the pods.
    pub places: &'a HashMap<PodUid, PodPaths>,
    /// The file system of the agent's root directory.
    pub root_fs: Option<FileSystem>,
}

/// Builds the summary.
///
/// # Errors
/// The snapshot lacks the root cgroup.
pub fn build(inputs: &SummaryInputs<'_>) -> Result<StatsSummary, String> {
    let root = inputs.snapshot.root.as_ref().ok_or("failed to get root cgroup stats")?;
    let pods = inputs.snapshot.pods.iter().filter(|seen| !seen.pod.containers.is_empty());
    Ok(StatsSummary { node: node(inputs, root), pods: pods.map(|seen| pod(inputs, root, seen)).collect() })
}

fn is_full(inputs: &SummaryInputs<'_>) -> bool {
    inputs.form == Form::Full
}

fn seconds(at: WallNs) -> Seconds {
    at.div_euclid(1_000_000_000)
}

fn node(inputs: &SummaryInputs<'_>, root: &CgroupObservation) -> NodeStats {
    let at = seconds(root.reading.at);
    let system = inputs.snapshot.system.iter().map(|(group, seen)| ContainerStats {
        name: group.name.to_owned(),
        started_at: Timestamp::from_second(group.started_at.unwrap_or(seen.reading.created_at)).unwrap_or_default(),
        usage: resources(seen, inputs),
        rootfs: None,
        logs: None,
    });
    let mut node = NodeStats {
        name: inputs.node.to_owned(),
        system: system.collect(),
        started_at: if is_full(inputs) { inputs.booted_at } else { root.reading.created_at },
        usage: resources(root, inputs),
        ..NodeStats::default()
    };
    node.system.sort_by(|a, b| a.name.cmp(&b.name));
    if is_full(inputs) {
        node.network = network(inputs.snapshot.network.as_ref(), root.reading.at);
        node.fs = inputs.root_fs.map(|fs| whole(at, &fs));
        node.runtime = inputs.runtime.map(runtime);
        node.rlimit = inputs.snapshot.processes.map(|processes| (at, processes));
    }
    node
}

fn runtime(report: &RuntimeReport) -> (Option<FsStats>, Option<FsStats>) {
    let of = |usage: &LayerUsage| part(seconds(usage.at), usage, report);
    let images = report.images.as_ref().map(of);
    (images, report.layers.as_ref().map(of).or(images))
}

/// Usage of a whole file system.
fn whole(at: Seconds, fs: &FileSystem) -> FsStats {
    FsStats {
        at,
        available: Some(fs.available),
        capacity: Some(fs.capacity),
        used: Some(fs.used()),
        inodes_free: Some(fs.inodes_free),
        inodes: Some(fs.inodes),
        inodes_used: Some(fs.inodes_used()),
    }
}

/// Usage of one directory within its file system.
fn taken(at: Seconds, fs: Option<&FileSystem>, usage: Usage) -> FsStats {
    let stats = fs.map(|fs| whole(at, fs)).unwrap_or_default();
    FsStats { at, used: Some(usage.bytes), inodes_used: Some(usage.inodes), ..stats }
}

fn part(at: Seconds, layer: &LayerUsage, report: &RuntimeReport) -> FsStats {
    let stats = report.filesystems.get(&layer.mountpoint).map(|fs| whole(at, fs)).unwrap_or_default();
    FsStats { at, used: layer.used, inodes_used: layer.inodes_used, ..stats }
}

fn network(network: Option<&NetworkInterfaces>, at: WallNs) -> Option<NetworkStats> {
    let network = network.filter(|network| !network.interfaces.is_empty())?;
    Some(NetworkStats { at, network: network.clone() })
}

/// Resource usage of a cgroup.
fn resources(seen: &CgroupObservation, inputs: &SummaryInputs<'_>) -> Resources {
    let reading = &seen.reading;
    let cpu = reading.cpu.map(|cpu| CpuStats {
        at: reading.at,
        usage_nano_cores: cpu.rate,
        usage_core_nano_seconds: Some(cpu.times.usage_ns),
        psi: reading.pressure.cpu,
    });
    let memory = reading.memory.map(|memory| MemoryStats {
        at: reading.at,
        available: memory.available(),
        usage: Some(memory.usage),
        working_set: Some(memory.working_set()),
        rss: Some(memory.stat.anon),
        page_faults: Some(memory.stat.pgfault),
        major_page_faults: Some(memory.stat.pgmajfault),
        psi: reading.pressure.memory,
    });
    let swap = reading.memory.map(|memory| SwapStats {
        at: reading.at,
        available: memory.swap_available(),
        usage: Some(memory.swap),
    });
    let io = reading.pressure.io.filter(|_| is_full(inputs)).map(|stalls| (reading.at, stalls));
    Resources { cpu, memory, io, swap }
}

/// Resource usage reported by the runtime, reduced to the requested form.
fn runtime_resources(usage: &Resources, inputs: &SummaryInputs<'_>) -> Resources {
    Resources { io: usage.io.filter(|_| is_full(inputs)), ..usage.clone() }
}

fn pod(inputs: &SummaryInputs<'_>, root: &CgroupObservation, seen: &PodUsage) -> PodStats {
    let places = inputs.places.get(&seen.pod.id.uid);
    let by_runtime = inputs.runtime_pods.get(&seen.pod.sandbox);
    let containers: Vec<ContainerStats> = seen
        .pod
        .containers
        .iter()
        .zip(&seen.containers)
        .map(|(shown, found)| {
            let by_runtime = by_runtime.and_then(|pod| pod.containers.get(&shown.id));
            container(inputs, places, shown, by_runtime, found.as_ref())
        })
        .collect();
    let usage = match (by_runtime, &seen.group) {
        (Some(pod), _) => {
            let (own, all) = (runtime_resources(&pod.usage, inputs), sum(&containers));
            Resources {
                cpu: own.cpu.or(all.cpu),
                memory: own.memory.or(all.memory),
                swap: own.swap.or(all.swap),
                ..own
            }
        }
        (None, Some(group)) => resources(group, inputs),
        (None, None) => sum(&containers),
    };
    let mut stats = PodStats {
        id: seen.pod.id.clone(),
        started_at: seen.pod.started_at.as_second(),
        containers,
        usage,
        network: None,
        volumes: Vec::new(),
        ephemeral_storage: None,
        processes: None,
    };
    if is_full(inputs) {
        let at = seen.group.as_ref().map_or(root.reading.at, |group| group.reading.at);
        stats.network = network(seen.network.as_ref(), at);
        stats.volumes = volumes(inputs, places);
        stats.ephemeral_storage = ephemeral(inputs, seconds(root.reading.at), places, &stats);
        stats.processes = processes(seen, by_runtime);
        if let Some(pod) = by_runtime {
            stats.network.clone_from(&pod.network);
        }
    }
    stats
}

/// Number of processes of a pod: from the runtime where it is the configured source, else from the cgroups.
pub fn processes(seen: &PodUsage, by_runtime: Option<&RuntimePod>) -> Option<u64> {
    let counts = || seen.containers.iter().flatten().filter_map(|container| container.reading.processes);
    by_runtime.map_or_else(|| Some(counts().map(u64::from).sum()), |pod| pod.processes)
}

fn container(
    inputs: &SummaryInputs<'_>,
    places: Option<&PodPaths>,
    shown: &ReportedContainer,
    by_runtime: Option<&RuntimeUsage>,
    seen: Option<&CgroupObservation>,
) -> ContainerStats {
    let listed = inputs.runtime.and_then(|report| report.containers.get(&shown.id));
    let usage = match (by_runtime, seen, listed) {
        (Some(container), ..) => runtime_resources(&container.usage, inputs),
        (None, Some(seen), _) => resources(seen, inputs),
        (None, None, Some(container)) => runtime_resources(&container.usage, inputs),
        (None, None, None) => Resources::default(),
    };
    let mut stats =
        ContainerStats { name: shown.name.to_string(), started_at: shown.created_at, usage, rootfs: None, logs: None };
    if is_full(inputs) {
        let layer = by_runtime.and_then(|usage| usage.layer.as_ref()).or_else(|| listed?.layer.as_ref());
        let of = |layer: &LayerUsage| Some(part(seconds(layer.at), layer, inputs.runtime?));
        stats.rootfs = layer.and_then(of);
        let logs = places.and_then(|places| inputs.measured.get(&places.logs.join(&*shown.name)));
        stats.logs = logs.map(|logs| taken(logs.at.as_second(), inputs.root_fs.as_ref(), logs.usage));
    }
    stats
}

/// Adds up the usage of the containers, for a pod without a cgroup.
fn sum(containers: &[ContainerStats]) -> Resources {
    fn add<T>(of: impl Iterator<Item = T>, more: impl Fn(T, T) -> T) -> Option<T> {
        of.reduce(more)
    }
    fn both(a: Option<u64>, b: Option<u64>) -> Option<u64> {
        match (a, b) {
            (Some(a), Some(b)) => Some(a.saturating_add(b)),
            (a, b) => a.or(b),
        }
    }
    let usages = || containers.iter().map(|container| &container.usage);
    let cpu = add(usages().filter_map(|u| u.cpu), |a, b| CpuStats {
        at: a.at.max(b.at),
        usage_nano_cores: both(a.usage_nano_cores, b.usage_nano_cores),
        usage_core_nano_seconds: both(a.usage_core_nano_seconds, b.usage_core_nano_seconds),
        psi: None,
    });
    let memory = add(usages().filter_map(|u| u.memory), |a, b| MemoryStats {
        at: a.at.max(b.at),
        available: both(a.available, b.available),
        usage: both(a.usage, b.usage),
        working_set: both(a.working_set, b.working_set),
        rss: both(a.rss, b.rss),
        page_faults: both(a.page_faults, b.page_faults),
        major_page_faults: both(a.major_page_faults, b.major_page_faults),
        psi: None,
    });
    let swap = add(usages().filter_map(|u| u.swap), |a, b| SwapStats {
        at: a.at.max(b.at),
        available: both(a.available, b.available),
        usage: both(a.usage, b.usage),
    });
    let cpu = cpu.map(|cpu| CpuStats { psi: None, ..cpu });
    Resources { cpu, memory: memory.map(|memory| MemoryStats { psi: None, ..memory }), io: None, swap }
}

fn volumes(inputs: &SummaryInputs<'_>, places: Option<&PodPaths>) -> Vec<VolumeStats> {
    let places = places.map(|places| places.volumes.as_slice()).unwrap_or_default();
    let measured = places.iter().filter_map(|place| Some((place, inputs.measured.get(&place.path)?)));
    let volume = |(place, measured): (&VolumePath, &Measurement)| {
        let stats = taken(measured.at.as_second(), measured.filesystem.as_ref(), measured.usage);
        // Volumes always have all six numbers.
        let known = |value: Option<u64>| Some(value.unwrap_or_default());
        let fs = FsStats {
            available: known(stats.available),
            capacity: known(stats.capacity),
            inodes_free: known(stats.inodes_free),
            inodes: known(stats.inodes),
            ..stats
        };
        VolumeStats { name: place.name.clone(), claim: place.claim.clone(), fs, is_abnormal: measured.is_abnormal }
    };
    let mut volumes: Vec<VolumeStats> = measured.map(volume).collect();
    volumes.sort_by(|a, b| a.name.cmp(&b.name));
    volumes
}

/// Sum of writable layers, logs, local volumes, termination messages, and the hosts file on the node's file system.
fn ephemeral(inputs: &SummaryInputs<'_>, at: Seconds, places: Option<&PodPaths>, pod: &PodStats) -> Option<FsStats> {
    let root = inputs.root_fs.as_ref()?;
    let layers = pod.containers.iter().flat_map(|c| [c.rootfs, c.logs]).flatten();
    let layers = layers.map(|fs| (fs.at, fs.used.unwrap_or_default(), fs.inodes_used.unwrap_or_default()));
    let local = places.into_iter().flat_map(|places| {
        let volumes = places.volumes.iter().filter(|volume| volume.storage == Storage::Ephemeral);
        volumes.map(|volume| &volume.path).chain([&places.logs]).chain(&places.etc_hosts)
    });
    let messages = places.and_then(|places| places.messages.as_ref());
    let messages = messages.into_iter().flat_map(|all| pod.containers.iter().map(|c| all.join(&*c.name)));
    let messages = messages.filter_map(|path| inputs.measured.get(&path));
    let local = local.filter_map(|path| inputs.measured.get(path)).chain(messages);
    let local = local.map(|measured| (measured.at.as_second(), measured.usage.bytes, measured.usage.inodes));
    let (mut newest, mut usage) = (at, Usage::default());
    for (at, bytes, inodes) in layers.chain(local) {
        newest = newest.max(at);
        usage.bytes = usage.bytes.saturating_add(bytes);
        usage.inodes = usage.inodes.saturating_add(inodes);
    }
    Some(taken(newest, Some(root), usage))
}

#[cfg(test)]
mod tests {
    use super::{
        super::testing::{AT_SECONDS, snapshot, summary},
        *,
    };
    use crate::{cgroup_files::PressureStats, reading::Depth};

    #[test]
    fn pods_without_a_running_container_are_absent() {
        let summary = summary(Depth::Summary, |_, _| {}).expect("made");
        let names: Vec<&str> = summary.pods.iter().map(|pod| &*pod.id.name).collect();
        assert_eq!(names, ["web"]);
        assert_eq!(summary.pods[0].processes, Some(4));
    }

    #[test]
    fn ephemeral_storage_is_the_sum_of_its_parts() {
        let summary = summary(Depth::Summary, |_, _| {}).expect("made");
        let pod = &summary.pods[0];
        let storage = pod.ephemeral_storage.expect("known");
        // layer 7 + logs 10 + pod's logs 1 + hosts 100 + local volume 1000 + messages 10000; the claim is not on the
        // node
        assert_eq!((storage.used, storage.inodes_used), (Some(11_118), Some(3 + 2 + 1 + 1 + 4 + 5)));
        assert_eq!((storage.capacity, storage.available, storage.at), (Some(100), Some(30), AT_SECONDS + 5));
        let rootfs = pod.containers[0].rootfs.expect("reported by the runtime");
        assert_eq!((rootfs.used, rootfs.capacity, rootfs.at), (Some(7), Some(100), AT_SECONDS));
        assert_eq!(pod.containers[0].logs.and_then(|logs| logs.used), Some(10));
        assert_eq!((pod.containers[1].rootfs, pod.containers[1].logs), (None, None));
        let data = &pod.volumes[1];
        assert_eq!((data.fs.capacity, data.fs.used, data.fs.inodes), (Some(0), Some(5000), Some(0)));
    }

    #[test]
    fn a_missing_group_is_made_up_for() {
        let summary = summary(Depth::Summary, |snapshot, report| {
            snapshot.pods[0].group = None;
            snapshot.pods[0].containers[1] = None;
            let cpu = CpuStats { usage_core_nano_seconds: Some(3_000_000_000), ..CpuStats::default() };
            let memory = MemoryStats { usage: Some(300), working_set: Some(200), ..MemoryStats::default() };
            let usage = Resources { cpu: Some(cpu), memory: Some(memory), ..Resources::default() };
            let usage = RuntimeUsage { usage, layer: None };
            report.containers.insert("id-side".into(), usage);
        });
        let pod = &summary.expect("made").pods[0];
        assert_eq!(pod.usage.cpu.and_then(|cpu| cpu.usage_core_nano_seconds), Some(8_000_000_000));
        assert_eq!(pod.usage.memory.and_then(|memory| memory.working_set), Some(550));
    }

    #[test]
    fn a_runtime_that_is_the_source_comes_first() {
        let cpu = |used| Some(CpuStats { usage_core_nano_seconds: Some(used), ..CpuStats::default() });
        let io = Some((0, PressureStats::default()));
        let usage = |used| Resources { cpu: cpu(used), io, ..Resources::default() };
        let container = RuntimeUsage { usage: usage(3), layer: None };
        let pod = RuntimePod {
            usage: usage(7),
            network: None,
            processes: Some(11),
            containers: HashMap::from([("id-main".into(), container)]),
        };
        let snapshot = snapshot(Depth::Summary);
        let build = |form| {
            build(&SummaryInputs {
                form,
                node: "n",
                booted_at: 0,
                snapshot: &snapshot,
                runtime: None,
                runtime_pods: &HashMap::from([("sandbox-web".into(), pod.clone())]),
                measured: &HashMap::new(),
                places: &HashMap::new(),
                root_fs: None,
            })
        };
        let full = &build(Form::Full).expect("made").pods[0];
        let used = |usage: &Resources| usage.cpu.and_then(|cpu| cpu.usage_core_nano_seconds);
        let of_containers: Vec<_> = full.containers.iter().map(|container| used(&container.usage)).collect();
        // The runtime reports nothing about the second one.
        assert_eq!((used(&full.usage), of_containers), (Some(7), vec![Some(3), Some(5_000_000_000)]));
        assert_eq!((full.processes, full.network.is_none(), full.usage.io), (Some(11), true, io));
        assert_eq!(build(Form::Short).expect("made").pods[0].usage.io, None);
    }

    #[test]
    fn without_the_root_there_is_no_summary() {
        let error = summary(Depth::Core, |snapshot, _| snapshot.root = None).expect_err("nothing to say");
        assert_eq!(error, "failed to get root cgroup stats");
    }

    #[test]
    fn sources_that_are_missing_cost_their_fields() {
        let mut snapshot = snapshot(Depth::Summary);
        snapshot.processes = None;
        let bare = build(&SummaryInputs {
            form: Form::Full,
            node: "n",
            booted_at: 0,
            snapshot: &snapshot,
            runtime: None,
            runtime_pods: &HashMap::new(),
            measured: &HashMap::new(),
            places: &HashMap::new(),
            root_fs: None,
        });
        let bare = bare.expect("made all the same");
        assert_eq!((bare.node.fs, bare.node.runtime, bare.node.rlimit), (None, None, None));
        assert_eq!((bare.pods[0].ephemeral_storage, bare.pods[0].volumes.len()), (None, 0));
        assert!(bare.pods[0].usage.cpu.is_some());
    }
}
