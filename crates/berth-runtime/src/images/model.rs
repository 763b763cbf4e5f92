//! Manifests, indexes and configurations of images, as OCI and Docker write them. Pure.
//!
//! Every list is bounded; fields nobody needs are not read. Behaviour: spec 09b §4.3.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize, de::DeserializeOwned};

use super::{
    digest::Digest,
    error::ImageError,
    record::{Platform, RunConfig},
};

/// Longest manifest or index, bytes.
pub const LONGEST_MANIFEST: u64 = 4 << 20;
/// Longest configuration, bytes.
pub const LONGEST_CONFIG: u64 = 8 << 20;
/// Most layers of an image (spec 09b §5.1).
pub const MOST_LAYERS: usize = 128;

/// OCI's media type of a manifest.
pub const OCI_MANIFEST: &str = "application/vnd.oci.image.manifest.v1+json";
/// OCI's media type of an index.
pub const OCI_INDEX: &str = "application/vnd.oci.image.index.v1+json";
/// OCI's media type of a configuration.
pub const OCI_CONFIG: &str = "application/vnd.oci.image.config.v1+json";
/// OCI's media type of a layer that is not packed.
pub const OCI_LAYER: &str = "application/vnd.oci.image.layer.v1.tar";
/// Docker's media type of a manifest.
pub const DOCKER_MANIFEST: &str = "application/vnd.docker.distribution.manifest.v2+json";
/// Docker's media type of a list.
pub const DOCKER_LIST: &str = "application/vnd.docker.distribution.manifest.list.v2+json";

/// Some content: what it is called by.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Descriptor {
    /// What it is.
    #[serde(default)]
    pub media_type: String,
    /// Digest of its bytes.
    pub digest: Digest,
    /// Its length, bytes.
    pub size: u64,
    /// Other places it can be had from.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub urls: Vec<String>,
    /// Notes.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub annotations: BTreeMap<String, String>,
    /// What machine it is for.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub platform: Option<Platform>,
}

impl Descriptor {
    /// Of these bytes.
    pub fn of(media_type: &str, bytes: &[u8]) -> Self {
        Self::new(media_type, Digest::of(bytes), bytes.len() as u64)
    }

    /// Of that content.
    pub fn new(media_type: &str, digest: Digest, size: u64) -> Self {
        let media_type = media_type.to_owned();
        Self { media_type, digest, size, urls: Vec::new(), annotations: BTreeMap::new(), platform: None }
    }
}

/// What an image consists of.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Manifest {
    /// 2.
    pub schema_version: u32,
    /// What it is.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub media_type: String,
    /// Its configuration.
    pub config: Descriptor,
    /// Its layers, from the bottom.
    #[serde(default)]
    pub layers: Vec<Descriptor>,
}

/// Images of one name for several machines.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Index {
    /// 2.
    pub schema_version: u32,
    /// What it is.
    #[serde(default)]
    pub media_type: String,
    /// The images.
    pub manifests: Vec<Descriptor>,
}

/// What stands behind a name.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Top {
    /// One image.
    Manifest(Manifest),
    /// Several.
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

/// Reads a manifest or an index; `told` is the media type it was served with.
///
/// # Errors
/// Where it is neither, or claims to be both, or is of the first schema.
pub fn top(bytes: &[u8], told: &str) -> Result<Top, ImageError> {
    let probe: Probe = json(bytes, "manifest")?;
    let told = told.split(';').next().unwrap_or_default().trim();
    if probe.schema_version == 1
        || told.contains("manifest.v1+prettyjws")
        || told.ends_with("docker.distribution.manifest.v1+json")
    {
        let kind = if told.is_empty() { "application/vnd.docker.distribution.manifest.v1+json" } else { told };
        return Err(ImageError::bad_content(format!("media type {kind:?} is no longer supported, rebuild the image")));
    }
    // A document that is read one way by us and another way by others hides something.
    if probe.manifests.is_some() && (probe.layers.is_some() || probe.config.is_some()) {
        return Err(ImageError::bad_content("invalid manifest: it is a manifest and an index at once"));
    }
    let is_index = probe.manifests.is_some();
    let claims_index = [OCI_INDEX, DOCKER_LIST].contains(&probe.media_type.as_str());
    let claims_manifest = [OCI_MANIFEST, DOCKER_MANIFEST].contains(&probe.media_type.as_str());
    if (is_index && claims_manifest) || (!is_index && claims_index) {
        return Err(ImageError::bad_content("invalid manifest: its media type is not what it is"));
    }
    if is_index {
        let index: Index = json(bytes, "index")?;
        return Ok(Top::Index(index));
    }
    let manifest: Manifest = json(bytes, "manifest")?;
    if manifest.layers.len() > MOST_LAYERS {
        return Err(ImageError::bad_content(format!(
            "image has {} layers, more than {MOST_LAYERS}",
            manifest.layers.len()
        )));
    }
    Ok(Top::Manifest(manifest))
}

/// What a configuration says.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Config {
    /// What containers inherit.
    pub run: RunConfig,
    /// For which machine.
    pub platform: Platform,
    /// Digests of the unpacked layers, from the bottom.
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

/// Reads a configuration of an image with that many layers.
///
/// # Errors
/// Where it is none, or names another number of layers.
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
        run: RunConfig {
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

/// Reads JSON and says what it should have been.
///
/// # Errors
/// Where it is something else.
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
    fn documents_are_told_apart() {
        let manifest = serde_json::json!({"schemaVersion": 2, "config": descriptor(), "layers": [descriptor()]});
        let index = serde_json::json!({"schemaVersion": 2, "manifests": [descriptor()]});
        let with = |value: &serde_json::Value, key: &str, more: serde_json::Value| {
            let mut value = value.clone();
            value[key] = more;
            value
        };
        let many: Vec<_> = (0..130).map(|_| descriptor()).collect();
        for (what, document, told, expected) in [
            ("manifest", manifest.clone(), "", Ok("manifest")),
            ("index", index.clone(), "", Ok("index")),
            ("both", with(&index, "layers", serde_json::json!([])), "", Err("at once")),
            ("claims index", with(&manifest, "mediaType", OCI_INDEX.into()), "", Err("media type is not")),
            ("claims manifest", with(&index, "mediaType", DOCKER_MANIFEST.into()), "", Err("media type is not")),
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
            let read = top(bytes.as_bytes(), told).map(|top| match top {
                Top::Manifest(_) => "manifest",
                Top::Index(_) => "index",
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
