//! Topology manager configuration: policy, scope, and policy options. Pure. Spec 06b §3.1.

use std::{collections::BTreeMap, num::IntErrorKind};

use berth_types::{fieldpath::quoted, go_bool};

use super::{merge::MergeTopology, policy::TopologyPolicy};
use crate::topology::MachineTopology;

/// Option: masks of close nodes are preferred among those of the same size; a boolean, default false.
const PREFER_CLOSEST: &str = "prefer-closest-numa-nodes";

/// Option: number of NUMA nodes above which the topology manager does not start.
const MAX_ALLOWABLE: &str = "max-allowable-numa-nodes";

/// Default and smallest value of `max-allowable-numa-nodes`.
const DEFAULT_MAX_NODES: i64 = 8;

/// What one merge of hints covers.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum TopologyScope {
    /// Each container has an affinity of its own.
    #[default]
    Container,
    /// All containers of a pod have the same affinity.
    Pod,
}

impl TopologyScope {
    /// The scope with this name in `topologyManagerScope`; `None` if there is none.
    pub fn parse(name: &str) -> Option<Self> {
        match name {
            "container" => Some(Self::Container),
            "pod" => Some(Self::Pod),
            _ => None,
        }
    }
}

/// Settings that the topology manager does not start with. The texts are those of the reference kubelet.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum TopologyConfigError {
    /// `topologyManagerPolicy` names no policy.
    #[error("unknown policy: \"{0}\"")]
    UnknownPolicy(String),
    /// `topologyManagerScope` names no scope.
    #[error("unknown scope: \"{0}\"")]
    UnknownScope(String),
    /// `topologyManagerPolicyOptions` has a key that is no option.
    #[error("unknown Topology Manager Policy option: {}", quoted(.0))]
    UnknownOption(String),
    /// The value of a boolean option is none of Go's booleans.
    #[error("bad value for option {}: strconv.ParseBool: parsing {}: invalid syntax", quoted(.option), quoted(.value))]
    Boolean {
        /// Name of the option.
        option: String,
        /// The value as configured.
        value: String,
    },
    /// The value of an integer option is no 64-bit integer.
    #[error(
        "unable to convert policy option to integer {}: strconv.Atoi: parsing {}: {cause}",
        quoted(.option),
        quoted(.value)
    )]
    Integer {
        /// Name of the option.
        option: String,
        /// The value as configured.
        value: String,
        /// `invalid syntax` or `value out of range`.
        cause: &'static str,
    },
    /// `max-allowable-numa-nodes` is below its default.
    #[error("the minimum value of {} should not be less than {}", quoted(MAX_ALLOWABLE), DEFAULT_MAX_NODES)]
    MaxNodes,
    /// The kernel reports no distances, which `prefer-closest-numa-nodes` needs.
    #[error("cannot discover NUMA topology: error getting NUMA distances from cadvisor")]
    NoDistances,
    /// The machine has more NUMA nodes than `max-allowable-numa-nodes`.
    #[error("unsupported on machines with more than {0} NUMA Nodes")]
    TooManyNodes(i64),
}

/// Options of the policy. Both are stable, so the gates of alpha and beta options permit nothing more.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct TopologyOptions {
    prefers_closest: bool,
    max_nodes: i64,
}

impl TopologyOptions {
    /// Parses the options by name; of several wrong ones the first is reported.
    fn parse(options: &BTreeMap<String, String>) -> Result<Self, TopologyConfigError> {
        let mut parsed = Self { prefers_closest: false, max_nodes: DEFAULT_MAX_NODES };
        for (name, value) in options {
            match name.as_str() {
                PREFER_CLOSEST => parsed.prefers_closest = boolean(name, value)?,
                MAX_ALLOWABLE => parsed.max_nodes = integer(name, value)?,
                _ => return Err(TopologyConfigError::UnknownOption(name.clone())),
            }
            if parsed.max_nodes < DEFAULT_MAX_NODES {
                return Err(TopologyConfigError::MaxNodes);
            }
        }
        Ok(parsed)
    }
}

fn boolean(option: &str, value: &str) -> Result<bool, TopologyConfigError> {
    let wrong = || TopologyConfigError::Boolean { option: option.to_owned(), value: value.to_owned() };
    go_bool::parse(value).ok_or_else(wrong)
}

/// Parses a decimal integer like Go's `strconv.Atoi`.
fn integer(option: &str, value: &str) -> Result<i64, TopologyConfigError> {
    value.parse().map_err(|error: std::num::ParseIntError| {
        let cause = match error.kind() {
            IntErrorKind::PosOverflow | IntErrorKind::NegOverflow => "value out of range",
            _ => "invalid syntax",
        };
        TopologyConfigError::Integer { option: option.to_owned(), value: value.to_owned(), cause }
    })
}

/// Configuration of the topology manager on this machine.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct TopologyConfig {
    /// Which results of a merge are admitted.
    pub policy: TopologyPolicy,
    /// Whether hints of containers or of pods are merged.
    pub scope: TopologyScope,
    /// NUMA nodes, and their distances with `prefer-closest-numa-nodes`.
    pub topology: MergeTopology,
}

impl TopologyConfig {
    /// Checks `topologyManagerPolicy`, `topologyManagerScope`, and `topologyManagerPolicyOptions` against the machine.
    /// With the policy `none` neither scope nor options matter.
    ///
    /// # Errors
    /// The first wrong setting, in the order of the reference: options, machine, policy, scope.
    pub fn new(
        policy: &str,
        scope: &str,
        options: &BTreeMap<String, String>,
        machine: &MachineTopology,
    ) -> Result<Self, TopologyConfigError> {
        let parsed = TopologyPolicy::parse(policy);
        if parsed == Some(TopologyPolicy::None) {
            return Ok(Self { topology: MergeTopology::new(machine, false), ..Self::default() });
        }
        let options = TopologyOptions::parse(options)?;
        if options.prefers_closest && machine.nodes.values().any(|node| node.distances.is_empty()) {
            return Err(TopologyConfigError::NoDistances);
        }
        if i64::try_from(machine.nodes.len()).is_ok_and(|nodes| nodes > options.max_nodes) {
            return Err(TopologyConfigError::TooManyNodes(options.max_nodes));
        }
        Ok(Self {
            policy: parsed.ok_or_else(|| TopologyConfigError::UnknownPolicy(policy.to_owned()))?,
            scope: TopologyScope::parse(scope).ok_or_else(|| TopologyConfigError::UnknownScope(scope.to_owned()))?,
            topology: MergeTopology::new(machine, options.prefers_closest),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{numa::NumaMask, topology::NumaNode};

    fn machine(count: u32, has_distances: bool) -> MachineTopology {
        let distances: BTreeMap<u32, u32> = (0..count).map(|node| (node, 10)).filter(|_| has_distances).collect();
        let node = || NumaNode { distances: distances.clone(), ..NumaNode::default() };
        MachineTopology { nodes: (0..count).map(|id| (id, node())).collect(), ..MachineTopology::default() }
    }

    fn options(entries: &[(&str, &str)]) -> BTreeMap<String, String> {
        entries.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect()
    }

    #[test]
    fn settings_are_parsed() {
        for (policy, scope, expected_policy, expected_scope) in [
            ("none", "pod", TopologyPolicy::None, TopologyScope::Container),
            ("best-effort", "container", TopologyPolicy::BestEffort, TopologyScope::Container),
            ("restricted", "pod", TopologyPolicy::Restricted, TopologyScope::Pod),
            ("single-numa-node", "pod", TopologyPolicy::SingleNumaNode, TopologyScope::Pod),
        ] {
            let config = TopologyConfig::new(policy, scope, &options(&[]), &machine(2, false)).expect(policy);
            assert_eq!((config.policy, config.scope), (expected_policy, expected_scope), "{policy}");
            assert_eq!(config.topology.nodes(), NumaMask::from_bits(0b11), "{policy}");
        }
    }

    #[test]
    fn options_are_parsed() {
        for (entries, prefers_closest, max_nodes) in [
            (&[(PREFER_CLOSEST, "true")][..], true, 8),
            (&[], false, 8),
            (&[(PREFER_CLOSEST, "T"), (MAX_ALLOWABLE, "8")], true, 8),
            (&[(PREFER_CLOSEST, "0"), (MAX_ALLOWABLE, "+16")], false, 16),
        ] {
            let expected = TopologyOptions { prefers_closest, max_nodes };
            assert_eq!(TopologyOptions::parse(&options(entries)), Ok(expected), "{entries:?}");
        }
        let closest = options(&[(PREFER_CLOSEST, "true")]);
        for (has_distances, options) in [(true, &closest), (true, &options(&[])), (false, &options(&[]))] {
            let machine = machine(2, has_distances);
            let config = TopologyConfig::new("restricted", "pod", options, &machine).expect("correct settings");
            assert_eq!(config.topology, MergeTopology::new(&machine, options == &closest));
        }
    }

    #[test]
    fn wrong_settings_have_the_texts_of_the_reference() {
        let four = ("restricted", "pod", 4, true);
        let nine = ("restricted", "pod", 9, true);
        let too_many = "unsupported on machines with more than 8 NUMA Nodes";
        for ((policy, scope, nodes, has_distances), entries, expected) in [
            (four, &[("x\"", "1")][..], "unknown Topology Manager Policy option: \"x\\\"\""),
            (("x", "pod", 4, true), &[], "unknown policy: \"x\""),
            (("restricted", "x", 4, true), &[], "unknown scope: \"x\""),
            (("x", "y", 4, true), &[], "unknown policy: \"x\""),
            (
                four,
                &[(PREFER_CLOSEST, "yes")],
                "bad value for option \"prefer-closest-numa-nodes\": strconv.ParseBool: parsing \"yes\": \
                 invalid syntax",
            ),
            (
                four,
                &[(MAX_ALLOWABLE, "many")],
                "unable to convert policy option to integer \"max-allowable-numa-nodes\": strconv.Atoi: parsing \
                 \"many\": invalid syntax",
            ),
            (
                four,
                &[(MAX_ALLOWABLE, "9223372036854775808")],
                "unable to convert policy option to integer \"max-allowable-numa-nodes\": strconv.Atoi: parsing \
                 \"9223372036854775808\": value out of range",
            ),
            (
                four,
                &[(MAX_ALLOWABLE, "7")],
                "the minimum value of \"max-allowable-numa-nodes\" should not be less than 8",
            ),
            // AC-06b-22
            (nine, &[], too_many),
            (nine, &[(MAX_ALLOWABLE, "8")], too_many),
            (
                ("restricted", "pod", 17, true),
                &[(MAX_ALLOWABLE, "16")],
                "unsupported on machines with more than 16 NUMA Nodes",
            ),
            (
                ("restricted", "pod", 4, false),
                &[(PREFER_CLOSEST, "true")],
                "cannot discover NUMA topology: error getting NUMA distances from cadvisor",
            ),
            (("x", "pod", 9, true), &[], too_many),
            (nine, &[("x", "1")], "unknown Topology Manager Policy option: \"x\""),
        ] {
            let machine = machine(nodes, has_distances);
            let error = TopologyConfig::new(policy, scope, &options(entries), &machine).expect_err(expected);
            assert_eq!(error.to_string(), expected);
        }
    }

    #[test]
    fn the_policy_none_accepts_any_machine_and_options() {
        let wrong = options(&[("x", "1")]);
        let config = TopologyConfig::new("none", "x", &wrong, &machine(9, false)).expect("nothing to check");
        assert_eq!((config.policy, config.topology.nodes().len()), (TopologyPolicy::None, 9));
        let more = options(&[(MAX_ALLOWABLE, "9")]);
        assert!(TopologyConfig::new("restricted", "pod", &more, &machine(9, false)).is_ok());
    }
}
