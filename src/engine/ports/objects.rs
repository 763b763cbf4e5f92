//! Objects of the API server that pods refer to. Standalone mode has a player that refuses.

use std::{collections::BTreeMap, sync::Arc};

use async_trait::async_trait;

use super::PullSecret;
use crate::pod::{Pod, api};

/// Why an object cannot be read.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum ObjectError {
    /// There is no API client (spec 02b §10.2).
    #[error("couldn't get {kind} {namespace}/{name}, no kubeClient defined")]
    NoClient {
        /// `configMap` or `secret`.
        kind: &'static str,
        /// Namespace.
        namespace: String,
        /// Name.
        name: String,
    },
    /// The object does not exist.
    #[error("{kind} \"{name}\" not found")]
    NotFound {
        /// Plural resource, e.g. `configmaps`.
        kind: &'static str,
        /// Name.
        name: String,
    },
    /// Anything else.
    #[error("{0}")]
    Other(String),
}

/// ConfigMaps, Secrets, Services, RuntimeClasses and pull secrets.
#[async_trait]
pub trait ObjectSource: Send + Sync + 'static {
    /// `data` of a ConfigMap.
    async fn config_map(&self, namespace: &str, name: &str) -> Result<Arc<BTreeMap<String, String>>, ObjectError>;
    /// `data` of a Secret, decoded.
    async fn secret(&self, namespace: &str, name: &str) -> Result<Arc<BTreeMap<String, Vec<u8>>>, ObjectError>;
    /// Services for environment variables: those of the namespace and `default/kubernetes`.
    /// `None` while the list has not been read once.
    fn services(&self, namespace: &str) -> Option<Vec<Arc<api::Service>>>;
    /// The runtime handler of a RuntimeClass; `""` for none.
    async fn runtime_handler(&self, class: Option<&str>) -> Result<String, ObjectError>;
    /// The pull secrets that could be read, and the names of those that could not.
    async fn pull_secrets(&self, pod: &Pod) -> (Vec<PullSecret>, Vec<String>);
}
