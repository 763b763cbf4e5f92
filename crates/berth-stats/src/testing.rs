//! Sample readings for the tests of this crate.

use std::collections::HashMap;

use jiff::Timestamp;

use super::{
    cgroup_files::{CpuTimes, MemoryStat},
    disk::{FileSystem, Usage},
    disk_measurer::Measurement,
    host::Processes,
    network::{LinkCounters, NetworkInterfaces},
    pods::{ReportedContainer, ReportedPod},
    reader::CgroupObservation,
    reading::{CgroupMemory, Cpu, Depth, Reading, WallNs},
    snapshot::{PodUsage, Snapshot, SystemGroup},
    summary::{Form, LayerUsage, PodPaths, RuntimeReport, RuntimeUsage, Seconds, StatsSummary, Storage, VolumePath},
    summary_builder::{SummaryInputs, build},
};
use berth_types::{PodRef, observation::NetworkMode};

pub const AT: WallNs = 1_624_396_278_302_000_000;
pub const AT_SECONDS: Seconds = 1_624_396_278;

pub fn seen(path: &str, cpu_ns: u64, memory: u64) -> CgroupObservation {
    let reading = Reading {
        at: AT,
        created_at: 1_600_000_000,
        cpu: Some(Cpu { times: CpuTimes { usage_ns: cpu_ns, user_ns: 2, system_ns: 3 }, ..Cpu::default() }),
        memory: Some(CgroupMemory {
            usage: memory,
            stat: MemoryStat {
                anon: memory / 2,
                inactive_file: 150,
                pgfault: 7,
                pgmajfault: 1,
                ..MemoryStat::default()
            },
            limit: u64::MAX,
            swap: 10,
            swap_limit: Some(15),
            ..CgroupMemory::default()
        }),
        processes: Some(2),
        outer_processes: Some((1, 2)),
        ..Reading::default()
    };
    CgroupObservation { path: path.into(), reading }
}

pub fn shown_pod(name: &str, containers: &[&str]) -> ReportedPod {
    let at = Timestamp::from_second(1_620_000_000).expect("in range");
    let container = |name: &&str| ReportedContainer {
        id: format!("id-{name}").into(),
        name: (*name).into(),
        image: "registry/app:1".to_owned(),
        created_at: at,
        started_at: at,
    };
    ReportedPod {
        id: PodRef { uid: format!("uid-{name}").into(), name: name.into(), namespace: "default".into() },
        sandbox: format!("sandbox-{name}").into(),
        handler: String::new(),
        started_at: at,
        is_ready: true,
        network: NetworkMode::Pod,
        containers: containers.iter().map(container).collect(),
    }
}

pub fn pod_seen(name: &str, containers: &[&str]) -> PodUsage {
    let pod = shown_pod(name, containers);
    let directory = format!("/kubepods/poduid-{name}");
    let interface = LinkCounters { name: "eth0".to_owned(), ..LinkCounters::default() };
    PodUsage {
        group: Some(seen(&directory, 10_000_000_000, 1000)),
        sandbox: Some(seen(&format!("{directory}/sandbox-{name}"), 1, 10)),
        containers: containers.iter().map(|c| Some(seen(&format!("{directory}/id-{c}"), 5_000_000_000, 500))).collect(),
        network: Some(NetworkInterfaces { interfaces: vec![interface], primary: Some(0) }),
        pod,
    }
}

pub fn snapshot(depth: Depth) -> Snapshot {
    let system = SystemGroup { name: "pods", path: "/kubepods".into(), started_at: None };
    Snapshot {
        depth,
        root: Some(seen("/", 10_000_000_000, 5000)),
        parent_cgroups: vec![seen("/kubepods", 1, 1)],
        system: vec![(system, seen("/kubepods", 9, 4000))],
        pods: vec![pod_seen("web", &["main", "side"]), pod_seen("zero", &[])],
        network: None,
        processes: Some(Processes { max: Some(4096), now: 321 }),
        has_pressure: false,
        size: (8, 0),
    }
}

/// Builds a summary of the sample after `change` has modified its inputs.
pub fn summary(depth: Depth, change: impl Fn(&mut Snapshot, &mut RuntimeReport)) -> Result<StatsSummary, String> {
    let (mut snapshot, mut report) = (snapshot(depth), RuntimeReport::default());
    let at = Timestamp::from_second(AT_SECONDS + 5).expect("in range");
    let measured =
        |bytes, inodes| Measurement { at, usage: Usage { bytes, inodes }, filesystem: None, is_abnormal: None };
    let disk = FileSystem { capacity: 100, free: 40, available: 30, inodes: 20, inodes_free: 15 };
    let layer = LayerUsage { at: AT, used: Some(7), inodes_used: Some(3), mountpoint: "/images".to_owned() };
    let usage = RuntimeUsage { layer: Some(layer.clone()), ..RuntimeUsage::default() };
    report.containers.insert("id-main".into(), usage);
    report.images = Some(layer);
    report.filesystems.insert("/images".to_owned(), disk);
    change(&mut snapshot, &mut report);
    let volume = |name: &str, storage| VolumePath {
        name: name.to_owned(),
        path: format!("/v/{name}").into(),
        storage,
        claim: (name == "data").then(|| ("default".to_owned(), "claim".to_owned())),
    };
    let places = PodPaths {
        logs: "/logs".into(),
        etc_hosts: Some("/hosts".into()),
        messages: Some("/messages".into()),
        volumes: vec![volume("data", Storage::Other), volume("cache", Storage::Ephemeral)],
    };
    let known = HashMap::from([
        ("/logs".into(), measured(1, 1)),
        ("/logs/main".into(), measured(10, 2)),
        ("/hosts".into(), measured(100, 1)),
        ("/messages/main".into(), measured(10_000, 5)),
        ("/v/cache".into(), Measurement { filesystem: Some(disk), ..measured(1000, 4) }),
        ("/v/data".into(), Measurement { is_abnormal: Some(true), ..measured(5000, 9) }),
    ]);
    build(&SummaryInputs {
        form: if depth == Depth::Core { Form::Short } else { Form::Full },
        node: "node-1",
        booted_at: 1_610_000_000,
        snapshot: &snapshot,
        runtime: Some(&report),
        runtime_pods: &HashMap::new(),
        measured: &known,
        places: &HashMap::from([("uid-web".into(), places)]),
        root_fs: Some(disk),
    })
}
