//! X.509 client certificate authentication: chain verification and subject to user. Pure.
//!
//! The handshake only proves that the client has the key (see `tls`); this module verifies the certificate for every
//! request, against the current CA bundle and the current time. Implements spec 04 §6.1.

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use jiff::Timestamp;
use rustls::{
    DistinguishedName, RootCertStore,
    pki_types::{CertificateDer, UnixTime, pem::PemObject},
    server::{WebPkiClientVerifier, danger::ClientCertVerifier},
};
use sha2::{Digest, Sha256};
use x509_parser::prelude::{AttributeTypeAndValue, FromDer, X509Certificate};

use super::identity::{AuthenticatedBy, UserInfo};
use berth_sys::tls::{self, Use};

/// Key of the extra attribute that identifies the credential.
const CREDENTIAL_ID: &str = "authentication.kubernetes.io/credential-id";
const COMMON_NAME: &str = "2.5.4.3";
const ORGANIZATION: &str = "2.5.4.10";
/// OID of the Kubernetes attribute for a user's UID.
const UID: &str = "1.3.6.1.4.1.57683.2";

/// Error of a CA bundle.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum BundleError {
    /// The bundle contains no certificate.
    #[error("data does not contain any valid RSA or ECDSA certificates")]
    Empty,
    /// An entry of the bundle is not a certificate.
    #[error("failed to parse certificate {number}: {cause}")]
    Unreadable {
        /// Position in the bundle, from 1.
        number: usize,
        /// Parse error, or the reason why the certificate cannot be a trust anchor.
        cause: String,
    },
}

/// Reason why a client certificate does not authenticate.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum X509Error {
    /// The certificate cannot be parsed.
    #[error("failed to parse client certificate")]
    Unreadable,
    /// No trusted CA signed it, or it is not valid now or not for client authentication.
    #[error("failed to verify client certificate: {0}")]
    Unverified(String),
    /// The subject has an unsupported text encoding.
    #[error("client certificate subject contains text with an unsupported encoding")]
    Text,
    /// The subject has more than one UID, or an empty one.
    #[error("client certificate subject contains {0} UIDs, expected exactly one non-empty UID")]
    Uid(usize),
}

/// Trusted client CAs.
pub struct ClientCas {
    authorities: Vec<Authority>,
    /// Verifier with all CAs; the common case, built once.
    all: Option<Arc<dyn ClientCertVerifier>>,
    subjects: Vec<DistinguishedName>,
}

struct Authority {
    certificate: CertificateDer<'static>,
    /// Validity in Unix seconds, both ends inclusive.
    valid: (i64, i64),
}

/// User that a certificate chain proves.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VerifiedIdentity {
    /// The user.
    pub identity: UserInfo,
    /// First second at which some certificate of the chain has expired.
    pub expires: Timestamp,
}

impl ClientCas {
    /// Parses a PEM bundle. As in kubelet, one invalid certificate rejects the bundle.
    ///
    /// # Errors
    /// What is wrong with the bundle.
    pub fn from_pem(pem: &[u8]) -> Result<Self, BundleError> {
        let mut authorities = Vec::new();
        for (index, certificate) in CertificateDer::pem_slice_iter(pem).enumerate() {
            let unreadable = |cause: String| BundleError::Unreadable { number: index + 1, cause };
            let certificate = certificate.map_err(|e| unreadable(e.to_string()))?;
            let parsed = parse(&certificate).map_err(|e| unreadable(e.to_string()))?;
            let valid = (parsed.validity().not_before.timestamp(), parsed.validity().not_after.timestamp());
            RootCertStore::empty().add(certificate.clone()).map_err(|e| unreadable(e.to_string()))?;
            authorities.push(Authority { certificate, valid });
        }
        if authorities.is_empty() {
            return Err(BundleError::Empty);
        }
        let roots = roots(authorities.iter());
        let subjects = roots.subjects();
        Ok(Self { all: verifier(roots), authorities, subjects })
    }

    /// Subjects of the CAs; the handshake sends them to clients that have several certificates.
    pub fn subjects(&self) -> &[DistinguishedName] {
        &self.subjects
    }

    /// Verifies the chain against the CAs. A leaf that is itself in the bundle (self-signed) needs no other CA.
    fn verify(&self, leaf: &CertificateDer<'_>, others: &[CertificateDer<'_>], now: UnixTime) -> Result<(), String> {
        if self.authorities.iter().any(|authority| authority.certificate == *leaf) {
            return tls::verify_pinned(leaf, Use::Client, now).map_err(|e| e.to_string());
        }
        let verifier = self.verifier(i64::try_from(now.as_secs()).unwrap_or(i64::MAX));
        let verifier = verifier.ok_or("all client CA certificates have expired")?;
        verifier.verify_client_cert(leaf, others, now).map(drop).map_err(|e| e.to_string())
    }

    /// Verifier with the CAs that are valid now: the library does not check the expiry of trust anchors.
    fn verifier(&self, now: i64) -> Option<Arc<dyn ClientCertVerifier>> {
        let holds = |authority: &&Authority| authority.valid.0 <= now && now <= authority.valid.1;
        let kept = self.authorities.iter().filter(holds);
        if kept.clone().count() == self.authorities.len() { self.all.clone() } else { verifier(roots(kept)) }
    }
}

impl std::fmt::Debug for ClientCas {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "ClientCas({})", self.authorities.len())
    }
}

fn roots<'a>(authorities: impl Iterator<Item = &'a Authority>) -> RootCertStore {
    let mut roots = RootCertStore::empty();
    roots.add_parsable_certificates(authorities.map(|authority| authority.certificate.clone()));
    roots
}

fn verifier(roots: RootCertStore) -> Option<Arc<dyn ClientCertVerifier>> {
    let provider = Arc::new(tls::provider());
    WebPkiClientVerifier::builder_with_provider(Arc::new(roots), provider).build().ok()
}

fn parse(certificate: &[u8]) -> Result<X509Certificate<'_>, X509Error> {
    match X509Certificate::from_der(certificate) {
        Ok(([], parsed)) => Ok(parsed),
        Ok(_) | Err(_) => Err(X509Error::Unreadable),
    }
}

/// Remaining validity of a certificate in seconds; negative after expiry, `None` where it cannot be parsed.
pub fn seconds_left(certificate: &[u8], now: Timestamp) -> Option<i64> {
    let parsed = parse(certificate).ok()?;
    Some(parsed.validity().not_after.timestamp().saturating_sub(now.as_second()))
}

/// Authenticates the chain (leaf first, as sent by the client); `None` where the chain is empty, or valid but without a
/// common name.
///
/// # Errors
/// Why the chain does not authenticate.
pub fn identify(
    chain: &[CertificateDer<'_>],
    cas: &ClientCas,
    now: Timestamp,
) -> Result<Option<VerifiedIdentity>, X509Error> {
    let Some((leaf, intermediates)) = chain.split_first() else { return Ok(None) };
    let parsed = parse(leaf)?;
    let since_epoch = Duration::from_secs(u64::try_from(now.as_second()).unwrap_or_default());
    cas.verify(leaf, intermediates, UnixTime::since_unix_epoch(since_epoch)).map_err(X509Error::Unverified)?;
    let subject = CertificateSubject::read(&parsed)?;
    if subject.name.is_empty() {
        return Ok(None);
    }
    let id = format!("X509SHA256={}", hex::encode(Sha256::digest(leaf)));
    let identity = UserInfo {
        name: subject.name,
        uid: subject.uid,
        groups: subject.groups,
        extra: BTreeMap::from([(CREDENTIAL_ID.to_owned(), vec![id])]),
        via: AuthenticatedBy::X509,
    };
    Ok(Some(VerifiedIdentity { identity, expires: expiry(&parsed, intermediates, cas, now) }))
}

/// When the proof must be renewed: the earliest expiry of any certificate that may be part of it.
fn expiry(leaf: &X509Certificate<'_>, others: &[CertificateDer<'_>], cas: &ClientCas, now: Timestamp) -> Timestamp {
    let ends = others.iter().filter_map(|other| Some(parse(other).ok()?.validity().not_after.timestamp()));
    let ends = ends.chain(cas.authorities.iter().map(|authority| authority.valid.1));
    let first = ends.filter(|end| *end >= now.as_second()).chain([leaf.validity().not_after.timestamp()]).min();
    first.and_then(|end| Timestamp::from_second(end.saturating_add(1)).ok()).unwrap_or(now)
}

/// Relevant attributes of a subject.
#[derive(Default)]
struct CertificateSubject {
    name: String,
    uid: String,
    groups: Vec<String>,
}

impl CertificateSubject {
    /// Uses the last common name and every organization.
    fn read(certificate: &X509Certificate<'_>) -> Result<Self, X509Error> {
        let mut subject = Self::default();
        let mut uids = Vec::new();
        for attribute in certificate.subject().iter_attributes() {
            match attribute.attr_type().to_id_string().as_str() {
                COMMON_NAME => subject.name = text(attribute)?,
                ORGANIZATION => subject.groups.push(text(attribute)?),
                UID => uids.push(text(attribute)?),
                _ => {}
            }
        }
        match uids.as_mut_slice() {
            [] => {}
            [uid] if !uid.is_empty() => subject.uid = std::mem::take(uid),
            other => return Err(X509Error::Uid(other.len())),
        }
        Ok(subject)
    }
}

fn text(attribute: &AttributeTypeAndValue<'_>) -> Result<String, X509Error> {
    attribute.as_str().map(str::to_owned).map_err(|_| X509Error::Text)
}

#[cfg(test)]
mod tests;
