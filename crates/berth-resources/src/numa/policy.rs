//! Topology manager policies: admission by the merged hint, reason of a refusal. Pure. Spec 06b §3.5.

use super::{
    hint::TopologyHint,
    mask::NumaMask,
    merge::{HintList, MergeTopology, is_preferred_single_node, merge, merge_single_node},
    options::TopologyScope,
};

/// Most sets of nodes that [`explain`] lists for a resource.
const MAX_LISTED_MASKS: usize = 4;

/// Policy of the topology manager.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum TopologyPolicy {
    /// Hints are not merged; every pod is admitted without affinity.
    #[default]
    None,
    /// Every pod is admitted.
    BestEffort,
    /// Only preferred results are admitted.
    Restricted,
    /// Only preferred results of a single node, or without affinity, are admitted.
    SingleNumaNode,
}

impl TopologyPolicy {
    /// The policy with this name in `topologyManagerPolicy`; `None` if there is none.
    pub fn parse(name: &str) -> Option<Self> {
        [Self::None, Self::BestEffort, Self::Restricted, Self::SingleNumaNode]
            .into_iter()
            .find(|policy| policy.name() == name)
    }

    /// Value of `topologyManagerPolicy`.
    pub fn name(self) -> &'static str {
        match self {
            Self::None => "none",
            Self::BestEffort => "best-effort",
            Self::Restricted => "restricted",
            Self::SingleNumaNode => "single-numa-node",
        }
    }

    /// Merges the hints of all providers for a container, or in scope `pod` for a pod.
    pub fn merge(self, lists: &[HintList<'_>], topology: &MergeTopology) -> TopologyDecision {
        let hint = match self {
            Self::None => TopologyHint { mask: None, is_preferred: false },
            Self::BestEffort | Self::Restricted => merge(lists, topology),
            Self::SingleNumaNode => merge_single_node(lists, topology),
        };
        let is_admitted = hint.is_preferred || matches!(self, Self::None | Self::BestEffort);
        TopologyDecision { hint, is_admitted }
    }

    /// Whether a result with this hint can be admitted by a policy that refuses.
    fn considers(self, hint: TopologyHint) -> bool {
        if self == Self::SingleNumaNode { is_preferred_single_node(hint) } else { hint.is_preferred }
    }
}

/// Result of a merge under a policy.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct TopologyDecision {
    /// Affinity of the container; all nodes if nothing fits better.
    pub hint: TopologyHint,
    /// Whether the policy admits the container.
    pub is_admitted: bool,
}

/// Refusal of a pod by the policy. The text is that of the reference kubelet.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("Resources cannot be allocated with Topology locality")]
pub struct TopologyAffinityError {
    /// Result of [`explain`] for the log and the event; the text of the error does not contain it.
    pub detail: String,
}

impl TopologyAffinityError {
    /// Reason of the pod's status.
    pub const REASON: &'static str = "TopologyAffinityError";

    /// Text for a pod with pod-level resources that the CPU and memory managers serve.
    pub fn pod_level_text(scope: TopologyScope) -> &'static str {
        match scope {
            TopologyScope::Pod => {
                "Pod Scope pod with pod-level resources failed admission under pod-scope topology manager"
            }
            TopologyScope::Container => {
                "Pod Scope pod with pod-level resources failed admission with a container-level topology manager"
            }
        }
    }
}

/// Explains why a merge has no preferred result: which resources prevent it, and on which nodes they are available.
/// Empty if there is a preferred result. Policies other than `single-numa-node` are explained as `restricted`.
pub fn explain(lists: &[HintList<'_>], policy: TopologyPolicy, topology: &MergeTopology) -> String {
    let is_unserved = |list: &&HintList<'_>| !list.hints.iter().any(|hint| policy.considers(*hint));
    let failures: Vec<String> = lists.iter().filter(is_unserved).map(|list| explain_list(*list, policy)).collect();
    if !failures.is_empty() {
        return failures.join("; ");
    }
    let result = match policy {
        TopologyPolicy::SingleNumaNode => merge_single_node(lists, topology),
        _ => merge(lists, topology),
    };
    if result.is_preferred {
        return String::new();
    }
    let preference = |list: &HintList<'_>| {
        let hints = list.hints.iter().filter(|hint| policy.considers(**hint));
        // A resource that any nodes can serve prevents nothing.
        let masks: Option<Vec<NumaMask>> = hints.map(|hint| hint.mask).collect();
        Some(format!("{} prefers {}", list.resource, alternatives(masks?)))
    };
    let preferences: Vec<String> = lists.iter().filter_map(preference).collect();
    format!("the preferred NUMA nodes have nothing in common: {}", preferences.join("; "))
}

/// Why no hint of a list can be admitted.
fn explain_list(list: HintList<'_>, policy: TopologyPolicy) -> String {
    let resource = list.resource;
    let masks: Vec<NumaMask> = list.hints.iter().filter_map(|hint| hint.mask).collect();
    if masks.is_empty() {
        return format!("{resource}: not available on any NUMA nodes");
    }
    let reason = match policy {
        TopologyPolicy::SingleNumaNode => "not available on a single NUMA node",
        _ => "not available on the smallest possible number of NUMA nodes",
    };
    format!("{resource}: {reason}; available on nodes {}", alternatives(masks))
}

/// The first few of several sets of nodes, the smallest first: `0 or 1 or 0,1`.
fn alternatives(mut masks: Vec<NumaMask>) -> String {
    masks.sort_unstable_by(|a, b| a.cmp_narrower(*b));
    masks.dedup();
    let more = masks.len().saturating_sub(MAX_LISTED_MASKS);
    let listed: Vec<String> = masks.iter().take(MAX_LISTED_MASKS).map(NumaMask::to_string).collect();
    let listed = listed.join(" or ");
    if more > 0 { format!("{listed} or {more} more") } else { listed }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        numa::{ProviderHints, merge::hint_lists},
        topology::{MachineTopology, NumaNode},
    };

    /// Machine with four nodes.
    fn topology() -> MergeTopology {
        let nodes = (0..4).map(|node| (node, NumaNode::default())).collect();
        MergeTopology::new(&MachineTopology { nodes, ..MachineTopology::default() }, false)
    }

    fn preferred(nodes: &[u32]) -> TopologyHint {
        TopologyHint { mask: Some(nodes.iter().copied().collect()), is_preferred: true }
    }

    fn other(nodes: &[u32]) -> TopologyHint {
        TopologyHint { is_preferred: false, ..preferred(nodes) }
    }

    fn provider(resource: &str, hints: &[TopologyHint]) -> ProviderHints {
        ProviderHints::from([(resource.to_owned(), Some(hints.to_vec()))])
    }

    #[test]
    fn policies_have_names() {
        for name in ["none", "best-effort", "restricted", "single-numa-node"] {
            assert_eq!(TopologyPolicy::parse(name).map(TopologyPolicy::name), Some(name));
        }
        assert_eq!(TopologyPolicy::parse("None"), None);
        assert_eq!(TopologyPolicy::default(), TopologyPolicy::None);
    }

    #[test]
    fn a_policy_admits_by_the_preference_of_the_result() {
        use TopologyPolicy::{BestEffort, None as NoPolicy, Restricted, SingleNumaNode};
        let all = [0, 1, 2, 3];
        let no_mask = |is_preferred: bool| TopologyHint { mask: None, is_preferred };
        let conflict = [provider("r1", &[preferred(&[0])]), provider("r2", &[preferred(&[1])])];
        let one_node = [provider("cpu", &[preferred(&[1]), other(&[0, 1])])];
        let two_nodes = [provider("cpu", &[preferred(&[0, 1])])];
        let unavailable = [provider("cpu", &[])];
        let unconcerned = [ProviderHints::new()];
        for (case, policy, providers, hint, is_admitted) in [
            ("none merges nothing", NoPolicy, &one_node[..], no_mask(false), true),
            ("none admits everything", NoPolicy, &unavailable, no_mask(false), true),
            ("AC-06b-19", BestEffort, &conflict, other(&all), true),
            ("AC-06b-19", Restricted, &conflict, other(&all), false),
            ("a conflict on one node", SingleNumaNode, &conflict, no_mask(false), false),
            ("one node", BestEffort, &one_node, preferred(&[1]), true),
            ("one node", Restricted, &one_node, preferred(&[1]), true),
            ("one node", SingleNumaNode, &one_node, preferred(&[1]), true),
            ("two nodes", Restricted, &two_nodes, preferred(&[0, 1]), true),
            ("AC-06b-20", SingleNumaNode, &two_nodes, no_mask(false), false),
            ("AC-06b-21", BestEffort, &unavailable, other(&all), true),
            ("unavailable", Restricted, &unavailable, other(&all), false),
            ("unavailable", SingleNumaNode, &unavailable, no_mask(false), false),
            ("no preference", Restricted, &unconcerned, preferred(&all), true),
            ("no preference", SingleNumaNode, &unconcerned, no_mask(true), true),
        ] {
            let decision = policy.merge(&hint_lists(providers), &topology());
            assert_eq!(decision, TopologyDecision { hint, is_admitted }, "{case}: {}", policy.name());
        }
    }

    #[test]
    fn a_refusal_has_the_text_of_the_reference() {
        let refusal = TopologyAffinityError { detail: "cpu: not available on any NUMA nodes".to_owned() };
        assert_eq!(refusal.to_string(), "Resources cannot be allocated with Topology locality");
        assert_eq!(TopologyAffinityError::REASON, "TopologyAffinityError");
        for (scope, expected) in [
            (TopologyScope::Pod, "failed admission under pod-scope topology manager"),
            (TopologyScope::Container, "failed admission with a container-level topology manager"),
        ] {
            let text = TopologyAffinityError::pod_level_text(scope);
            assert_eq!(text, format!("Pod Scope pod with pod-level resources {expected}"));
        }
    }

    #[test]
    fn a_refusal_is_explained() {
        use TopologyPolicy::{Restricted, SingleNumaNode};
        let cpu = |hints: &[TopologyHint]| provider("cpu", hints);
        let pairs = [other(&[2, 3]), other(&[0, 3]), other(&[0, 1]), other(&[1, 2]), other(&[0, 1, 2]), other(&[0, 1])];
        for (policy, providers, expected) in [
            (Restricted, vec![cpu(&[])], "cpu: not available on any NUMA nodes"),
            (
                Restricted,
                vec![cpu(&[other(&[0, 1])])],
                "cpu: not available on the smallest possible number of NUMA nodes; available on nodes 0,1",
            ),
            (
                Restricted,
                vec![cpu(&pairs)],
                "cpu: not available on the smallest possible number of NUMA nodes; available on nodes 0,1 or 1,2 or \
                 0,3 or 2,3 or 1 more",
            ),
            (
                SingleNumaNode,
                vec![cpu(&[preferred(&[0, 1])]), provider("memory", &[preferred(&[0])])],
                "cpu: not available on a single NUMA node; available on nodes 0,1",
            ),
            (
                Restricted,
                vec![cpu(&[]), provider("memory", &[]), provider("example.com/gpu", &[preferred(&[0])])],
                "cpu: not available on any NUMA nodes; memory: not available on any NUMA nodes",
            ),
            (
                SingleNumaNode,
                vec![
                    ProviderHints::new(),
                    cpu(&[preferred(&[0]), preferred(&[1]), other(&[0, 1])]),
                    provider("example.com/gpu", &[preferred(&[2])]),
                ],
                "the preferred NUMA nodes have nothing in common: cpu prefers 0 or 1; example.com/gpu prefers 2",
            ),
            (Restricted, vec![cpu(&[preferred(&[0])])], ""),
            (SingleNumaNode, vec![ProviderHints::new()], ""),
        ] {
            assert_eq!(explain(&hint_lists(&providers), policy, &topology()), expected);
        }
    }
}
