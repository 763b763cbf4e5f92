//! Documents of image pull records, byte-compatible with upstream's (spec 03b §3.1). Pure.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

const V1BETA1: &str = "kubelet.config.k8s.io/v1beta1";
const V1ALPHA1: &str = "kubelet.config.k8s.io/v1alpha1";
const INTENT: &str = "ImagePullIntent";
const PULLED: &str = "ImagePulledRecord";
/// A document kind of Berth; upstream has no equivalent.
const PRELOADED: &str = "PreloadedImage";
/// API version of [`PRELOADED`].
const PRELOADED_VERSION: &str = "berth/v1";

/// Maximum number of secrets recorded per mapping.
pub const SECRETS_LIMIT: usize = 100;

/// A secret of a successful pull.
#[derive(Serialize, Deserialize, Clone, PartialEq, Eq, PartialOrd, Ord, Debug)]
#[serde(deny_unknown_fields)]
pub struct SecretRecord {
    /// UID of the Secret.
    pub uid: String,
    /// Namespace of the Secret.
    pub namespace: String,
    /// Name of the Secret.
    pub name: String,
    /// Hash of the login that was used.
    #[serde(rename = "credentialHash")]
    pub hash: String,
}

impl SecretRecord {
    /// Namespace, name, and UID of the Secret, regardless of its content.
    pub fn coordinates(&self) -> (&str, &str, &str) {
        (&self.namespace, &self.name, &self.uid)
    }
}

/// A service account of a successful pull with its token.
#[derive(Serialize, Deserialize, Clone, PartialEq, Eq, PartialOrd, Ord, Debug)]
#[serde(deny_unknown_fields)]
pub struct AccountRecord {
    /// UID of the ServiceAccount.
    pub uid: String,
    /// Namespace of the ServiceAccount.
    pub namespace: String,
    /// Name of the ServiceAccount.
    pub name: String,
}

impl AccountRecord {
    fn coordinates(&self) -> (&str, &str, &str) {
        (&self.namespace, &self.name, &self.uid)
    }
}

/// Credentials that permit the use of an image under one name.
#[derive(Serialize, Deserialize, Clone, PartialEq, Eq, Default, Debug)]
#[serde(deny_unknown_fields)]
pub struct Grants {
    /// Secrets of successful pulls.
    #[serde(rename = "kubernetesSecrets", default, skip_serializing_if = "Vec::is_empty")]
    pub secrets: Vec<SecretRecord>,
    /// Service accounts of successful pulls.
    #[serde(rename = "kubernetesServiceAccounts", default, skip_serializing_if = "Vec::is_empty")]
    pub accounts: Vec<AccountRecord>,
    /// Whether every pod of this node may use it: pulled without credentials, or with the node's.
    #[serde(rename = "nodePodsAccessible", default, skip_serializing_if = "std::ops::Not::not")]
    pub node: bool,
}

/// The credential of a successful pull, as recorded.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Proof {
    /// No credential, or the node's own.
    Node,
    /// A pull secret.
    Secret(SecretRecord),
    /// A service account's token.
    Account(AccountRecord),
}

impl Grants {
    /// Adds the credential of a successful pull; lists stay sorted by namespace, name, UID.
    pub fn add(&mut self, proof: &Proof) {
        match proof {
            Proof::Node => *self = Self { node: true, ..Self::default() },
            _ if self.node => {}
            Proof::Secret(secret) => {
                let same = |s: &SecretRecord| s.coordinates() == secret.coordinates();
                match self.secrets.iter_mut().find(|s| same(s)) {
                    Some(known) => known.hash.clone_from(&secret.hash),
                    None => self.secrets.push(secret.clone()),
                }
                self.secrets.sort_by(|a, b| a.coordinates().cmp(&b.coordinates()));
            }
            Proof::Account(account) => {
                if !self.accounts.contains(account) {
                    self.accounts.push(account.clone());
                }
                self.accounts.sort_by(|a, b| a.coordinates().cmp(&b.coordinates()));
            }
        }
    }
}

/// Record of one image pulled by this agent.
#[derive(Serialize, Deserialize, Clone, PartialEq, Eq, Debug)]
#[serde(deny_unknown_fields)]
pub struct PulledRecord {
    kind: String,
    #[serde(rename = "apiVersion")]
    api_version: String,
    /// Time of the last change.
    #[serde(rename = "lastUpdatedTime", with = "seconds")]
    pub updated: jiff::Timestamp,
    /// The runtime's image reference.
    #[serde(rename = "imageRef")]
    pub image_ref: String,
    /// Grants by image name without tag and digest.
    #[serde(rename = "credentialMapping", default, skip_serializing_if = "BTreeMap::is_empty")]
    pub grants: BTreeMap<String, Grants>,
}

impl PulledRecord {
    /// Creates a record without grants.
    pub fn new(image_ref: &str, now: jiff::Timestamp) -> Self {
        Self {
            kind: PULLED.to_owned(),
            api_version: V1BETA1.to_owned(),
            updated: now,
            image_ref: image_ref.to_owned(),
            grants: BTreeMap::new(),
        }
    }
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Intent {
    kind: String,
    #[serde(rename = "apiVersion")]
    api_version: String,
    image: String,
}

/// Why a record file cannot be decoded.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum RecordError {
    /// The JSON is malformed.
    #[error("{0}")]
    Syntax(String),
    /// The kind or version of the document is not supported.
    #[error("unexpected document {kind} of {version}")]
    Unexpected {
        /// `kind` of the document.
        kind: String,
        /// `apiVersion` of the document.
        version: String,
    },
}

/// Value of a record file, and whether its version is outdated.
pub struct DecodedDocument<T> {
    /// The document's value.
    pub value: T,
    /// Whether it has an older version and should be rewritten.
    pub outdated: bool,
}

fn check(kind: &str, expected: &str, version: &str) -> Result<bool, RecordError> {
    match version {
        V1BETA1 if kind == expected => Ok(false),
        V1ALPHA1 if kind == expected => Ok(true),
        _ => Err(RecordError::Unexpected { kind: kind.to_owned(), version: version.to_owned() }),
    }
}

/// Decodes an intent; returns the image as the pod writes it.
///
/// # Errors
/// Strict: unknown fields, kinds, and versions are rejected.
pub fn decode_intent(data: &[u8]) -> Result<DecodedDocument<String>, RecordError> {
    let intent: Intent = serde_json::from_slice(data).map_err(|e| RecordError::Syntax(e.to_string()))?;
    let outdated = check(&intent.kind, INTENT, &intent.api_version)?;
    Ok(DecodedDocument { value: intent.image, outdated })
}

/// Decodes a pulled record.
///
/// # Errors
/// Strict: unknown fields, kinds, and versions are rejected.
pub fn decode_pulled(data: &[u8]) -> Result<DecodedDocument<PulledRecord>, RecordError> {
    let mut record: PulledRecord = serde_json::from_slice(data).map_err(|e| RecordError::Syntax(e.to_string()))?;
    let outdated = check(&record.kind, PULLED, &record.api_version)?;
    record.api_version = V1BETA1.to_owned();
    Ok(DecodedDocument { value: record, outdated })
}

/// An image that was in the runtime's store, and not by a pull, before a pull of its name began.
#[derive(Serialize, Deserialize, Clone, PartialEq, Eq, Debug)]
#[serde(deny_unknown_fields)]
pub struct PreloadedImage {
    kind: String,
    #[serde(rename = "apiVersion")]
    api_version: String,
    /// The image as the pod writes it.
    pub image: String,
    /// The runtime's image reference.
    #[serde(rename = "imageRef")]
    pub image_ref: String,
}

impl PreloadedImage {
    /// Creates the document for that name and reference.
    pub fn new(image: &str, image_ref: &str) -> Self {
        Self {
            kind: PRELOADED.to_owned(),
            api_version: PRELOADED_VERSION.to_owned(),
            image: image.to_owned(),
            image_ref: image_ref.to_owned(),
        }
    }
}

/// Decodes the document of a preloaded image.
///
/// # Errors
/// Strict: unknown fields, kinds, and versions are rejected.
pub fn decode_preloaded(data: &[u8]) -> Result<DecodedDocument<PreloadedImage>, RecordError> {
    let value: PreloadedImage = serde_json::from_slice(data).map_err(|e| RecordError::Syntax(e.to_string()))?;
    if value.kind != PRELOADED || value.api_version != PRELOADED_VERSION {
        return Err(RecordError::Unexpected { kind: value.kind, version: value.api_version });
    }
    Ok(DecodedDocument { value, outdated: false })
}

/// Encodes the document of a preloaded image as one line.
pub fn encode_preloaded(image: &PreloadedImage) -> Vec<u8> {
    line(image)
}

/// Encodes an intent as one line.
pub fn encode_intent(image: &str) -> Vec<u8> {
    let intent = Intent { kind: INTENT.to_owned(), api_version: V1BETA1.to_owned(), image: image.to_owned() };
    line(&intent)
}

/// Encodes a pulled record as one line.
pub fn encode_pulled(record: &PulledRecord) -> Vec<u8> {
    line(record)
}

fn line(value: &impl Serialize) -> Vec<u8> {
    let mut data = serde_json::to_vec(value).expect("strings, times and maps with string keys always serialize");
    data.push(b'\n');
    data
}

/// RFC 3339 in whole seconds, as upstream formats times.
mod seconds {
    use jiff::Timestamp;
    use serde::{Deserialize, Deserializer, Serializer, de::Error};

    pub fn serialize<S: Serializer>(time: &Timestamp, to: S) -> Result<S::Ok, S::Error> {
        let whole = Timestamp::from_second(time.as_second()).unwrap_or(*time);
        to.serialize_str(&whole.to_string())
    }

    pub fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<Timestamp, D::Error> {
        let text: Option<String> = Option::deserialize(from)?;
        text.map_or(Ok(Timestamp::UNIX_EPOCH), |text| text.parse().map_err(D::Error::custom))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn secret(name: &str, hash: &str) -> SecretRecord {
        SecretRecord { uid: "u".into(), namespace: "ns".into(), name: name.into(), hash: hash.into() }
    }

    #[test]
    fn documents_are_as_the_reference_writes_them() {
        let intent =
            "{\"kind\":\"ImagePullIntent\",\"apiVersion\":\"kubelet.config.k8s.io/v1beta1\",\"image\":\"busybox\"}\n";
        assert_eq!(String::from_utf8_lossy(&encode_intent("busybox")), intent);
        let mut record =
            PulledRecord::new("sha256:1", jiff::Timestamp::new(1_767_225_600, 500_000_000).expect("in range"));
        record.grants.entry("docker.io/library/busybox".into()).or_default().add(&Proof::Secret(secret("s", "h")));
        let expected = concat!(
            r#"{"kind":"ImagePulledRecord","apiVersion":"kubelet.config.k8s.io/v1beta1","#,
            r#""lastUpdatedTime":"2026-01-01T00:00:00Z","imageRef":"sha256:1","credentialMapping":{"#,
            r#""docker.io/library/busybox":{"kubernetesSecrets":[{"uid":"u","namespace":"ns","name":"s","#,
            r#""credentialHash":"h"}]}}}"#,
            "\n"
        );
        assert_eq!(String::from_utf8_lossy(&encode_pulled(&record)), expected);
        let back = decode_pulled(expected.as_bytes()).expect("reads its own");
        assert!(!back.outdated);
        assert_eq!(back.value.grants, record.grants);
    }

    #[test]
    fn older_versions_are_read_and_strangers_refused() {
        let old =
            "{\"kind\":\"ImagePullIntent\",\"apiVersion\":\"kubelet.config.k8s.io/v1alpha1\",\"image\":\"busybox\"}";
        assert!(decode_intent(old.as_bytes()).expect("an old one").outdated);
        for bad in [
            old.replace("v1alpha1", "v2"),
            old.replace("ImagePullIntent", "ImagePulledRecord"),
            old.replace("\"image\"", "\"picture\""),
            old.replace('}', ",\"more\":1}"),
            "junk".to_owned(),
        ] {
            assert!(decode_intent(bad.as_bytes()).is_err(), "{bad}");
        }
    }

    #[test]
    fn grants_are_merged() {
        let mut grants = Grants::default();
        grants.add(&Proof::Secret(secret("b", "1")));
        grants.add(&Proof::Secret(secret("a", "1")));
        grants.add(&Proof::Secret(secret("b", "2")));
        assert_eq!(grants.secrets, [secret("a", "1"), secret("b", "2")]);
        let account = AccountRecord { uid: "u".into(), namespace: "ns".into(), name: "sa".into() };
        grants.add(&Proof::Account(account.clone()));
        grants.add(&Proof::Account(account.clone()));
        assert_eq!(grants.accounts.len(), 1);
        grants.add(&Proof::Node);
        assert_eq!(grants, Grants { node: true, ..Grants::default() });
        grants.add(&Proof::Account(account));
        assert_eq!(grants, Grants { node: true, ..Grants::default() }, "what everybody may use stays so");
    }
}
