//! Client identity: TLS client certificate that may change at any time (spec 10 §8.3).
//!
//! One [`ClientIdentity`] is shared by its writer (a file watcher, the certificate manager, an exec plugin) and by every TLS
//! handshake, which uses the current certificate.

use std::sync::Arc;

use arc_swap::ArcSwapOption;
use rustls::{
    Error, InconsistentKeys, SignatureScheme,
    client::ResolvesClientCert,
    pki_types::{CertificateDer, PrivateKeyDer, pem::PemObject},
    sign::CertifiedKey,
};
use tokio::sync::watch;
use x509_parser::prelude::{FromDer, X509Certificate};

/// A certificate and key are unusable; the text is the cause.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct IdentityError(String);

/// Certificate chain with its private key, verified to belong together.
#[derive(Clone, Debug)]
pub struct CertifiedPair(Arc<CertifiedKey>);

impl CertifiedPair {
    /// Parses PEM, leaf first; both arguments may be the same text.
    ///
    /// # Errors
    /// A text has no certificate or no key, or they do not belong together.
    pub fn from_pem(certificate: &[u8], key: &[u8]) -> Result<Self, IdentityError> {
        let failed = |text: String| IdentityError(format!("tls: {text}"));
        let chain: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(certificate).collect();
        let chain = chain.map_err(|e| failed(format!("failed to parse the certificate: {e}")))?;
        if chain.is_empty() {
            return Err(failed("failed to find any PEM data in certificate input".to_owned()));
        }
        let key = PrivateKeyDer::from_pem_slice(key)
            .map_err(|_| failed("failed to find any PEM data in key input".to_owned()))?;
        match CertifiedKey::from_der(chain, key, &rustls::crypto::ring::default_provider()) {
            Ok(pair) => Ok(Self(Arc::new(pair))),
            Err(Error::InconsistentKeys(InconsistentKeys::KeyMismatch)) => {
                Err(failed("private key does not match public key".to_owned()))
            }
            Err(error) => Err(failed(error.to_string())),
        }
    }

    /// Last second of the leaf's validity, since the epoch; `None` if it cannot be parsed.
    pub fn expires(&self) -> Option<i64> {
        let (_, leaf) = X509Certificate::from_der(self.chain().first()?).ok()?;
        Some(leaf.validity().not_after.timestamp())
    }

    /// Certificate chain, leaf first.
    pub fn chain(&self) -> &[CertificateDer<'static>] {
        &self.0.cert
    }
}

impl PartialEq for CertifiedPair {
    fn eq(&self, other: &Self) -> bool {
        // A certificate determines its key.
        self.chain() == other.chain()
    }
}

/// Current client identity; anonymous until a certificate is set. Cheap to clone; clones share their state.
#[derive(Clone, Debug)]
pub struct ClientIdentity(Arc<Current>);

#[derive(Debug)]
struct Current {
    pair: ArcSwapOption<CertifiedPair>,
    changes: watch::Sender<u64>,
}

impl ClientIdentity {
    /// Returns an anonymous identity.
    pub fn anonymous() -> Self {
        Self(Arc::new(Current { pair: ArcSwapOption::empty(), changes: watch::Sender::new(0) }))
    }

    /// Returns an identity with that certificate.
    pub fn of(pair: CertifiedPair) -> Self {
        let identity = Self::anonymous();
        identity.set(Some(pair));
        identity
    }

    /// Replaces the certificate: new connections use it, existing ones are drained. Returns whether it differs from the
    /// previous one.
    pub fn set(&self, pair: Option<CertifiedPair>) -> bool {
        // Serialized, so that a comparison does not miss a concurrent update.
        self.0.changes.send_if_modified(|changes| {
            let is_new = self.0.pair.load().as_deref() != pair.as_ref();
            if is_new {
                self.0.pair.store(pair.map(Arc::new));
                *changes += 1;
            }
            is_new
        })
    }

    /// Current certificate; `None`: anonymous.
    pub fn current(&self) -> Option<Arc<CertifiedPair>> {
        self.0.pair.load_full()
    }

    /// Counter of changes.
    pub fn changes(&self) -> watch::Receiver<u64> {
        self.0.changes.subscribe()
    }
}

impl ResolvesClientCert for ClientIdentity {
    fn resolve(&self, _hints: &[&[u8]], schemes: &[SignatureScheme]) -> Option<Arc<CertifiedKey>> {
        let pair = self.current()?;
        pair.0.key.choose_scheme(schemes).map(|_| pair.0.clone())
    }

    fn has_certs(&self) -> bool {
        self.0.pair.load().is_some()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pair() -> (String, String) {
        let made = rcgen::generate_simple_self_signed(["n".to_owned()]).expect("a pair");
        (made.cert.pem(), made.signing_key.serialize_pem())
    }

    #[test]
    fn unusable_pairs_are_rejected() {
        let ((certificate, key), (_, other)) = (pair(), pair());
        for (certificate, key, expected) in [
            ("", "", "tls: failed to find any PEM data in certificate input"),
            (&certificate, "", "tls: failed to find any PEM data in key input"),
            (&certificate, &other, "tls: private key does not match public key"),
        ] {
            let error = CertifiedPair::from_pem(certificate.as_bytes(), key.as_bytes()).expect_err(expected);
            assert_eq!(error.to_string(), expected);
        }
        let both = format!("{certificate}{key}");
        assert!(CertifiedPair::from_pem(both.as_bytes(), both.as_bytes()).is_ok(), "one file has both");
    }

    #[test]
    fn only_another_certificate_is_a_change() {
        let ((certificate, key), (second, second_key)) = (pair(), pair());
        let read = |c: &str, k: &str| CertifiedPair::from_pem(c.as_bytes(), k.as_bytes()).expect("a pair");
        let identity = ClientIdentity::anonymous();
        let changes = identity.changes();
        assert!((identity.current().is_none(), identity.has_certs()) == (true, false));
        assert!(!identity.set(None));
        assert!(identity.set(Some(read(&certificate, &key))));
        assert!(!identity.set(Some(read(&certificate, &key))), "the file was only touched");
        assert!(identity.set(Some(read(&second, &second_key))));
        assert!(identity.set(None));
        assert_eq!(*changes.borrow(), 3);
    }
}
