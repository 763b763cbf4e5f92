//! NUMA masks and topology hints, and the topology manager's merge of them.

pub mod hint;
pub mod mask;
pub mod mask_combinations;
pub mod merge;
pub mod options;
pub mod policy;

pub use hint::{ProviderHints, TopologyHint};
pub use mask::NumaMask;
pub use merge::{HintList, MergeTopology, hint_lists};
pub use options::{TopologyConfig, TopologyConfigError, TopologyScope};
pub use policy::{TopologyPolicy, explain};
