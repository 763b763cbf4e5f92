//! Port of API objects that pods refer to: ConfigMaps, Secrets, tokens, certificates.
//!
//! Standalone mode has an implementation that refuses every read.

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
        /// Namespace of the ConfigMap or Secret.
        namespace: String,
        /// Name of the ConfigMap or Secret.
        name: String,
    },
    /// The object does not exist.
    #[error("{kind} \"{name}\" not found")]
    NotFound {
        /// Resource as the server or the lister spells it: `configmaps`, `configmap`, `runtimeclass.node.k8s.io`.
        kind: &'static str,
        /// Name of the missing object; the message has no namespace.
        name: String,
    },
    /// Anything else.
    #[error("{0}")]
    Other(String),
}

/// Parameters of a service account token request.
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct TokenRequest {
    /// Audience; empty for the API server itself.
    pub audience: String,
    /// Requested lifetime in seconds; `None` for a token that is never renewed.
    pub expiration_seconds: Option<i64>,
}

/// Metadata of a service account.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct ServiceAccount {
    /// `metadata.uid`.
    pub uid: String,
    /// `metadata.annotations`.
    pub annotations: BTreeMap<String, String>,
}

/// A certificate requested by a source of a projected volume.
#[derive(Clone, PartialEq, Debug)]
pub struct CertificateRequest {
    /// Volume name in the pod.
    pub volume: String,
    /// Index of the source in the volume.
    pub source: usize,
    /// The source's projection.
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

/// Omits the private key.
impl fmt::Debug for Credential {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Credential").field("chain", &self.chain).finish_non_exhaustive()
    }
}

/// Reads ConfigMaps, Secrets, Services, RuntimeClasses, and pull secrets.
#[async_trait]
pub trait ObjectSource: Send + Sync + 'static {
    /// `data` of a ConfigMap.
    async fn config_map(&self, namespace: &str, name: &str) -> Result<Arc<BTreeMap<String, String>>, ObjectError>;
    /// `data` of a Secret, decoded.
    async fn secret(&self, namespace: &str, name: &str) -> Result<Arc<BTreeMap<String, Vec<u8>>>, ObjectError>;
    /// Services for environment variables: those of the namespace and `default/kubernetes`.
    /// `None` before the first complete list.
    fn services(&self, namespace: &str) -> Option<Vec<Arc<api::Service>>>;
    /// Runtime handler of a RuntimeClass; `""` for none.
    async fn runtime_handler(&self, class: Option<&str>) -> Result<String, ObjectError>;
    /// Pull secrets that could be read, and the names of those that could not.
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
    /// Registers the objects that the pod refers to and drops its previous references. Cheap if nothing changed;
    /// precedes any read for the pod.
    fn register(&self, _pod: &Pod) {}
    /// Drops the references of a deleted pod whose volumes are unmounted.
    fn unregister(&self, _pod: &PodUid) {}
    /// Offers the token that a volume of the pod contains from before the agent's start. It becomes the pod's current
    /// token if it is a valid one.
    fn adopt_token(&self, _pod: &Pod, _ask: &TokenRequest, _token: &str) {}
    /// A token of the pod's service account, bound to the pod: the current one until its refresh is due.
    async fn token(&self, _pod: &Pod, _ask: &TokenRequest) -> Result<String, ObjectError> {
        Err(ObjectError::Other("cannot use TokenManager when kubelet is in standalone mode".to_owned()))
    }
    /// The service account, read from the API server.
    async fn service_account(&self, _namespace: &str, _name: &str) -> Result<ServiceAccount, ObjectError> {
        Err(ObjectError::Other("cannot get service account without an API server".to_owned()))
    }
    /// Certificates of the ClusterTrustBundles that a projection selects; empty only if the projection permits that.
    async fn trust_bundle(&self, _pod: &Pod, _ask: &api::ClusterTrustBundleProjection) -> Result<String, ObjectError> {
        let text = "ClusterTrustBundle projection is not supported in static kubelet mode";
        Err(ObjectError::Other(text.to_owned()))
    }
    /// Newest key and certificate for a projection (spec 07 §9.4).
    async fn pod_certificate(&self, _pod: &Pod, _ask: &CertificateRequest) -> Result<Arc<Credential>, ObjectError> {
        // As the kubelet without its feature gate, which is off by default.
        Err(ObjectError::Other("unimplemented".to_owned()))
    }
}
