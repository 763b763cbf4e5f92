//! Random sequences of the static policy, with crashes: no CPU is ever assigned twice. Pure.

use std::collections::HashSet;

use berth_types::quantity::{Amount, QuantityFormat};
use proptest::prelude::*;

use super::*;
use crate::{
    cpu::{
        checkpoint::{InitialContainers, decode, encode},
        fixtures::pod,
    },
    topology::machines::{machine, machine_a, machine_b},
};

/// Number of simulated nodes, each of which may crash [`STEPS`] times.
const SEEDS: u64 = 2_000;
const STEPS: usize = 5;

fn pods() -> Vec<Pod> {
    vec![
        pod("a", &[], &["c=1"]),
        pod("b", &["i=2"], &["c=4"]),
        pod("c", &["i=3"], &["c=1", "d=1"]),
        pod("d", &["s*=2"], &["c=2"]),
        pod("e", &["i=2", "s*=1", "j=1"], &["c=2"]),
        pod("f", &[], &["c=500m"]),
        pod("g", &["i=4"], &["c=2", "d=1"]),
    ]
}

/// Policy, state, and reusable CPUs of a node.
struct Node {
    policy: StaticPolicy,
    state: CpuState,
    reusable: ReusableCpus,
}

impl Node {
    fn new(topology: CpuTopology, options: StaticOptions) -> Self {
        let reservation = Amount::from_value(1, QuantityFormat::DecimalSi);
        let reserved =
            ReservedCpus::choose(&topology, reservation, &CpuSet::default(), options).expect("a reserved CPU");
        let policy = StaticPolicy { topology, reserved, options };
        let mut node = Self { policy, state: CpuState::default(), reusable: ReusableCpus::default() };
        node.policy.initialize(&mut node.state).expect("a fresh state");
        node
    }

    /// Allocates the containers of a pod until one is refused; the others keep theirs, as in the reference.
    fn admit(&mut self, pod: &Pod, affinity: Option<NumaMask>) -> bool {
        let mut containers = pod.init_containers().iter().chain(pod.containers());
        containers.all(|container| {
            self.policy.allocate(&mut self.state, &mut self.reusable, pod, container, affinity).is_ok()
        })
    }

    /// Starts again from a checkpoint.
    fn restore(&mut self, content: &[u8]) {
        self.state = decode(content, "static", &InitialContainers::new()).expect("a checkpoint");
        self.reusable = ReusableCpus::default();
        let result = self.policy.initialize(&mut self.state);
        // The reference refuses to start, too, if all CPUs are assigned and no reserved one is in the shared pool.
        let expected = if self.state.default.is_empty() { Err(CpuStateMismatch::EmptyDefault) } else { Ok(false) };
        assert_eq!(result, expected);
    }

    /// Checks that each CPU is in the shared pool or of one pod, and of one container that runs until the pod ends.
    fn check(&self, pods: &[Pod]) {
        let exclusive = self.state.exclusive();
        assert!(self.state.default.is_disjoint(&exclusive), "{:?}", self.state);
        let strict = self.policy.options.strict_reservation;
        let all = if strict { self.policy.allocatable() } else { self.policy.topology.all() };
        assert_eq!(self.state.default.union(&exclusive), all, "{:?}", self.state);
        assert!(exclusive.is_disjoint(&self.policy.reserved.cpus), "{:?}", self.state);
        let of_pods: usize = pods.iter().map(|pod| self.state.pod(pod.uid()).len()).sum();
        assert_eq!(of_pods, exclusive.len(), "{:?}", self.state);
        for pod in pods {
            let sidecars = pod.init_containers().iter().filter(|container| Pod::is_sidecar(container));
            let running = sidecars.chain(pod.containers());
            let sets: Vec<&CpuSet> =
                running.filter_map(|container| self.state.container(pod.uid(), &container.name)).collect();
            let distinct: CpuSet = sets.iter().flat_map(|cpus| cpus.iter()).collect();
            let sum: usize = sets.iter().map(|cpus| cpus.len()).sum();
            assert_eq!(sum, distinct.len(), "{}: {:?}", pod.uid(), self.state);
        }
    }
}

/// Xorshift generator: a seed gives the same sequence on every run.
struct Generator(u64);

impl Generator {
    fn below(&mut self, bound: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        usize::try_from(self.0 % 1_000_003).expect("a small number") % bound
    }
}

/// A container starts once the checkpoint with its CPUs is written. Whenever the agent is killed, the next one assigns
/// the CPUs of running containers to no other container.
#[test]
fn crashes_never_give_cpus_of_running_containers_to_others() {
    let pods = pods();
    for seed in 1..=SEEDS {
        let mut random = Generator(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15));
        let options = StaticOptions { strict_reservation: seed % 2 == 0, ..StaticOptions::default() };
        let mut node = Node::new(machine_a(), options);
        let mut file = encode("static", &node.state);
        let mut running: HashSet<PodUid> = HashSet::new();
        for _ in 0..STEPS {
            let pod = &pods[random.below(pods.len())];
            let before = node.state.clone();
            let is_admitted = if random.below(3) == 0 {
                running.remove(pod.uid());
                node.state.retain(&running);
                false
            } else {
                node.admit(pod, None)
            };
            match random.below(3) {
                0 => {
                    file = encode("static", &node.state);
                    if is_admitted {
                        running.insert(pod.uid().clone());
                    }
                }
                // Killed before the checkpoint is written.
                1 => {
                    node.restore(&file);
                    assert_eq!(node.state, before, "seed {seed}");
                }
                // Killed after the checkpoint is written, before the containers start.
                _ => {
                    file = encode("static", &node.state);
                    node.restore(&file);
                }
            }
            if node.state.default.is_empty() {
                break;
            }
            for pod in pods.iter().filter(|pod| running.contains(pod.uid())) {
                let before = node.state.clone();
                assert!(node.admit(pod, None), "seed {seed}: {}", pod.uid());
                assert_eq!(node.state, before, "seed {seed}: a running pod keeps its CPUs");
            }
            node.check(&pods);
        }
    }
}

fn any_topology() -> impl Strategy<Value = CpuTopology> {
    (0..6).prop_map(|index| match index {
        0 => machine_a(),
        1 => machine_b(),
        2 => machine(2, 2, 2, 2),
        3 => machine(1, 4, 2, 1),
        4 => machine(4, 1, 2, 2),
        _ => machine(1, 1, 3, 4),
    })
}

fn any_options() -> impl Strategy<Value = StaticOptions> {
    let allocator = (0..5).prop_map(|index| {
        let none = StaticOptions::default();
        match index {
            0 => none,
            1 => StaticOptions { prefers_uncore_cache: true, ..none },
            2 => StaticOptions { distributes_over_nodes: true, ..none },
            3 => StaticOptions { spreads_over_cores: true, ..none },
            _ => StaticOptions { aligns_by_socket: true, ..none },
        }
    });
    (allocator, any::<bool>(), any::<bool>()).prop_map(|(options, full, strict_reservation)| StaticOptions {
        full_cores_only: full && !options.spreads_over_cores,
        strict_reservation,
        ..options
    })
}

#[derive(Clone, Debug)]
enum Step {
    Admit { pod: usize, affinity: Option<u64> },
    ReleasePod { pod: usize },
    Retain { bits: u8 },
    Restart,
}

fn any_step() -> impl Strategy<Value = Step> {
    let affinity = prop::option::of(1_u64..16);
    prop_oneof![
        4 => (0_usize..7, affinity).prop_map(|(pod, affinity)| Step::Admit { pod, affinity }),
        1 => (0_usize..7).prop_map(|pod| Step::ReleasePod { pod }),
        1 => any::<u8>().prop_map(|bits| Step::Retain { bits }),
        1 => Just(Step::Restart),
    ]
}

proptest! {
    #[test]
    fn no_cpu_is_assigned_twice(
        topology in any_topology(),
        options in any_options(),
        steps in prop::collection::vec(any_step(), 1..12),
    ) {
        let pods = pods();
        let mut node = Node::new(topology, options);
        for step in steps {
            match step {
                Step::Admit { pod, affinity } => {
                    node.admit(&pods[pod], affinity.map(NumaMask::from_bits));
                }
                Step::ReleasePod { pod } => {
                    node.state.release_pod(pods[pod].uid());
                    prop_assert!(node.state.pod(pods[pod].uid()).is_empty());
                }
                Step::Retain { bits } => {
                    let active = pods.iter().enumerate().filter(|(index, _)| bits & (1_u8 << *index) != 0);
                    node.state.retain(&active.map(|(_, pod)| pod.uid().clone()).collect());
                }
                Step::Restart => {
                    let (before, content) = (node.state.clone(), encode("static", &node.state));
                    node.restore(&content);
                    prop_assert_eq!(&node.state, &before);
                }
            }
            node.check(&pods);
        }
        node.state.retain(&HashSet::new());
        prop_assert_eq!(node.state.exclusive().len(), 0);
        let strict = node.policy.options.strict_reservation;
        let all = if strict { node.policy.allocatable() } else { node.policy.topology.all() };
        prop_assert_eq!(node.state.default, all);
    }
}
