//! What is remembered of an image. Pure.
//!
//! An image is known by the digest of the configuration that is used, so that one image from two registries is one image.
//! Behaviour: spec 09b §2.

use std::collections::BTreeMap;

use base64::{Engine as _, engine::general_purpose::STANDARD};
use serde::{Deserialize, Serialize};

use super::{digest::Digest, model::Descriptor};
use crate::launch::image::ImageConfig;

/// A machine an image is for.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct Platform {
    /// `linux`.
    #[serde(default)]
    pub os: String,
    /// `amd64`, `arm64`.
    #[serde(default)]
    pub architecture: String,
    /// `v7`; empty for none.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub variant: String,
}

/// Where an image came from.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Origin {
    /// A registry.
    Pull,
    /// An archive.
    Import,
    /// This program.
    Builtin,
}

/// A name an image is known by.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Reference {
    /// `host/path:tag` or `host/path@digest`, normalised.
    pub name: String,
    /// What it led to: the index where there is one.
    pub target: Digest,
    /// When it began to mean this image, nanoseconds since the epoch; of two claims the later one holds.
    pub ref_time: i64,
}

/// What an image's configuration says of its containers.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct RunConfig {
    /// `User`.
    pub user: String,
    /// `Env`.
    pub env: Vec<String>,
    /// `Entrypoint`.
    pub entrypoint: Vec<String>,
    /// `Cmd`.
    pub cmd: Vec<String>,
    /// `WorkingDir`.
    pub working_dir: String,
    /// Keys of `Volumes`.
    pub volumes: Vec<String>,
    /// `StopSignal`.
    pub stop_signal: String,
    /// `Labels`.
    pub labels: BTreeMap<String, String>,
    /// Keys of `ExposedPorts`.
    pub exposed_ports: Vec<String>,
}

/// A file of an image's root as it is kept in its record.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum KeptFile {
    /// There is none.
    #[default]
    Missing,
    /// It is longer than what is kept.
    TooLong,
    /// Its bytes in base 64.
    Content(String),
}

impl KeptFile {
    /// Of these bytes.
    pub fn of(bytes: &[u8]) -> Self {
        Self::Content(STANDARD.encode(bytes))
    }

    /// The bytes; none where they are not kept.
    pub fn bytes(&self) -> Vec<u8> {
        match self {
            Self::Content(text) => STANDARD.decode(text).unwrap_or_default(),
            Self::Missing | Self::TooLong => Vec::new(),
        }
    }
}

/// An image.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Record {
    /// The version of this form.
    pub v: u64,
    /// The image's id: digest of its configuration.
    pub id: Digest,
    /// Its names.
    pub refs: Vec<Reference>,
    /// What its names led to: an index or the manifest.
    pub target: Descriptor,
    /// Its manifest.
    pub manifest: Descriptor,
    /// For which machine it is.
    pub platform: Platform,
    /// Numbers of its layers from the bottom.
    pub layers: Vec<u64>,
    /// Chain id of the topmost layer; none for an image without layers.
    pub chain_id: Option<Digest>,
    /// Configuration, manifest and packed layers, bytes: what CRI reports.
    pub size: u64,
    /// What containers inherit.
    pub config: RunConfig,
    /// `/etc/passwd` of its root.
    pub passwd: KeptFile,
    /// `/etc/group` of its root.
    pub group: KeptFile,
    /// Whether it is never collected.
    pub pinned: bool,
    /// Where it came from.
    pub source: Origin,
    /// When it came to this machine, nanoseconds since the epoch.
    pub created: i64,
    /// When a container was last made of it, likewise.
    pub last_used: i64,
}

impl Record {
    /// Its id as CRI shows it.
    pub fn id(&self) -> String {
        self.id.to_string()
    }

    /// Names by tag, sorted.
    pub fn repo_tags(&self) -> Vec<String> {
        self.names(false)
    }

    /// Names by digest, sorted.
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

    /// What a container is planned with.
    pub fn image_config(&self) -> ImageConfig {
        let config = self.config.clone();
        ImageConfig {
            architecture: self.platform.architecture.clone(),
            user: config.user,
            env: config.env,
            entrypoint: config.entrypoint,
            cmd: config.cmd,
            working_dir: config.working_dir,
            volumes: config.volumes,
            stop_signal: config.stop_signal,
            passwd: self.passwd.bytes(),
            group: self.group.bytes(),
        }
    }

    /// The user a container runs as, as CRI wants it: number or name; neither where the image names nobody.
    pub fn user(&self) -> User {
        let user = self.config.user.split(':').next().unwrap_or_default();
        let is_number = !user.is_empty() && user.bytes().all(|byte| byte.is_ascii_digit());
        match user.parse::<i64>() {
            Ok(uid) => User::Id(uid),
            Err(_) if user.is_empty() => User::Nobody,
            // Too large for a number is no name: whoever asks refuses it.
            Err(_) if is_number => User::Id(i64::MAX),
            Err(_) => User::Name(user.to_owned()),
        }
    }
}

/// Whom an image names as user.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum User {
    /// Nobody.
    Nobody,
    /// A number.
    Id(i64),
    /// A name.
    Name(String),
}
