//! Renewal of state files that no longer fit: moved aside at the start if no pod needs them.
//!
//! Opt-in. The reference asks the operator to drain the node and to delete the file. A file that records a pod with
//! containers, or that cannot be decoded, stays, and the start fails as in the reference. Implements spec 06b §5.

use std::{collections::BTreeSet, path::PathBuf};

use tracing::warn;

use super::{
    manager::{PlacementManagerDeps, restore_cpu, restore_memory},
    settings::PlacementPolicies,
};
use crate::{
    cpu::{InitialContainers, checkpoint},
    memory::MemoryCheckpoint,
};
use berth_ports::StateFile;
use berth_types::PodUid;

/// Ending of the name of a file that was moved aside.
const ENDING: &str = ".old";

/// Moves each state file that cannot be restored aside, to a name with the ending `.old`, unless a pod in it has
/// containers in the runtime. `deps.containers` must list all containers of the runtime.
///
/// # Errors
/// The text of the failure to read or to rename a file.
pub async fn renew_state_files(policies: &PlacementPolicies, deps: &PlacementManagerDeps) -> Result<(), String> {
    if let Err(cause) = restore_cpu(policies, deps).await {
        let pods = |content: &[u8]| checkpoint::recorded_pods(content, &deps.containers);
        move_aside(&*deps.cpu_file, pods, &deps.containers, &cause).await?;
    }
    if let Err(cause) = restore_memory(policies, deps).await {
        move_aside(&*deps.memory_file, pods_with_memory, &deps.containers, &cause).await?;
    }
    Ok(())
}

async fn move_aside(
    file: &dyn StateFile,
    recorded_pods: impl Fn(&[u8]) -> Option<BTreeSet<PodUid>>,
    containers: &InitialContainers,
    cause: &str,
) -> Result<(), String> {
    let path = file.path();
    let content = file.read().await.map_err(|error| format!("cannot read {}: {error}", path.display()))?;
    let Some(pods) = content.and_then(|content| recorded_pods(&content)) else { return Ok(()) };
    if containers.values().any(|(pod, _)| pods.contains(pod)) {
        return Ok(());
    }
    let mut aside = path.as_os_str().to_owned();
    aside.push(ENDING);
    let aside = PathBuf::from(aside);
    let renamed = tokio::fs::rename(path, &aside).await;
    renamed.map_err(|error| format!("cannot rename {} to {}: {error}", path.display(), aside.display()))?;
    warn!(path = %path.display(), aside = %aside.display(), err = cause, "Moved state file aside: no running pod needs it");
    Ok(())
}

/// Pods with memory in a file of any policy; `None` if the file cannot be decoded.
fn pods_with_memory(content: &[u8]) -> Option<BTreeSet<PodUid>> {
    let checkpoint = MemoryCheckpoint::decode(content).ok()?;
    Some(checkpoint.assignments.into_keys().chain(checkpoint.pods.into_keys()).collect())
}
