//! Port of the image manager: pull an image for a pod, or return why it is unusable.

use std::sync::Arc;

use async_trait::async_trait;

use super::PodProgress;
use berth_proto::cri;
use berth_types::Pod;

/// `imagePullPolicy` of a container.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum PullPolicy {
    /// Pull on every start.
    Always,
    /// Pull if absent.
    IfNotPresent,
    /// Never pull.
    Never,
}

impl PullPolicy {
    /// Parses the API value; missing or unknown counts as `IfNotPresent`.
    pub fn parse(text: Option<&str>) -> Self {
        match text {
            Some("Always") => Self::Always,
            Some("Never") => Self::Never,
            _ => Self::IfNotPresent,
        }
    }
}

/// Image pull secret as the API stores it.
#[derive(Clone, PartialEq, Eq)]
pub struct PullSecret {
    /// Namespace, name, and UID, as stored in pull records.
    pub coordinates: (String, String, String),
    /// Secret type: `kubernetes.io/dockerconfigjson` or `kubernetes.io/dockercfg`.
    pub kind: String,
    /// Raw credential document.
    pub data: Vec<u8>,
}

impl std::fmt::Debug for PullSecret {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "PullSecret({:?})", self.coordinates)
    }
}

/// A request for one image.
#[derive(Clone, Debug)]
pub struct EnsureImage {
    /// Pod that needs the image.
    pub pod: Arc<Pod>,
    /// Image reference exactly as the pod specifies it.
    pub image: String,
    /// Pull policy.
    pub policy: PullPolicy,
    /// Pull secrets of the pod.
    pub secrets: Arc<[PullSecret]>,
    /// Sandbox configuration sent with the pull.
    pub sandbox: Option<Arc<cri::PodSandboxConfig>>,
    /// Runtime handler (sent only if its feature gate is enabled).
    pub handler: String,
    /// `fieldPath` of events, e.g. `spec.containers{web}`.
    pub field_path: Option<String>,
    /// Receives the name of the wait.
    pub progress: PodProgress,
}

/// User configured in an image.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum ImageUser {
    /// Numeric user id.
    Uid(i64),
    /// User name.
    Name(String),
    /// No user configured.
    Unset,
}

/// An image present in the runtime.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ResolvedImage {
    /// Image reference for `CreateContainer`.
    pub reference: String,
    /// User configured in the image.
    pub user: ImageUser,
}

/// Why an image is not usable; becomes `state.waiting`.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("{reason}: {message}")]
pub struct ImageError {
    /// `ErrImagePull`, `ImagePullBackOff`, `ErrImageNeverPull`, `InvalidImageName`, …
    pub reason: &'static str,
    /// Message for people.
    pub message: String,
    /// Earliest useful retry; `None` if unknown.
    pub retry_at: Option<tokio::time::Instant>,
}

/// Makes images available. Emits the events of spec 03b §1.1 itself.
#[async_trait]
pub trait ImageProvider: Send + Sync + 'static {
    /// Makes one image available to one pod. A present image never waits for a pull.
    async fn ensure(&self, request: EnsureImage) -> Result<ResolvedImage, ImageError>;
    /// Drops the pull back-off of a deleted pod.
    fn forget(&self, pod: &berth_types::PodUid);
}
