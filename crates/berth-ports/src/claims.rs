//! Port of dynamic resource allocation: claims of pods, prepared before their sandbox and released after their end.

use std::{collections::HashSet, sync::Arc};

use async_trait::async_trait;

use berth_types::{Pod, PodUid, api};

/// Prepares the resource claims of pods (spec 06c §3).
#[async_trait]
pub trait PodClaims: Send + Sync + 'static {
    /// Prepares all claims of a pod; repeatable. A pod without claims needs no call of a driver.
    ///
    /// # Errors
    /// The text of the first failure.
    async fn prepare(&self, pod: &Arc<Pod>) -> Result<(), String>;

    /// Releases the claims of a pod whose containers have stopped; repeatable.
    ///
    /// # Errors
    /// The text of the first failure; the pod's deletion waits until a later call succeeds.
    async fn unprepare(&self, pod: &PodUid) -> Result<(), String>;

    /// Qualified CDI device names of a container.
    ///
    /// # Errors
    /// A claim of the container is not prepared.
    fn cdi_devices(&self, pod: &Pod, container: &api::Container) -> Result<Vec<String>, String>;

    /// Health of the claimed devices of a container, for `allocatedResourcesStatus`.
    fn health(&self, pod: &Pod, container: &str) -> Vec<api::ResourceStatus>;

    /// Releases, in the background, claims of pods that are not active any more.
    fn reconcile(&self, active: &HashSet<PodUid>);
}

/// No dynamic resource allocation: there is no API server that holds claims.
#[derive(Clone, Copy, Debug)]
pub struct NoClaims;

#[async_trait]
impl PodClaims for NoClaims {
    async fn prepare(&self, pod: &Arc<Pod>) -> Result<(), String> {
        match pod.spec().resource_claims.as_ref().is_some_and(|claims| !claims.is_empty()) {
            true => Err("prepare dynamic resources: resource claims need an API server".to_owned()),
            false => Ok(()),
        }
    }

    async fn unprepare(&self, _: &PodUid) -> Result<(), String> {
        Ok(())
    }

    fn cdi_devices(&self, _: &Pod, _: &api::Container) -> Result<Vec<String>, String> {
        Ok(Vec::new())
    }

    fn health(&self, _: &Pod, _: &str) -> Vec<api::ResourceStatus> {
        Vec::new()
    }

    fn reconcile(&self, _: &HashSet<PodUid>) {}
}
