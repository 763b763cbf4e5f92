//! From a client certificate to a name. Pure. Spec 04 §6.1.
//!
//! The handshake only proves that the client holds the key (see `tls`); whether the certificate is
//! worth anything is decided here, for every request: against the bundle and the time of now.

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use jiff::Timestamp;
use rustls::{
    DistinguishedName, RootCertStore,
    pki_types::{CertificateDer, UnixTime, pem::PemObject},
    server::{WebPkiClientVerifier, danger::ClientCertVerifier},
};
use sha2::{Digest, Sha256};
use x509_parser::prelude::{AttributeTypeAndValue, FromDer, X509Certificate};

use super::identity::{Identity, Via};
use berth_sys::tls::{self, Use};

/// Key of the extra that names the credential.
const CREDENTIAL_ID: &str = "authentication.kubernetes.io/credential-id";
const COMMON_NAME: &str = "2.5.4.3";
const ORGANIZATION: &str = "2.5.4.10";
/// Kubernetes' own attribute for a user's unique id.
const UID: &str = "1.3.6.1.4.1.57683.2";

/// A bundle of authorities cannot be used.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum BundleError {
    /// Nothing in it.
    #[error("data does not contain any valid RSA or ECDSA certificates")]
    Empty,
    /// Something in it is no certificate.
    #[error("certificate {number} cannot be read: {cause}")]
    Unreadable {
        /// Which, from 1.
        number: usize,
        /// Why.
        cause: String,
    },
}

/// A client certificate proves nothing.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum X509Error {
    /// It is none.
    #[error("the client certificate cannot be read")]
    Unreadable,
    /// Nobody we believe vouches for it, now, for this use.
    #[error("verifying the client certificate failed: {0}")]
    Unverified(String),
    /// The name in it is written in a way we do not read.
    #[error("the subject of the client certificate holds a text that cannot be read")]
    Text,
    /// It has more than one unique id, or an empty one.
    #[error("the subject of the client certificate holds {0} UIDs, expected one that is not empty")]
    Uid(usize),
}

/// The authorities whose clients are believed.
pub struct ClientCas {
    authorities: Vec<Authority>,
    /// Of all authorities; the common case, made once.
    all: Option<Arc<dyn ClientCertVerifier>>,
    subjects: Vec<DistinguishedName>,
}

struct Authority {
    certificate: CertificateDer<'static>,
    /// Unix seconds, both inclusive.
    valid: (i64, i64),
}

/// Who a certificate is about.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Proof {
    /// Who.
    pub identity: Identity,
    /// The first second in which something of the chain has expired.
    pub expires: Timestamp,
}

impl ClientCas {
    /// Reads a PEM bundle. Like the reference it takes all or nothing.
    ///
    /// # Errors
    /// What is wrong with it.
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

    /// Their names, as a handshake tells them to clients that have several certificates.
    pub fn subjects(&self) -> &[DistinguishedName] {
        &self.subjects
    }

    /// Whether an authority vouches for the certificate, or it is one of them: a self-signed one proves itself.
    fn verify(&self, leaf: &CertificateDer<'_>, others: &[CertificateDer<'_>], now: UnixTime) -> Result<(), String> {
        if self.authorities.iter().any(|authority| authority.certificate == *leaf) {
            return tls::verify_pinned(leaf, Use::Client, now).map_err(|e| e.to_string());
        }
        let verifier = self.verifier(i64::try_from(now.as_secs()).unwrap_or(i64::MAX));
        let verifier = verifier.ok_or("all authorities have expired")?;
        verifier.verify_client_cert(leaf, others, now).map(drop).map_err(|e| e.to_string())
    }

    /// A verifier of those authorities that have not expired: the library would believe them for ever.
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

/// Seconds a certificate has left; negative where it has expired, `None` where it is none.
pub fn seconds_left(certificate: &[u8], now: Timestamp) -> Option<i64> {
    let parsed = parse(certificate).ok()?;
    Some(parsed.validity().not_after.timestamp().saturating_sub(now.as_second()))
}

/// Who the chain (leaf first, as the client sent it) proves its holder to be; `None` where the
/// certificate is good and names nobody.
///
/// # Errors
/// Why it proves nothing.
pub fn identify(chain: &[CertificateDer<'_>], cas: &ClientCas, now: Timestamp) -> Result<Option<Proof>, X509Error> {
    let Some((leaf, intermediates)) = chain.split_first() else { return Ok(None) };
    let parsed = parse(leaf)?;
    let since_epoch = Duration::from_secs(u64::try_from(now.as_second()).unwrap_or_default());
    cas.verify(leaf, intermediates, UnixTime::since_unix_epoch(since_epoch)).map_err(X509Error::Unverified)?;
    let subject = Subject::read(&parsed)?;
    if subject.name.is_empty() {
        return Ok(None);
    }
    let id = format!("X509SHA256={}", hex(&Sha256::digest(leaf)));
    let identity = Identity {
        name: subject.name,
        uid: subject.uid,
        groups: subject.groups,
        extra: BTreeMap::from([(CREDENTIAL_ID.to_owned(), vec![id])]),
        via: Via::X509,
    };
    Ok(Some(Proof { identity, expires: expiry(&parsed, intermediates, cas, now) }))
}

/// When the proof has to be made again: with the first end of whatever may have been part of it.
fn expiry(leaf: &X509Certificate<'_>, others: &[CertificateDer<'_>], cas: &ClientCas, now: Timestamp) -> Timestamp {
    let ends = others.iter().filter_map(|other| Some(parse(other).ok()?.validity().not_after.timestamp()));
    let ends = ends.chain(cas.authorities.iter().map(|authority| authority.valid.1));
    let first = ends.filter(|end| *end >= now.as_second()).chain([leaf.validity().not_after.timestamp()]).min();
    first.and_then(|end| Timestamp::from_second(end.saturating_add(1)).ok()).unwrap_or(now)
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// What counts of a subject.
#[derive(Default)]
struct Subject {
    name: String,
    uid: String,
    groups: Vec<String>,
}

impl Subject {
    /// The last common name counts, and every organization.
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
