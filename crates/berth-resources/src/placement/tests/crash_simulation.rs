//! Simulation of kill -9 between any two steps: the node converges, and no CPU has two owners.

use std::sync::Arc;

use tokio::{runtime::Builder, sync::mpsc, task::yield_now};

use super::fixture::{Agent, FakeNode, MemoryFile, machine_of, pod, static_cpus};
use crate::{
    cpu::{checkpoint::encode, exclusive_cpus},
    devices::alignment::ResourceAlignment,
    placement::RunningContainer,
    topology::machines::machine_a,
};
use berth_ports::{ContainerPlacements, StateFile};
use berth_types::{CpuSet, Pod};

/// Number of agents that are killed, each at a moment of its own.
const SEEDS: u64 = 10_000;
/// Agents that are killed one after the other on the same node.
const AGENTS_PER_NODE: u64 = 10;
/// Random steps of an agent that is not killed before.
const STEPS: usize = 4;
/// Polls of the agent after which it is killed at the latest. A start with a few steps takes about as many.
const MAX_POLLS: usize = 100;

/// Xorshift generator: a seed gives the same sequence on every run.
struct SeededRandom(u64);

impl SeededRandom {
    fn new(seed: u64) -> Self {
        Self((seed + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15))
    }

    fn below(&mut self, bound: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        usize::try_from(self.0 % 1_000_003).expect("a small number") % bound
    }
}

/// A node with its state files, which outlives the agents.
struct SimulatedNode {
    node: Arc<FakeNode>,
    files: [Arc<MemoryFile>; 2],
    pods: Vec<Pod>,
}

impl SimulatedNode {
    fn new() -> Self {
        let pods = vec![
            pod("pinned1", &["c=1"]),
            pod("pinned2", &["a=1", "b=2"]),
            pod("pinned3", &["*i=2", "c=3"]),
            pod("pinned4", &["c=4"]),
            pod("shared1", &["c=500m"]),
            pod("shared2", &["*i=500m", "a=500m", "b=1500m"]),
        ];
        Self { node: FakeNode::new(&machine_a()), files: Default::default(), pods }
    }

    /// Runs an agent, and kills it after so many polls; `None` lets it end by itself.
    fn run_agent(&self, seed: u64, polls: Option<usize>) {
        self.node.clear_updates();
        let runtime = Builder::new_current_thread().enable_time().start_paused(true).build().expect("a runtime");
        runtime.block_on(async {
            let kill = async {
                match polls {
                    Some(polls) => {
                        for _ in 0..polls {
                            yield_now().await;
                        }
                    }
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                biased;
                () = kill => {}
                () = self.serve_pods(seed) => {}
            }
        });
        // Drops all tasks where they are: nothing of the agent runs any more.
        drop(runtime);
    }

    /// Restores the pods of the agent before, then ends and starts pods at random.
    async fn serve_pods(&self, seed: u64) {
        let files = self.files.each_ref().map(|file| -> Arc<dyn StateFile> { file.clone() });
        let agent = Agent::start(&static_cpus("1"), machine_of(machine_a()), files).await;
        let agent = agent.unwrap_or_else(|error| panic!("seed {seed}: {error}"));
        let changed = agent.reconcile(&self.node);
        let active = self.pods.iter().filter(|pod| self.node.records().is_active(pod));
        for pod in active.collect::<Vec<_>>() {
            let was_running = pod.containers().iter().any(|c| self.node.records().is_running(pod, &c.name));
            let is_admitted = self.admit(&agent, pod);
            assert!(is_admitted || !was_running, "seed {seed}: {} runs, and is refused", pod.uid());
            if is_admitted {
                self.start(&agent, pod, seed).await;
            }
        }
        self.converge(&agent, &changed, seed).await;
        let mut random = SeededRandom::new(seed + SEEDS);
        for _ in 0..STEPS {
            self.step(&agent, &changed, &mut random, seed).await;
        }
        self.converge(&agent, &changed, seed).await;
    }

    async fn step(&self, agent: &Agent, changed: &mpsc::UnboundedSender<()>, random: &mut SeededRandom, seed: u64) {
        let pod = &self.pods[random.below(self.pods.len())];
        if self.node.records().is_active(pod) {
            self.node.end(pod);
            changed.send(()).expect("the reconciler runs");
        } else {
            self.node.activate(&[pod]);
            if self.admit(agent, pod) {
                self.start(agent, pod, seed).await;
            }
        }
        for _ in 0..random.below(3) {
            yield_now().await;
        }
    }

    /// Admits an active pod; a refused one ends.
    fn admit(&self, agent: &Agent, pod: &Pod) -> bool {
        let records = self.node.records();
        let is_admitted = agent.admit_among(pod, records.active()).is_ok();
        if !is_admitted {
            agent.manager.release(pod.uid());
            self.node.end(pod);
        }
        is_admitted
    }

    /// Starts the containers of a pod that do not run: init containers one after the other, then the regular ones.
    async fn start(&self, agent: &Agent, pod: &Pod, seed: u64) {
        let is_running = |name: &str| self.node.records().is_running(pod, name);
        if !pod.containers().iter().any(|container| is_running(&container.name)) {
            for init in pod.init_containers() {
                let id = agent.start_container(&self.node, pod, &init.name).await;
                self.check_owners(seed);
                self.node.exit(&id);
            }
        }
        for container in pod.containers() {
            if !is_running(&container.name) {
                agent.start_container(&self.node, pod, &container.name).await;
                self.check_owners(seed);
            }
        }
    }

    /// Checks that no two running containers have an exclusive CPU in common.
    fn check_owners(&self, seed: u64) {
        let records = self.node.records();
        let is_exclusive = |container: &RunningContainer| {
            let mut owners = self.pods.iter().filter(|pod| *pod.uid() == container.pod);
            owners.any(|pod| is_pinned(pod, &container.name))
        };
        let pinned = records.containers().filter(|(container, _)| is_exclusive(container));
        let sets: Vec<&CpuSet> = pinned.map(|(_, cpus)| cpus).collect();
        let distinct: CpuSet = sets.iter().flat_map(|cpus| cpus.iter()).collect();
        let sum: usize = sets.iter().map(|cpus| cpus.len()).sum();
        assert_eq!(sum, distinct.len(), "seed {seed}: {sets:?}");
    }

    /// Waits for a whole pass of the reconciler, and checks that containers run on exactly their CPUs.
    async fn converge(&self, agent: &Agent, changed: &mpsc::UnboundedSender<()>, seed: u64) {
        // The first pass may have begun before the last change.
        for _ in 0..2 {
            changed.send(()).expect("the reconciler runs");
            agent.next_pass().await;
        }
        self.check_owners(seed);
        let records = self.node.records();
        for (container, cpus) in records.containers() {
            let placement = agent.manager.placement(&container.pod, &container.name);
            assert_eq!(*cpus, placement.cpus, "seed {seed}: {container:?}");
        }
        let state = agent.manager.state().cpu.clone();
        let exclusive = state.exclusive();
        assert!(state.default.is_disjoint(&exclusive), "seed {seed}: {state:?}");
        assert_eq!(state.default.union(&exclusive), machine_a().all(), "seed {seed}: {state:?}");
        for pod in &self.pods {
            let assigned = state.assignments.get(pod.uid());
            assert!(assigned.is_none() || records.is_active(pod), "seed {seed}: {} has ended", pod.uid());
            for container in pod.init_containers().iter().chain(pod.containers()).filter(|_| records.is_active(pod)) {
                let count = state.container(pod.uid(), &container.name).map_or(0, CpuSet::len);
                assert_eq!(count, exclusive_cpus(pod, container), "seed {seed}: {} {}", pod.uid(), container.name);
            }
        }
        agent.manager.cpu_checkpoint.write().await.expect("written");
        assert_eq!(self.files[0].content(), encode("static", &state), "seed {seed}");
    }
}

/// Whether a container of the pod has exclusive CPUs.
fn is_pinned(pod: &Pod, name: &str) -> bool {
    pod.container(name).is_some_and(|(_, container)| exclusive_cpus(pod, container) > 0)
}

fn simulate(seeds: impl Iterator<Item = u64>) {
    for first in seeds {
        let node = SimulatedNode::new();
        for seed in first..first + AGENTS_PER_NODE {
            let polls = SeededRandom::new(seed).below(MAX_POLLS);
            node.run_agent(seed, Some(polls));
        }
        node.run_agent(first + AGENTS_PER_NODE, None);
    }
}

/// The bad input of issue 37, over 10,000 seeds.
#[test]
fn agents_that_are_killed_leave_no_cpu_to_two_owners() {
    let node = usize::try_from(AGENTS_PER_NODE).expect("a small number");
    std::thread::scope(|scope| {
        let halves = [0..SEEDS / 2, SEEDS / 2..SEEDS];
        let threads = halves.map(|seeds| scope.spawn(move || simulate(seeds.step_by(node))));
        for thread in threads {
            thread.join().expect("no seed fails");
        }
    });
}
