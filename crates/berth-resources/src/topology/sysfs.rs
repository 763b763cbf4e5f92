//! Topology discovery from sysfs: CPUs, uncore caches, NUMA nodes, memory. Spec 06b §1.1, §2.3.
//!
//! Only the online CPUs and the node IDs are required. Every other file may be missing or malformed: a CPU without
//! readable files is a core of its own on socket 0, and a node has no memory, huge pages, or distances.

use std::{
    collections::{BTreeMap, BTreeSet, btree_map::Entry},
    fs::{self, File},
    io::{self, Read},
    path::{Path, PathBuf},
    str::FromStr,
};

use berth_types::CpuSet;

use super::model::{CpuInfo, CpuTopology, MachineTopology, NumaNode};
use crate::numa::mask::MAX_NODES;

/// Directory of the CPUs, relative to the root.
const CPUS: &str = "sys/devices/system/cpu";

/// Directory of the NUMA nodes, relative to the root.
const NODES: &str = "sys/devices/system/node";

/// Files of this size or more, in bytes, are refused: the kernel's own are far smaller.
const MAX_FILE_SIZE: u64 = 64 << 10;

/// Directory entries beyond this number are ignored.
const MAX_ENTRIES: usize = 1 << 17;

/// Cache directories of a CPU; machines have up to five.
const MAX_CACHES: u32 = 10;

/// Lowest level of an uncore cache.
const MIN_UNCORE_LEVEL: u32 = 3;

/// The topology cannot be discovered; the resource managers do not start.
#[derive(Debug, thiserror::Error)]
pub enum TopologyError {
    /// Neither the kernel's list nor the directories of the CPUs give a CPU.
    #[error("failed to read the online CPUs from {path:?}")]
    OnlineCpus {
        /// The kernel's list.
        path: PathBuf,
        /// Reason why the list cannot be used.
        source: io::Error,
    },
    /// A NUMA mask has no bit for a node.
    #[error("NUMA node {node} of {path:?} is not supported: the highest node ID is {}", MAX_NODES - 1)]
    UnsupportedNode {
        /// ID as the kernel writes it.
        node: String,
        /// Directory of the NUMA nodes.
        path: PathBuf,
    },
}

/// Reads the topology of the machine. `root` is `/` (a copy in tests). Blocking: a dozen small kernel files per CPU.
///
/// # Errors
/// No CPU is online, or a NUMA node has an ID of 64 or more.
pub fn read(root: &Path) -> Result<MachineTopology, TopologyError> {
    let online = online_cpus(root)?;
    let ids = node_ids(root)?;
    let cpus = cpu_topology(root, &online, &ids);
    let mut nodes = numa_nodes(root, &ids);
    for info in cpus.cpus.values() {
        nodes.entry(info.node).or_default();
    }
    // The list may contain CPUs of the boot parameter that are offline.
    let isolated = read_list(&root.join(CPUS).join("isolated")).unwrap_or_default();
    Ok(MachineTopology { cpus, nodes, isolated: isolated.intersection(&online) })
}

/// Reads the online CPUs only, to detect CPUs that were added or removed since [`read`]. Blocking: usually one file.
///
/// # Errors
/// No CPU is online according to the kernel's list and to the directories of the CPUs.
pub fn online_cpus(root: &Path) -> Result<CpuSet, TopologyError> {
    let directory = root.join(CPUS);
    let path = directory.join("online");
    let source = match read_list(&path) {
        Ok(cpus) if !cpus.is_empty() => return Ok(cpus),
        Ok(_) => io::Error::new(io::ErrorKind::InvalidData, "the list is empty"),
        Err(error) => error,
    };
    // A CPU that cannot be put offline has no such file.
    let is_offline =
        |cpu: u32| read_text(&directory.join(format!("cpu{cpu}/online"))).is_ok_and(|text| text.trim() == "0");
    let mut cpus = CpuSet::default();
    for digits in numbered_entries(&directory, "cpu") {
        // As a list, the number has the upper bound of a CPU set.
        let cpu = CpuSet::parse(&digits).unwrap_or_default();
        cpus.extend(cpu.iter().filter(|cpu| !is_offline(*cpu)));
    }
    if cpus.is_empty() { Err(TopologyError::OnlineCpus { path, source }) } else { Ok(cpus) }
}

/// IDs of the NUMA nodes; empty on a machine without NUMA directories.
fn node_ids(root: &Path) -> Result<BTreeSet<u32>, TopologyError> {
    let path = root.join(NODES);
    let ids = numbered_entries(&path, "node").map(|digits| match digits.parse::<u32>() {
        Ok(id) if id < MAX_NODES => Ok(id),
        _ => Err(TopologyError::UnsupportedNode { node: digits, path: path.clone() }),
    });
    ids.collect()
}

/// Positions of the online CPUs.
///
/// A sibling counts only if it is on the same socket and NUMA node, so that no core spans either, whatever the files
/// contain. A CPU without a readable list of siblings is a core of its own.
fn cpu_topology(root: &Path, online: &CpuSet, node_ids: &BTreeSet<u32>) -> CpuTopology {
    let node_of = nodes_of_cpus(root, online, node_ids);
    let mut cpus: BTreeMap<u32, CpuInfo> = BTreeMap::new();
    for cpu in online.iter() {
        let directory = root.join(CPUS).join(format!("cpu{cpu}/topology"));
        let node = node_of.get(&cpu).copied().unwrap_or(0);
        // ARM kernels write -1 where the firmware describes no package.
        let socket = read_number::<u32>(&directory.join("physical_package_id")).unwrap_or(0);
        // The map has the CPUs below this one: the first match is the lowest thread of the core.
        let lower = |sibling: u32| cpus.get(&sibling).filter(|info| info.node == node && info.socket == socket);
        let core = siblings(&directory, cpu).iter().find_map(lower).map_or(cpu, |info| info.core);
        cpus.insert(cpu, CpuInfo { node, socket, core, uncore_cache: socket });
    }
    set_uncore_caches(root, online, &mut cpus);
    CpuTopology { cpus }
}

/// NUMA node of each CPU that a node lists.
///
/// With emulated NUMA (`numa=fake`) several nodes list a CPU. The link in the CPU's directory then names its own node,
/// which the reference uses as well; without a link the lowest node has the CPU.
fn nodes_of_cpus(root: &Path, online: &CpuSet, node_ids: &BTreeSet<u32>) -> BTreeMap<u32, u32> {
    let mut node_of = BTreeMap::new();
    for &node in node_ids {
        let listed = read_list(&root.join(NODES).join(format!("node{node}/cpulist"))).unwrap_or_default();
        for cpu in listed.iter().filter(|cpu| online.contains(*cpu)) {
            match node_of.entry(cpu) {
                Entry::Vacant(entry) => {
                    entry.insert(node);
                }
                Entry::Occupied(mut entry) => {
                    if root.join(CPUS).join(format!("cpu{cpu}/node{node}")).exists() {
                        entry.insert(node);
                    }
                }
            }
        }
    }
    node_of
}

/// Hardware threads of the core of `cpu`; only itself if no file has a list that contains it.
fn siblings(directory: &Path, cpu: u32) -> CpuSet {
    // The second name exists since Linux 5.3; the first is deprecated.
    let mut files = ["thread_siblings_list", "core_cpus_list"].iter();
    let list = files.find_map(|name| read_list(&directory.join(name)).ok().filter(|list| list.contains(cpu)));
    list.unwrap_or_else(|| CpuSet::from_iter([cpu]))
}

/// Uncore cache of a core.
struct SharedCache {
    /// The kernel's ID; the lowest CPU of `cpus` where the kernel has none.
    id: u32,
    /// Online CPUs that share the cache.
    cpus: CpuSet,
}

/// Gives all CPUs of a core the uncore cache of its first thread.
///
/// The kernel's IDs are unique among the caches of one level, over all sockets, so they are used as they are, as the
/// reference does. If two different caches have the same ID nevertheless (caches of two levels, missing files, virtual
/// machines), the reference treats them as one cache. Here every group of the machine is then numbered by its lowest
/// CPU. An ID may equal the socket ID of cores without an uncore cache: such cores join the group, as in the reference.
fn set_uncore_caches(root: &Path, online: &CpuSet, cpus: &mut BTreeMap<u32, CpuInfo>) {
    let mut node_cpus: BTreeMap<u32, CpuSet> = BTreeMap::new();
    for (&cpu, info) in &*cpus {
        node_cpus.entry(info.node).or_default().extend([cpu]);
    }
    let first_threads = cpus.iter().filter(|(cpu, info)| info.core == **cpu);
    let caches: BTreeMap<u32, SharedCache> = first_threads
        .filter_map(|(&cpu, info)| Some((cpu, uncore_cache(root, cpu, online, node_cpus.get(&info.node)?)?)))
        .collect();

    let mut known: BTreeMap<u32, &CpuSet> = BTreeMap::new();
    let mut pairs = caches.values().map(|cache| (cache.id, &cache.cpus));
    let is_ambiguous = pairs.any(|(id, shared)| known.insert(id, shared).is_some_and(|other| other != shared));
    let mut lowest: BTreeMap<(Option<&CpuSet>, u32), u32> = BTreeMap::new();
    for (&cpu, info) in cpus.iter_mut() {
        let cache = caches.get(&info.core);
        if is_ambiguous {
            let group = (cache.map(|cache| &cache.cpus), info.socket);
            info.uncore_cache = *lowest.entry(group).or_insert(cpu);
        } else if let Some(cache) = cache {
            info.uncore_cache = cache.id;
        }
    }
}

/// The first cache of level 3 or higher that `cpu` lists and that is not exactly the cache of its NUMA node.
///
/// The reference ignores all caches of a node if one of them has no ID; here the cache is known by its lowest CPU.
fn uncore_cache(root: &Path, cpu: u32, online: &CpuSet, node_cpus: &CpuSet) -> Option<SharedCache> {
    let directory = root.join(CPUS).join(format!("cpu{cpu}/cache"));
    let mut indexes = (0..MAX_CACHES).map(|index| directory.join(format!("index{index}")));
    indexes.find_map(|index| {
        read_number::<u32>(&index.join("level")).filter(|level| *level >= MIN_UNCORE_LEVEL)?;
        let cpus = read_list(&index.join("shared_cpu_list")).ok()?.intersection(online);
        if !cpus.contains(cpu) || cpus == *node_cpus {
            return None;
        }
        let lowest = cpus.iter().next()?;
        let id = read_number::<u32>(&index.join("id")).unwrap_or(lowest);
        Some(SharedCache { id, cpus })
    })
}

/// Memory, huge pages, and distances of the NUMA nodes.
fn numa_nodes(root: &Path, ids: &BTreeSet<u32>) -> BTreeMap<u32, NumaNode> {
    if ids.is_empty() {
        let memory = total_memory(&root.join("proc/meminfo"));
        let hugepages = hugepages(&root.join("sys/kernel/mm/hugepages"));
        return BTreeMap::from([(0, NumaNode { memory, hugepages, distances: BTreeMap::new() })]);
    }
    // A list of nodes has the format of a CPU list.
    let online = read_list(&root.join(NODES).join("online"));
    let online: Vec<u32> = online.map_or_else(|_| ids.iter().copied().collect(), |list| list.iter().collect());
    let node = |id: u32| {
        let directory = root.join(NODES).join(format!("node{id}"));
        NumaNode {
            memory: total_memory(&directory.join("meminfo")),
            hugepages: hugepages(&directory.join("hugepages")),
            distances: distances(&directory.join("distance"), &online),
        }
    };
    ids.iter().map(|&id| (id, node(id))).collect()
}

/// `MemTotal` in bytes, of `/proc/meminfo` or of a node's file, whose lines have a prefix; 0 if unreadable.
fn total_memory(path: &Path) -> u64 {
    let text = read_text(path).unwrap_or_default();
    let value = text.lines().find_map(|line| line.split_once("MemTotal:"));
    value.and_then(|(_, value)| kibibytes(value.split_whitespace().next()?)).unwrap_or(0)
}

/// Number of huge pages by page size in bytes; page sizes without a readable number are left out.
fn hugepages(directory: &Path) -> BTreeMap<u64, u64> {
    let names = entry_names(directory).filter_map(|name| {
        let size = kibibytes(name.strip_prefix("hugepages-")?.strip_suffix("kB")?)?;
        Some((size, read_number::<u64>(&directory.join(&name).join("nr_hugepages"))?))
    });
    names.collect()
}

/// Distances by node ID. `online` are the nodes in the order of the file's numbers; empty if their counts differ.
fn distances(path: &Path, online: &[u32]) -> BTreeMap<u32, u32> {
    let text = read_text(path).unwrap_or_default();
    let numbers: Option<Vec<u32>> = text.split_whitespace().map(|number| number.parse().ok()).collect();
    let numbers = numbers.filter(|numbers| numbers.len() == online.len()).unwrap_or_default();
    online.iter().copied().zip(numbers).collect()
}

/// Bytes of a number of kibibytes.
fn kibibytes(text: &str) -> Option<u64> {
    text.parse::<u64>().ok()?.checked_mul(1024)
}

/// Digits of the directory's entries `<prefix><digits>`.
fn numbered_entries(directory: &Path, prefix: &str) -> impl Iterator<Item = String> {
    entry_names(directory).filter_map(move |name| {
        let digits = name.strip_prefix(prefix)?;
        let is_number = !digits.is_empty() && digits.bytes().all(|byte| byte.is_ascii_digit());
        is_number.then(|| digits.to_owned())
    })
}

/// Names of the directory's entries, in no order; none if the directory cannot be read.
fn entry_names(directory: &Path) -> impl Iterator<Item = String> {
    let entries = fs::read_dir(directory).into_iter().flatten().take(MAX_ENTRIES).flatten();
    entries.filter_map(|entry| entry.file_name().into_string().ok())
}

fn read_list(path: &Path) -> io::Result<CpuSet> {
    CpuSet::parse(read_text(path)?.trim()).map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error))
}

fn read_number<T: FromStr>(path: &Path) -> Option<T> {
    read_text(path).ok()?.trim().parse().ok()
}

fn read_text(path: &Path) -> io::Result<String> {
    let mut text = String::new();
    let mut file = File::open(path)?.take(MAX_FILE_SIZE);
    file.read_to_string(&mut text)?;
    if file.limit() == 0 {
        return Err(io::Error::new(io::ErrorKind::FileTooLarge, "the file is longer than any of the kernel"));
    }
    Ok(text)
}

#[cfg(test)]
mod tests;
