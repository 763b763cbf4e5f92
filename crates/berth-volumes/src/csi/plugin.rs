//! The plugin: what CSI volumes are like, and what all calls for them need. Spec 07 §12.

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
    driver::Driver,
    drivers::Drivers,
    paths::{self, CsiLayout, PLUGIN},
    rebuild,
    source::{CsiVolume, SecretName},
};
use crate::{
    device::{DevicePlugin, Expansion, Found, OpError, Published, Rebuilt, Removal, Traits, Usage},
    spec::{Mode, VolumeSpec},
};
use berth_ports::{Clock, Fullness, ObjectSource, StorageObjects};
use berth_types::{Pod, PodUid};

/// What the owner allows beyond the calls themselves: reads of objects have deadlines of their own.
const SLACK: Duration = Duration::from_secs(30);

/// What the plugin needs of others.
pub struct CsiDeps {
    /// The drivers.
    pub drivers: Arc<Drivers>,
    /// Their objects, attachments and secrets.
    pub objects: Arc<dyn StorageObjects>,
    /// Tokens of service accounts.
    pub tokens: Arc<dyn ObjectSource>,
    /// Wall time.
    pub clock: Arc<dyn Clock>,
    /// Whether drivers are asked if volumes are well (gate `CSIVolumeHealth`).
    pub asks_health: bool,
}

/// Volumes of CSI drivers.
pub struct Csi {
    pub(super) deps: CsiDeps,
    pub(super) layout: CsiLayout,
    pub(super) node: String,
}

/// A driver that can be called, and what it can do.
pub(super) struct Ready {
    pub(super) driver: Arc<Driver>,
    pub(super) can: Capabilities,
    pub(super) object: Option<Arc<CSIDriver>>,
}

impl Csi {
    /// For the node of that name, with the agent's root directory.
    pub fn new(root: &Path, node: &str, deps: CsiDeps) -> Self {
        // The mount table knows paths without links only.
        let root = fs::canonicalize(root).unwrap_or_else(|_| root.to_owned());
        Self { deps, layout: CsiLayout::new(&root), node: node.to_owned() }
    }

    /// The volume as its driver knows it.
    pub(super) fn volume(spec: &VolumeSpec, namespace: &str, pod: &PodUid) -> Result<CsiVolume, OpError> {
        let volume = CsiVolume::of(spec, namespace, pod).ok_or_else(|| OpError::failed(not_ours(spec)))?;
        volume.checked().map_err(|error| OpError::failed(format!("{PLUGIN}: {error}")))
    }

    /// The driver, if it is registered; `what` fails otherwise.
    pub(super) fn driver(&self, name: &str, what: &str) -> Result<Arc<Driver>, OpError> {
        let found = self.deps.drivers.get(name);
        found.map_err(|error| OpError::transient(format!("{PLUGIN}: {what}: {error}")))
    }

    /// The driver with what it can do, and its object.
    pub(super) async fn ready(&self, name: &str, until: Instant, what: &str) -> Result<Ready, OpError> {
        let driver = self.driver(name, what)?;
        // Nothing was tried yet, whatever it says.
        let can = driver.capabilities(until).await.map_err(|error| OpError::transient(error.to_string()))?;
        let object = self.object(name).await?;
        Ok(Ready { driver, can, object })
    }

    /// The driver's object.
    pub(super) async fn object(&self, name: &str) -> Result<Option<Arc<CSIDriver>>, OpError> {
        let found = self.deps.objects.driver(name).await;
        found.map_err(|error| OpError::transient(format!("{PLUGIN}: failed to get CSIDriver {name}: {error}")))
    }

    /// What the driver's other half said when it attached the volume.
    pub(super) async fn attached_as(
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

    /// The name of the volume's attachment.
    pub(super) fn attachment(&self, volume: &CsiVolume) -> String {
        paths::attachment(&volume.handle, &volume.driver, &self.node)
    }

    /// A secret; `field` names it in the volume.
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

    /// The tokens that the driver wants of the pod; `None` if it wants none.
    pub(super) async fn tokens(&self, object: Option<&CSIDriver>, pod: &Pod) -> Result<Option<String>, OpError> {
        let asked = context::asks(object);
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
impl DevicePlugin for Csi {
    fn name(&self) -> &'static str {
        PLUGIN
    }

    fn supports(&self, spec: &VolumeSpec) -> bool {
        CsiVolume::of(spec, "", &"".into()).is_some()
    }

    async fn describe(&self, pod: &Pod, spec: &VolumeSpec) -> Result<Traits, OpError> {
        let volume = Self::volume(spec, pod.namespace(), pod.uid())?;
        let object = self.object(&volume.driver).await?;
        Ok(Traits {
            volume: volume.name(),
            label: volume.label(),
            is_migrated: spec.is_migrated,
            attachable: !volume.is_inline && context::is_attached(object.as_deref()),
            stages: !volume.is_inline,
            mount_options: true,
            republishes: context::is_republished(object.as_deref()),
            expands: !volume.is_inline,
            takes_label: context::takes_labels(object.as_deref()),
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

    async fn publish(&self, usage: &Usage) -> Result<Published, OpError> {
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

    async fn fullness(&self, usage: &Usage, _path: &Path) -> Result<Fullness, OpError> {
        self.told_fullness(usage, deadline()).await
    }

    fn rebuild(&self, found: &Found) -> Result<Rebuilt, String> {
        rebuild::rebuild(&self.layout, found)
    }

    fn staged(&self) -> Result<Vec<(Mode, Rebuilt)>, String> {
        rebuild::staged(&self.layout)
    }

    fn map_dir(&self, root: &Path, spec: &VolumeSpec) -> PathBuf {
        CsiLayout::new(root).map_dir(&spec.name)
    }

    async fn is_over_limit(&self, usage: &Usage) -> bool {
        self.is_beyond(usage).await
    }

    fn limit(&self) -> Duration {
        LIMIT + SLACK
    }

    fn cured(&self) -> watch::Receiver<u64> {
        self.deps.drivers.moved()
    }
}
