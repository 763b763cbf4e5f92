//! Immediate removal of a terminated pod's containers, sandboxes, and logs from the runtime.
//!
//! For pods whose content is no longer needed; garbage collection would remove it a round later.

use futures::future::join_all;

use super::{manager::RuntimeManager, pod_sync::Logs};
use berth_cri::CriError;
use berth_ports::ContainerLogFile;
use berth_types::observation::{ContainerState, ObservedContainer, ObservedPod};

impl RuntimeManager {
    /// Removes the containers of a pod with their logs, then its sandboxes, then its log directory.
    /// Fails while a container runs; what is already gone counts as removed.
    pub(super) async fn remove_observed(&self, observed: &ObservedPod) -> Result<(), String> {
        if let Some(running) = observed.running().next() {
            return Err(format!("container {} is still running", running.id));
        }
        let containers = join_all(observed.containers.iter().map(|c| self.remove_ended(observed, c))).await;
        failures(containers)?;
        let sandboxes = join_all(observed.sandboxes.iter().map(|s| self.remove_sandbox(s.id.as_str()))).await;
        failures(sandboxes)?;
        self.deps.logs.remove_directory(observed.id.clone()).await
    }

    async fn remove_ended(&self, observed: &ObservedPod, instance: &ObservedContainer) -> Result<(), String> {
        let failed = |e: &dyn std::fmt::Display| format!("failed to remove container {}: {e}", instance.id);
        if instance.state == ContainerState::Unknown {
            let stopped = self.deps.cri.stop_container(instance.id.as_str(), super::grace::MINIMUM).await;
            tolerate_absence(stopped).map_err(|e| failed(&e))?;
        }
        let file = ContainerLogFile {
            pod: observed.id.clone(),
            container: instance.name.clone(),
            id: instance.id.clone(),
            path: instance.log_path.clone().into(),
        };
        self.remove_instance(file, Logs::Remove).await.map_err(|e| failed(&e))
    }

    async fn remove_sandbox(&self, id: &str) -> Result<(), String> {
        let failed = |e: CriError| format!("failed to remove sandbox {id}: {e}");
        tolerate_absence(self.deps.cri.stop_pod_sandbox(id).await).map_err(failed)?;
        tolerate_absence(self.deps.cri.remove_pod_sandbox(id).await).map_err(failed)
    }
}

fn tolerate_absence(result: Result<(), CriError>) -> Result<(), CriError> {
    match result {
        Err(gone) if gone.is_not_found() => Ok(()),
        other => other,
    }
}

fn failures(results: Vec<Result<(), String>>) -> Result<(), String> {
    let texts: Vec<String> = results.into_iter().filter_map(Result::err).collect();
    if texts.is_empty() { Ok(()) } else { Err(texts.join(", ")) }
}
