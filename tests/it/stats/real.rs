//! Statistics of this machine's cgroups, compared with the kernel's own files. Needs root.

use std::{
    fs,
    io::Write,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};

use berth_stats::Form;
use serde_json::Value;

use crate::stats::fixture::{Fixture, pod};

/// Cgroups in every hierarchy: a pod, its sandbox, and one container; removed when dropped.
struct Tree {
    name: String,
    roots: Vec<PathBuf>,
}

impl Tree {
    /// Creates the cgroups; `None` if that is not possible.
    fn new(test: &str) -> Option<Self> {
        if !nix::unistd::geteuid().is_root() {
            println!("skipped: {test}: needs root to make control groups");
            return None;
        }
        let name = format!("berth-stats-{}", std::process::id());
        let mounts = fs::read_to_string("/proc/self/mounts").expect("readable");
        let mounts = mounts.lines().map(|line| line.split(' ').collect::<Vec<_>>());
        let roots = mounts.filter(|fields| matches!(fields.as_slice(), [_, _, "cgroup" | "cgroup2", ..]));
        let roots = roots.map(|fields| Path::new(fields[1]).join(&name));
        let roots = roots.filter(|root| {
            // A cpuset accepts no process until its CPUs and memory nodes are set.
            ["", "podu1", "podu1/sandbox", "podu1/c1"].iter().all(|group| {
                let folder = root.join(group);
                let made = fs::create_dir_all(&folder).is_ok();
                for file in ["cpuset.cpus", "cpuset.mems"] {
                    let above = folder.parent().map(|above| fs::read_to_string(above.join(file)));
                    if let Some(Ok(value)) = above {
                        let _ = fs::write(folder.join(file), value.trim());
                    }
                }
                made
            })
        });
        let roots = roots.collect();
        Some(Self { name, roots })
    }

    /// Moves a process into a cgroup, in every hierarchy.
    fn enter(&self, group: &str, child: &Child) {
        for root in &self.roots {
            let _ = fs::write(root.join(group).join("cgroup.procs"), child.id().to_string()); // some accept none
        }
    }

    /// The number in the first of these files that exists.
    fn number(&self, group: &str, files: &[&str]) -> u64 {
        let all = self.roots.iter().flat_map(|root| files.iter().map(move |file| root.join(group).join(file)));
        let text = all.filter_map(|path| fs::read_to_string(path).ok()).next().expect("one of them exists");
        let number = text.trim().strip_prefix("usage_usec ").unwrap_or(&text).split_whitespace().next();
        number.and_then(|number| number.parse().ok()).expect("a number")
    }
}

impl Drop for Tree {
    fn drop(&mut self) {
        let deadline = Instant::now() + Duration::from_secs(30);
        while self.roots.iter().any(|root| root.exists()) && Instant::now() < deadline {
            for root in &self.roots {
                for group in ["podu1/c1", "podu1/sandbox", "podu1", ""] {
                    let _ = fs::remove_dir(root.join(group)); // retried
                }
            }
        }
    }
}

/// Child processes, killed when dropped.
struct ChildProcesses(Vec<Child>);

impl Drop for ChildProcesses {
    fn drop(&mut self) {
        for child in &mut self.0 {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

/// Value of the first series on a page with that prefix.
fn value(page: &str, series: &str) -> Option<f64> {
    let line = page.lines().find(|line| line.starts_with(series))?;
    line.rsplit_once("} ").map_or(line, |(_, rest)| rest).split(' ').next()?.parse().ok()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn pages_match_the_values_of_the_kernel() {
    let Some(tree) = Tree::new("pages_match_the_values_of_the_kernel") else { return };
    // Declared after the tree: children are killed and reaped before their cgroups are removed.
    let start = |program: &str, argument: &str| Command::new(program).arg(argument).spawn().expect("starts");
    // Memory allocated before the move is not charged to the cgroup.
    let work = "read go; text=$(head -c 300000 /dev/zero | tr '\\0' x); while :; do :; done";
    let busy = Command::new("sh").args(["-c", work]).stdin(Stdio::piped()).spawn().expect("starts");
    let mut running = ChildProcesses(vec![start("sleep", "1000"), busy]);
    tree.enter("podu1/sandbox", &running.0[0]);
    tree.enter("podu1/c1", &running.0[1]);
    running.0[1].stdin.take().expect("open").write_all(b"go\n").expect("it reads");
    let house = Fixture::new(vec![pod("u1", "web")], Some(format!("/{}", tree.name)));

    let first: Value =
        serde_json::from_slice(&house.provider.summary(Form::Full).await.expect("a page")).expect("JSON");
    let container = |page: &Value| page["pods"][0]["containers"][0].clone();
    let used = |page: &Value| container(page)["cpu"]["usageCoreNanoSeconds"].as_u64().expect("known");
    assert!(container(&first)["cpu"].get("usageNanoCores").is_none(), "one look has no rate: {first:#}");
    assert!(first["pods"][0]["process_stats"]["process_count"].as_u64().is_some_and(|count| count >= 1), "{first:#}");
    let processes = house.provider.processes().await.expect("known");
    assert!(processes.values().all(|count| count.is_some_and(|count| count >= 1)), "{processes:?}");
    // Both processes are in the host's network namespace, as a shim is: its traffic belongs to no pod.
    assert!(first["pods"][0]["network"].is_null(), "{first:#}");

    // The busy process runs on; a later page shows more CPU time, and a rate.
    let later = async {
        loop {
            let page = house.provider.summary(Form::Full).await.expect("a page");
            let page: Value = serde_json::from_slice(&page).expect("JSON");
            if container(&page)["cpu"].get("usageNanoCores").is_some() && used(&page) > used(&first) {
                return page;
            }
            tokio::task::yield_now().await;
        }
    };
    let page = tokio::time::timeout(Duration::from_secs(60), later).await.expect("it is busy");
    let nano = tree.number("podu1/c1", &["cpuacct.usage"]).max(used(&page));
    assert!(used(&page) <= nano && used(&page) > used(&first));
    let rate = container(&page)["cpu"]["usageNanoCores"].as_u64().expect("known");
    assert!(rate > 0 && rate < 1_500_000_000, "one process cannot use more than a core: {rate}");
    let memory = tree.number("podu1/c1", &["memory.usage_in_bytes", "memory.current"]);
    let shown = container(&page)["memory"]["usageBytes"].as_u64().expect("known");
    assert!(shown.abs_diff(memory) < 8 << 20, "shown {shown}, the kernel says {memory}");
    let total = fs::read_to_string("/proc/meminfo").expect("readable");
    let total: u64 = total.split_whitespace().nth(1).and_then(|n| n.parse().ok()).expect("MemTotal");
    let node = &page["node"]["memory"];
    let (available, working_set) = (node["availableBytes"].as_u64(), node["workingSetBytes"].as_u64());
    assert_eq!(available.zip(working_set).map(|(a, w)| a + w), Some(total * 1024), "{node:#}");

    // AC-04b-M12
    let page = house.provider.cadvisor_metrics().await;
    let page = std::str::from_utf8(&page).expect("text");
    let id = |group: &str| format!("/{}/{group}", tree.name);
    let groups =
        page.lines().filter(|line| line.starts_with("container_memory_usage_bytes{") && line.contains("pod=\"web\""));
    assert_eq!(groups.count(), 3, "{page}");
    let labels = |group: &str, container: &str, image: &str, name: &str| {
        format!(
            "{{container=\"{container}\",id=\"{}\",image=\"{image}\",name=\"{name}\",namespace=\"default\",pod=\"web\"}}",
            id(group)
        )
    };
    let of_main = labels("podu1/c1", "main", "registry.example/app:1", "c1");
    // Besides the shell, a process of its pipeline may be running.
    assert!(value(page, &format!("container_processes{of_main}")).is_some_and(|count| count >= 1.0), "{page}");
    let sandbox = page.lines().filter(|line| line.starts_with("container_network_receive_bytes_total{"));
    assert!(sandbox.clone().all(|line| line.contains("id=\"/\"") || line.contains(&id("podu1/sandbox"))), "{page}");
    let seconds =
        page.lines().find(|l| l.starts_with("container_cpu_usage_seconds_total{container=\"main\",cpu=\"total\""));
    assert!(seconds.is_some(), "{page}");
    assert!(value(page, &format!("container_start_time_seconds{of_main}")).is_some_and(|start| start > 1.6e9));

    let page = house.provider.resource_metrics().await;
    let page = std::str::from_utf8(&page).expect("text");
    let labels = "{container=\"main\",namespace=\"default\",pod=\"web\"}";
    assert!(
        value(page, &format!("container_cpu_usage_seconds_total{labels}")).is_some_and(|used| used > 0.0),
        "{page}"
    );
    let working_set = value(page, &format!("container_memory_working_set_bytes{labels}"));
    assert!(working_set.is_some_and(|bytes| bytes >= 300_000.0), "{page}");
    drop(running);
}
