//! Image manifests, indexes, and configurations in OCI and Docker format. Pure.
//!
//! Every list is bounded; unused fields are not parsed. Implements spec 09b §4.3.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize, de::DeserializeOwned};

use super::{digest::Digest, error::ImageError, record::Platform};
use crate::launch::image::ImageConfig;

/// Maximum size of a manifest or index, bytes.
pub const LONGEST_MANIFEST: u64 = 4 << 20;
/// Maximum size of an image configuration, bytes.
pub const LONGEST_CONFIG: u64 = 8 << 20;
/// Maximum number of layers of an image (spec 09b §5.1).
pub const MOST_LAYERS: usize = 128;

/// OCI media type of a manifest.
pub const OCI_MANIFEST: &str = "application/vnd.oci.image.manifest.v1+json";
/// OCI media type of an index.
pub const OCI_INDEX: &str = "application/vnd.oci.image.index.v1+json";
/// OCI media type of an image configuration.
pub const OCI_CONFIG: &str = "application/vnd.oci.image.config.v1+json";
/// OCI media type of an uncompressed layer.
pub const OCI_LAYER: &str = "application/vnd.oci.image.layer.v1.tar";
/// Docker media type of a manifest.
pub const DOCKER_MANIFEST: &str = "application/vnd.docker.distribution.manifest.v2+json";
/// Docker media type of a manifest list.
pub const DOCKER_LIST: &str = "application/vnd.docker.distribution.manifest.list.v2+json";

/// OCI content descriptor.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Descriptor {
    /// Media type of the content.
    #[serde(default)]
    pub media_type: String,
    /// Digest of the content.
    pub digest: Digest,
    /// Size of the content, bytes.
    pub size: u64,
    /// Alternative download locations.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub urls: Vec<String>,
    /// OCI annotations; those of an archive's index hold the image names.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub annotations: BTreeMap<String, String>,
    /// Platform of the content, in an index.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub platform: Option<Platform>,
}

impl Descriptor {
    /// Describes these bytes.
    pub fn of(media_type: &str, bytes: &[u8]) -> Self {
        Self::new(media_type, Digest::of(bytes), bytes.len() as u64)
    }

    /// Describes content by digest and size.
    pub fn new(media_type: &str, digest: Digest, size: u64) -> Self {
        let media_type = media_type.to_owned();
        Self { media_type, digest, size, urls: Vec::new(), annotations: BTreeMap::new(), platform: None }
    }
}

/// Image manifest.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Manifest {
    /// Always 2.
    pub schema_version: u32,
    /// Media type of the manifest.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub media_type: String,
    /// Image configuration.
    pub config: Descriptor,
    /// Layers, bottom first.
    #[serde(default)]
    pub layers: Vec<Descriptor>,
}

/// Image index: manifests for several platforms.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Index {
    /// Always 2.
    pub schema_version: u32,
    /// Media type of the index.
    #[serde(default)]
    pub media_type: String,
    /// Manifests of the images.
    pub manifests: Vec<Descriptor>,
}

/// Document that a reference points to.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum ManifestOrIndex {
    /// A single image.
    Manifest(Manifest),
    /// An index of several images.
    Index(Index),
}

#[derive(Deserialize)]
struct Probe {
    #[serde(rename = "mediaType", default)]
    media_type: String,
    #[serde(rename = "schemaVersion", default)]
    schema_version: u32,
    manifests: Option<serde::de::IgnoredAny>,
    layers: Option<serde::de::IgnoredAny>,
    config: Option<serde::de::IgnoredAny>,
}

/// Parses a manifest or an index; `content_type` is the media type from the response header.
///
/// # Errors
/// The document is neither, is both at once, contradicts its media type, has too many layers, or is of schema 1.
pub fn parse_manifest_or_index(bytes: &[u8], content_type: &str) -> Result<ManifestOrIndex, ImageError> {
    let probe: Probe = json(bytes, "manifest")?;
    let content_type = content_type.split(';').next().unwrap_or_default().trim();
    if probe.schema_version == 1
        || content_type.contains("manifest.v1+prettyjws")
        || content_type.ends_with("docker.distribution.manifest.v1+json")
    {
        let kind =
            if content_type.is_empty() { "application/vnd.docker.distribution.manifest.v1+json" } else { content_type };
        return Err(ImageError::bad_content(format!("media type {kind:?} is no longer supported, rebuild the image")));
    }
    // An ambiguous document could be parsed differently by other tools to hide content.
    if probe.manifests.is_some() && (probe.layers.is_some() || probe.config.is_some()) {
        return Err(ImageError::bad_content("invalid manifest: has fields of both a manifest and an index"));
    }
    let is_index = probe.manifests.is_some();
    let claims_index = [OCI_INDEX, DOCKER_LIST].contains(&probe.media_type.as_str());
    let claims_manifest = [OCI_MANIFEST, DOCKER_MANIFEST].contains(&probe.media_type.as_str());
    if (is_index && claims_manifest) || (!is_index && claims_index) {
        return Err(ImageError::bad_content("invalid manifest: media type does not match the content"));
    }
    if is_index {
        let index: Index = json(bytes, "index")?;
        return Ok(ManifestOrIndex::Index(index));
    }
    let manifest: Manifest = json(bytes, "manifest")?;
    if manifest.layers.len() > MOST_LAYERS {
        return Err(ImageError::bad_content(format!(
            "image has {} layers, more than {MOST_LAYERS}",
            manifest.layers.len()
        )));
    }
    Ok(ManifestOrIndex::Manifest(manifest))
}

/// Parsed image configuration.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Config {
    /// Defaults of containers.
    pub run: ImageConfig,
    /// Platform of the image.
    pub platform: Platform,
    /// Digests of the uncompressed layers, bottom first.
    pub diff_ids: Vec<Digest>,
}

#[derive(Deserialize)]
struct RawConfig {
    #[serde(default)]
    architecture: String,
    #[serde(default)]
    os: String,
    #[serde(default)]
    variant: String,
    config: Option<RawRun>,
    #[serde(default)]
    rootfs: RawRoot,
}

#[derive(Deserialize, Default)]
struct RawRoot {
    #[serde(default)]
    diff_ids: Option<Vec<Digest>>,
}

/// Lists and maps may be `null`.
#[derive(Deserialize, Default)]
#[serde(rename_all = "PascalCase", default)]
struct RawRun {
    user: Option<String>,
    env: Option<Vec<String>>,
    entrypoint: Option<Vec<String>>,
    cmd: Option<Vec<String>>,
    working_dir: Option<String>,
    volumes: Option<BTreeMap<String, serde::de::IgnoredAny>>,
    stop_signal: Option<String>,
    labels: Option<BTreeMap<String, String>>,
    exposed_ports: Option<BTreeMap<String, serde::de::IgnoredAny>>,
}

/// Parses the configuration of an image with `layers` layers.
///
/// # Errors
/// It is invalid, or has another number of layers.
pub fn config(bytes: &[u8], layers: usize) -> Result<Config, ImageError> {
    let raw: RawConfig = json(bytes, "image config")?;
    let diff_ids = raw.rootfs.diff_ids.unwrap_or_default();
    if diff_ids.len() != layers {
        return Err(ImageError::bad_content(format!(
            "invalid image config: {} diff_ids for {layers} layers",
            diff_ids.len()
        )));
    }
    let run = raw.config.unwrap_or_default();
    Ok(Config {
        run: ImageConfig {
            user: run.user.unwrap_or_default(),
            env: run.env.unwrap_or_default(),
            entrypoint: run.entrypoint.unwrap_or_default(),
            cmd: run.cmd.unwrap_or_default(),
            working_dir: run.working_dir.unwrap_or_default(),
            volumes: run.volumes.unwrap_or_default().into_keys().collect(),
            stop_signal: run.stop_signal.unwrap_or_default(),
            labels: run.labels.unwrap_or_default(),
            exposed_ports: run.exposed_ports.unwrap_or_default().into_keys().collect(),
        },
        platform: Platform { os: raw.os, architecture: raw.architecture, variant: raw.variant },
        diff_ids,
    })
}

/// Parses JSON; `what` names the document in the error.
///
/// # Errors
/// The bytes are no such JSON document.
pub fn json<T: DeserializeOwned>(bytes: &[u8], what: &str) -> Result<T, ImageError> {
    serde_json::from_slice(bytes).map_err(|error| ImageError::bad_content(format!("invalid {what}: {error}")))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn descriptor() -> serde_json::Value {
        serde_json::json!({"mediaType": "x", "digest": Digest::of(b"x"), "size": 1})
    }

    #[test]
    fn manifests_and_indexes_are_distinguished() {
        let manifest = serde_json::json!({"schemaVersion": 2, "config": descriptor(), "layers": [descriptor()]});
        let index = serde_json::json!({"schemaVersion": 2, "manifests": [descriptor()]});
        let with = |value: &serde_json::Value, key: &str, more: serde_json::Value| {
            let mut value = value.clone();
            value[key] = more;
            value
        };
        let many: Vec<_> = (0..130).map(|_| descriptor()).collect();
        for (what, document, content_type, expected) in [
            ("manifest", manifest.clone(), "", Ok("manifest")),
            ("index", index.clone(), "", Ok("index")),
            ("both", with(&index, "layers", serde_json::json!([])), "", Err("both a manifest and an index")),
            ("claims index", with(&manifest, "mediaType", OCI_INDEX.into()), "", Err("media type does not match")),
            (
                "claims manifest",
                with(&index, "mediaType", DOCKER_MANIFEST.into()),
                "",
                Err("media type does not match"),
            ),
            (
                "schema 1",
                serde_json::json!({"schemaVersion": 1}),
                "application/vnd.docker.distribution.manifest.v1+prettyjws",
                Err("v1+prettyjws"),
            ),
            // AC-09b-I14
            ("130 layers", with(&manifest, "layers", many.into()), "", Err("130 layers, more than 128")),
            ("nothing", serde_json::json!({}), "", Err("invalid manifest")),
        ] {
            let bytes = document.to_string();
            let read = parse_manifest_or_index(bytes.as_bytes(), content_type).map(|top| match top {
                ManifestOrIndex::Manifest(_) => "manifest",
                ManifestOrIndex::Index(_) => "index",
            });
            match (read, expected) {
                (Ok(read), Ok(expected)) => assert_eq!(read, expected, "{what}"),
                (Err(error), Err(text)) => assert!(error.text.contains(text), "{what}: {error}"),
                (read, expected) => panic!("{what}: {read:?}, not {expected:?}"),
            }
        }
    }

    #[test]
    fn configurations_may_be_full_of_nulls() {
        let text =
            br#"{"architecture":"amd64","os":"linux","config":{"Env":null,"Cmd":["a"],"Volumes":{"/v":{}},"User":"7"},
            "rootfs":{"type":"layers","diff_ids":null}}"#;
        let read = config(text, 0).expect("a configuration");
        assert_eq!((read.run.cmd, read.run.volumes, read.run.user), (vec!["a".into()], vec!["/v".into()], "7".into()));
        assert!(config(text, 1).is_err());
        assert!(config(br#"{"config":null}"#, 0).is_ok());
    }
}
