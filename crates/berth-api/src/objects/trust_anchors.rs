//! `ClusterTrustBundle` projection: selection of bundles and PEM concatenation. Pure.
//!
//! Implements spec 07 §9.3.

use std::collections::BTreeMap;

use base64::{Engine, engine::general_purpose::STANDARD};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::LabelSelector;
use rustls::pki_types::{CertificateDer, pem::PemObject};
use sha2::{Digest, Sha256};

use berth_types::api::ClusterTrustBundleProjection;

/// Maximum size of a label selector, in bytes.
const LONGEST_SELECTOR: usize = 100 * 1024;
/// Maximum size of a projection's certificates, in bytes.
const MOST: usize = 8 * 1024 * 1024;
/// Characters per PEM line.
const LINE: usize = 64;

/// Trust bundle, independent of its API version.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Bundle {
    /// Object name.
    pub name: String,
    /// Signer name.
    pub signer: Option<String>,
    /// `metadata.labels`, which the selector of a projection matches.
    pub labels: BTreeMap<String, String>,
    /// Certificates, PEM.
    pub text: String,
}

/// Why a projection cannot be built.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum TrustBundleError {
    /// No bundle has that name.
    #[error("clustertrustbundle.certificates.k8s.io {0:?} not found")]
    NotFound(String),
    /// Signer and selector match no bundle.
    #[error("combination of signerName and labelSelector matched zero ClusterTrustBundles")]
    NoneMatched,
    /// Neither name nor signer is set.
    #[error("ClusterTrustBundle projection requires either name or signerName to be set")]
    NotNamed,
    /// The selector is too long to be evaluated on each read.
    #[error("label selector is {0} bytes long, must be at most {LONGEST_SELECTOR} bytes")]
    Selector(usize),
    /// The certificates exceed the size limit.
    #[error("trust bundles exceed {MOST} bytes in total")]
    TooMuch,
}

/// Concatenates the certificates of the bundles that a projection selects; empty if it is optional and selects none.
///
/// # Errors
/// The projection is invalid, selects no bundle although it is not optional, or is too large.
pub fn anchors(
    ask: &ClusterTrustBundleProjection,
    bundles: impl Iterator<Item = Bundle>,
) -> Result<String, TrustBundleError> {
    let is_optional = ask.optional == Some(true);
    let (meant, missing): (Vec<String>, TrustBundleError) = match (&ask.name, &ask.signer_name) {
        (Some(name), _) => {
            let of_name = bundles.filter(|bundle| bundle.name == *name).map(|bundle| bundle.text);
            (of_name.collect(), TrustBundleError::NotFound(name.clone()))
        }
        (None, Some(signer)) => {
            check(ask.label_selector.as_ref())?;
            let is_meant = |bundle: &Bundle| {
                bundle.signer.as_ref() == Some(signer) && selects(ask.label_selector.as_ref(), &bundle.labels)
            };
            (bundles.filter(is_meant).map(|bundle| bundle.text).collect(), TrustBundleError::NoneMatched)
        }
        (None, None) => return Err(TrustBundleError::NotNamed),
    };
    if meant.is_empty() && !is_optional {
        return Err(missing);
    }
    joined(&meant)
}

fn check(selector: Option<&LabelSelector>) -> Result<(), TrustBundleError> {
    let labels = selector.and_then(|selector| selector.match_labels.as_ref()).into_iter().flatten();
    let labels: usize = labels.map(|(key, value)| key.len() + value.len() + 2).sum();
    let requirements = selector.and_then(|selector| selector.match_expressions.as_ref()).into_iter().flatten();
    let requirements: usize = requirements
        .map(|one| one.key.len() + one.operator.len() + one.values.iter().flatten().map(|v| v.len() + 1).sum::<usize>())
        .sum();
    let length = labels + requirements;
    if length > LONGEST_SELECTOR { Err(TrustBundleError::Selector(length)) } else { Ok(()) }
}

/// Matches labels; an absent selector matches nothing, an empty one everything.
fn selects(selector: Option<&LabelSelector>, labels: &BTreeMap<String, String>) -> bool {
    let Some(selector) = selector else { return false };
    let label = |key: &String| labels.get(key);
    let mut all = selector.match_labels.iter().flatten();
    let mut requirements = selector.match_expressions.iter().flatten();
    all.all(|(key, value)| label(key) == Some(value))
        && requirements.all(|one| {
            let values = one.values.as_deref().unwrap_or_default();
            match one.operator.as_str() {
                "In" => label(&one.key).is_some_and(|value| values.contains(value)),
                "NotIn" => label(&one.key).is_none_or(|value| !values.contains(value)),
                "Exists" => label(&one.key).is_some(),
                "DoesNotExist" => label(&one.key).is_none(),
                _ => false,
            }
        })
}

/// Deduplicates certificates and drops everything else in the texts. The order is stable but arbitrary (by digest): no
/// consumer may rely on an order, and unchanged files are not rewritten.
fn joined(texts: &[String]) -> Result<String, TrustBundleError> {
    let mut found: BTreeMap<[u8; 32], CertificateDer<'static>> = BTreeMap::new();
    let mut bytes: usize = 0;
    for text in texts {
        // The server admits no invalid certificates.
        for certificate in CertificateDer::pem_slice_iter(text.as_bytes()).filter_map(Result::ok) {
            let digest: [u8; 32] = Sha256::digest(&certificate).into();
            if found.contains_key(&digest) {
                continue;
            }
            bytes = bytes.saturating_add(certificate.len().saturating_mul(4) / 3);
            if bytes > MOST {
                return Err(TrustBundleError::TooMuch);
            }
            found.insert(digest, certificate);
        }
    }
    let mut out = String::new();
    for certificate in found.values() {
        let encoded = STANDARD.encode(certificate);
        out.push_str("-----BEGIN CERTIFICATE-----\n");
        let mut rest = encoded.as_str();
        while !rest.is_empty() {
            let (line, more) = rest.split_at_checked(LINE).unwrap_or((rest, ""));
            out.push_str(line);
            out.push('\n');
            rest = more;
        }
        out.push_str("-----END CERTIFICATE-----\n");
    }
    Ok(out)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn pem(content: &[u8]) -> String {
        format!("-----BEGIN CERTIFICATE-----\n{}\n-----END CERTIFICATE-----\n", STANDARD.encode(content))
    }

    fn ask(value: serde_json::Value) -> ClusterTrustBundleProjection {
        let mut value = value;
        value["path"] = json!("p");
        serde_json::from_value(value).expect("a projection")
    }

    #[test]
    fn bundles_are_meant_by_name_or_by_signer_and_labels() {
        let labels: BTreeMap<String, String> = [("env".to_owned(), "a".to_owned())].into();
        let texts: Vec<String> = [1, 2, 3].map(|n| pem(&[n])).into();
        let bundles = [
            ("one", None, BTreeMap::new(), &texts[0]),
            ("s:two", Some("s"), labels, &texts[1]),
            ("s:three", Some("s"), BTreeMap::new(), &texts[2]),
        ]
        .map(|(name, signer, labels, text)| Bundle {
            name: name.to_owned(),
            signer: signer.map(str::to_owned),
            labels,
            text: text.clone(),
        });
        let got = |value| anchors(&ask(value), bundles.iter().cloned());
        let of = |numbers: &[usize]| joined(&numbers.iter().map(|n| texts[*n].clone()).collect::<Vec<_>>());
        let env = |operator: &str, values: &[&str]| {
            json!({"signerName": "s", "labelSelector":
                {"matchExpressions": [{"key": "env", "operator": operator, "values": values}]}})
        };
        for (value, expected) in [
            (json!({"name": "one"}), of(&[0])),
            (json!({"name": "none"}), Err(TrustBundleError::NotFound("none".to_owned()))),
            (json!({"name": "none", "optional": true}), Ok(String::new())),
            (json!({"signerName": "s", "labelSelector": {}}), of(&[1, 2])),
            (json!({"signerName": "s"}), Err(TrustBundleError::NoneMatched)),
            (json!({"signerName": "s", "optional": true}), Ok(String::new())),
            (json!({"signerName": "t", "labelSelector": {}}), Err(TrustBundleError::NoneMatched)),
            (json!({"signerName": "s", "labelSelector": {"matchLabels": {"env": "a"}}}), of(&[1])),
            (env("In", &["a", "b"]), of(&[1])),
            (env("NotIn", &["a"]), of(&[2])),
            (env("Exists", &[]), of(&[1])),
            (env("DoesNotExist", &[]), of(&[2])),
            (env("Like", &[]), Err(TrustBundleError::NoneMatched)),
            (json!({}), Err(TrustBundleError::NotNamed)),
        ] {
            assert_eq!(got(value.clone()), expected, "{value}");
        }
        let long = "x".repeat(LONGEST_SELECTOR);
        let refused = got(json!({"signerName": "s", "labelSelector": {"matchLabels": {"k": long}}}));
        assert_eq!(refused, Err(TrustBundleError::Selector(LONGEST_SELECTOR + 3)));
    }

    #[test]
    fn certificates_are_there_once_and_alone() {
        let (one, two) = (pem(&[1; 100]), pem(&[2; 100]));
        let noisy =
            format!("a comment\n{one}{two}# more\n{one}-----BEGIN PRIVATE KEY-----\nAA==\n-----END PRIVATE KEY-----\n");
        let text = joined(&[noisy, two.clone()]).expect("joined");
        assert_eq!(text.matches("-----BEGIN CERTIFICATE-----\n").count(), 2);
        assert!(!text.contains('#') && !text.contains("PRIVATE") && text.ends_with("-----END CERTIFICATE-----\n"));
        assert!(text.lines().all(|line| line.len() <= LINE));
        assert_eq!(joined(&[two, one]), Ok(text), "always in the same order");
        let large = pem(&vec![7; MOST]);
        assert_eq!(joined(&[large]), Err(TrustBundleError::TooMuch));
    }
}
