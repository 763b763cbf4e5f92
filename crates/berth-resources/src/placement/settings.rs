//! Settings of the CPU, memory, and topology managers. Pure. Spec 06b §1.2, §2.1, §3.1.

use std::collections::BTreeMap;

use crate::{
    cpu::{
        CpuPolicy, CpuPolicyContext, CpuPolicyError, CpuReservationError, ReservedCpus, StaticOptions, StaticPolicy,
    },
    memory::{MemoryPolicy, MemoryPolicyError, NodeMemoryReservation, ReservedMemory, ReservedMemoryError},
    numa::{TopologyConfig, TopologyConfigError, TopologyPolicy, TopologyScope},
    pod_level::PodLevelManagement,
    topology::MachineTopology,
};
use berth_types::{
    CpuSet, Pod,
    quantity::Amount,
    resources::{Amounts, CPU, amount_of},
};

/// Fields of the kubelet configuration, and the gates that they depend on.
#[derive(Clone, Debug)]
pub struct PlacementSettings {
    /// `cpuManagerPolicy`
    pub cpu_policy: String,
    /// `cpuManagerPolicyOptions`
    pub cpu_options: BTreeMap<String, String>,
    /// Gate `CPUManagerPolicyBetaOptions`
    pub cpu_beta_options: bool,
    /// Gate `CPUManagerPolicyAlphaOptions`
    pub cpu_alpha_options: bool,
    /// Gate `DisableCPUQuotaWithExclusiveCPUs`
    pub disables_cpu_quota: bool,
    /// Gate `InPlacePodVerticalScalingExclusiveCPUs`
    pub resizes_exclusive_cpus: bool,
    /// Gates `PodLevelResourceManagers` and `PodLevelResources`
    pub pod_level: PodLevelManagement,
    /// `reservedSystemCPUs`
    pub reserved_cpus: CpuSet,
    /// Sum of `systemReserved` and `kubeReserved`, without eviction thresholds.
    pub reserved: Amounts,
    /// The same with the hard eviction thresholds: capacity without allocatable.
    pub not_allocatable: Amounts,
    /// `memoryManagerPolicy`
    pub memory_policy: String,
    /// `reservedMemory`
    pub reserved_memory: Vec<NodeMemoryReservation>,
    /// `topologyManagerPolicy`
    pub topology_policy: String,
    /// `topologyManagerScope`
    pub topology_scope: String,
    /// `topologyManagerPolicyOptions`
    pub topology_options: BTreeMap<String, String>,
}

/// The policies `none`, as in a kubelet configuration without these fields; all gates are off.
impl Default for PlacementSettings {
    fn default() -> Self {
        Self {
            cpu_policy: "none".to_owned(),
            cpu_options: BTreeMap::new(),
            cpu_beta_options: false,
            cpu_alpha_options: false,
            disables_cpu_quota: false,
            resizes_exclusive_cpus: false,
            pod_level: PodLevelManagement::default(),
            reserved_cpus: CpuSet::default(),
            reserved: Amounts::new(),
            not_allocatable: Amounts::new(),
            memory_policy: "None".to_owned(),
            reserved_memory: Vec::new(),
            topology_policy: "none".to_owned(),
            topology_scope: "container".to_owned(),
            topology_options: BTreeMap::new(),
        }
    }
}

impl PlacementSettings {
    /// Whether no manager has a policy that needs the topology of the machine.
    pub fn are_policies_off(&self) -> bool {
        self.cpu_policy == "none" && self.memory_policy == "None" && self.topology_policy == "none"
    }
}

/// Settings with which the managers do not start. The texts are those of the reference kubelet.
#[derive(Debug, thiserror::Error)]
pub enum PlacementSettingsError {
    /// CPU manager policy or options.
    #[error("failed to initialize cpu manager: {0}")]
    CpuPolicy(#[from] CpuPolicyError),
    /// `reservedSystemCPUs` or the CPU reservations do not fit the machine.
    #[error("failed to initialize cpu manager: {0}")]
    ReservedCpus(#[from] CpuReservationError),
    /// Memory manager policy.
    #[error("failed to initialize memory manager: {0}")]
    MemoryPolicy(#[from] MemoryPolicyError),
    /// `reservedMemory` does not add up to the reservations of the node.
    #[error("failed to initialize memory manager: {0}")]
    ReservedMemory(#[from] ReservedMemoryError),
    /// Topology manager policy, scope, or options.
    #[error("failed to initialize topology manager: {0}")]
    Topology(#[from] TopologyConfigError),
}

/// Policies of the managers on this machine.
#[derive(Clone, Debug)]
pub struct PlacementPolicies {
    /// Topology of the machine.
    pub machine: MachineTopology,
    /// Policy of the topology manager.
    pub topology: TopologyConfig,
    /// Static policy of the CPU manager; `None` with the policy `none`.
    pub cpu: Option<StaticPolicy>,
    /// Memory that the static policy of the memory manager never allocates; `None` with the policy `None`.
    pub memory: Option<ReservedMemory>,
    /// Whether containers with exclusive CPUs run without CPU quota.
    pub disables_cpu_quota: bool,
    /// Whether a resize can give exclusive CPUs to a container that runs.
    pub resizes_exclusive_cpus: bool,
    /// Whether pods with pod-level resources get CPUs and memory.
    pub pod_level: PodLevelManagement,
}

impl PlacementPolicies {
    /// Checks the settings in the order of the reference: topology, CPU, memory manager.
    ///
    /// # Errors
    /// The first wrong setting.
    pub fn new(settings: &PlacementSettings, machine: MachineTopology) -> Result<Self, PlacementSettingsError> {
        let topology = TopologyConfig::new(
            &settings.topology_policy,
            &settings.topology_scope,
            &settings.topology_options,
            &machine,
        )?;
        let context = CpuPolicyContext {
            beta_options: settings.cpu_beta_options,
            alpha_options: settings.cpu_alpha_options,
            is_single_numa_node: topology.policy == TopologyPolicy::SingleNumaNode,
            sockets: machine.cpus.num_sockets(),
            nodes: machine.cpus.num_nodes(),
        };
        let cpu = match CpuPolicy::parse(&settings.cpu_policy, &settings.cpu_options, context)? {
            CpuPolicy::None => None,
            CpuPolicy::Static(options) => {
                let count: Amount = amount_of(&settings.reserved, CPU);
                let reserved = ReservedCpus::choose(&machine.cpus, count, &settings.reserved_cpus, options)?;
                let options = StaticOptions { pod_level: settings.pod_level, ..options };
                Some(StaticPolicy { topology: machine.cpus.clone(), reserved, options })
            }
        };
        let memory = match MemoryPolicy::parse(&settings.memory_policy)? {
            MemoryPolicy::None => None,
            MemoryPolicy::Static => {
                Some(ReservedMemory::new(&settings.reserved_memory, &settings.not_allocatable, &machine)?)
            }
        };
        let PlacementSettings { disables_cpu_quota, resizes_exclusive_cpus, pod_level, .. } = *settings;
        Ok(Self { machine, topology, cpu, memory, disables_cpu_quota, resizes_exclusive_cpus, pod_level })
    }

    /// Whether a pod gets CPUs and memory as a whole: it has pod-level resources, and the topology manager merges the
    /// hints of whole pods. With another scope or policy, containers of such a pod get theirs from the node.
    pub fn serves_as_whole(&self, pod: &Pod) -> bool {
        let has_pod_scope = self.topology.policy != TopologyPolicy::None && self.topology.scope == TopologyScope::Pod;
        has_pod_scope && self.pod_level.manages(pod)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::topology::{NumaNode, machines::machine_b};

    fn machine() -> MachineTopology {
        let node = || NumaNode { memory: 8 << 30, ..NumaNode::default() };
        MachineTopology { cpus: machine_b(), nodes: (0..2).map(|id| (id, node())).collect(), ..Default::default() }
    }

    fn settings() -> PlacementSettings {
        let amount = |text: &str| Amount::parse(text).expect(text);
        PlacementSettings {
            cpu_policy: "static".to_owned(),
            reserved: [("cpu".to_owned(), amount("1500m"))].into(),
            memory_policy: "Static".to_owned(),
            not_allocatable: [("memory".to_owned(), amount("1124Mi"))].into(),
            reserved_memory: vec![NodeMemoryReservation {
                node: 0,
                amounts: [("memory".to_owned(), amount("1124Mi"))].into(),
            }],
            topology_policy: "single-numa-node".to_owned(),
            topology_scope: "container".to_owned(),
            ..PlacementSettings::default()
        }
    }

    #[test]
    fn policies_follow_from_settings_and_machine() {
        let policies = PlacementPolicies::new(&settings(), machine()).expect("correct settings");
        let cpu = policies.cpu.expect("static");
        // The reservation is rounded up to whole CPUs.
        assert_eq!(cpu.reserved.cpus.to_string(), "0,6");
        assert_eq!(policies.memory.expect("static").bytes(0, "memory"), 1124 << 20);
        assert_eq!(policies.topology.policy, TopologyPolicy::SingleNumaNode);
        let policies = PlacementPolicies::new(&PlacementSettings::default(), machine()).expect("correct settings");
        assert!(policies.cpu.is_none() && policies.memory.is_none());
    }

    #[test]
    fn wrong_settings_name_the_manager() {
        let change = |change: &dyn Fn(&mut PlacementSettings)| {
            let mut settings = settings();
            change(&mut settings);
            PlacementPolicies::new(&settings, machine()).expect_err("wrong").to_string()
        };
        for (text, expected) in [
            (
                change(&|s| s.topology_policy = "x".to_owned()),
                "failed to initialize topology manager: unknown policy: \"x\"",
            ),
            (change(&|s| s.cpu_policy = "x".to_owned()), "failed to initialize cpu manager: unknown policy: \"x\""),
            (
                change(&|s| s.reserved.clear()),
                "failed to initialize cpu manager: [cpumanager] the static policy requires \
                 systemreserved.cpu + kubereserved.cpu to be greater than zero",
            ),
            // AC-06b-26
            (
                change(&|s| s.memory_policy = "BestEffort".to_owned()),
                "failed to initialize memory manager: policy \"BestEffort\" is not available for platform \"linux\"",
            ),
            // AC-06b-23
            (
                change(&|s| {
                    s.reserved_memory[0].amounts =
                        [("memory".to_owned(), Amount::parse("1Gi").expect("an amount"))].into()
                }),
                "failed to initialize memory manager: the total amount \"1Gi\" of type \"memory\" is not equal to the \
                 value \"1124Mi\" determined by Node Allocatable feature",
            ),
        ] {
            assert_eq!(text, expected);
        }
    }
}
