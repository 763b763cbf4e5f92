//! TLS server trust: reloadable CA bundle (spec 10 §8.1, `AC-10-38`).
//!
//! An unusable bundle is ignored; the previous one stays in use.

use std::sync::Arc;

use arc_swap::ArcSwap;
use rustls::{
    Error, RootCertStore,
    pki_types::{CertificateDer, pem::PemObject},
};

use berth_sys::tls::{ServerCertificates, ServerPolicy, TrustedAuthorities};

/// Policy for server certificates whose authorities can be replaced.
#[derive(Debug)]
pub struct ServerTrust {
    judge: ArcSwap<Verifier>,
}

#[derive(Debug)]
enum Verifier {
    /// Verifies certificates against authorities.
    Authorities(TrustedAuthorities),
    /// Accepts every certificate.
    NoVerification,
}

impl ServerTrust {
    /// Returns a policy that accepts every certificate.
    pub fn no_verification() -> Self {
        Self::of(Verifier::NoVerification)
    }

    /// Returns a policy with the authorities of a PEM bundle.
    ///
    /// # Errors
    /// The bundle has no usable certificate.
    pub fn bundle(pem: &[u8]) -> Result<Self, String> {
        authorities(pem).map(Self::of)
    }

    /// Returns a policy with the system's authorities. Blocking.
    ///
    /// # Errors
    /// There are none.
    pub fn machine() -> Result<Self, String> {
        judge(rustls_native_certs::load_native_certs().certs).map(Self::of)
    }

    /// Replaces the authorities.
    ///
    /// # Errors
    /// The bundle has no usable certificate; the previous authorities stay.
    pub fn replace(&self, pem: &[u8]) -> Result<(), String> {
        self.judge.store(Arc::new(authorities(pem)?));
        Ok(())
    }

    fn of(judge: Verifier) -> Self {
        Self { judge: ArcSwap::from_pointee(judge) }
    }
}

fn authorities(pem: &[u8]) -> Result<Verifier, String> {
    let load_error = |e: &dyn std::fmt::Display| format!("unable to load root certificates: {e}");
    let mut known = Vec::new();
    for certificate in CertificateDer::pem_slice_iter(pem) {
        let certificate = certificate.map_err(|e| load_error(&e))?;
        RootCertStore::empty().add(certificate.clone()).map_err(|e| load_error(&e))?;
        known.push(certificate);
    }
    judge(known)
}

fn judge(known: Vec<CertificateDer<'static>>) -> Result<Verifier, String> {
    let authorities = TrustedAuthorities::new(RootCertStore::empty(), known);
    authorities.map(Verifier::Authorities).map_err(|e| format!("unable to load root certificates: {e}"))
}

impl ServerPolicy for ServerTrust {
    fn verify(&self, server: &ServerCertificates<'_>) -> Result<(), Error> {
        match &**self.judge.load() {
            Verifier::Authorities(authorities) => authorities.verify(server),
            Verifier::NoVerification => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn garbage_changes_nothing() {
        let pem = rcgen::generate_simple_self_signed(["ca".to_owned()]).expect("a certificate").cert.pem();
        let trust = ServerTrust::bundle(pem.as_bytes()).expect("a bundle");
        let before = Arc::as_ptr(&trust.judge.load_full());
        for garbage in ["", "nonsense", "-----BEGIN CERTIFICATE-----\neA==\n-----END CERTIFICATE-----\n"] {
            assert!(trust.replace(garbage.as_bytes()).is_err(), "{garbage}");
        }
        assert_eq!(Arc::as_ptr(&trust.judge.load_full()), before);
        trust.replace(pem.as_bytes()).expect("the same is fine");
    }
}
