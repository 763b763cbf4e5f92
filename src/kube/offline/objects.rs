//! Objects that pods refer to, remembered: what the API server said is learned, and told again while the
//! last-known pods run and it cannot be asked.

use std::{collections::BTreeMap, sync::Arc};

use async_trait::async_trait;

use super::{
    Offline,
    known::{Data, Key, Kind, Learned},
};
use crate::{
    engine::ports::{ObjectError, ObjectSource, PullSecret, TokenAsk},
    pod::{Pod, PodUid, api},
};

/// Around the source that asks the API server.
pub struct OfflineObjects {
    inner: Arc<dyn ObjectSource>,
    offline: Arc<Offline>,
}

impl OfflineObjects {
    /// Learns what `inner` reads.
    pub fn new(inner: Arc<dyn ObjectSource>, offline: Arc<Offline>) -> Self {
        Self { inner, offline }
    }

    /// What was read, learned; or what is remembered, where it could not be read.
    fn kept(
        &self,
        (kind, namespace, name): (Kind, &str, &str),
        read: Result<Arc<Data>, ObjectError>,
    ) -> Result<Arc<Data>, ObjectError> {
        let key = Key { kind, namespace: namespace.to_owned(), name: name.to_owned() };
        match read {
            Ok(data) => {
                self.offline.learn(Learned::Object(key, data.clone()));
                Ok(data)
            }
            Err(error) if self.may_recall(&error) => self.offline.last.objects.get(&key).cloned().ok_or(error),
            Err(error) => Err(error),
        }
    }

    /// Whoever says that an object is not there has been asked.
    fn may_recall(&self, error: &ObjectError) -> bool {
        self.offline.is_recalling() && !matches!(error, ObjectError::NotFound { .. })
    }
}

#[async_trait]
impl ObjectSource for OfflineObjects {
    async fn config_map(&self, namespace: &str, name: &str) -> Result<Arc<BTreeMap<String, String>>, ObjectError> {
        let read = self.inner.config_map(namespace, name).await;
        let bytes = |data: &BTreeMap<String, String>| {
            data.iter().map(|(key, value)| (key.clone(), value.clone().into_bytes())).collect::<Data>()
        };
        let is_read = read.as_ref().ok().cloned();
        let kept = self.kept((Kind::ConfigMap, namespace, name), read.map(|data| Arc::new(bytes(&data))))?;
        let text = |value: &Vec<u8>| String::from_utf8_lossy(value).into_owned();
        Ok(is_read.unwrap_or_else(|| Arc::new(kept.iter().map(|(key, value)| (key.clone(), text(value))).collect())))
    }

    async fn secret(&self, namespace: &str, name: &str) -> Result<Arc<Data>, ObjectError> {
        let read = self.inner.secret(namespace, name).await;
        self.kept((Kind::Secret, namespace, name), read)
    }

    fn services(&self, namespace: &str) -> Option<Vec<Arc<api::Service>>> {
        match self.inner.services(namespace) {
            Some(services) => {
                self.offline.learn(Learned::Services(namespace.to_owned(), services.clone()));
                Some(services)
            }
            // A pod of a namespace that was never asked about starts without any, rather than never.
            None if self.offline.is_recalling() => {
                Some(self.offline.last.services.get(namespace).cloned().unwrap_or_default())
            }
            None => None,
        }
    }

    async fn runtime_handler(&self, class: Option<&str>) -> Result<String, ObjectError> {
        let read = self.inner.runtime_handler(class).await;
        match (read, class) {
            (Ok(handler), Some(class)) => {
                self.offline.learn(Learned::Handler(class.to_owned(), handler.clone()));
                Ok(handler)
            }
            (Err(error), Some(class)) if self.may_recall(&error) => {
                self.offline.last.handlers.get(class).cloned().ok_or(error)
            }
            (read, _) => read,
        }
    }

    async fn pull_secrets(&self, pod: &Pod) -> (Vec<PullSecret>, Vec<String>) {
        self.inner.pull_secrets(pod).await
    }

    async fn config_map_files(&self, namespace: &str, name: &str) -> Result<Arc<Data>, ObjectError> {
        let read = self.inner.config_map_files(namespace, name).await;
        self.kept((Kind::ConfigMapFiles, namespace, name), read)
    }

    fn register(&self, pod: &Pod) {
        self.inner.register(pod);
    }

    fn unregister(&self, pod: &PodUid) {
        self.inner.unregister(pod);
    }

    fn adopt_token(&self, pod: &Pod, ask: &TokenAsk, held: &str) {
        self.inner.adopt_token(pod, ask, held);
    }

    /// Tokens are not kept: an empty one stands in, which nobody takes, as nobody is there to take one. The
    /// next sync after the server's return brings a good one.
    async fn token(&self, pod: &Pod, ask: &TokenAsk) -> Result<String, ObjectError> {
        match self.inner.token(pod, ask).await {
            Err(error) if self.may_recall(&error) => Ok(String::new()),
            token => token,
        }
    }
}
