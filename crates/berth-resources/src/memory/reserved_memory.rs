//! Policy of the memory manager, and memory reserved per NUMA node. Pure. Spec 06b §2.1, §2.2.

use std::collections::{BTreeMap, BTreeSet};

use berth_types::{
    fieldpath::quoted,
    resources::{Amounts, MEMORY, amount_of, is_hugepage},
};

use super::machine_state::whole_bytes;
use crate::topology::MachineTopology;

/// Value of `memoryManagerPolicy`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum MemoryPolicy {
    /// Containers use the memory of all NUMA nodes.
    None,
    /// Containers of Guaranteed pods get memory of chosen NUMA nodes.
    Static,
}

/// The policy cannot be used; the texts are the reference's.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum MemoryPolicyError {
    /// The policy exists on other platforms only.
    #[error("policy {} is not available for platform \"linux\"", quoted(.0))]
    Platform(String),
    /// No such policy.
    #[error("unknown policy: \"{0}\"")]
    Unknown(String),
}

impl MemoryPolicy {
    /// Parses the value of the configuration.
    ///
    /// # Errors
    /// The policy is unknown or for Windows only.
    pub fn parse(name: &str) -> Result<Self, MemoryPolicyError> {
        match name {
            "None" => Ok(Self::None),
            "Static" => Ok(Self::Static),
            "BestEffort" => Err(MemoryPolicyError::Platform(name.to_owned())),
            _ => Err(MemoryPolicyError::Unknown(name.to_owned())),
        }
    }

    /// Name in the configuration and in the checkpoint.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::None => "None",
            Self::Static => "Static",
        }
    }
}

/// An element of `reservedMemory`.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct NodeMemoryReservation {
    /// NUMA node ID as configured.
    pub node: i32,
    /// Amounts of `memory`, `hugepages-2Mi`, …
    pub amounts: Amounts,
}

/// `reservedMemory` does not fit the node; the agent does not start. The texts are the reference's.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum ReservedMemoryError {
    /// The machine has no such NUMA node.
    #[error("the reserved memory configuration references a NUMA node {0} that does not exist on this machine")]
    UnknownNode(i32),
    /// The sum over all nodes differs from the reservations for system, Kubernetes components, and hard eviction.
    #[error(
        "the total amount {} of type {} is not equal to the value {} determined by Node Allocatable feature",
        quoted(.total),
        quoted(.resource),
        quoted(.expected)
    )]
    Total {
        /// Sum of `reservedMemory`, as a quantity.
        total: String,
        /// `memory`, `hugepages-2Mi`, …
        resource: String,
        /// Sum of the reservations, as a quantity.
        expected: String,
    },
    /// An amount has a fraction of a byte. The spelling is the reference's.
    #[error("could not covert a variable of type Quantity to int64")]
    Fraction,
    /// No memory is reserved at all.
    #[error("[memorymanager] you should specify the system reserved memory")]
    Missing,
}

/// Memory that the policy `Static` never allocates, in bytes by NUMA node and resource.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct ReservedMemory {
    nodes: BTreeMap<u32, BTreeMap<String, u64>>,
}

impl ReservedMemory {
    /// Checks the configured reservations against the machine, and against the sums that are not allocatable on this
    /// node (`systemReserved`, `kubeReserved`, and hard eviction thresholds).
    ///
    /// # Errors
    /// The first inconsistency.
    pub fn new(
        configured: &[NodeMemoryReservation],
        not_allocatable: &Amounts,
        topology: &MachineTopology,
    ) -> Result<Self, ReservedMemoryError> {
        let mut nodes: BTreeMap<u32, BTreeMap<String, u64>> = BTreeMap::new();
        let totals = totals(configured, topology)?;
        check_totals(&totals, not_allocatable)?;
        for NodeMemoryReservation { node, amounts } in configured {
            let node = known_node(*node, topology)?;
            for (resource, amount) in amounts {
                let bytes = whole_bytes(*amount).ok_or(ReservedMemoryError::Fraction)?;
                nodes.entry(node).or_default().insert(resource.clone(), bytes);
            }
        }
        if amount_of(&totals, MEMORY).is_zero() {
            return Err(ReservedMemoryError::Missing);
        }
        Ok(Self { nodes })
    }

    /// Reserved bytes of a resource on a node; 0 without a reservation.
    pub fn bytes(&self, node: u32, resource: &str) -> u64 {
        self.nodes.get(&node).and_then(|resources| resources.get(resource)).copied().unwrap_or(0)
    }
}

/// Sum of the reservations over all nodes, in the notation of the last one.
fn totals(configured: &[NodeMemoryReservation], topology: &MachineTopology) -> Result<Amounts, ReservedMemoryError> {
    let mut totals = Amounts::new();
    for NodeMemoryReservation { node, amounts } in configured {
        known_node(*node, topology)?;
        for (resource, amount) in amounts {
            let total = amount.plus(amount_of(&totals, resource));
            totals.insert(resource.clone(), total);
        }
    }
    Ok(totals)
}

fn check_totals(totals: &Amounts, not_allocatable: &Amounts) -> Result<(), ReservedMemoryError> {
    let is_memory = |resource: &&String| *resource == MEMORY || is_hugepage(resource);
    let resources: BTreeSet<&String> = totals.keys().chain(not_allocatable.keys().filter(is_memory)).collect();
    for resource in resources {
        let (total, expected) = (amount_of(totals, resource), amount_of(not_allocatable, resource));
        if total != expected {
            return Err(ReservedMemoryError::Total {
                total: total.canonical(),
                resource: resource.clone(),
                expected: expected.canonical(),
            });
        }
    }
    Ok(())
}

fn known_node(node: i32, topology: &MachineTopology) -> Result<u32, ReservedMemoryError> {
    let known = u32::try_from(node).ok().filter(|id| topology.nodes.contains_key(id));
    known.ok_or(ReservedMemoryError::UnknownNode(node))
}

#[cfg(test)]
mod tests {
    use berth_types::quantity::Amount;

    use super::*;
    use crate::memory::fixture::{GI, MI, topology};

    #[test]
    fn policies_have_names() {
        for policy in [MemoryPolicy::None, MemoryPolicy::Static] {
            assert_eq!(MemoryPolicy::parse(policy.as_str()), Ok(policy));
        }
        for (name, error) in [
            // AC-06b-26
            ("BestEffort", "policy \"BestEffort\" is not available for platform \"linux\""),
            ("static", "unknown policy: \"static\""),
            ("", "unknown policy: \"\""),
        ] {
            assert_eq!(MemoryPolicy::parse(name).expect_err(name).to_string(), error);
        }
    }

    fn amounts(list: &[(&str, &str)]) -> Amounts {
        list.iter().map(|(name, text)| ((*name).to_owned(), Amount::parse(text).expect(text))).collect()
    }

    fn new(
        configured: &[(i32, &[(&str, &str)])],
        not_allocatable: &[(&str, &str)],
    ) -> Result<ReservedMemory, ReservedMemoryError> {
        let reservation =
            |(node, list): &(i32, &[(&str, &str)])| NodeMemoryReservation { node: *node, amounts: amounts(list) };
        let configured: Vec<NodeMemoryReservation> = configured.iter().map(reservation).collect();
        ReservedMemory::new(&configured, &amounts(not_allocatable), &topology(&[(4 * GI, 0), (4 * GI, 0)]))
    }

    #[test]
    fn reservations_are_bytes_by_node_and_resource() {
        let reserved = new(
            &[(0, &[("memory", "1Gi"), ("hugepages-2Mi", "4Mi")]), (1, &[("memory", "100Mi")])],
            &[("memory", "1124Mi"), ("hugepages-2Mi", "4Mi"), ("cpu", "1"), ("ephemeral-storage", "1Gi")],
        )
        .expect("consistent");
        for (node, resource, bytes) in [
            (0, "memory", GI),
            (0, "hugepages-2Mi", 4 * MI),
            (1, "memory", 100 * MI),
            (1, "hugepages-2Mi", 0),
            (2, "memory", 0),
        ] {
            assert_eq!(reserved.bytes(node, resource), bytes, "{node} {resource}");
        }
        // Amounts are compared by value.
        assert!(new(&[(0, &[("memory", "1Gi")])], &[("memory", "1048576Ki")]).is_ok());
    }

    #[test]
    fn inconsistent_reservations_are_refused() {
        let is_not_equal = |total: &str, resource: &str, value: &str| {
            format!(
                "the total amount \"{total}\" of type \"{resource}\" is not equal to the value \"{value}\" determined \
                 by Node Allocatable feature"
            )
        };
        let unknown = "the reserved memory configuration references a NUMA node";
        let missing = "[memorymanager] you should specify the system reserved memory";
        type Case<'a> = (&'a [(i32, &'a [(&'a str, &'a str)])], &'a [(&'a str, &'a str)], String);
        let cases: [Case<'_>; 10] = [
            // AC-06b-23
            (&[(0, &[("memory", "1Gi")])], &[("memory", "1124Mi")], is_not_equal("1Gi", "memory", "1124Mi")),
            (
                &[(0, &[("memory", "1Gi")]), (1, &[("memory", "1000M")])],
                &[("memory", "1Gi")],
                is_not_equal("2073741824", "memory", "1Gi"),
            ),
            (&[(0, &[("memory", "1Gi")])], &[], is_not_equal("1Gi", "memory", "0")),
            (&[], &[("memory", "100Mi")], is_not_equal("0", "memory", "100Mi")),
            (
                &[(0, &[("memory", "1Gi"), ("hugepages-1Gi", "1Gi")])],
                &[("memory", "1Gi")],
                is_not_equal("1Gi", "hugepages-1Gi", "0"),
            ),
            (
                &[(0, &[("memory", "1Gi")])],
                &[("memory", "1Gi"), ("hugepages-2Mi", "2Mi")],
                is_not_equal("0", "hugepages-2Mi", "2Mi"),
            ),
            (&[(2, &[("memory", "1Gi")])], &[], format!("{unknown} 2 that does not exist on this machine")),
            (&[(-1, &[("memory", "1Gi")])], &[], format!("{unknown} -1 that does not exist on this machine")),
            (
                &[(0, &[("memory", "1500m")])],
                &[("memory", "1.5")],
                "could not covert a variable of type Quantity to int64".to_owned(),
            ),
            (&[(0, &[("hugepages-2Mi", "2Mi")])], &[("hugepages-2Mi", "2Mi")], missing.to_owned()),
        ];
        for (configured, not_allocatable, error) in cases {
            assert_eq!(new(configured, not_allocatable).expect_err(&error).to_string(), error);
        }
        assert_eq!(new(&[], &[]), Err(ReservedMemoryError::Missing));
    }
}
