//! Objects of the API server that pods refer to. Standalone mode has a player that refuses.

use std::{collections::BTreeMap, fmt, sync::Arc};

use async_trait::async_trait;

use super::PullSecret;
use berth_types::{Pod, PodUid, api};

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
        /// As the server or the store of it says: `configmaps`, `configmap`, `runtimeclass.node.k8s.io`.
        kind: &'static str,
        /// Name.
        name: String,
    },
    /// Anything else.
    #[error("{0}")]
    Other(String),
}

/// A token that the service account of a pod is to get.
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct TokenAsk {
    /// Who it is for; empty for the API server itself.
    pub audience: String,
    /// How long it should live, in seconds; `None` for one that is never renewed.
    pub expiration_seconds: Option<i64>,
}

/// What is known of a service account.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct ServiceAccount {
    /// `metadata.uid`.
    pub uid: String,
    /// `metadata.annotations`.
    pub annotations: BTreeMap<String, String>,
}

/// A certificate that a pod is to have: a source of one of its projected volumes.
#[derive(Clone, PartialEq, Debug)]
pub struct CertificateAsk {
    /// The volume.
    pub volume: String,
    /// Which of its sources.
    pub source: usize,
    /// What the source says.
    pub projection: api::PodCertificateProjection,
}

/// A private key and the certificates for it.
#[derive(Clone, PartialEq, Eq)]
pub struct Credential {
    /// PKCS #8, PEM.
    pub key: String,
    /// Leaf and intermediates, PEM.
    pub chain: String,
}

/// The key is nobody's business.
impl fmt::Debug for Credential {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Credential").field("chain", &self.chain).finish_non_exhaustive()
    }
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

    /// All keys of a ConfigMap as files: `data` and `binaryData`.
    async fn config_map_files(
        &self,
        namespace: &str,
        name: &str,
    ) -> Result<Arc<BTreeMap<String, Vec<u8>>>, ObjectError> {
        let data = self.config_map(namespace, name).await?;
        Ok(Arc::new(data.iter().map(|(key, value)| (key.clone(), value.clone().into_bytes())).collect()))
    }
    /// The pod refers to what it names, and to nothing else any more. Cheap where nothing changed;
    /// comes before any read for the pod.
    fn register(&self, _pod: &Pod) {}
    /// The pod is gone, and what was mounted for it.
    fn unregister(&self, _pod: &PodUid) {}
    /// A volume of the pod holds this for that ask, from before the agent started. It becomes the one the pod
    /// has where it is a token that can be.
    fn adopt_token(&self, _pod: &Pod, _ask: &TokenAsk, _held: &str) {}
    /// A token of the pod's service account, bound to the pod: the one it has, until that is due.
    async fn token(&self, _pod: &Pod, _ask: &TokenAsk) -> Result<String, ObjectError> {
        Err(ObjectError::Other("cannot use TokenManager when kubelet is in standalone mode".to_owned()))
    }
    /// A service account as the API server has it now.
    async fn service_account(&self, _namespace: &str, _name: &str) -> Result<ServiceAccount, ObjectError> {
        Err(ObjectError::Other("there is no API server".to_owned()))
    }
    /// Certificates of the cluster's trust bundles that a projection means; none where it may mean none.
    async fn trust_bundle(&self, _pod: &Pod, _ask: &api::ClusterTrustBundleProjection) -> Result<String, ObjectError> {
        let text = "ClusterTrustBundle projection is not supported in static kubelet mode";
        Err(ObjectError::Other(text.to_owned()))
    }
    /// The key and the certificate that a projection asks for, the newest there is (spec 07 §9.4).
    async fn pod_certificate(&self, _pod: &Pod, _ask: &CertificateAsk) -> Result<Arc<Credential>, ObjectError> {
        // As the reference without its gate, which is off unless somebody sets it.
        Err(ObjectError::Other("unimplemented".to_owned()))
    }
}
