//! Snapshot of the whole node's resource usage, from which every stats and metrics page is built.
//!
//! One blocking pass reads the cgroups of the pods that the runtime reported.

use std::{
    collections::{HashMap, HashSet},
    path::PathBuf,
    sync::Arc,
    thread,
};

use jiff::Timestamp;

use super::{
    host::{self, Processes},
    network::{self, Namespace, NetworkInterfaces},
    pods::ReportedPod,
    reader::{CgroupKey, CgroupObservation, CgroupReader, CgroupRequest, MachineMemory, PodCgroupPaths, YOUNG_NS},
    reading::{Depth, WallNs},
};
use berth_ports::Clock;
use berth_types::{SandboxId, observation::NetworkMode};

/// System cgroup that the summary lists by name.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct SystemGroup {
    /// `kubelet`, `runtime`, `misc`, or `pods`.
    pub name: &'static str,
    /// Path of the cgroup.
    pub path: Arc<str>,
    /// Start time of its process in seconds since the epoch; `None`: use the creation time of the cgroup.
    pub started_at: Option<i64>,
}

/// Resource usage of the node at one time.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct Snapshot {
    /// Depth of the readings.
    pub depth: Depth,
    /// Root cgroup.
    pub root: Option<CgroupObservation>,
    /// Cgroups above the pods' cgroups; only at [`Depth::Full`].
    pub parent_cgroups: Vec<CgroupObservation>,
    /// System cgroups, by name.
    pub system: Vec<(SystemGroup, CgroupObservation)>,
    /// Pods with their cgroups, ordered by namespace, name, and UID.
    pub pods: Vec<PodUsage>,
    /// Network of the node; not at [`Depth::Core`].
    pub network: Option<NetworkInterfaces>,
    /// Processes of the machine; not at [`Depth::Core`].
    pub processes: Option<Processes>,
    /// True if the kernel reports pressure (PSI) per cgroup.
    pub has_pressure: bool,
    /// Number of known cgroups and of open control files.
    pub size: (usize, usize),
}

/// Resource usage of one pod.
#[derive(Clone, PartialEq, Debug)]
pub struct PodUsage {
    /// Identity and containers of the pod.
    pub pod: ReportedPod,
    /// Pod cgroup.
    pub group: Option<CgroupObservation>,
    /// Cgroup of the sandbox; only at [`Depth::Full`].
    pub sandbox: Option<CgroupObservation>,
    /// Cgroups of the containers, in the order of [`ReportedPod::containers`].
    pub containers: Vec<Option<CgroupObservation>>,
    /// Network of the pod; not at [`Depth::Core`].
    pub network: Option<NetworkInterfaces>,
}

/// Process in the network namespace of a sandbox. It represents the pod as long as it is in that namespace, even if its
/// cgroup is gone: if the PID was reused, the new process must be in the same namespace to count.
struct NetworkProcess {
    pid: u32,
    namespace: Namespace,
}

/// Takes snapshots. Every call blocks.
pub struct Sampler {
    reader: CgroupReader,
    names: Arc<dyn PodCgroupPaths>,
    clock: Arc<dyn Clock>,
    root: PathBuf,
    max_pids: u64,
    members: HashMap<SandboxId, NetworkProcess>,
    /// Pod networks of the previous reading, if that one was at [`Depth::Summary`], and when it began.
    last: Option<(WallNs, HashMap<SandboxId, NetworkInterfaces>)>,
    has_pressure: bool,
}

impl Sampler {
    /// `root` is `/`; `max_pids` is the kernel's PID limit, 0 if unknown.
    pub fn new(
        reader: CgroupReader,
        names: Arc<dyn PodCgroupPaths>,
        clock: Arc<dyn Clock>,
        root: PathBuf,
        max_pids: u64,
    ) -> Self {
        let has_pressure = reader.has_pressure();
        Self { reader, names, clock, root, max_pids, members: HashMap::new(), last: None, has_pressure }
    }

    /// Reads all cgroups and networks once. Blocking.
    ///
    /// A full reading reuses the pod networks of a summary reading that is at most [`YOUNG_NS`] old.
    pub fn sample(&mut self, pods: Vec<ReportedPod>, system: Vec<SystemGroup>, depth: Depth) -> Snapshot {
        let machine = host::memory(&self.root);
        let (wanted, above) = self.wanted(&pods, &system, depth);
        let began = wall(self.clock.now());
        let is_young = |at: &WallNs| (0..=YOUNG_NS).contains(&began.saturating_sub(*at));
        let young = self.last.take().filter(|(at, _)| depth == Depth::Full && is_young(at));
        let mut early = young.map(|(_, networks)| networks).unwrap_or_default();
        let mut known = if depth == Depth::Core { Vec::new() } else { self.known_members(&pods) };
        known.retain(|sandbox| !early.contains_key(sandbox));
        let (seen, networks) = self.pass(&wanted, machine, &known);
        early.extend(networks);
        let mut seen = seen.into_iter();
        let root = seen.next().flatten();
        let above = seen.by_ref().take(above).flatten().collect();
        let system = system.into_iter().filter_map(|group| Some((group, seen.next()??))).collect();
        let mut shown: Vec<PodUsage> = pods
            .into_iter()
            .map(|pod| PodUsage {
                group: seen.next().flatten(),
                sandbox: seen.next().flatten(),
                containers: seen.by_ref().take(pod.containers.len()).collect(),
                network: None,
                pod,
            })
            .collect();
        let network = if depth == Depth::Core { None } else { self.networks(&mut shown, early) };
        if depth == Depth::Summary {
            let of = |seen: &PodUsage| Some((seen.pod.sandbox.clone(), seen.network.clone()?));
            self.last = Some((began, shown.iter().filter_map(of).collect()));
        }
        if depth != Depth::Full {
            shown.iter_mut().for_each(|pod| pod.sandbox = None);
        }
        let processes = if depth == Depth::Core { None } else { host::processes(&self.root, self.max_pids) };
        Snapshot {
            depth,
            root,
            parent_cgroups: above,
            system,
            pods: shown,
            network,
            processes,
            has_pressure: self.has_pressure,
            size: self.reader.size(),
        }
    }

    /// Closes all open control files.
    pub fn close(&mut self) {
        self.last = None;
        self.reader.close();
    }

    /// Cgroups to read, in this order: root, cgroups above pods, system cgroups, then per pod its own cgroup, sandbox,
    /// and containers. Also returns the number of cgroups above pods.
    fn wanted(&self, pods: &[ReportedPod], system: &[SystemGroup], depth: Depth) -> (Vec<CgroupRequest>, usize) {
        let at = |path: &str, depth| CgroupRequest { key: CgroupKey::At(path.into()), depth };
        let full = (depth == Depth::Full).then_some(depth);
        let mut wanted = vec![at("/", Some(depth))];
        let above = self.names.above();
        wanted.extend(above.iter().map(|path| at(path, full)));
        wanted.extend(system.iter().map(|group| at(&group.path, Some(depth))));
        for pod in pods {
            let uid = &pod.id.uid;
            // Below full depth only a process of the sandbox is needed, and only until one is known.
            let needs_process =
                pod.is_ready && pod.network == NetworkMode::Pod && !self.members.contains_key(&pod.sandbox);
            let sandbox = full.or_else(|| (depth == Depth::Summary && needs_process).then_some(depth));
            wanted.push(CgroupRequest { key: CgroupKey::Pod(uid.clone()), depth: Some(depth) });
            let key = CgroupKey::Container(uid.clone(), pod.sandbox.as_str().into());
            wanted.push(CgroupRequest { key, depth: sandbox });
            for container in &pod.containers {
                let key = CgroupKey::Container(uid.clone(), container.id.as_str().into());
                wanted.push(CgroupRequest { key, depth: Some(depth) });
            }
        }
        (wanted, above.len())
    }

    /// Ready sandboxes with their own network namespace and a known process in it.
    fn known_members(&self, pods: &[ReportedPod]) -> Vec<SandboxId> {
        let own = pods.iter().filter(|pod| pod.is_ready && pod.network == NetworkMode::Pod);
        own.map(|pod| &pod.sandbox).filter(|sandbox| self.members.contains_key(*sandbox)).cloned().collect()
    }

    /// Reads all cgroups and, in parallel, the networks of the `known` processes.
    fn pass(
        &mut self,
        wanted: &[CgroupRequest],
        machine: MachineMemory,
        known: &[SandboxId],
    ) -> (Vec<Option<CgroupObservation>>, HashMap<SandboxId, NetworkInterfaces>) {
        let (reader, members, clock) = (&mut self.reader, &self.members, self.clock.clone());
        let now = move || wall(clock.now());
        if known.is_empty() {
            return (reader.pass(wanted, machine, &now), HashMap::new());
        }
        let proc = self.root.join("proc");
        let network = |sandbox: &SandboxId| {
            let member = members.get(sandbox)?;
            let (network, namespace) = network::of_pods_process(&proc, member.pid)?;
            (namespace.as_ref() == Some(&member.namespace)).then(|| (sandbox.clone(), network))
        };
        thread::scope(|scope| {
            let networks = scope.spawn(|| known.iter().filter_map(network).collect());
            let seen = reader.pass(wanted, machine, &now);
            (seen, networks.join().unwrap_or_default())
        })
    }

    /// Sets the network of each pod that was not read `early`; returns the node's network.
    fn networks(
        &mut self,
        pods: &mut [PodUsage],
        mut early: HashMap<SandboxId, NetworkInterfaces>,
    ) -> Option<NetworkInterfaces> {
        let proc = self.root.join("proc");
        let host = network::of_process(&proc, 1);
        for seen in pods.iter_mut() {
            if seen.pod.network == NetworkMode::Node {
                seen.network.clone_from(&host);
                continue;
            }
            if !seen.pod.is_ready {
                continue;
            }
            let sandbox = &seen.pod.sandbox;
            seen.network = early.remove(sandbox);
            if seen.network.is_some() {
                continue;
            }
            self.members.remove(sandbox);
            // A sandbox need not have a process of its own, and the one of the embedded runtime is outside of the pod's
            // network.
            let groups = seen.sandbox.iter().chain(seen.containers.iter().flatten());
            let mut candidates = groups.filter_map(|group| group.reading.outer_processes).flat_map(|(a, b)| [a, b]);
            let found = candidates.find_map(|pid| Some((pid, network::of_pods_process(&proc, pid)?)));
            if let Some((pid, (network, namespace))) = found {
                seen.network = Some(network);
                // Without a namespace link, each reading searches for a process again.
                let member = namespace.map(|namespace| NetworkProcess { pid, namespace });
                self.members.extend(member.map(|member| (sandbox.clone(), member)));
            }
        }
        let known: HashSet<&SandboxId> = pods.iter().map(|seen| &seen.pod.sandbox).collect();
        self.members.retain(|sandbox, _| known.contains(sandbox));
        host
    }
}

/// Nanoseconds since the epoch; 0 if out of range.
pub fn wall(at: Timestamp) -> WallNs {
    i64::try_from(at.as_nanosecond()).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use std::{fs, path::Path};

    use super::*;
    use crate::{mounts::Mounts, testing::shown_pod};
    use berth_types::PodUid;

    struct Kubepods;

    impl PodCgroupPaths for Kubepods {
        fn above(&self) -> Vec<String> {
            Vec::new()
        }

        fn of_pod(&self, pod: &PodUid) -> Vec<String> {
            vec![format!("/kubepods/pod{pod}")]
        }
    }

    struct Noon;

    impl Clock for Noon {
        fn now(&self) -> Timestamp {
            Timestamp::from_second(1_620_000_000).expect("in range")
        }
    }

    /// Creates a process that has `eth0` in that network namespace.
    fn process_in(proc: &Path, pid: u32, namespace: &str) {
        let of = proc.join(pid.to_string());
        fs::create_dir_all(of.join("ns")).expect("made");
        fs::create_dir_all(of.join("net")).expect("made");
        fs::write(of.join("net/dev"), "  eth0: 1 1 0 0 0 0 0 0 1 1 0 0 0 0 0 0\n").expect("written");
        let _ = fs::remove_file(of.join("ns/net")); // absent the first time
        std::os::unix::fs::symlink(namespace, of.join("ns/net")).expect("linked");
    }

    /// After a PID wrap-around at 32,768 a container's shell may have a greater PID than the commands it runs.
    #[test]
    fn the_network_of_a_pod_is_found_while_its_first_processes_come_and_go() {
        let dir = tempfile::tempdir().expect("a directory");
        let (proc, groups) = (dir.path().join("proc"), dir.path().join("groups"));
        let container = groups.join("kubepods/poduid-a/id-a");
        fs::create_dir_all(&container).expect("made");
        let runs = |processes: &str| fs::write(container.join("cgroup.procs"), processes).expect("written");
        for group in [&*groups, &groups.join("kubepods/poduid-a"), &container] {
            fs::write(group.join("cpu.stat"), "usage_usec 7\n").expect("written");
        }
        process_in(&proc, 1, "net:[1]");
        let reader = CgroupReader::new(Mounts::Unified(groups.clone()), Arc::new(Kubepods), 100);
        let mut sampler = Sampler::new(reader, Arc::new(Kubepods), Arc::new(Noon), dir.path().to_owned(), 0);
        let mut has_network = || {
            let snapshot = sampler.sample(vec![shown_pod("a", &["a"])], Vec::new(), Depth::Summary);
            snapshot.pods[0].network.is_some()
        };

        runs("17\n20\n");
        assert!(!has_network(), "both were gone before they were looked at");
        runs("18\n90\n");
        process_in(&proc, 90, "net:[2]");
        assert!(has_network(), "the last one is there");
        runs("19\n21\n");
        assert!(has_network(), "the one of before still is in that network");
        process_in(&proc, 90, "net:[3]");
        assert!(!has_network(), "its number went to a process of another pod");
        process_in(&proc, 19, "net:[2]");
        assert!(has_network(), "found again");
        process_in(&proc, 19, "net:[1]");
        assert!(!has_network(), "the machine's network is no pod's");
    }
}
