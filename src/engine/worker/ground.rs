//! What a pod stands on before anything of it runs: its cgroup and its volumes (spec 02a §9.7 SyncPod, spec 06a §7).

use std::sync::Arc;

use tokio_util::sync::CancellationToken;
use tracing::warn;

use super::{WorkerContext, sync::Turn};
use berth_ports::{Event, MountedVolumes, VolumeError};
use berth_types::{Pod, observed::ObservedPod};

/// What there is before a pod's sandbox.
pub(super) struct Ground {
    /// The cgroup that its containers go into.
    pub cgroup: String,
    /// All its volumes.
    pub volumes: Arc<MountedVolumes>,
}

/// What came of the volumes; `None` where the pod was stopped meanwhile.
type Mounted = Option<Result<Arc<MountedVolumes>, VolumeError>>;

/// The volumes of a pod. What is under way when it is stopped goes on, and is taken down with the rest.
async fn mount(context: Arc<WorkerContext>, pod: Arc<Pod>, stopping: CancellationToken) -> Mounted {
    tokio::select! {
        mounted = context.volumes.mount(&pod) => Some(mounted),
        () = stopping.cancelled() => None,
    }
}

/// Dynamic resource allocation is not part of this release.
const NO_CLAIMS: &str = "Failed to prepare dynamic resources: resource claims are not supported by this release";

impl Turn<'_> {
    /// Refuses to begin a pod with resource claims: its containers would run without what they asked for. One that an
    /// earlier agent began goes on.
    fn refuse_claims(&self, pod: &Pod, observed: &ObservedPod) -> Result<(), String> {
        let has_claims = pod.spec().resource_claims.as_ref().is_some_and(|claims| !claims.is_empty());
        if !has_claims || observed.running().next().is_some() {
            return Ok(());
        }
        self.context.events.record(Event::warning(pod.id(), "FailedPrepareDynamicResources", NO_CLAIMS));
        Err(NO_CLAIMS.to_owned())
    }

    /// The pod's cgroup and its volumes; `None` where what was seen is no longer so. Volumes of a pod that begins wait
    /// for nothing that its cgroup is needed for: objects and tokens are asked for while it is made, but not again and again
    /// where it cannot be made.
    pub(super) async fn ground(
        &mut self,
        pod: &Arc<Pod>,
        observed: &Arc<ObservedPod>,
        stopping: &CancellationToken,
    ) -> Result<Option<Ground>, String> {
        self.refuse_claims(pod, observed)?;
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
        // Of the two that may have failed this one is told.
        let Some(cgroup) = made? else { return Ok(None) };
        self.memory.stage.set("volumes");
        let mounted = match early {
            Some(mounted) => mounted,
            None => mounting.await,
        };
        let volumes = self.volumes(pod, mounted)?;
        Ok(Some(Ground { cgroup, volumes }))
    }

    fn volumes(&mut self, pod: &Arc<Pod>, mounted: Mounted) -> Result<Arc<MountedVolumes>, String> {
        match mounted.ok_or_else(|| "the pod is stopped while its volumes are awaited".to_owned())? {
            Ok(volumes) => Ok(volumes),
            Err(VolumeError::LimitExceeded(text)) => Err(self.refuse(pod, &text)),
            Err(error) => {
                let text = format!("Unable to attach or mount volumes: {error}");
                let told = match error {
                    // What went wrong was told as it did.
                    VolumeError::TimedOut(_) => Vec::new(),
                    VolumeError::NotSetUp { causes, .. } => causes,
                    VolumeError::Unsupported { .. } | VolumeError::Failed(_) | VolumeError::LimitExceeded(_) => {
                        vec![text.clone()]
                    }
                };
                for message in told {
                    self.context.events.record(Event::warning(pod.id(), "FailedMount", message));
                }
                Err(text)
            }
        }
    }

    /// The pod's cgroup, made anew where it has gone. One that is missing while containers run
    /// means that those run outside of it: they are stopped first, and `None` says that what was
    /// seen is no longer so (AC-06a-17).
    async fn cgroup(&mut self, pod: &Arc<Pod>, observed: &Arc<ObservedPod>) -> Result<Option<String>, String> {
        self.memory.stage.set("pod cgroup");
        let runs = observed.running().next().is_some();
        if self.memory.cgroup.is_some() || runs {
            if !self.context.resources.exists(pod).await {
                self.memory.cgroup = None;
                if runs {
                    warn!(pod = %pod.object_name(), podUID = %pod.uid(), "Pod cgroup is gone, restarting what runs outside of it");
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
                self.context.events.record(Event::warning(pod.id(), "FailedCreatePodContainer", text.clone()));
                Err(text)
            }
        }
    }
}
