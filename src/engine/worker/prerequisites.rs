//! Pod prerequisites before the sandbox: cgroup and volumes (spec 02a §9.7 SyncPod, spec 06a §7).

use std::sync::Arc;

use tokio_util::sync::CancellationToken;
use tracing::warn;

use super::{WorkerContext, pod_sync::SyncContext};
use berth_ports::{EventRecord, MountedVolumes, VolumeError};
use berth_types::{
    Pod,
    observation::{ObservedPod, SandboxState},
};

/// Prerequisites of a pod's sandbox.
pub(super) struct PodPrerequisites {
    /// Cgroup parent of the pod's containers.
    pub cgroup: String,
    /// The mounted volumes of the pod.
    pub volumes: Arc<MountedVolumes>,
}

/// Result of mounting the volumes; `None` if the pod was stopped in the meantime.
type MountResult = Option<Result<Arc<MountedVolumes>, VolumeError>>;

/// Mounts the pod's volumes. Mounts in progress when the pod is stopped continue, and are unmounted
/// with the others.
async fn mount(context: Arc<WorkerContext>, pod: Arc<Pod>, stopping: CancellationToken) -> MountResult {
    tokio::select! {
        mounted = context.volumes.mount(&pod) => Some(mounted),
        () = stopping.cancelled() => None,
    }
}

impl SyncContext<'_> {
    /// Prepares the resource claims of a pod that gets a new sandbox; containers in an existing one use
    /// what was prepared for it (spec 06c §3.3).
    async fn prepare_claims(&self, pod: &Arc<Pod>, observed: &ObservedPod) -> Result<(), String> {
        if observed.sandboxes.iter().any(|sandbox| sandbox.state == SandboxState::Ready) {
            return Ok(());
        }
        self.memory.progress.enter("resource claims");
        let prepared = self.context.claims.prepare(pod).await;
        prepared.inspect_err(|error| {
            let text = format!("Failed to prepare dynamic resources: {error}");
            self.context.events.record(EventRecord::warning(pod.id(), "FailedPrepareDynamicResources", text));
        })
    }

    /// Ensures the pod's cgroup and mounts its volumes; `None` if the observation is outdated. For a
    /// starting pod both run concurrently, because fetching objects and tokens does not need the
    /// cgroup; but not while a previous attempt to create the cgroup failed, to avoid fetching them
    /// repeatedly.
    pub(super) async fn prerequisites(
        &mut self,
        pod: &Arc<Pod>,
        observed: &Arc<ObservedPod>,
        stopping: &CancellationToken,
    ) -> Result<Option<PodPrerequisites>, String> {
        tokio::select! {
            prepared = self.prepare_claims(pod, observed) => prepared?,
            () = stopping.cancelled() => return Err("pod is terminating, stopped preparing its resource claims".to_owned()),
        }
        let begins = self.memory.cgroup.is_none() && !self.memory.no_cgroup && observed.running().next().is_none();
        let mut mounting = Box::pin(mount(self.context.clone(), pod.clone(), stopping.clone()));
        let (mut early, mut making) = (None, Box::pin(self.cgroup(pod, observed)));
        let made = loop {
            tokio::select! {
                biased;
                made = &mut making => break made,
                mounted = &mut mounting, if begins && early.is_none() => early = Some(mounted),
            }
        };
        drop(making);
        // If both failed, this error is reported.
        let Some(cgroup) = made? else { return Ok(None) };
        self.memory.progress.enter("volumes");
        let mounted = match early {
            Some(mounted) => mounted,
            None => mounting.await,
        };
        let volumes = self.volumes(pod, mounted)?;
        Ok(Some(PodPrerequisites { cgroup, volumes }))
    }

    fn volumes(&mut self, pod: &Arc<Pod>, mounted: MountResult) -> Result<Arc<MountedVolumes>, String> {
        match mounted.ok_or_else(|| "pod is terminating, stopped waiting for its volumes".to_owned())? {
            Ok(volumes) => Ok(volumes),
            Err(VolumeError::LimitExceeded(text)) => Err(self.refuse(pod, &text)),
            Err(error) => {
                let text = format!("Unable to attach or mount volumes: {error}");
                let messages = match error {
                    // The causes were recorded as events when they occurred.
                    VolumeError::TimedOut(_) => Vec::new(),
                    VolumeError::NotSetUp { causes, .. } => causes,
                    VolumeError::Unsupported { .. } | VolumeError::Failed(_) | VolumeError::LimitExceeded(_) => {
                        vec![text.clone()]
                    }
                };
                for message in messages {
                    self.context.events.record(EventRecord::warning(pod.id(), "FailedMount", message));
                }
                Err(text)
            }
        }
    }

    /// Ensures the pod's cgroup; recreates it if it disappeared. If it is missing while containers run,
    /// these run outside of it: they are stopped first, and `None` reports that the observation is
    /// outdated (AC-06a-17).
    async fn cgroup(&mut self, pod: &Arc<Pod>, observed: &Arc<ObservedPod>) -> Result<Option<String>, String> {
        self.memory.progress.enter("pod cgroup");
        let runs = observed.running().next().is_some();
        if self.memory.cgroup.is_some() || runs {
            if !self.context.resources.exists(pod).await {
                self.memory.cgroup = None;
                if runs {
                    warn!(pod = %pod.object_name(), podUID = %pod.uid(), "Pod cgroup does not exist, restarting containers that run outside of it");
                    self.kill_all(observed.clone()).await?;
                    return Ok(None);
                }
            } else if let Some(parent) = &self.memory.cgroup {
                return Ok(Some(parent.clone()));
            }
        }
        let ensured = self.context.resources.ensure(pod).await;
        self.memory.no_cgroup = ensured.is_err();
        match ensured {
            Ok(cgroup) => {
                self.memory.cgroup = Some(cgroup.parent.clone());
                Ok(Some(cgroup.parent))
            }
            Err(error) => {
                let text = format!("unable to ensure pod container exists: {error}");
                self.context.events.record(EventRecord::warning(pod.id(), "FailedCreatePodContainer", text.clone()));
                Err(text)
            }
        }
    }
}
