//! CSI implementation of the volume plugin trait, and the inputs shared by all calls.
//!
//! Implements spec 07 §12.

use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use async_trait::async_trait;
use futures::future::try_join_all;
use k8s_openapi::api::storage::v1::CSIDriver;
use tokio::{sync::watch, time::Instant};

use super::{
    attachment,
    client::{Capabilities, LIMIT, deadline},
    context,
    driver::RegisteredDriver,
    drivers::Drivers,
    paths::{self, CsiLayout, PLUGIN},
    rebuild,
    source::{CsiVolume, SecretName},
};
use crate::{
    attachable::{
        AttachableVolumePlugin, Expansion, FoundVolume, OpError, PublishedVolume, ReconstructedVolume, Removal, Usage,
        VolumeTraits,
    },
    spec::{Mode, VolumeSpec},
};
use berth_ports::{Clock, ObjectSource, StorageObjects, VolumeStats};
use berth_types::{Pod, PodUid};

/// Time that the owner task allows beyond the calls: reads of objects have their own timeouts.
const SLACK: Duration = Duration::from_secs(30);

/// Dependencies of the plugin.
pub struct CsiDeps {
    /// Registry of CSI drivers.
    pub drivers: Arc<Drivers>,
    /// Access to `CSIDriver` and `VolumeAttachment` objects and secrets.
    pub objects: Arc<dyn StorageObjects>,
    /// Service account tokens.
    pub tokens: Arc<dyn ObjectSource>,
    /// Wall-clock time.
    pub clock: Arc<dyn Clock>,
    /// Whether volume health is queried (gate `CSIVolumeHealth`).
    pub asks_health: bool,
}

/// CSI volume plugin.
pub struct Csi {
    pub(super) deps: CsiDeps,
    pub(super) layout: CsiLayout,
    pub(super) node: String,
}

/// Registered driver, with its capabilities and its `CSIDriver` object.
pub(super) struct ReadyDriver {
    pub(super) driver: Arc<RegisteredDriver>,
    pub(super) can: Capabilities,
    pub(super) object: Option<Arc<CSIDriver>>,
}

impl Csi {
    /// Creates the plugin for the node of that name, with the agent's root directory.
    pub fn new(root: &Path, node: &str, deps: CsiDeps) -> Self {
        // The mount table contains only paths without symlinks.
        let root = fs::canonicalize(root).unwrap_or_else(|_| root.to_owned());
        Self { deps, layout: CsiLayout::new(&root), node: node.to_owned() }
    }

    /// Returns the CSI source of the volume.
    pub(super) fn volume(spec: &VolumeSpec, namespace: &str, pod: &PodUid) -> Result<CsiVolume, OpError> {
        let volume = CsiVolume::of(spec, namespace, pod).ok_or_else(|| OpError::failed(not_ours(spec)))?;
        volume.checked().map_err(|error| OpError::failed(format!("{PLUGIN}: {error}")))
    }

    /// Returns the driver if it is registered; `what` is the failed action in the error.
    pub(super) fn driver(&self, name: &str, what: &str) -> Result<Arc<RegisteredDriver>, OpError> {
        let found = self.deps.drivers.get(name);
        found.map_err(|error| OpError::transient(format!("{PLUGIN}: {what}: {error}")))
    }

    /// Returns the driver with its capabilities and its object.
    pub(super) async fn ready(&self, name: &str, until: Instant, what: &str) -> Result<ReadyDriver, OpError> {
        let driver = self.driver(name, what)?;
        // Transient whatever the error: nothing was attempted yet.
        let can = driver.capabilities(until).await.map_err(|error| OpError::transient(error.to_string()))?;
        let object = self.object(name).await?;
        Ok(ReadyDriver { driver, can, object })
    }

    /// Returns the `CSIDriver` object.
    pub(super) async fn object(&self, name: &str) -> Result<Option<Arc<CSIDriver>>, OpError> {
        let found = self.deps.objects.driver(name).await;
        found.map_err(|error| OpError::transient(format!("{PLUGIN}: failed to get CSIDriver {name}: {error}")))
    }

    /// Returns the publish context that the controller plugin reported when it attached the volume.
    pub(super) async fn publish_context(
        &self,
        volume: &CsiVolume,
        object: Option<&CSIDriver>,
    ) -> Result<BTreeMap<String, String>, OpError> {
        if volume.is_inline || !context::is_attached(object) {
            return Ok(BTreeMap::new());
        }
        let name = self.attachment(volume);
        let found = self.deps.objects.attachment(&name).await;
        let found = found.map_err(|error| {
            OpError::transient(format!("{PLUGIN}: failed to get VolumeAttachment [ID={name}]: {error}"))
        })?;
        Ok(attachment::metadata(&found))
    }

    /// Returns the name of the volume's `VolumeAttachment`.
    pub(super) fn attachment(&self, volume: &CsiVolume) -> String {
        paths::attachment(&volume.handle, &volume.driver, &self.node)
    }

    /// Reads a secret; `field` is its field in the volume source, for errors.
    pub(super) async fn secret(
        &self,
        field: &str,
        name: Option<&SecretName>,
    ) -> Result<BTreeMap<String, String>, OpError> {
        let Some((namespace, name)) = name else { return Ok(BTreeMap::new()) };
        let found = self.deps.objects.secret(namespace, name).await.map_err(|error| {
            OpError::transient(format!("{PLUGIN}: fetching {field} {namespace}/{name} failed: {error}"))
        })?;
        Ok(found.into_iter().map(|(key, value)| (key, String::from_utf8_lossy(&value).into_owned())).collect())
    }

    /// Returns the tokens that the driver requests for the pod; `None` if it requests none.
    pub(super) async fn tokens(&self, object: Option<&CSIDriver>, pod: &Pod) -> Result<Option<String>, OpError> {
        let asked = context::token_requests(object);
        if asked.is_empty() {
            return Ok(None);
        }
        let had = try_join_all(asked.into_iter().map(async |ask| {
            let token = self.deps.tokens.token(pod, &ask).await?;
            Ok((ask, token))
        }));
        let had = had.await.map_err(|error: berth_ports::ObjectError| {
            OpError::transient(format!(
                "{PLUGIN}: mounter.SetUpAt failed to get service account token attributes: {error}"
            ))
        })?;
        Ok(Some(context::tokens(&had, self.deps.clock.now())))
    }
}

fn not_ours(spec: &VolumeSpec) -> String {
    format!("{PLUGIN}: volume {:?} has no CSI source", spec.name)
}

#[async_trait]
impl AttachableVolumePlugin for Csi {
    fn name(&self) -> &'static str {
        PLUGIN
    }

    fn supports(&self, spec: &VolumeSpec) -> bool {
        CsiVolume::of(spec, "", &"".into()).is_some()
    }

    async fn describe(&self, pod: &Pod, spec: &VolumeSpec) -> Result<VolumeTraits, OpError> {
        let volume = Self::volume(spec, pod.namespace(), pod.uid())?;
        let object = self.object(&volume.driver).await?;
        Ok(VolumeTraits {
            volume: volume.name(),
            label: volume.label(),
            is_migrated: spec.is_migrated,
            attachable: !volume.is_inline && context::is_attached(object.as_deref()),
            stages: !volume.is_inline,
            mount_options: true,
            republishes: context::is_republished(object.as_deref()),
            expands: !volume.is_inline,
            supports_mount_label: context::takes_labels(object.as_deref()),
        })
    }

    async fn attached(&self, usage: &Usage) -> Result<Option<String>, OpError> {
        let volume = Self::volume(&usage.spec, usage.pod.namespace(), usage.pod.uid())?;
        let name = self.attachment(&volume);
        let found = self.deps.objects.attachment(&name).await.map_err(|error| {
            let handle = &volume.handle;
            OpError::transient(format!("volume {handle} has GET error for volume attachment {name}: {error}"))
        })?;
        attachment::verify(&found, &volume.handle).map_err(OpError::transient)?;
        Ok(None)
    }

    async fn stage(&self, usage: &Usage) -> Result<(), OpError> {
        match usage.mode {
            Mode::Filesystem => self.stage_filesystem(usage).await,
            Mode::Block => self.stage_block(usage).await,
        }
    }

    async fn publish(&self, usage: &Usage) -> Result<PublishedVolume, OpError> {
        match usage.mode {
            Mode::Filesystem => self.publish_filesystem(usage).await,
            Mode::Block => self.publish_block(usage).await,
        }
    }

    async fn unpublish(&self, removal: &Removal) -> Result<(), OpError> {
        let Some((pod, path)) = &removal.pod else { return Ok(()) };
        match removal.mode {
            Mode::Filesystem => self.unpublish_filesystem(removal, pod, path).await,
            Mode::Block => self.unpublish_block(removal, pod).await,
        }
    }

    async fn unstage(&self, removal: &Removal) -> Result<(), OpError> {
        match removal.mode {
            Mode::Filesystem => self.unstage_filesystem(removal).await,
            Mode::Block => self.unstage_block(removal).await,
        }
    }

    async fn expand(&self, expansion: &Expansion) -> Result<u64, OpError> {
        self.expand_volume(expansion).await
    }

    async fn fullness(&self, usage: &Usage, _path: &Path) -> Result<VolumeStats, OpError> {
        self.volume_stats(usage, deadline()).await
    }

    fn rebuild(&self, found: &FoundVolume) -> Result<ReconstructedVolume, String> {
        rebuild::rebuild(&self.layout, found)
    }

    fn staged(&self) -> Result<Vec<(Mode, ReconstructedVolume)>, String> {
        rebuild::staged(&self.layout)
    }

    fn map_dir(&self, root: &Path, spec: &VolumeSpec) -> PathBuf {
        CsiLayout::new(root).map_dir(&spec.name)
    }

    async fn is_over_limit(&self, usage: &Usage) -> bool {
        self.is_over_attach_limit(usage).await
    }

    fn limit(&self) -> Duration {
        LIMIT + SLACK
    }

    fn recovered(&self) -> watch::Receiver<u64> {
        self.deps.drivers.moved()
    }
}
