//! Benchmark of the statistics pages at 110 pods and 220 containers, without caches.
//!
//! Measures the reading of real cgroups (needs root, else only the rendering is measured) and each page.
//!
//! `cargo bench --bench stats`

use std::{
    collections::HashMap,
    fs,
    hint::black_box,
    path::{Path, PathBuf},
    sync::Arc,
    time::{Duration, Instant},
};

use berth_ports::SystemClock;
use berth_stats::{
    Form, HiddenMetrics, Host, PageCompression, PodCgroupPaths,
    cadvisor_page::{self, Counts, OpenFileCount},
    compressed, host,
    mounts::Mounts,
    pods::{ReportedContainer, ReportedPod},
    reader::CgroupReader,
    reading::Depth,
    resource_page,
    snapshot::{Sampler, Snapshot},
    summary_builder, summary_json,
};
use berth_sys::{mount_table, open_files::OpenFiles};
use berth_types::{PodRef, PodUid, observation::NetworkMode};
use bytes::Bytes;
use jiff::Timestamp;

const PODS: usize = 110;
const CONTAINERS: usize = 2;
const ROUNDS: u32 = 50;
/// Maximum number of cgroup control files that stay open, as in the agent.
const MAX_OPEN: usize = 16_384;

struct Names(String);

impl PodCgroupPaths for Names {
    fn above(&self) -> Vec<String> {
        vec![self.0.clone()]
    }

    fn of_pod(&self, pod: &PodUid) -> Vec<String> {
        vec![format!("{}/pod{pod}", self.0)]
    }
}

fn id(kind: &str, pod: usize, number: usize) -> String {
    format!("{kind}{pod:04}{number:02}{}", "0123456789abcdef".repeat(4)).chars().take(64).collect()
}

fn pods() -> Vec<ReportedPod> {
    let at = Timestamp::from_second(1_700_000_000).expect("in range");
    let container = |pod: usize, number: usize| ReportedContainer {
        id: id("c", pod, number).into(),
        name: format!("container-{number}").into(),
        image: "registry.example/team/application:v1.2.3".to_owned(),
        created_at: at,
        started_at: at,
    };
    let pod = |pod: usize| ReportedPod {
        id: PodRef {
            uid: format!("{pod:08}-0000-4000-8000-000000000000").into(),
            name: format!("application-{pod:04}").into(),
            namespace: "production".into(),
        },
        sandbox: id("s", pod, 0).into(),
        handler: String::new(),
        started_at: at,
        is_ready: true,
        network: NetworkMode::Pod,
        containers: (0..CONTAINERS).map(|number| container(pod, number)).collect(),
    };
    (0..PODS).map(pod).collect()
}

/// Cgroups of all pods in every hierarchy; removed when dropped.
struct Tree(Vec<PathBuf>);

impl Tree {
    fn new(name: &str, mounts: &Mounts, pods: &[ReportedPod]) -> Self {
        let roots: Vec<PathBuf> = match mounts {
            Mounts::Unified(root) => vec![root.clone()],
            Mounts::Old(trees) => trees.iter().flatten().cloned().collect(),
        };
        let mut made = Vec::new();
        for root in roots.iter().map(|root| root.join(name)) {
            made.push(root.clone());
            for pod in pods {
                let folder = root.join(format!("pod{}", pod.id.uid));
                let ids = pod.containers.iter().map(|c| c.id.as_str()).chain([pod.sandbox.as_str()]);
                let below: Vec<PathBuf> = ids.map(|id| folder.join(id)).collect();
                made.push(folder);
                made.extend(below);
            }
        }
        for folder in &made {
            let _ = fs::create_dir_all(folder); // without permission, nothing is read below
        }
        Self(made)
    }
}

impl Drop for Tree {
    fn drop(&mut self) {
        for folder in self.0.iter().rev() {
            let _ = fs::remove_dir(folder);
        }
    }
}

/// CPU time of this process so far.
fn spent() -> Duration {
    let usage = nix::sys::resource::getrusage(nix::sys::resource::UsageWho::RUSAGE_SELF).expect("always there");
    let of = |time: nix::sys::time::TimeVal| {
        Duration::new(time.tv_sec().unsigned_abs(), u32::try_from(time.tv_usec()).unwrap_or_default() * 1000)
    };
    of(usage.user_time()) + of(usage.system_time())
}

fn measure<T>(what: &str, mut work: impl FnMut() -> T) -> T {
    let mut last = work();
    let (began, before) = (Instant::now(), spent());
    for _ in 0..ROUNDS {
        last = black_box(work());
    }
    let (wall, cpu) = (began.elapsed() / ROUNDS, (spent() - before) / ROUNDS);
    println!("{what:<40} {:>8.2} ms wall {:>8.2} ms cpu", wall.as_secs_f64() * 1e3, cpu.as_secs_f64() * 1e3);
    last
}

fn write_pages(snapshot: &Snapshot, files: &Counts) {
    let inputs = |form| summary_builder::SummaryInputs {
        form,
        node: "node-1",
        booted_at: 1_600_000_000,
        snapshot,
        runtime: None,
        runtime_pods: &*Box::leak(Box::default()),
        measured: &*Box::leak(Box::default()),
        places: &*Box::leak(Box::default()),
        root_fs: None,
    };
    let (full, short) = (inputs(Form::Full), inputs(Form::Short));
    let page = measure("/stats/summary: page", || summary_json::write(&summary_builder::build(&full).expect("a root")));
    println!("{:<40} {:>8} KB", "", page.len() / 1024);
    let page = measure("/metrics/resource: page", || {
        let summary = summary_builder::build(&short);
        resource_page::write(summary.as_ref().map_err(String::as_str), HiddenMetrics::Omitted)
    });
    println!("{:<40} {:>8} KB", "", page.len() / 1024);
    let page = measure("/metrics/cadvisor: page", || {
        cadvisor_page::write(&cadvisor_page::CadvisorInputs {
            snapshot,
            now: 1_700_000_000_000_000_000,
            host: &Host::default(),
            memory: host::memory(Path::new("/")),
            files,
            mounted: &[],
            devices: &HashMap::new(),
            sandbox_images: &HashMap::from([(String::new(), "registry.example/pause:3.10".to_owned())]),
            is_partial: false,
        })
    });
    println!("{:<40} {:>8} KB", "", page.len() / 1024);
    let page = Bytes::from(page);
    let page = measure("/metrics/cadvisor: gzip", || compressed(page.clone(), PageCompression::Gzip));
    println!("{:<40} {:>8} KB", "", page.len() / 1024);
}

fn main() {
    let Some(mounts) = mount_table::read().ok().and_then(|table| Mounts::find(&table)) else {
        println!("no cgroup file system is mounted");
        return;
    };
    let name = format!("berth-bench-{}", std::process::id());
    let (pods, names) = (pods(), Arc::new(Names(format!("/{name}"))));
    let tree = Tree::new(&name, &mounts, &pods);
    println!("{PODS} pods, {} containers, {} directories", PODS * CONTAINERS, tree.0.len());
    let reader = CgroupReader::new(mounts, names.clone(), MAX_OPEN);
    let mut sampler = Sampler::new(reader, names, Arc::new(SystemClock), "/".into(), 0);
    for (depth, what) in [
        (Depth::Core, "/metrics/resource: reading"),
        (Depth::Summary, "/stats/summary: reading"),
        (Depth::Full, "/metrics/cadvisor: reading"),
    ] {
        measure(what, || sampler.sample(pods.clone(), Vec::new(), depth));
    }
    measure("all three readings, in sequence", || {
        [Depth::Core, Depth::Summary, Depth::Full].map(|depth| sampler.sample(pods.clone(), Vec::new(), depth))
    });
    let snapshot = sampler.sample(pods.clone(), Vec::new(), Depth::Full);
    println!("cgroups and open files: {:?}", snapshot.size);
    let open = OpenFiles { descriptors: 20, sockets: 5, soft_limit: Some(1_048_576) };
    let open = OpenFileCount { files: open, used_ns: None };
    let files = snapshot.pods.iter().flat_map(|pod| pod.containers.iter().flatten());
    let files = files.map(|seen| (seen.path.clone(), open)).collect();
    write_pages(&snapshot, &files);
}
