//! The role of the images room: make one image usable by one pod, or say exactly why not.

use std::sync::Arc;

use async_trait::async_trait;

use super::Stage;
use berth_proto::cri;
use berth_types::Pod;

/// `imagePullPolicy`.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum PullPolicy {
    /// Pull on each start.
    Always,
    /// Pull where absent.
    IfNotPresent,
    /// Never pull.
    Never,
}

impl PullPolicy {
    /// Reads the API's text; missing or unknown counts as `IfNotPresent`.
    pub fn parse(text: Option<&str>) -> Self {
        match text {
            Some("Always") => Self::Always,
            Some("Never") => Self::Never,
            _ => Self::IfNotPresent,
        }
    }
}

/// A pull secret as the API stores it.
#[derive(Clone, PartialEq, Eq)]
pub struct PullSecret {
    /// Namespace, name, UID: what pull records remember.
    pub coordinates: (String, String, String),
    /// `kubernetes.io/dockerconfigjson` or `kubernetes.io/dockercfg`.
    pub kind: String,
    /// The raw document.
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
    /// Who needs it.
    pub pod: Arc<Pod>,
    /// The image exactly as the pod writes it.
    pub image: String,
    /// Pull policy.
    pub policy: PullPolicy,
    /// Pull secrets of the pod.
    pub secrets: Arc<[PullSecret]>,
    /// Sent with the pull.
    pub sandbox: Option<Arc<cri::PodSandboxConfig>>,
    /// The runtime handler (sent only behind its gate).
    pub handler: String,
    /// Where events point, e.g. `spec.containers{web}`.
    pub field_path: Option<String>,
    /// Where the wait is named.
    pub stage: Stage,
}

/// The user an image asks for.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum ImageUser {
    /// Numeric.
    Uid(i64),
    /// A name.
    Name(String),
    /// The image says nothing.
    Unset,
}

/// An image that is usable now.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ResolvedImage {
    /// What goes into `CreateContainer`.
    pub reference: String,
    /// The user it asks for.
    pub user: ImageUser,
}

/// Why an image is not usable: becomes `state.waiting`.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("{reason}: {message}")]
pub struct ImageError {
    /// `ErrImagePull`, `ImagePullBackOff`, `ErrImageNeverPull`, `InvalidImageName`, …
    pub reason: &'static str,
    /// The message.
    pub message: String,
    /// When it makes sense to try again; `None` where nothing is known.
    pub retry_at: Option<tokio::time::Instant>,
}

/// Makes images usable. Emits the events of spec 03b §1.1 itself.
#[async_trait]
pub trait ImageProvider: Send + Sync + 'static {
    /// Makes one image usable by one pod. A present image never waits behind a pull.
    async fn ensure(&self, request: EnsureImage) -> Result<ResolvedImage, ImageError>;
    /// Forgets the pull back-off of a pod that is gone.
    fn forget(&self, pod: &berth_types::PodUid);
}
