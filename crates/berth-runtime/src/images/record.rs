//! Image record: persisted metadata of an image. Pure.
//!
//! An image is identified by the digest of its configuration, so that one image from two registries is one image.
//! Implements spec 09b §2.

use base64::{Engine as _, engine::general_purpose::STANDARD};
use serde::{Deserialize, Serialize};

use super::{digest::Digest, model::Descriptor};
use crate::launch::image::{ImageConfig, LaunchImage};

/// Platform of an image.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct Platform {
    /// Operating system: `linux`.
    #[serde(default)]
    pub os: String,
    /// Architecture: `amd64`, `arm64`.
    #[serde(default)]
    pub architecture: String,
    /// Variant: `v7`; empty: none.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub variant: String,
}

/// Source of an image.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ImageOrigin {
    /// Pulled from a registry.
    Pull,
    /// Imported from an archive.
    Import,
    /// Built into the program.
    Builtin,
}

/// Tag or digest by which an image is known, and what it resolved to.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct ImageReference {
    /// `host/path:tag` or `host/path@digest`, normalized.
    pub name: String,
    /// Digest the name resolved to: the index if there is one.
    pub target: Digest,
    /// When the name was assigned to this image, nanoseconds since the epoch; of two images the later assignment wins.
    pub ref_time: i64,
}

/// Content of a file of an image's root, stored in its record.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum StoredFile {
    /// The file does not exist.
    #[default]
    Missing,
    /// The file exceeds the size limit.
    TooLong,
    /// Content in base64.
    Content(String),
}

impl StoredFile {
    /// Encodes the bytes.
    pub fn of(bytes: &[u8]) -> Self {
        Self::Content(STANDARD.encode(bytes))
    }

    /// The content; empty if it is not stored.
    pub fn bytes(&self) -> Vec<u8> {
        match self {
            Self::Content(text) => STANDARD.decode(text).unwrap_or_default(),
            Self::Missing | Self::TooLong => Vec::new(),
        }
    }
}

/// Persistent metadata of one image ID.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct ImageRecord {
    /// Version of the format.
    pub v: u64,
    /// Image ID: digest of its configuration.
    pub id: Digest,
    /// References to the image.
    pub refs: Vec<ImageReference>,
    /// Descriptor that the references resolved to: an index or the manifest.
    pub target: Descriptor,
    /// Descriptor of the manifest.
    pub manifest: Descriptor,
    /// Platform of the image.
    pub platform: Platform,
    /// Layer numbers, bottom first.
    pub layers: Vec<u64>,
    /// Chain ID of the topmost layer; none for an image without layers.
    pub chain_id: Option<Digest>,
    /// Size of configuration, manifest, and compressed layers, bytes; reported by CRI.
    pub size: u64,
    /// Container defaults.
    pub config: ImageConfig,
    /// `/etc/passwd` of the root.
    pub passwd: StoredFile,
    /// `/etc/group` of the root.
    pub group: StoredFile,
    /// Whether the image is exempt from garbage collection.
    pub pinned: bool,
    /// Source of the image.
    pub source: ImageOrigin,
    /// When the image was added to this machine, nanoseconds since the epoch.
    pub created: i64,
    /// When a container was last created from it, nanoseconds since the epoch.
    pub last_used: i64,
}

impl ImageRecord {
    /// Image ID as reported by CRI.
    pub fn id(&self) -> String {
        self.id.to_string()
    }

    /// References by tag, sorted.
    pub fn repo_tags(&self) -> Vec<String> {
        self.names(false)
    }

    /// References by digest, sorted.
    pub fn repo_digests(&self) -> Vec<String> {
        self.names(true)
    }

    fn names(&self, by_digest: bool) -> Vec<String> {
        let names = self.refs.iter().map(|reference| &reference.name);
        let mut out: Vec<String> = names.filter(|name| name.contains('@') == by_digest).cloned().collect();
        out.sort();
        out.dedup();
        out
    }

    /// Image data that the launch plans of its containers use.
    pub fn launch_image(&self) -> LaunchImage {
        LaunchImage {
            config: self.config.clone(),
            architecture: self.platform.architecture.clone(),
            passwd: self.passwd.bytes(),
            group: self.group.bytes(),
        }
    }

    /// User of containers as CRI reports it: ID or name; neither if the image sets none.
    pub fn user(&self) -> User {
        let user = self.config.user.split(':').next().unwrap_or_default();
        let is_number = !user.is_empty() && user.bytes().all(|byte| byte.is_ascii_digit());
        match user.parse::<i64>() {
            Ok(uid) => User::Id(uid),
            Err(_) if user.is_empty() => User::Unset,
            // A number out of range is no name: the caller rejects the ID.
            Err(_) if is_number => User::Id(i64::MAX),
            Err(_) => User::Name(user.to_owned()),
        }
    }
}

/// User set by an image.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum User {
    /// No user.
    Unset,
    /// User ID.
    Id(i64),
    /// Username.
    Name(String),
}
