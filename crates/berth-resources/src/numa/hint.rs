//! Topology hints: NUMA nodes from which a provider can serve a request. Pure. Spec 06b §3.2.

use std::collections::BTreeMap;

use super::mask::NumaMask;

/// NUMA nodes that can serve a request together.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct TopologyHint {
    /// The nodes; `None` for no preference.
    pub mask: Option<NumaMask>,
    /// Whether no smaller number of nodes could serve the request on an idle machine.
    pub is_preferred: bool,
}

/// Hints of one provider (devices, CPUs, memory) by resource name. An empty map is no preference at all; `None` is no
/// preference for a resource, an empty list means that the resource cannot be provided.
pub type ProviderHints = BTreeMap<String, Option<Vec<TopologyHint>>>;
