//! TLS certificate verifiers: a wrapper for rustls, and policies that accept or reject certificates.
//!
//! [`ServerVerifier`] is compatible with Go's `x509.Certificate.Verify`; the others replace Go's `InsecureSkipVerify`.

use std::{collections::HashSet, fmt::Debug, sync::Arc};

use rustls::{
    CertificateError, DigitallySignedStruct, DistinguishedName, Error, RootCertStore, SignatureScheme,
    client::{
        VerifierBuilderError, WebPkiServerVerifier,
        danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier},
        verify_server_name,
    },
    crypto::{CryptoProvider, WebPkiSupportedAlgorithms, verify_tls12_signature, verify_tls13_signature},
    pki_types::{CertificateDer, ServerName, UnixTime},
    server::{
        ParsedCertificate,
        danger::{ClientCertVerified, ClientCertVerifier},
    },
};
use x509_parser::prelude::{FromDer, X509Certificate};

use super::provider;

/// Certificates that a server presents, and what they are verified against.
#[derive(Clone, Copy, Debug)]
pub struct ServerCertificates<'a> {
    /// Certificate of the server itself.
    pub end_entity: &'a CertificateDer<'a>,
    /// Certificates between the server's and an authority's.
    pub intermediates: &'a [CertificateDer<'a>],
    /// Name or address that the client connects to.
    pub name: &'a ServerName<'a>,
    /// Stapled OCSP response; empty if there is none.
    pub ocsp: &'a [u8],
    /// Time of the verification.
    pub now: UnixTime,
}

/// Decides which servers are trusted. Handshake signatures are verified by [`Verifier`].
pub trait ServerPolicy: Debug + Send + Sync {
    /// Verifies the certificates of a server.
    ///
    /// # Errors
    /// If the server is not trusted.
    fn verify(&self, server: &ServerCertificates<'_>) -> Result<(), Error>;
}

impl<P: ServerPolicy + ?Sized> ServerPolicy for Arc<P> {
    fn verify(&self, server: &ServerCertificates<'_>) -> Result<(), Error> {
        (**self).verify(server)
    }
}

/// Verifier of rustls: certificates by a policy, handshake signatures by the algorithms of a provider.
#[derive(Debug)]
pub struct Verifier<P> {
    policy: P,
    algorithms: WebPkiSupportedAlgorithms,
}

impl<P> Verifier<P> {
    /// Returns a verifier with this policy.
    pub fn with(policy: P, provider: &CryptoProvider) -> Self {
        Self { policy, algorithms: provider.signature_verification_algorithms }
    }
}

/// Methods that both verifier traits of rustls require of a [`Verifier`].
macro_rules! verify_handshake_signatures {
    () => {
        fn verify_tls12_signature(
            &self,
            message: &[u8],
            certificate: &CertificateDer<'_>,
            signature: &DigitallySignedStruct,
        ) -> Result<HandshakeSignatureValid, Error> {
            verify_tls12_signature(message, certificate, signature, &self.algorithms)
        }

        fn verify_tls13_signature(
            &self,
            message: &[u8],
            certificate: &CertificateDer<'_>,
            signature: &DigitallySignedStruct,
        ) -> Result<HandshakeSignatureValid, Error> {
            verify_tls13_signature(message, certificate, signature, &self.algorithms)
        }

        fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
            self.algorithms.supported_schemes()
        }
    };
}

impl<P: ServerPolicy> ServerCertVerifier for Verifier<P> {
    fn verify_server_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        name: &ServerName<'_>,
        ocsp: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        self.policy.verify(&ServerCertificates { end_entity, intermediates, name, ocsp, now })?;
        Ok(ServerCertVerified::assertion())
    }

    verify_handshake_signatures!();
}

/// Verifies only handshake signatures: the peer has the private key of its certificate, regardless of the issuer. For
/// registries with `skip_verify`, and for clients whose certificate is validated with each request.
#[derive(Debug)]
pub struct SignatureOnly {
    ca_names: Vec<DistinguishedName>,
}

impl SignatureOnly {
    /// Verifier that accepts every server.
    pub fn of_servers(provider: &CryptoProvider) -> Verifier<Self> {
        Verifier::with(Self { ca_names: Vec::new() }, provider)
    }

    /// Verifier that accepts every client, also one without a certificate; `ca_names` are sent to clients, which may
    /// choose a certificate by them.
    pub fn of_clients(ca_names: &[DistinguishedName], provider: &CryptoProvider) -> Verifier<Self> {
        Verifier::with(Self { ca_names: ca_names.to_vec() }, provider)
    }
}

impl ServerPolicy for SignatureOnly {
    fn verify(&self, _server: &ServerCertificates<'_>) -> Result<(), Error> {
        Ok(())
    }
}

impl ClientCertVerifier for Verifier<SignatureOnly> {
    fn client_auth_mandatory(&self) -> bool {
        false
    }

    fn root_hint_subjects(&self) -> &[DistinguishedName] {
        &self.policy.ca_names
    }

    fn verify_client_cert(
        &self,
        _end_entity: &CertificateDer<'_>,
        _intermediates: &[CertificateDer<'_>],
        _now: UnixTime,
    ) -> Result<ClientCertVerified, Error> {
        Ok(ClientCertVerified::assertion())
    }

    verify_handshake_signatures!();
}

/// Verifies nothing, for probes and hooks. Signatures are not checked either: the check rejects certificates that the
/// kubelet accepts (X.509 version 1, short keys, unparsable ones), and a signature by the key of an untrusted
/// certificate proves nothing.
#[derive(Debug)]
pub struct NoVerification {
    schemes: Vec<SignatureScheme>,
}

impl NoVerification {
    /// Signature schemes that the kubelet offers and the provider lacks.
    const ADDITIONAL: [SignatureScheme; 2] = [SignatureScheme::RSA_PKCS1_SHA1, SignatureScheme::ECDSA_SHA1_Legacy];

    /// Returns a verifier that offers the provider's signature schemes and SHA-1.
    pub fn new(provider: &CryptoProvider) -> Self {
        let mut schemes = provider.signature_verification_algorithms.supported_schemes();
        schemes.extend(Self::ADDITIONAL);
        Self { schemes }
    }
}

impl ServerCertVerifier for NoVerification {
    fn verify_server_cert(
        &self,
        _end_entity: &CertificateDer<'_>,
        _intermediates: &[CertificateDer<'_>],
        _name: &ServerName<'_>,
        _ocsp: &[u8],
        _now: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        Ok(ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        _message: &[u8],
        _certificate: &CertificateDer<'_>,
        _signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        Ok(HandshakeSignatureValid::assertion())
    }

    fn verify_tls13_signature(
        &self,
        _message: &[u8],
        _certificate: &CertificateDer<'_>,
        _signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        Ok(HandshakeSignatureValid::assertion())
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.schemes.clone()
    }
}

/// Accepts a server that presents a pinned certificate, regardless of its names and dates, and servers whose
/// certificate a pinned one has signed.
#[derive(Debug)]
pub struct PinnedServer {
    pinned: Vec<CertificateDer<'static>>,
    /// `None` if no pinned certificate is usable as an authority.
    signed: Option<Arc<WebPkiServerVerifier>>,
}

impl PinnedServer {
    /// Verifier with these certificates.
    pub fn verifier(pinned: Vec<CertificateDer<'static>>, provider: &Arc<CryptoProvider>) -> Verifier<Self> {
        let mut roots = RootCertStore::empty();
        roots.add_parsable_certificates(pinned.iter().cloned());
        let signed = WebPkiServerVerifier::builder_with_provider(roots.into(), provider.clone()).build().ok();
        Verifier::with(Self { pinned, signed }, provider)
    }
}

impl ServerPolicy for PinnedServer {
    fn verify(&self, server: &ServerCertificates<'_>) -> Result<(), Error> {
        if self.pinned.iter().any(|pinned| pinned == server.end_entity) {
            return Ok(());
        }
        let unknown = Error::InvalidCertificate(CertificateError::UnknownIssuer);
        verify_signed(self.signed.as_deref().ok_or(unknown)?, server)
    }
}

/// Accepts servers whose certificate was issued by an authority, and those whose own certificate is among the
/// authorities: a self-signed or pinned one.
#[derive(Debug)]
pub struct TrustedAuthorities {
    signed: Arc<WebPkiServerVerifier>,
    known: HashSet<CertificateDer<'static>>,
}

impl TrustedAuthorities {
    /// A policy with these authorities: certificates, and the root store of the library.
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

impl ServerPolicy for TrustedAuthorities {
    fn verify(&self, server: &ServerCertificates<'_>) -> Result<(), Error> {
        if !self.known.contains(server.end_entity) {
            return verify_signed(&self.signed, server);
        }
        verify_pinned(server.end_entity, Use::Server, server.now)?;
        verify_server_name(&ParsedCertificate::try_from(server.end_entity)?, server.name)
    }
}

/// Verifier with Go's rules and fixed authorities.
pub type ServerVerifier = Verifier<TrustedAuthorities>;

impl ServerVerifier {
    /// A verifier with these authorities: certificates, and the root store of the library.
    ///
    /// # Errors
    /// If there are no authorities.
    pub fn new(
        roots: RootCertStore,
        known: impl IntoIterator<Item = CertificateDer<'static>>,
    ) -> Result<Self, VerifierBuilderError> {
        Ok(Self::with(TrustedAuthorities::new(roots, known)?, &provider()))
    }
}

fn verify_signed(authorities: &WebPkiServerVerifier, server: &ServerCertificates<'_>) -> Result<(), Error> {
    let ServerCertificates { end_entity, intermediates, name, ocsp, now } = *server;
    authorities.verify_server_cert(end_entity, intermediates, name, ocsp, now).map(drop)
}

/// Purpose for which a certificate is presented.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Use {
    /// Server authentication.
    Server,
    /// Client authentication.
    Client,
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
