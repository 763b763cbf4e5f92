//! Fake sysfs tree in a temporary directory, for tests of topology discovery.

use std::{collections::BTreeSet, fs, path::Path};

use super::model::CpuTopology;

/// Root directory with the kernel's files; deleted on drop.
pub struct FakeSysfs {
    directory: tempfile::TempDir,
}

impl FakeSysfs {
    /// A root directory without files.
    pub fn empty() -> Self {
        Self { directory: tempfile::tempdir().expect("a temporary directory") }
    }

    /// A root directory with all CPUs, caches, and nodes of a topology. Each node has 1 GiB, and all uncore caches are
    /// of level 3. Distances, huge pages, and isolated CPUs are left out.
    pub fn of(topology: &CpuTopology) -> Self {
        let sysfs = Self::empty();
        sysfs.online(&topology.all().to_string());
        let mut nodes = BTreeSet::new();
        for (&cpu, info) in &topology.cpus {
            let siblings = topology.select(|other| other.core == info.core).to_string();
            let shared = topology.select(|other| other.uncore_cache == info.uncore_cache).to_string();
            sysfs.cpu(cpu, &info.socket.to_string(), &siblings);
            sysfs.cache(cpu, 0, 1, &cpu.to_string(), Some(info.core));
            sysfs.cache(cpu, 1, 2, &siblings, Some(info.core));
            sysfs.cache(cpu, 2, 3, &shared, Some(info.uncore_cache));
            nodes.insert(info.node);
        }
        for node in nodes {
            sysfs.node(node, &topology.select(|info| info.node == node).to_string(), 1 << 20);
        }
        sysfs
    }

    /// The directory that stands for `/`.
    pub fn root(&self) -> &Path {
        self.directory.path()
    }

    /// Writes a file; `path` is relative to the root.
    pub fn write(&self, path: &str, content: impl AsRef<[u8]>) -> &Self {
        let path = self.root().join(path);
        fs::create_dir_all(path.parent().expect("below the root")).expect("a directory");
        fs::write(path, content).expect("a file");
        self
    }

    /// Deletes a file; `path` is relative to the root.
    pub fn remove(&self, path: &str) -> &Self {
        fs::remove_file(self.root().join(path)).expect("a file");
        self
    }

    /// Writes the list of online CPUs.
    pub fn online(&self, cpus: &str) -> &Self {
        self.write("sys/devices/system/cpu/online", format!("{cpus}\n"))
    }

    /// Writes the package and the hardware threads of the core of a CPU.
    pub fn cpu(&self, cpu: u32, package: &str, siblings: &str) -> &Self {
        let topology = format!("sys/devices/system/cpu/cpu{cpu}/topology");
        self.write(&format!("{topology}/physical_package_id"), format!("{package}\n"));
        self.write(&format!("{topology}/thread_siblings_list"), format!("{siblings}\n"))
    }

    /// Writes a cache of a CPU and the CPUs that share it; without `id` the kernel reports none.
    pub fn cache(&self, cpu: u32, index: u32, level: u32, shared: &str, id: Option<u32>) -> &Self {
        let cache = format!("sys/devices/system/cpu/cpu{cpu}/cache/index{index}");
        if let Some(id) = id {
            self.write(&format!("{cache}/id"), format!("{id}\n"));
        }
        self.write(&format!("{cache}/level"), format!("{level}\n"));
        self.write(&format!("{cache}/shared_cpu_list"), format!("{shared}\n"))
    }

    /// Writes the CPUs and the memory, in kibibytes, of a NUMA node.
    pub fn node(&self, node: u32, cpus: &str, memory: u64) -> &Self {
        let directory = format!("sys/devices/system/node/node{node}");
        let meminfo = format!("Node {node} MemTotal:       {memory} kB\nNode {node} MemFree:        1 kB\n");
        self.write(&format!("{directory}/meminfo"), meminfo);
        self.write(&format!("{directory}/cpulist"), format!("{cpus}\n"))
    }

    /// Writes the number of huge pages of a NUMA node; `size` is in kibibytes.
    pub fn hugepages(&self, node: u32, size: u64, pages: u64) -> &Self {
        let directory = format!("sys/devices/system/node/node{node}/hugepages/hugepages-{size}kB");
        self.write(&format!("{directory}/nr_hugepages"), format!("{pages}\n"))
    }

    /// Writes the distances of a NUMA node to all online nodes.
    pub fn distances(&self, node: u32, distances: &str) -> &Self {
        self.write(&format!("sys/devices/system/node/node{node}/distance"), format!("{distances}\n"))
    }
}
