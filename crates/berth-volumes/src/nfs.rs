//! NFS volume plugin.
//!
//! A server that does not answer affects only its own pod: nothing here accesses the mounted file system. The kernel's
//! mount table shows what is mounted, and every program has a timeout. Implements spec 07 §7.7.

use std::{net::Ipv6Addr, path::Path, sync::Arc, time::Duration};

use async_trait::async_trait;

use super::{
    attachable::{
        AttachableVolumePlugin, FoundVolume, OpError, PublishedVolume, ReconstructedVolume, Removal, Usage,
        VolumeTraits,
    },
    global_mount, local,
    machine::{self, HostOperations, KillPolicy, RunError, Work},
    spec::{Mode, VolumeSpec},
    usage_stats,
};
use berth_ports::VolumeStats;
use berth_types::{Pod, api};

const NAME: &str = "kubernetes.io/nfs";
/// Timeout of a mount: the mount helper contacts the server, with retries.
const MOUNTING: Duration = Duration::from_secs(110);
/// Timeout of an operation: a mount that timed out plus its cleanup.
const LIMIT: Duration = Duration::from_secs(240);

/// NFS volume plugin.
pub struct NfsPlugin {
    machine: Arc<dyn HostOperations>,
}

/// Exported directory of an NFS server.
#[derive(Clone, PartialEq, Eq, Debug)]
struct Share {
    server: String,
    path: String,
}

impl Share {
    fn of(spec: &VolumeSpec) -> Result<Self, OpError> {
        let source = spec.as_inline().and_then(|volume| volume.nfs.as_ref());
        let source = source.or_else(|| spec.volume()?.nfs.as_ref());
        let source = source.ok_or_else(|| OpError::failed("spec does not reference a NFS volume type"))?;
        let (server, path) = (source.server.clone(), source.path.clone());
        // `mount` would parse it as an option.
        if server.is_empty() || server.starts_with('-') {
            return Err(OpError::failed(format!(
                "nfs.server: invalid value {server:?}: expected a host name or IP address"
            )));
        }
        Ok(Self { server, path })
    }

    /// Returns the source argument of `mount`: IPv6 addresses need brackets.
    fn source(&self) -> String {
        let Self { server, path } = self;
        if server.parse::<Ipv6Addr>().is_ok() { format!("[{server}]:{path}") } else { format!("{server}:{path}") }
    }
}

impl NfsPlugin {
    /// Creates the plugin on a host.
    pub fn new(machine: Arc<dyn HostOperations>) -> Self {
        Self { machine }
    }
}

async fn mount(work: &Work, share: &Share, options: &[String], target: &Path) -> Result<(), OpError> {
    let arguments = machine::mount_arguments("nfs", options, &share.source(), target);
    let message = |how: &str, output: &str| machine::mount_failed(how, "mount", &arguments, output);
    let error = match work.run("mount", &arguments, KillPolicy::UnlessCanceled(MOUNTING)).await {
        Ok(ended) if ended.is_success() => return Ok(()),
        Ok(ended) => OpError::failed(message(&ended.how, &ended.output)),
        Err(RunError::NotStarted(cause)) => OpError::failed(message(&cause, "")),
        // The mount may still complete.
        Err(error @ (RunError::TimedOut(_) | RunError::Canceled)) => {
            OpError::uncertain(message(&error.to_string(), ""))
        }
    };
    match global_mount::unpublish(work, target).await {
        Ok(()) => Err(error),
        Err(left) => {
            tracing::warn!(path = %target.display(), err = %left, "Failed to clean up after failed mount");
            Err(OpError::uncertain(error.text))
        }
    }
}

#[async_trait]
impl AttachableVolumePlugin for NfsPlugin {
    fn name(&self) -> &'static str {
        NAME
    }

    fn supports(&self, spec: &VolumeSpec) -> bool {
        spec.as_inline().is_some_and(|volume| volume.nfs.is_some())
            || spec.volume().is_some_and(|volume| volume.nfs.is_some())
    }

    async fn describe(&self, _pod: &Pod, spec: &VolumeSpec) -> Result<VolumeTraits, OpError> {
        Ok(traits(&spec.name))
    }

    async fn publish(&self, usage: &Usage) -> Result<PublishedVolume, OpError> {
        if usage.mode == Mode::Block {
            return Err(OpError::failed("no volume plugin matched"));
        }
        let share = Share::of(&usage.spec)?;
        let (target, place) = (usage.target.clone(), usage.target.clone());
        let work = Work::new(&self.machine, &usage.operation);
        if !work.is_mounted(&target).await? {
            usage.operation.blocking(move || local::make(&place)).await?;
            let ours: &[&str] = if usage.spec.read_only() { &["ro"] } else { &[] };
            mount(&work, &share, &machine::options(&usage.spec.mount_options(), ours), &target).await?;
        }
        // A remote directory is neither relabeled nor given another group.
        Ok(PublishedVolume { path: target, relabel: false })
    }

    async fn fullness(&self, usage: &Usage, path: &Path) -> Result<VolumeStats, OpError> {
        usage_stats::of_share(&Work::new(&self.machine, &usage.operation), path).await
    }

    async fn unpublish(&self, removal: &Removal) -> Result<(), OpError> {
        let Some((_, target)) = &removal.pod else { return Ok(()) };
        global_mount::unpublish(&Work::new(&self.machine, &removal.operation), target).await
    }

    fn rebuild(&self, found: &FoundVolume) -> Result<ReconstructedVolume, String> {
        if found.mode == Mode::Block {
            return Err("NFS volumes do not support volumeMode Block".to_owned());
        }
        // An unmount needs only the target path.
        let volume = api::Volume {
            name: found.name.clone(),
            nfs: Some(api::NFSVolumeSource::default()),
            ..api::Volume::default()
        };
        Ok(ReconstructedVolume { spec: VolumeSpec::inline(&volume), traits: traits(&found.name), label: None })
    }

    fn limit(&self) -> Duration {
        LIMIT
    }
}

fn traits(volume: &str) -> VolumeTraits {
    VolumeTraits { volume: volume.to_owned(), label: NAME.to_owned(), mount_options: true, ..VolumeTraits::default() }
}

#[cfg(test)]
mod tests;
