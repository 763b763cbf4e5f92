//! Object source with a checkpoint fallback while the API server is unreachable.
//!
//! Records what the API server returns. Serves recorded objects while the last-known pods run and the server cannot be
//! reached.

use std::{collections::BTreeMap, pin::pin, sync::Arc, time::Duration};

use async_trait::async_trait;
use tokio::time::timeout;

use super::{
    Offline,
    checkpoint::{CheckpointUpdate, Data, ObjectDataKey, ObjectDataKind},
};
use berth_ports::{CertificateRequest, Credential, ObjectError, ObjectSource, PullSecret, TokenRequest};
use berth_types::{Pod, PodUid, api};

/// Timeout of reads from the API server while the last-known pods run, for recorded objects: the agent already waited
/// for the server before it used the checkpoint, and each object would wait as long again.
const PATIENCE: Duration = Duration::from_secs(1);
/// Keys under which a pull secret is recorded.
const UID: &str = "uid";
const KIND: &str = "type";
const DOCUMENT: &str = "document";

/// Wraps the source that reads from the API server.
pub struct OfflineObjects {
    inner: Arc<dyn ObjectSource>,
    offline: Arc<Offline>,
}

impl OfflineObjects {
    /// Returns a source that records what `inner` reads.
    pub fn new(inner: Arc<dyn ObjectSource>, offline: Arc<Offline>) -> Self {
        Self { inner, offline }
    }

    /// Reads from the API server; with a short timeout for a recorded object while the last-known pods run.
    async fn read_with_timeout<T>(
        &self,
        is_remembered: bool,
        asking: impl Future<Output = Result<T, ObjectError>> + Send,
    ) -> Result<T, ObjectError> {
        if !is_remembered || !self.offline.is_recalling() {
            return asking.await;
        }
        let mut asking = pin!(asking);
        match timeout(PATIENCE, &mut asking).await {
            Ok(result) => result,
            // The server came back during the read: its response is used.
            Err(_) if !self.offline.is_recalling() => asking.await,
            Err(_) => Err(ObjectError::Other(format!("no response from the API server within {PATIENCE:?}"))),
        }
    }

    /// Reads an object and records it; falls back to the recorded one if the read fails.
    async fn read_or_recall(
        &self,
        key: ObjectDataKey,
        asking: impl Future<Output = Result<Arc<Data>, ObjectError>> + Send,
    ) -> Result<Arc<Data>, ObjectError> {
        let remembered = self.offline.last.objects.get(&key);
        match self.read_with_timeout(remembered.is_some(), asking).await {
            Ok(data) => {
                self.offline.learn(CheckpointUpdate::Object(key, data.clone()));
                Ok(data)
            }
            Err(error) if self.may_recall(&error) => remembered.cloned().ok_or(error),
            Err(error) => Err(error),
        }
    }

    /// `NotFound` is a response of the server, so there is no fallback.
    fn may_recall(&self, error: &ObjectError) -> bool {
        self.offline.is_recalling() && !matches!(error, ObjectError::NotFound { .. })
    }
}

#[async_trait]
impl ObjectSource for OfflineObjects {
    async fn config_map(&self, namespace: &str, name: &str) -> Result<Arc<BTreeMap<String, String>>, ObjectError> {
        let asking = async {
            let data = self.inner.config_map(namespace, name).await?;
            Ok(Arc::new(data.iter().map(|(key, value)| (key.clone(), value.clone().into_bytes())).collect()))
        };
        let kept = self.read_or_recall(key(ObjectDataKind::ConfigMap, namespace, name), asking).await?;
        Ok(Arc::new(kept.iter().map(|(key, value)| (key.clone(), text(value))).collect()))
    }

    async fn secret(&self, namespace: &str, name: &str) -> Result<Arc<Data>, ObjectError> {
        self.read_or_recall(key(ObjectDataKind::Secret, namespace, name), self.inner.secret(namespace, name)).await
    }

    fn services(&self, namespace: &str) -> Option<Vec<Arc<api::Service>>> {
        match self.inner.services(namespace) {
            Some(services) => {
                self.offline.learn(CheckpointUpdate::Services(namespace.to_owned(), services.clone()));
                Some(services)
            }
            // Pods of a namespace that was never recorded start without services, rather than never.
            None if self.offline.is_recalling() => {
                Some(self.offline.last.services.get(namespace).cloned().unwrap_or_default())
            }
            None => None,
        }
    }

    async fn runtime_handler(&self, class: Option<&str>) -> Result<String, ObjectError> {
        let is_remembered = class.is_some_and(|class| self.offline.last.handlers.contains_key(class));
        let read = self.read_with_timeout(is_remembered, self.inner.runtime_handler(class)).await;
        match (read, class) {
            (Ok(handler), Some(class)) => {
                self.offline.learn(CheckpointUpdate::Handler(class.to_owned(), handler.clone()));
                Ok(handler)
            }
            (Err(error), Some(class)) if self.may_recall(&error) => {
                self.offline.last.handlers.get(class).cloned().ok_or(error)
            }
            (read, _) => read,
        }
    }

    /// Recorded, because otherwise an image that was pulled with credentials would be requested again and could not be
    /// pulled.
    async fn pull_secrets(&self, pod: &Pod) -> (Vec<PullSecret>, Vec<String>) {
        let names = pod.spec().image_pull_secrets.iter().flatten().map(|secret| secret.name.clone());
        let names: Vec<String> = names.filter(|name| !name.is_empty()).collect();
        let remembered = |name: &String| {
            let data = self.offline.last.objects.get(&key(ObjectDataKind::PullSecret, pod.namespace(), name))?;
            Some(recalled(pod.namespace(), name, data))
        };
        let is_remembered = names.iter().any(|name| remembered(name).is_some());
        let asking = async { Ok(self.inner.pull_secrets(pod).await) };
        let (mut found, mut missing) =
            self.read_with_timeout(is_remembered, asking).await.unwrap_or_else(|_| (Vec::new(), names.clone()));
        for secret in &found {
            let (namespace, name, _) = &secret.coordinates;
            self.offline
                .learn(CheckpointUpdate::Object(key(ObjectDataKind::PullSecret, namespace, name), learned(secret)));
        }
        if self.offline.is_recalling() {
            found.extend(missing.iter().filter_map(remembered));
            missing.retain(|name| remembered(name).is_none());
        }
        (found, missing)
    }

    async fn config_map_files(&self, namespace: &str, name: &str) -> Result<Arc<Data>, ObjectError> {
        let asking = self.inner.config_map_files(namespace, name);
        self.read_or_recall(key(ObjectDataKind::ConfigMapFiles, namespace, name), asking).await
    }

    fn register(&self, pod: &Pod) {
        self.inner.register(pod);
    }

    fn unregister(&self, pod: &PodUid) {
        self.inner.unregister(pod);
    }

    fn adopt_token(&self, pod: &Pod, ask: &TokenRequest, token: &str) {
        self.inner.adopt_token(pod, ask, token);
    }

    /// Tokens are not recorded: an empty one takes their place, which no server accepts, but no server is reachable.
    /// The next sync after the server's return provides a valid one.
    async fn token(&self, pod: &Pod, ask: &TokenRequest) -> Result<String, ObjectError> {
        match self.inner.token(pod, ask).await {
            Err(error) if self.may_recall(&error) => Ok(String::new()),
            token => token,
        }
    }

    /// Not recorded either.
    async fn pod_certificate(&self, pod: &Pod, ask: &CertificateRequest) -> Result<Arc<Credential>, ObjectError> {
        self.inner.pod_certificate(pod, ask).await
    }

    /// Not recorded: a volume keeps the certificates it has.
    async fn trust_bundle(&self, pod: &Pod, ask: &api::ClusterTrustBundleProjection) -> Result<String, ObjectError> {
        self.inner.trust_bundle(pod, ask).await
    }
}

fn key(kind: ObjectDataKind, namespace: &str, name: &str) -> ObjectDataKey {
    ObjectDataKey { kind, namespace: namespace.to_owned(), name: name.to_owned() }
}

fn text(value: &[u8]) -> String {
    String::from_utf8_lossy(value).into_owned()
}

/// Encodes a pull secret for the checkpoint.
fn learned(secret: &PullSecret) -> Arc<Data> {
    let parts = [
        (UID, secret.coordinates.2.clone().into_bytes()),
        (KIND, secret.kind.clone().into_bytes()),
        (DOCUMENT, secret.data.clone()),
    ];
    Arc::new(parts.into_iter().map(|(part, value)| (part.to_owned(), value)).collect())
}

/// Decodes a pull secret of the checkpoint.
fn recalled(namespace: &str, name: &str, data: &Data) -> PullSecret {
    let part = |part: &str| data.get(part).cloned().unwrap_or_default();
    PullSecret {
        coordinates: (namespace.to_owned(), name.to_owned(), text(&part(UID))),
        kind: text(&part(KIND)),
        data: part(DOCUMENT),
    }
}
