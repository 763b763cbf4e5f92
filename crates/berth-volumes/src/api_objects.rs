//! API objects and tokens that a pod's volumes need, read before the blocking set-up.
//!
//! The set-up runs on threads that cannot wait for API responses.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
    time::Duration,
};

use futures::future::join_all;
use tokio::time::timeout;

use berth_ports::{CertificateRequest, Credential, ObjectError, ObjectSource, TokenRequest};
use berth_types::{Pod, api};

/// Timeout of each read for a pod.
const LIMIT: Duration = Duration::from_secs(30);

/// Files by key.
pub type Data = Arc<BTreeMap<String, Vec<u8>>>;

/// Objects read, by name.
#[derive(Default)]
pub struct VolumeObjects {
    config_maps: BTreeMap<String, Result<Data, ObjectError>>,
    secrets: BTreeMap<String, Result<Data, ObjectError>>,
    tokens: BTreeMap<TokenRequest, Result<String, ObjectError>>,
    bundles: Vec<(api::ClusterTrustBundleProjection, Result<String, ObjectError>)>,
    certificates: Vec<(CertificateRequest, Result<Arc<Credential>, ObjectError>)>,
}

/// Objects that volumes need.
#[derive(Default)]
struct ObjectRequests {
    config_maps: BTreeSet<String>,
    secrets: BTreeSet<String>,
    tokens: BTreeSet<TokenRequest>,
    bundles: Vec<api::ClusterTrustBundleProjection>,
    certificates: Vec<CertificateRequest>,
}

/// Returns the token request of a projection.
pub fn token_of(source: &api::ServiceAccountTokenProjection) -> TokenRequest {
    TokenRequest {
        audience: source.audience.clone().unwrap_or_default(),
        expiration_seconds: source.expiration_seconds,
    }
}

/// Whether the API server must issue something for this pod alone: a token or a certificate. That takes longer than
/// reading stored objects and cannot be cached before the first request.
pub fn is_issued(volume: &api::Volume) -> bool {
    let mut sources = volume.projected.iter().flat_map(|projected| projected.sources.iter().flatten());
    sources.any(|source| source.service_account_token.is_some() || source.pod_certificate.is_some())
}

fn object_requests(volumes: &[&api::Volume]) -> ObjectRequests {
    let mut wanted = ObjectRequests::default();
    for volume in volumes {
        wanted.config_maps.extend(volume.config_map.as_ref().map(|source| source.name.clone()));
        wanted.secrets.extend(volume.secret.as_ref().map(|source| source.secret_name.clone().unwrap_or_default()));
        let sources = volume.projected.iter().flat_map(|projected| projected.sources.iter().flatten());
        for (index, source) in sources.enumerate() {
            wanted.config_maps.extend(source.config_map.as_ref().map(|source| source.name.clone()));
            wanted.secrets.extend(source.secret.as_ref().map(|source| source.name.clone()));
            wanted.tokens.extend(source.service_account_token.as_ref().map(token_of));
            wanted.bundles.extend(source.cluster_trust_bundle.clone());
            let certificate = source.pod_certificate.as_ref().map(|projection| CertificateRequest {
                volume: volume.name.clone(),
                source: index,
                projection: projection.clone(),
            });
            wanted.certificates.extend(certificate);
        }
    }
    wanted
}

/// Reads all objects concurrently; errors are returned when an object is used.
pub async fn fetch(objects: &dyn ObjectSource, pod: &Pod, volumes: &[&api::Volume]) -> VolumeObjects {
    let (wanted, namespace) = (object_requests(volumes), pod.namespace());
    let config_maps = join_all(wanted.config_maps.into_iter().map(async |name| {
        let read = within(objects.config_map_files(namespace, &name)).await;
        (name, read)
    }));
    let secrets = join_all(wanted.secrets.into_iter().map(async |name| {
        let read = within(objects.secret(namespace, &name)).await;
        (name, read)
    }));
    let tokens = join_all(wanted.tokens.into_iter().map(async |ask| {
        let token = within(objects.token(pod, &ask)).await;
        (ask, token)
    }));
    let bundles = join_all(wanted.bundles.into_iter().map(async |ask| {
        let text = within(objects.trust_bundle(pod, &ask)).await;
        (ask, text)
    }));
    let certificates = join_all(wanted.certificates.into_iter().map(async |ask| {
        let credential = within(objects.pod_certificate(pod, &ask)).await;
        (ask, credential)
    }));
    let (config_maps, secrets, tokens, bundles, certificates) =
        tokio::join!(config_maps, secrets, tokens, bundles, certificates);
    VolumeObjects {
        config_maps: config_maps.into_iter().collect(),
        secrets: secrets.into_iter().collect(),
        tokens: tokens.into_iter().collect(),
        bundles,
        certificates,
    }
}

async fn within<T>(read: impl Future<Output = Result<T, ObjectError>>) -> Result<T, ObjectError> {
    let late = || Err(ObjectError::Other("timed out waiting for the condition".to_owned()));
    timeout(LIMIT, read).await.unwrap_or_else(|_| late())
}

impl VolumeObjects {
    /// Returns the files of a ConfigMap.
    pub fn config_map(&self, name: &str) -> Result<Data, ObjectError> {
        found(&self.config_maps, name)
    }

    /// Returns the files of a Secret.
    pub fn secret(&self, name: &str) -> Result<Data, ObjectError> {
        found(&self.secrets, name)
    }

    /// Returns a service account token.
    pub fn token(&self, ask: &TokenRequest) -> Result<String, ObjectError> {
        self.tokens.get(ask).cloned().unwrap_or_else(|| Err(not_read("token")))
    }

    /// Returns the certificates of a trust bundle.
    pub fn trust_bundle(&self, ask: &api::ClusterTrustBundleProjection) -> Result<String, ObjectError> {
        let read = self.bundles.iter().find(|(read, _)| read == ask).map(|(_, text)| text.clone());
        read.unwrap_or_else(|| Err(not_read("trust bundle")))
    }

    /// Returns the key and certificate for a source of a volume.
    pub fn certificate(&self, volume: &str, source: usize) -> Result<Arc<Credential>, ObjectError> {
        let read = self.certificates.iter().find(|(ask, _)| ask.volume == volume && ask.source == source);
        read.map_or_else(|| Err(not_read("certificate")), |(_, credential)| credential.clone())
    }
}

fn found(read: &BTreeMap<String, Result<Data, ObjectError>>, name: &str) -> Result<Data, ObjectError> {
    read.get(name).cloned().unwrap_or_else(|| Err(not_read(name)))
}

/// Returns the error for an object that was not read; does not occur, because every set-up reads its objects first.
fn not_read(what: &str) -> ObjectError {
    ObjectError::Other(format!("{what:?} was not read"))
}
