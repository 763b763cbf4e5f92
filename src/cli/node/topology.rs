//! `berth topology`: map of CPUs and memory by NUMA node, with the containers that have them.

use std::{collections::BTreeMap, process::ExitCode};

use anyhow::Result;
use clap::Args;
use serde::Deserialize;
use serde_json::Value;

use super::{
    OutputFormat, format_document,
    node_client::{self, NodeClient},
    print,
};
use crate::cli::table::{columns, line};
use berth_types::CpuSet;

/// Characters of a CPU list, above which it continues on the next line.
const WIDTH: usize = 48;

/// Characters of the reason of a refusal; `-o json` has all of them.
const DETAIL: usize = 200;

/// Output format and connection.
#[derive(Args, Debug)]
pub(in crate::cli) struct TopologyArguments {
    /// Output format
    #[arg(short, long, value_enum, default_value_t)]
    output: OutputFormat,
    #[command(flatten)]
    connection: node_client::ConnectionArguments,
}

/// Document of `/debug/topology`.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct TopologyDocument {
    policies: PolicyNames,
    shared: String,
    reserved: String,
    isolated: String,
    nodes: Vec<NodeRow>,
    cpus: Vec<CpuRow>,
    containers: Vec<ContainerRow>,
    refusals: Vec<RefusalRow>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct PolicyNames {
    cpu: String,
    memory: String,
    topology: String,
    scope: String,
    options: BTreeMap<String, String>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct NodeRow {
    id: u32,
    memory_bytes: u64,
    allocatable_memory_bytes: Option<u64>,
    free_memory_bytes: Option<u64>,
    hugepages: Vec<HugePageRow>,
    distances: BTreeMap<u32, u32>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct HugePageRow {
    page_size: u64,
    total: u64,
    free: Option<u64>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct CpuRow {
    cpu: u32,
    core: u32,
    socket: u32,
    node: u32,
    uncore_cache: u32,
    #[serde(rename = "use")]
    usage: String,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct ContainerRow {
    namespace: String,
    pod: String,
    uid: String,
    container: String,
    cpus: String,
    memory: Vec<MemoryRow>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct MemoryRow {
    #[serde(rename = "type")]
    kind: String,
    bytes: u64,
    nodes: Vec<i64>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct RefusalRow {
    namespace: String,
    pod: String,
    uid: String,
    detail: String,
}

/// Prints the map or the JSON document.
pub(in crate::cli) async fn print_map(wanted: TopologyArguments) -> Result<ExitCode> {
    let client = NodeClient::open(&wanted.connection)?;
    let document: Value = client.document("/debug/topology").await?;
    print(format_document(document, wanted.output, |document: TopologyDocument| map(&document))?)?;
    Ok(ExitCode::SUCCESS)
}

/// Renders the document: policies, a block per NUMA node, containers, refusals. Pure.
fn map(document: &TopologyDocument) -> String {
    let owners = owners(&document.containers);
    let mut blocks = vec![policies(document)];
    blocks.extend(document.nodes.iter().map(|node| node_block(node, &document.cpus, &owners)));
    blocks.push(containers(&document.containers));
    if !document.refusals.is_empty() {
        blocks.push(refusals(&document.refusals));
    }
    blocks.join("\n")
}

fn policies(document: &TopologyDocument) -> String {
    let PolicyNames { cpu, memory, topology, scope, options } = &document.policies;
    let topology = if topology == "none" { topology.clone() } else { format!("{topology}, scope {scope}") };
    let named = [("CPU policy", cpu), ("Memory policy", memory), ("Topology policy", &topology)];
    let mut rows: Vec<Vec<String>> = named.iter().map(|(name, policy)| row(&[name, policy])).collect();
    if !options.is_empty() {
        let options: Vec<String> = options.iter().map(|(name, value)| format!("{name}={value}")).collect();
        rows.push(row(&["Options", &options.join(", ")]));
    }
    let TopologyDocument { shared, reserved, isolated, .. } = document;
    for (name, list) in [("Shared CPUs", shared), ("Reserved CPUs", reserved), ("Isolated CPUs", isolated)] {
        let lines = wrapped(list).into_iter().enumerate();
        rows.extend(lines.map(|(at, line)| row(&[if at == 0 { name } else { "" }, &line])));
    }
    columns(&rows)
}

/// Pods by their exclusive CPUs. A list that cannot be parsed has no CPUs.
fn owners(containers: &[ContainerRow]) -> BTreeMap<u32, String> {
    let mut owners = BTreeMap::new();
    for container in containers {
        let cpus = CpuSet::parse(&container.cpus).unwrap_or_default();
        let pod = match container.pod.as_str() {
            // The UID stands for the name of a pod that no source has and that has no worker.
            "" => container.uid.clone(),
            pod => format!("{}/{pod}", container.namespace),
        };
        owners.extend(cpus.iter().map(|cpu| (cpu, pod.clone())));
    }
    owners
}

fn node_block(node: &NodeRow, cpus: &[CpuRow], owners: &BTreeMap<u32, String>) -> String {
    let cpus: Vec<&CpuRow> = cpus.iter().filter(|cpu| cpu.node == node.id).collect();
    let mut text = format!("NUMA node {}: {} CPUs\n", node.id, cpus.len());
    let free = |free: Option<String>| free.map(|free| format!(", {free} free")).unwrap_or_default();
    let allocatable = node.allocatable_memory_bytes.map(|bytes| format!(", {} allocatable", size(bytes)));
    let memory = size(node.memory_bytes) + &allocatable.unwrap_or_default() + &free(node.free_memory_bytes.map(size));
    let mut facts = vec![row(&["memory", &memory])];
    for pool in &node.hugepages {
        let pages = format!("{} pages{}", pool.total, free(pool.free.map(|pages| pages.to_string())));
        facts.push(row(&[&format!("hugepages-{}", size(pool.page_size)), &pages]));
    }
    if node.distances.len() > 1 {
        facts.push(row(&["distance", &distances(&node.distances)]));
    }
    text += &indented(&columns(&facts));
    if !cpus.is_empty() {
        let mut rows = vec![row(&["SOCKET", "CORE", "CACHE", "CPUS (S: shared, R: reserved)"])];
        rows.extend(core_groups(&cpus, owners).iter().map(CoreGroup::row));
        text += &indented(&columns(&rows));
    }
    text
}

/// Distances in ascending order, with the nodes that have them: `10 to 0, 21 to 1-3`.
fn distances(distances: &BTreeMap<u32, u32>) -> String {
    let mut nodes: BTreeMap<u32, CpuSet> = BTreeMap::new();
    for (node, distance) in distances {
        nodes.entry(*distance).or_default().extend([*node]);
    }
    let texts: Vec<String> = nodes.iter().map(|(distance, nodes)| format!("{distance} to {nodes}")).collect();
    texts.join(", ")
}

/// Consecutive cores on one line: same socket, same cache, and same use of each hardware thread.
#[derive(Clone)]
struct CoreGroup<'a> {
    socket: u32,
    cache: u32,
    cores: CpuSet,
    /// Use and CPUs by hardware thread.
    threads: Vec<(&'a str, CpuSet)>,
}

impl CoreGroup<'_> {
    /// Both groups as one; `None` if they differ or the line would become too long.
    fn joined(&self, next: &Self) -> Option<Self> {
        let is_same_use = self.threads.iter().map(|thread| thread.0).eq(next.threads.iter().map(|thread| thread.0));
        if !is_same_use || (self.socket, self.cache) != (next.socket, next.cache) {
            return None;
        }
        let mut joined = self.clone();
        joined.cores = self.cores.union(&next.cores);
        for ((_, cpus), (_, more)) in joined.threads.iter_mut().zip(&next.threads) {
            *cpus = cpus.union(more);
        }
        let length: usize = joined.threads.iter().map(|(_, cpus)| cpus.to_string().len()).sum();
        (length <= WIDTH).then_some(joined)
    }

    /// CPUs by use: `0-3,8-11 S`, or `1 default/web; 9 S`.
    fn cpus(&self) -> String {
        let mut uses: Vec<(&str, CpuSet)> = Vec::new();
        for (usage, cpus) in &self.threads {
            match uses.iter_mut().find(|(known, _)| known == usage) {
                Some((_, all)) => *all = all.union(cpus),
                None => uses.push((*usage, cpus.clone())),
            }
        }
        let texts: Vec<String> = uses.into_iter().map(|(usage, cpus)| format!("{cpus} {usage}")).collect();
        texts.join("; ")
    }

    fn row(&self) -> Vec<String> {
        vec![self.socket.to_string(), self.cores.to_string(), self.cache.to_string(), self.cpus()]
    }
}

/// Groups the CPUs of a NUMA node by core, and joins equal consecutive cores.
fn core_groups<'a>(cpus: &[&'a CpuRow], owners: &'a BTreeMap<u32, String>) -> Vec<CoreGroup<'a>> {
    let mut cores: BTreeMap<u32, Vec<&'a CpuRow>> = BTreeMap::new();
    for cpu in cpus {
        cores.entry(cpu.core).or_default().push(*cpu);
    }
    let mut groups: Vec<CoreGroup<'a>> = Vec::new();
    for (core, threads) in cores {
        let Some(first) = threads.first() else { continue };
        let group = CoreGroup {
            socket: first.socket,
            cache: first.uncore_cache,
            cores: [core].into_iter().collect(),
            threads: threads.iter().map(|cpu| (usage(cpu, owners), [cpu.cpu].into_iter().collect())).collect(),
        };
        match groups.last_mut() {
            Some(last) => match last.joined(&group) {
                Some(joined) => *last = joined,
                None => groups.push(group),
            },
            None => groups.push(group),
        }
    }
    groups
}

/// Use of a CPU: `S`, `R`, or the pod that has it.
fn usage<'a>(cpu: &CpuRow, owners: &'a BTreeMap<u32, String>) -> &'a str {
    match cpu.usage.as_str() {
        "shared" => "S",
        "reserved" => "R",
        _ => owners.get(&cpu.cpu).map_or("exclusive", String::as_str),
    }
}

fn containers(containers: &[ContainerRow]) -> String {
    if containers.is_empty() {
        return "No container has exclusive CPUs or reserved memory.\n".to_owned();
    }
    let mut rows = vec![row(&["NAMESPACE", "POD", "CONTAINER", "MEMORY", "CPUS"])];
    for container in containers {
        let pod = if container.pod.is_empty() { &container.uid } else { &container.pod };
        let cpus = wrapped(&container.cpus);
        let memory: Vec<String> = container.memory.iter().map(reserved_memory).collect();
        for at in 0..cpus.len().max(memory.len()) {
            let missing = if at == 0 { "-" } else { "" };
            let cell = |cells: &[String]| cells.get(at).map_or(missing, String::as_str).to_owned();
            let name = |name: &str| if at == 0 { or_dash(name).to_owned() } else { String::new() };
            let names = [&container.namespace, pod, &container.container].map(|text| name(text));
            rows.push(names.into_iter().chain([cell(&memory), cell(&cpus)]).collect());
        }
    }
    columns(&rows)
}

/// `memory 4Gi on 0`
fn reserved_memory(memory: &MemoryRow) -> String {
    let nodes: Vec<String> = memory.nodes.iter().map(i64::to_string).collect();
    format!("{} {} on {}", memory.kind, size(memory.bytes), nodes.join(","))
}

fn refusals(refusals: &[RefusalRow]) -> String {
    let mut rows = vec![row(&["NAMESPACE", "REFUSED POD", "REASON"])];
    for refusal in refusals {
        let pod = if refusal.pod.is_empty() { &refusal.uid } else { &refusal.pod };
        rows.push(row(&[or_dash(&refusal.namespace), pod, &line(&refusal.detail, DETAIL)]));
    }
    columns(&rows)
}

/// Splits a CPU list at its commas into lines of at most [`WIDTH`] characters; a dash for an empty list.
fn wrapped(list: &str) -> Vec<String> {
    let mut lines: Vec<String> = Vec::new();
    for range in or_dash(list).split(',') {
        match lines.last_mut() {
            Some(line) if line.len() + range.len() + 2 <= WIDTH => {
                line.push(',');
                line.push_str(range);
            }
            Some(line) => {
                line.push(',');
                lines.push(range.to_owned());
            }
            None => lines.push(range.to_owned()),
        }
    }
    lines
}

fn row(cells: &[&str]) -> Vec<String> {
    cells.iter().map(|cell| (*cell).to_owned()).collect()
}

fn or_dash(text: &str) -> &str {
    if text.is_empty() { "-" } else { text }
}

fn indented(text: &str) -> String {
    text.lines().map(|line| format!("  {line}\n")).collect()
}

/// Size in the largest binary unit of which there is at least one, with at most one decimal.
fn size(bytes: u64) -> String {
    const UNITS: [&str; 5] = ["", "Ki", "Mi", "Gi", "Ti"];
    let (mut value, mut unit) = (bytes as f64, 0);
    while value >= 1023.95 && unit + 1 < UNITS.len() {
        value /= 1024.0;
        unit += 1;
    }
    let number = format!("{value:.1}");
    format!("{}{}", number.trim_end_matches(".0"), UNITS.get(unit).copied().unwrap_or_default())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    const GI: u64 = 1 << 30;

    fn rendered(document: Value) -> String {
        map(&serde_json::from_value::<TopologyDocument>(document).expect("a document"))
    }

    fn cpu(cpu: u32, core: u32, place: u32, cache: u32, usage: &str) -> Value {
        json!({"cpu": cpu, "core": core, "socket": place, "node": place, "uncoreCache": cache, "use": usage})
    }

    /// The lines of cores, without their indentation. All other indented lines start with a letter or more spaces.
    fn cores(text: &str) -> Vec<&str> {
        let indented = text.lines().filter_map(|line| line.strip_prefix("  "));
        indented.filter(|line| line.starts_with(|c: char| c.is_ascii_digit())).collect()
    }

    /// Two nodes with 8 CPUs each, and one with memory only.
    fn three_nodes() -> Value {
        let usage = |number: u32| match number {
            0 | 8 => "reserved",
            1 | 2 | 4 | 9 | 10 | 14 => "exclusive",
            _ => "shared",
        };
        let cpus: Vec<Value> = (0..16)
            .map(|number| {
                let core = number % 8;
                cpu(number, core, core / 4, core / 2, usage(number))
            })
            .collect();
        json!({
            "policies": {
                "cpu": "static",
                "memory": "Static",
                "topology": "restricted",
                "scope": "pod",
                "options": {"full-pcpus-only": "true"},
            },
            "shared": "3,5-7,11-13,15",
            "reserved": "0,8",
            "isolated": "",
            "nodes": [
                {
                    "id": 0,
                    "memoryBytes": 32 * GI,
                    "allocatableMemoryBytes": 30 * GI,
                    "freeMemoryBytes": 26 * GI + GI / 2,
                    "hugepages": [{"pageSize": 2 << 20, "total": 512, "free": 256}],
                    "distances": {"0": 10, "1": 21},
                },
                {
                    "id": 1,
                    "memoryBytes": 32 * GI,
                    "allocatableMemoryBytes": null,
                    "freeMemoryBytes": null,
                    "hugepages": [{"pageSize": GI, "total": 4, "free": null}],
                    "distances": {"0": 21, "1": 10},
                },
                {"id": 2, "memoryBytes": 64 * GI},
            ],
            "cpus": cpus,
            "containers": [
                {
                    "namespace": "default",
                    "pod": "db",
                    "uid": "u1",
                    "container": "main",
                    "cpus": "1-2,9-10",
                    "memory": [
                        {"type": "hugepages-2Mi", "bytes": 512 << 20, "nodes": [0]},
                        {"type": "memory", "bytes": 3 * GI + GI / 2, "nodes": [0, 1]},
                    ],
                },
                {"namespace": "", "pod": "", "uid": "0f3c", "container": "c", "cpus": "4", "memory": []},
            ],
            "refusals": [{
                "namespace": "default",
                "pod": "big",
                "uid": "u2",
                "detail": "cpu: no NUMA node has 6 free CPUs;\npreferred 0 or 1",
            }],
        })
    }

    #[test]
    fn the_map_has_a_block_for_each_numa_node() {
        let text = rendered(three_nodes());
        let expected = "\
CPU policy        static
Memory policy     Static
Topology policy   restricted, scope pod
Options           full-pcpus-only=true
Shared CPUs       3,5-7,11-13,15
Reserved CPUs     0,8
Isolated CPUs     -

NUMA node 0: 8 CPUs
  memory          32Gi, 30Gi allocatable, 26.5Gi free
  hugepages-2Mi   512 pages, 256 free
  distance        10 to 0, 21 to 1
  SOCKET   CORE   CACHE   CPUS (S: shared, R: reserved)
  0        0      0       0,8 R
  0        1      0       1,9 default/db
  0        2      1       2,10 default/db
  0        3      1       3,11 S

NUMA node 1: 8 CPUs
  memory          32Gi
  hugepages-1Gi   4 pages
  distance        10 to 1, 21 to 0
  SOCKET   CORE   CACHE   CPUS (S: shared, R: reserved)
  1        4      2       4 0f3c; 12 S
  1        5      2       5,13 S
  1        6      3       6 S; 14 exclusive
  1        7      3       7,15 S

NUMA node 2: 0 CPUs
  memory   64Gi

NAMESPACE   POD    CONTAINER   MEMORY                     CPUS
default     db     main        hugepages-2Mi 512Mi on 0   1-2,9-10
                               memory 3.5Gi on 0,1
-           0f3c   c           -                          4

NAMESPACE   REFUSED POD   REASON
default     big           cpu: no NUMA node has 6 free CPUs; preferred 0 or 1
";
        assert_eq!(text, expected);
    }

    #[test]
    fn equal_consecutive_cores_share_a_line() {
        let text = |cpus: Vec<Value>| {
            let container = json!({"namespace": "n", "pod": "p", "container": "c", "cpus": "4-5,8"});
            rendered(json!({"nodes": [{"id": 0}], "cpus": cpus, "containers": [container]}))
        };
        for (case, cpus, expected) in [
            ("one line", (0..4).map(|c| cpu(c, c, 0, 0, "shared")).collect(), vec!["0        0-3    0       0-3 S"]),
            (
                "another use",
                vec![cpu(0, 0, 0, 0, "reserved"), cpu(1, 1, 0, 0, "shared"), cpu(2, 2, 0, 0, "reserved")],
                vec!["0        0      0       0 R", "0        1      0       1 S", "0        2      0       2 R"],
            ),
            (
                "another cache",
                (0..4).map(|c| cpu(c, c, 0, c / 2, "shared")).collect(),
                vec!["0        0-1    0       0-1 S", "0        2-3    1       2-3 S"],
            ),
            (
                "the same pod on one hardware thread",
                vec![
                    cpu(4, 4, 0, 0, "exclusive"),
                    cpu(5, 5, 0, 0, "exclusive"),
                    cpu(12, 4, 0, 0, "shared"),
                    cpu(13, 5, 0, 0, "shared"),
                ],
                vec!["0        4-5    0       4-5 n/p; 12-13 S"],
            ),
            (
                "another hardware thread",
                vec![
                    cpu(4, 4, 0, 0, "exclusive"),
                    cpu(12, 4, 0, 0, "shared"),
                    cpu(5, 5, 0, 0, "shared"),
                    cpu(8, 5, 0, 0, "exclusive"),
                ],
                vec!["0        4      0       4 n/p; 12 S", "0        5      0       5 S; 8 n/p"],
            ),
        ] {
            assert_eq!(cores(&text(cpus)), expected, "{case}");
        }
    }

    #[test]
    fn a_map_of_512_cpus_fits_a_terminal() {
        let document = |place: fn(u32) -> u32, cache: fn(u32) -> u32| {
            let cpus: Vec<Value> =
                (0..512).map(|c| cpu(c, c % 256, place(c % 256), cache(c % 256), "shared")).collect();
            let isolated: Vec<String> = (0..64).step_by(2).map(|c: u32| c.to_string()).collect();
            json!({
                "shared": "0-511",
                "isolated": isolated.join(","),
                "nodes": [{"id": 0}, {"id": 1}],
                "cpus": cpus,
                "containers": [{"pod": "p", "container": "c", "cpus": isolated.join(",")}],
            })
        };
        for (case, text, lines) in [
            ("caches of 8 cores", rendered(document(|core| core / 128, |core| core / 8)), 32),
            ("even and odd CPUs", rendered(document(|core| core % 2, |core| core % 2)), 42),
        ] {
            assert_eq!(cores(&text).len(), lines, "{case}");
            let longest = text.lines().map(str::len).max();
            assert!(longest.is_some_and(|longest| longest <= 100), "{case}: {longest:?}");
            assert!(text.contains("Isolated CPUs     0,2,4,"), "{text}");
        }
        let strided = rendered(document(|core| core % 2, |core| core % 2));
        let line = "0        0,2,4,6,8,10,12           0       0,2,4,6,8,10,12,256,258,260,262,264,266,268 S";
        assert_eq!(cores(&strided).first(), Some(&line));
    }

    #[test]
    fn a_node_without_managers_has_no_containers() {
        let text = rendered(json!({
            "policies": {"cpu": "none", "memory": "None", "topology": "none", "scope": "container", "options": {}},
            "nodes": [{"id": 0, "memoryBytes": 1536, "distances": {"0": 10}}],
        }));
        let expected = "\
CPU policy        none
Memory policy     None
Topology policy   none
Shared CPUs       -
Reserved CPUs     -
Isolated CPUs     -

NUMA node 0: 0 CPUs
  memory   1.5Ki

No container has exclusive CPUs or reserved memory.
";
        assert_eq!(text, expected);
    }

    #[test]
    fn sizes_are_exact_where_they_are_round() {
        for (bytes, expected) in [
            (0, "0"),
            (1023, "1023"),
            (1024, "1Ki"),
            (2 << 20, "2Mi"),
            (1 << 30, "1Gi"),
            (GI * 5 / 4, "1.2Gi"),
            (GI - 1, "1Gi"),
            (100 * GI, "100Gi"),
            (2048 * GI, "2Ti"),
            (10 << 50, "10240Ti"),
        ] {
            assert_eq!(size(bytes), expected, "{bytes}");
        }
    }
}
