//! Error text of a checkpoint that cannot be used: drain the node and delete the file. Pure. Spec 06b §1.4, §2.3.

use std::{fmt::Display, path::Path};

use berth_types::fieldpath::quoted;

/// Formats the cause with the advice of the reference. `manager` is `CPU manager` or `memory manager`.
pub fn drain_advice(cause: &impl Display, manager: &str, path: &Path) -> String {
    format!(
        "could not restore state from checkpoint: {cause}, please drain this node and delete the {manager} checkpoint \
         file {} before restarting Kubelet",
        quoted(&path.display().to_string())
    )
}
