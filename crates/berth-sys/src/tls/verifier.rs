//! TLS server certificate verification, compatible with Go's `x509.Certificate.Verify`.

use std::{collections::HashSet, sync::Arc};

use rustls::{
    CertificateError, DigitallySignedStruct, Error, RootCertStore, SignatureScheme,
    client::{
        VerifierBuilderError, WebPkiServerVerifier,
        danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier},
        verify_server_name,
    },
    crypto::{verify_tls12_signature, verify_tls13_signature},
    pki_types::{CertificateDer, ServerName, UnixTime},
    server::ParsedCertificate,
};
use x509_parser::prelude::{FromDer, X509Certificate};

use super::{provider, signatures};

/// Purpose for which a certificate is presented.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Use {
    /// Server authentication.
    Server,
    /// Client authentication.
    Client,
}

/// Accepts servers that a certificate authority vouches for, and those whose own certificate is among the authorities:
/// a self-signed or pinned one.
#[derive(Debug)]
pub struct ServerVerifier {
    signed: Arc<WebPkiServerVerifier>,
    known: HashSet<CertificateDer<'static>>,
}

impl ServerVerifier {
    /// A verifier with these authorities: certificates, and the root store of the library.
    ///
    /// # Errors
    /// If there are no authorities.
    pub fn new(
        mut roots: RootCertStore,
        known: impl IntoIterator<Item = CertificateDer<'static>>,
    ) -> Result<Self, VerifierBuilderError> {
        let known: HashSet<CertificateDer<'static>> = known.into_iter().collect();
        roots.add_parsable_certificates(known.iter().cloned());
        let signed = WebPkiServerVerifier::builder_with_provider(Arc::new(roots), Arc::new(provider())).build()?;
        Ok(Self { signed, known })
    }
}

impl ServerCertVerifier for ServerVerifier {
    fn verify_server_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        name: &ServerName<'_>,
        ocsp: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        if !self.known.contains(end_entity) {
            return self.signed.verify_server_cert(end_entity, intermediates, name, ocsp, now);
        }
        verify_pinned(end_entity, Use::Server, now)?;
        verify_server_name(&ParsedCertificate::try_from(end_entity)?, name)?;
        Ok(ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        verify_tls12_signature(message, cert, dss, &signatures::all())
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        verify_tls13_signature(message, cert, dss, &signatures::all())
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        signatures::all().supported_schemes()
    }
}

/// Verifies a certificate that is trusted as such: it must be valid now, and permit the use if it restricts its uses.
///
/// # Errors
/// If it has expired, is not yet valid, is for another use, or cannot be parsed.
pub fn verify_pinned(certificate: &CertificateDer<'_>, shown_for: Use, now: UnixTime) -> Result<(), Error> {
    // Rejects what the library cannot verify, notably unknown critical extensions.
    ParsedCertificate::try_from(certificate)?;
    let wrong = |error| Err(Error::InvalidCertificate(error));
    let Ok(([], parsed)) = X509Certificate::from_der(certificate) else { return wrong(CertificateError::BadEncoding) };
    let seconds = i64::try_from(now.as_secs()).unwrap_or(i64::MAX);
    if seconds < parsed.validity().not_before.timestamp() {
        return wrong(CertificateError::NotValidYet);
    }
    if seconds > parsed.validity().not_after.timestamp() {
        return wrong(CertificateError::Expired);
    }
    let Ok(uses) = parsed.extended_key_usage() else { return wrong(CertificateError::BadEncoding) };
    let is_meant = uses.is_none_or(|uses| {
        uses.value.any
            || match shown_for {
                Use::Server => uses.value.server_auth,
                Use::Client => uses.value.client_auth,
            }
    });
    if is_meant { Ok(()) } else { wrong(CertificateError::InvalidPurpose) }
}

#[cfg(test)]
mod tests;
